// Descriptions of requests and steps, as lists of [term, detail].
import { inWords } from "./queue.js";

const plural = (count, one, many = `${one}s`) => `${count.toLocaleString("en")} ${count === 1 ? one : many}`;

export function duration(seconds) {
  if (seconds < 0.0995) return `${(1e3 * seconds).toFixed(1)} ms`;
  if (seconds < 0.9995) return `${Math.round(1e3 * seconds)} ms`;
  const minutes = Math.floor(seconds / 60);
  return (minutes ? `${minutes} min ` : "") + `${(seconds - 60 * minutes).toFixed(2)} s`;
}

export function requestStory(history, request) {
  const facts = [];
  const add = (term, detail) => { if (detail) facts.push([term, detail]); };
  const most = request.maxTokens ?? "any number";
  add("request", request.numPrompt && `${plural(request.numPrompt, "prompt token")}, up to ${most} more`);
  add("adapter", request.adapter);
  if (request.arrived !== null) add("arrived", `at ${duration(request.arrived)}`);
  request.waits.forEach((wait, index) => add(index ? "waited again" : "waited", waited(history, wait)));
  request.joins.forEach((join, index) => add(
    index ? "joined again" : "joined", `slot ${request.slots[index] ?? "?"} at step ${join.ordinal}`
      + (join.cached ? `; ${plural(join.cached, "token")} found in the cache` : "")));
  add("cache", request.joins.length && looked(request.joins[0]));
  const { steps, computed } = request;
  add("prompt", steps.prefill && `${plural(computed.prefill, "token")} in ${plural(steps.prefill, "step")}`);
  const known = request.firstToken !== null && request.arrived !== null;
  add("first token", known && `after ${duration(request.firstToken - request.arrived)}`);
  add("answer", request.numTokens && `${plural(request.numTokens, "token")}${pace(request)}`);
  add("drafts", request.drafts && `${request.draftsRight} of ${request.drafts} right`);
  request.lost.forEach(({ ordinal, lost, reason }) => add(
    "yielded", `at step ${ordinal}, ${plural(lost, "token")} to compute again (${inWords(reason)})`));
  add("computed again", steps.recompute && plural(computed.recompute, "token"));
  add("held", steps.held && `${plural(steps.held, "step")} after its last token`);
  add("padding", request.padded && plural(request.padded, "token"));
  const { ended, flushed } = request;
  add("ended", ended && `${ended.reason} at ${duration(ended.seconds)} ${ended.message}`);
  add("sent", flushed && `its last byte at ${duration(flushed.last)}`);
  return facts;
}

// Returns why the tokens known at a join were in the prefix cache, or were not.
function looked({ spans }) {
  return spans.map(([end, cause, , by, position], index) => {
    const count = (end - (spans[index - 1]?.[0] ?? 0)).toLocaleString("en");
    if (cause === "diverged") return `${count} diverged at token ${position.toLocaleString("en")}`;
    if (cause === "evicted") return `${count} evicted for ${by < 0 ? "another request" : `request ${by}`}`;
    return `${count} ${inWords(cause)}`;
  }).join("; ");
}

function pace(request) {
  const rest = request.numTokens - 1, seconds = request.lastToken - request.firstToken;
  return rest > 0 && seconds > 0 ? `, one in ${duration(seconds / rest)}` : "";
}

// Returns how long a request waited, and the reasons of the steps without it.
function waited(history, wait) {
  const until = wait.until ?? history.last?.until ?? wait.since;
  const reasons = new Map();
  for (let ordinal = Math.ceil(wait.from ?? history.end); ordinal < (wait.to ?? history.end); ordinal++) {
    const step = history.step(ordinal);
    if (!step) continue;
    const reason = step.refused.find(([number]) => number === wait.number)?.[1] ?? step.stop?.[0] ?? "";
    if (reason) reasons.set(reason, (reasons.get(reason) ?? 0) + 1);
  }
  const why = [...reasons].map(([reason, count]) => `${inWords(reason)} (${plural(count, "step")})`).join(", ");
  const time = duration(Math.max(0, until - (wait.since ?? until)));
  return time + (why ? `: ${why}` : "") + (wait.to === null ? ", and still does" : "");
}

// Returns how many drafts a step verified, and why not more.
function drafted(step) {
  const count = step.drafts.reduce((sum, drafts) => sum + drafts.length, 0);
  const right = step.drafts.reduce(
    (sum, drafts, row) => sum + (drafts.length ? Math.max(0, (step.yielded[row]?.length ?? 0) - 1) : 0), 0);
  const why = step.draftLimit && `no more: ${inWords(step.draftLimit)}`;
  return count ? `${right} of ${count} right${why && `; ${why}`}` : why;
}

export function stepStory(history, step) {
  const facts = [];
  const { sum } = step;
  const add = (term, detail) => { if (detail) facts.push([term, detail]); };
  add("took", duration(step.until - step.at));
  add("rows", `${step.numbers.length} of ${step.capacity} slots`);
  const kinds = [["decode", sum.decode], ["prompt", sum.prefill], ["computed again", sum.recompute],
    ["padding", sum.padding], ["held", sum.held], ["void", sum.void]].filter(([, count]) => count);
  add("tokens", kinds.map(([name, count]) => `${count.toLocaleString("en")} ${name}`).join(", "));
  add("drafts", drafted(step));
  if (step.proposing) {
    const [seconds, passes] = step.proposing;
    add("draft model", `${plural(passes, "pass", "passes")} in ${duration(seconds)}`);
  }
  const busy = new Map();
  for (const [rank, from, to] of step.ranks) busy.set(rank, (busy.get(rank) ?? 0) + to - from);
  add("ranks", [...busy].sort(([one], [other]) => one - other).map(([rank, s]) => `${rank}: ${duration(s)}`).join(", "));
  add("joined", step.admitted.length && step.admitted.map(([number]) => number).join(", "));
  add("ended", step.ended.length && step.ended.map(([number, reason]) => `${number} (${reason})`).join(", "));
  add("yielded", step.preempted.length && step.preempted.map(([number]) => number).join(", "));
  if (step.stop) {
    const [reason, first, behind] = step.stop;
    add("waiting", `request ${first}${behind ? ` and ${behind} behind it` : ""}: ${inWords(reason)}`);
  }
  const refused = step.refused.map(([number, reason]) => `${number}: ${inWords(reason)}`);
  add("passed over", refused.join(", "));
  return facts;
}
