// One request: its parameters and its history.
export class Request {
  constructor(number, entry, arrived) {
    this.number = number;
    this.id = entry.add?.name ?? "";
    this.numPrompt = entry.num_prompt ?? 0;
    this.adapter = entry.add?.spec.adapter_name ?? "";
    this.maxTokens = entry.add?.spec.params.max_tokens ?? null;
    this.arrived = arrived; // seconds; null where the log begins later
    this.wait = null; // the current one
    this.waits = [];
    this.joins = []; // {ordinal, seconds, cached, spans}: spans of known tokens by why they were cached or not
    this.lost = []; // {ordinal, reason, lost}: each preemption
    this.ended = null;
    this.high = 0; // most tokens computed so far
    this.steps = { prefill: 0, decode: 0, recompute: 0, held: 0, void: 0 };
    this.computed = { prefill: 0, decode: 0, recompute: 0, held: 0, void: 0 }; // tokens
    this.padded = 0;
    this.numTokens = 0; // returned so far
    this.drafts = 0; // verified so far
    this.draftsRight = 0;
    this.firstToken = this.lastToken = null; // seconds
    this.slots = []; // one for each join
    this.flushed = null; // seconds: {first, last} byte written to the socket
  }

  // Returns the kind of a row that starts at token `start`.  Tokens computed before are recomputed.
  kindOf(start) {
    if (this.ended) return "void";
    if (start < this.high) return "recompute";
    return start < this.numPrompt ? "prefill" : "decode";
  }

  joined(step, cached, spans) { this.joins.push({ ordinal: step.ordinal, seconds: step.at, cached, spans }); }

  ran(step, row, kind) {
    const count = step.counts[row], yielded = step.tokens[row]?.length ?? 0;
    if (this.slots.length < this.joins.length) this.slots.push(step.slots[row]);
    this.steps[kind] += 1;
    this.computed[kind] += count;
    this.padded += step.padding[row] ?? 0;
    const drafts = step.drafts[row]?.length ?? 0;
    const right = drafts && Math.max(0, (step.yielded[row]?.length ?? 0) - 1);
    this.drafts += drafts;
    this.draftsRight += right;
    if (kind !== "held" && kind !== "void") { // what follows a wrong draft is computed for the first time
      this.high = Math.max(this.high, step.starts[row] + count - (drafts - right));
    }
    if (!yielded) return;
    this.numTokens += yielded;
    this.firstToken ??= step.until;
    this.lastToken = step.until;
  }
}
