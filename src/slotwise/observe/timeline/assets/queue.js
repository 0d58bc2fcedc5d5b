// The waiting requests, from arrival to admission; why no other was admitted; and how batches were formed.
const ROW = 7; // most pixels of a waiting request
const WORDS = {
  no_slot: "no slot free", no_blocks: "no cache blocks left", token_budget: "token budget spent", ending: "ending", verifying: "verifying drafts",
  waiting_for_kv: "its blocks have not arrived", load_limit: "a step copies only so many blocks from host memory",
  token_pending: "the token of its last row is on its way",
  time_budget: "the step's time is spent", micro_batch: "in another stage's step",
  first_token: "left to a tenant far behind", short_step: "kept short for a tenant that may come",
  tier_cap: "free slots are another tier's", outranked: "gave way to one that goes first",
  prompts_alone: "prompts run alone", batch_running: "the batch must end first", window_open: "collecting a batch",
  no_adapter_slot: "as many adapters run as may", one_at_a_time: "one at a time", grammar_compiling: "its grammar is being compiled",
  no_match: "nothing to draft from", resting: "drafts did not pay lately", no_gain: "drafts would not pay",
  measuring: "a step without drafts is measured",
  max_drafts: "as many as the settings allow", no_room: "no room for drafts",
};
const LETTER = 6.1; // pixels of a letter in the smaller type

export const inWords = (reason) => WORDS[reason] ?? reason.replaceAll("_", " ");

// Returns the requests that wait in the steps in view, in rows from the bottom, next to the slots, as
// {wait, top, height}; more rows are thinner.
export function waitsShown({ history, view, layout }) {
  const [low, high] = view.shown;
  const shown = history.waits.filter((wait) => wait.place !== null && (wait.to === null || wait.to >= low)
    && (wait.from === null || wait.from <= high));
  const rows = shown.reduce((most, wait) => Math.max(most, wait.place + 1), 1);
  const { top, height } = layout.queue, row = Math.min(ROW, height / rows);
  const apart = ({ place }) => row >= 1 || Math.floor(place * row) !== Math.floor((place - 1) * row);
  return shown.filter(apart).map((wait) => ({
    wait, top: top + height - row * (wait.place + 1), height: Math.max(1, row - (row > 3 ? 1 : 0)) }));
}

export function drawQueue(scene) {
  const { history, view, layout, palette, pen, lit } = scene;
  const { queue, left, width, lanes } = layout;
  const now = view.extent[1];
  pen.rect(left, queue.top, width, queue.height, palette.lane);
  pen.clipped(left, queue.top, width, lanes.top - queue.top, () => {
    for (const { wait, top, height } of waitsShown(scene)) {
      const from = view.x(wait.from === null ? now : view.place(wait.from, wait.since));
      const to = view.x(wait.to === null ? now : view.place(wait.to, wait.until));
      const draw = () => pen.rect(from, top, Math.max(1, to - from), height, palette.of(wait.number).soft);
      if (lit === null || lit === wait.number) draw();
      else pen.faint(0.22, draw);
    }
  });
  const waiting = history.step(view.shown[1] - 1)?.waiting ?? 0;
  label(pen, palette, layout, queue, "queue", `${waiting} wait`);
}

// Draws why the first request of the queue was not admitted: each reason where it held, or where one does not fit, a
// list of all.
export function drawReasons({ history, view, layout, palette, pen }) {
  const { reasons, left, width } = layout;
  const runs = reasonsShown(history, view);
  const named = new Set(runs.filter((run) => run.words).map((run) => run.value));
  const words = runs.every((run) => named.has(run.value)) ? null : listOf(runs, width - 6);
  pen.clipped(left, reasons.top, width, reasons.height, () => {
    for (const run of runs) {
      pen.rect(run.x, reasons.top + reasons.height - 3, Math.max(0.5, run.wide - 1), 2, palette.quiet);
      if (words === null && run.words) drawReason(run.words, run.x);
    }
    if (words) drawReason(words, left);
  });
  const name = layout.narrow ? "why" : "why they wait";
  pen.text(name, left - 8, reasons.top + 12, palette.quiet, { size: 11, align: "right" });

  function drawReason(words, x) {
    pen.text(words, x + 2, reasons.top + reasons.height - 7, palette.quiet, { size: 11 });
  }
}

// Returns the runs of reasons in view as {value, steps, x, wide, words}, without words where none fit.
function reasonsShown(history, view) {
  const [low, high] = view.shown;
  return history.reasons.all.filter((run) => run.first < high && run.end > low).map(({ value, first, end }) => {
    const [from, to] = [Math.max(low, first), Math.min(high, end)];
    const x = view.x(view.start(from)), wide = view.x(view.stop(to - 1)) - x;
    const words = [inWords(value), value.replaceAll("_", " ")].find((one) => one.length * LETTER < wide - 6);
    return { value, steps: to - from, x, wide, words };
  });
}

// Returns the reasons of these runs with their shares of the steps, the most frequent first, and the number of those
// that `width` pixels do not hold.
function listOf(runs, width) {
  const steps = new Map();
  for (const run of runs) steps.set(run.value, (steps.get(run.value) ?? 0) + run.steps);
  const all = [...steps.values()].reduce((sum, one) => sum + one, 0);
  const reasons = [...steps].sort((one, other) => other[1] - one[1])
    .map(([value, count]) => `${inWords(value)} ${Math.round(100 * count / all)}%`);
  const further = (count) => count < reasons.length ? ` +${reasons.length - count}` : "";
  const upTo = (count) => reasons.slice(0, count).join(" · ") + further(count);
  let count = reasons.length;
  while (count > 1 && upTo(count).length * LETTER > width) count -= 1;
  return upTo(count);
}

// Draws the batching in force and the share of the needed slots that did useful work, for each segment.
export function drawHeads({ history, view, layout, palette, pen }) {
  const { heads, left, right, lanes } = layout;
  const [low, high] = view.shown;
  history.segments.forEach((segment, index) => {
    const from = Math.max(low, segment.first), to = Math.min(high, history.segments[index + 1]?.first ?? high);
    if (from >= to) return;
    const x = Math.max(left, view.x(view.start(from))), end = Math.min(right, view.x(view.stop(to - 1)));
    const tall = lanes.top + lanes.height - heads.top;
    if (segment.first >= low && x > left + 1) pen.rect(x - 1, heads.top, 2, tall, palette.ink);
    const share = history.needed(from, to);
    const name = segment.words, facts = share === null ? "" : `${Math.round(100 * share)}% of the needed slots used`;
    pen.clipped(x, heads.top, Math.max(0, end - x), heads.height, () => {
      const after = x + 18 + 8.6 * name.length;
      if (after - 12 < end) pen.text(name, x + 6, heads.top + 17, palette.ink, { size: 14, weight: 700 });
      if (end - after > LETTER * facts.length) pen.text(facts, after, heads.top + 17, palette.quiet, { size: 13 });
    });
  });
  for (const mark of history.marks) {
    if (mark.at < low || mark.at > high) continue;
    const x = view.x(view.start(mark.at));
    pen.line(x, heads.top + 20, x, lanes.top + lanes.height, palette.loss, 1.5, [4, 3]);
    pen.text(mark.text, x + 4, lanes.top + 12, palette.loss, { size: 11 });
  }
}

export function label(pen, palette, layout, band, name, value) {
  const x = layout.left - 8;
  pen.text(name, x, band.top + 12, palette.quiet, { size: 11, align: "right" });
  const how = { size: layout.narrow ? 11 : 12, align: "right", weight: 600 };
  if (value) pen.text(value, x, band.top + 26, palette.ink, how);
}
