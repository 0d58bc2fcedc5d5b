// What is said beneath an answer: its speed, its first token, what came from the cache, and why it took that long.
import { duration, make, plural } from "./dom.js";

export class Stopwatch {
  constructor() {
    this.began = performance.now();
    this.first = this.last = 0;
    this.tokens = this.early = 0; // tokens so far, and those of the first event
  }

  // An event arrived, with which the answer has so many tokens.  Their text may come later: of a tool call, say.
  mark(tokens) {
    if (tokens <= this.tokens) return;
    this.tokens = tokens;
    this.last = performance.now();
    this.first ||= this.last;
    this.early ||= tokens;
  }

  // The facts of an answer, from these times and from the usage that the server reports.
  facts(usage) {
    const { tokens } = this, seconds = (this.last - this.first) / 1e3;
    return {
      tokens, prompt: usage?.prompt_tokens ?? 0, cached: usage?.prompt_tokens_details?.cached_tokens ?? 0,
      ttft: this.first ? (this.first - this.began) / 1e3 : null,
      rate: seconds > SHORT ? (tokens - this.early) / seconds : null,
    };
  }
}

const SHORT = 0.05; // seconds that say nothing of a speed
const ENDS = { length: "ended at its length", abort: "stopped", timeout: "timed out", error: "failed" };

// Returns the facts as elements, each a short phrase.
export function factsShown(facts) {
  const phrase = (words, title = "") => make("span", { textContent: words, title });
  const { rate, ttft, tokens, prompt, cached, finish } = facts;
  return [
    rate ? phrase(`${rate.toFixed(rate < 9.95 ? 1 : 0)} tokens/s`, `${plural(tokens, "token")}, after the first`) : null,
    ttft === null || ttft === undefined ? null : phrase(`first token ${duration(ttft)}`, "From the click to the first token"),
    prompt ? phrase(`${cached.toLocaleString("en")} of ${prompt.toLocaleString("en")} prompt tokens cached`,
      "Tokens of the prompt that were found in the prefix cache") : null,
    tokens ? phrase(plural(tokens, "token"), "Of the answer") : null,
    ENDS[finish] ? phrase(ENDS[finish]) : null,
  ].filter(Boolean);
}

// Shows the server's explanation of a request: its sentence, and a bar of its parts.
export function explanationShown({ requests }) {
  return requests.map((request) => {
    const bar = make("div", { className: "parts" });
    bar.setAttribute("aria-hidden", "true");
    for (const { part, ms } of request.parts) {
      const share = ms / (request.total_ms || 1);
      if (share < 0.002) continue;
      const piece = make("i", { className: part, title: `${part.replaceAll("_", " ")}: ${duration(ms / 1e3)}` });
      piece.style.flexGrow = share;
      bar.append(piece);
    }
    return make("div", {}, make("p", { textContent: request.sentence }), bar);
  });
}
