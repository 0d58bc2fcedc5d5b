// The history of the batch, step by step, folded from the entries of an event log.
//
// Every executed step has an ordinal: its index in this history, which an engine's restart does not reset.  A lane is a
// slot; a span is one request's work of one kind in one slot over consecutive steps:
//
//     lane 3   |prefill 7|decode 7 ............|prefill 9|decode 9 ....|held 9 .....|
//              first                        end = first
import { Request } from "./request.js";
import { Runs } from "./runs.js";

const MAX_STEPS = 20000;
const LASTING = new Set(["decode", "held", "void"]); // kinds whose cells are equal, so that one span covers many

export class History {
  constructor(maxSteps = MAX_STEPS) {
    this.maxSteps = maxSteps;
    this.run = null;
    this.steps = [];
    this.first = 0; // ordinal of steps[0]
    this.requests = new Map();
    this.lanes = []; // of each slot, its spans in order
    this.waits = []; // in order of their start
    this.segments = []; // with constant scheduling settings: {first, kind, capacity}
    this.reasons = new Runs(); // why no further request was admitted
    this.marks = []; // other events: {at, text}
    this.zero = null; // nanoseconds at which seconds are 0
    this.unplaced = []; // waits that started after the last step
    this.unseated = []; // waits without a row in the picture of the queue
    this.places = []; // rows of that picture: true if taken
    this.ranks = 0; // that compute the model; 0: one process does
  }

  get end() { return this.first + this.steps.length; }
  get last() { return this.steps[this.steps.length - 1]; }
  step(ordinal) { return this.steps[ordinal - this.first]; }
  seconds(ns) { return (ns - this.zero) / 1e9; }
  segmentAt(ordinal) { return this.segments.findLast((one) => one.first <= ordinal) ?? this.segments[0]; }

  // The latest request of this name: its own, its response's, or the client's X-Request-Id.
  named(name) {
    const ids = ["", "cmpl-", "chatcmpl-", "resp-", "msg-", "embd-"].map((shape) => `${shape}${name}`);
    return [...this.requests.values()].findLast(({ id }) => id === name || ids.includes(id.replace(/-\d+$/, "")));
  }

  // Of the requests of the response with this id: how many have ended, and the steps [from, to) in which they ran.
  extentOf(id) {
    const ended = [...this.requests.values()].filter((one) => one.ended && one.id.startsWith(`${id}-`));
    const from = Math.min(...ended.flatMap((one) => one.joins.map((join) => join.ordinal)));
    return { ended: ended.length, from, to: Math.max(...ended.map((one) => one.ended.ordinal)) };
  }

  take(entry) {
    this.zero ??= entry.started_ns ?? entry.ns ?? null;
    switch (entry.kind) {
      case "run": return this.#begin(entry);
      case "request": return this.#arrive(entry);
      case "step": return this.#step(entry);
      case "sent": return this.#sent(entry);
      case "gap": return this.#miss(entry);
      case "engine": return this.#mark(`engine ${entry.state}`);
    }
  }

  // The largest capacity, in slots, in steps [from, to).
  capacity(from, to) {
    let most = 0;
    this.segments.forEach((one, index) => {
      if (one.first < to && (this.segments[index + 1]?.first ?? Infinity) > from) most = Math.max(most, one.capacity);
    });
    return most;
  }

  // The share of the slot-steps of [from, to) that did useful work.
  useful(from, to) { return this.#share(from, to, "seats", "capacity"); }

  // The same of those that requests needed: they were in them, or waited while they were empty.  An idle slot does not count.
  needed(from, to) { return this.#share(from, to, "needs", "need"); }

  #share(from, to, sum, own) {
    const [low, high] = [this.step(Math.max(from, this.first)), this.step(Math.min(to, this.end) - 1)];
    if (!low || !high) return null;
    const all = high[sum] - low[sum] + low[own];
    return all ? (high.wanted - low.wanted + low.useful) / all : null;
  }

  spanAt(slot, ordinal) {
    const lane = this.lanes[slot] ?? [];
    const span = lane[firstEndingAfter(lane, ordinal)];
    return span && span.first <= ordinal ? span : null;
  }

  #begin(run) {
    if (this.run && this.run.started_ns !== run.started_ns) this.#mark("a new engine");
    this.run = run;
    this.#schedule(run.scheduling);
  }

  #schedule(scheduling) {
    const { kind, prefill } = scheduling.batching;
    const words = kind.replaceAll("_", " ") + (prefill && prefill !== "chunked" ? `, prompts ${prefill}` : "");
    const segment = { first: this.end, kind, words, capacity: scheduling.max_num_seqs };
    const last = this.segments[this.segments.length - 1];
    if (last && last.words === words && last.capacity === segment.capacity) return;
    if (last && last.first === this.end) this.segments.pop();
    this.segments.push(segment);
  }

  #sent({ number, first_ns, last_ns }) {
    const request = this.requests.get(number);
    if (request) request.flushed = { first: this.seconds(first_ns), last: this.seconds(last_ns) };
  }

  #mark(text) { this.marks.push({ at: this.end, text }); }

  // Unfinished requests may have ended in the gap; those that have not are sent again after it.
  #miss(gap) {
    this.#mark(`${gap.missed} entries are missing`);
    for (const request of this.requests.values()) {
      if (!request.ended) this.#ended([request.number, "unknown", 0], this.end, this.last?.until ?? 0);
    }
  }

  #arrive(entry) {
    const number = entry.add.request_id;
    const known = this.requests.get(number);
    const request = known ?? new Request(number, entry, this.seconds(entry.ns));
    if (known && known.ended?.reason !== "unknown") return;
    request.ended = null;
    this.requests.set(number, request);
    this.unplaced.push(this.#queue(request, null, request.arrived));
  }

  #queue(request, from, since) {
    const wait = { number: request.number, place: null, from, since, to: null, until: null };
    request.wait = wait;
    request.waits.push(wait);
    this.waits.push(wait);
    this.unseated.push(wait);
    return wait;
  }

  #unqueue(request, to, until) {
    const wait = request.wait;
    if (!wait) return;
    wait.to = to;
    wait.until = until;
    wait.from ??= to;
    if (wait.place !== null) this.places[wait.place] = false;
    request.wait = null;
  }

  // The request had left the queue before the log begins.
  #unknown(request) {
    const { wait } = request;
    this.#unqueue(request, this.end, null);
    this.waits = this.waits.filter((one) => one !== wait);
    request.waits.pop();
  }

  // A request that a step has left waiting gets the lowest free row in the picture of the queue.
  #seat() {
    for (const wait of this.unseated) {
      if (wait.to !== null) continue;
      const free = this.places.indexOf(false);
      wait.place = free < 0 ? this.places.length : free;
      this.places[wait.place] = true;
    }
    this.unseated = [];
  }

  // A request that arrives during a step is drawn within it.
  #place(step) {
    this.unplaced = this.unplaced.filter((wait) => {
      if (wait.from === null && wait.since > step.until) return true;
      const part = (wait.since - step.at) / (step.until - step.at || 1);
      wait.from ??= step.ordinal + Math.min(1, Math.max(0, part));
      return false;
    });
  }

  #step(entry) {
    const { outcome } = entry;
    if (entry.inputs?.configured) this.#schedule(entry.inputs.configured);
    if (outcome?.failure) this.#mark(`a step failed: ${outcome.failure}`);
    if (!entry.result) {
      for (const end of outcome?.ended ?? []) this.#ended(end, this.end, this.seconds(entry.ended_ns));
      return;
    }
    const step = this.#column(entry);
    this.#place(step);
    for (const [number, reason, lost] of step.preempted) {
      const request = this.#known(number);
      request.lost.push({ ordinal: step.ordinal, reason, lost });
      this.#queue(request, step.ordinal, step.at);
    }
    for (const [number, cached] of step.admitted) {
      const request = this.#known(number);
      this.#unqueue(request, step.ordinal, step.at);
      request.joined(step, cached, step.lookups.find(([looked]) => looked === number)?.[1] ?? []);
    }
    const why = step.stop?.[0] ?? step.refused.find(([number]) => this.requests.get(number)?.wait)?.[1] ?? "";
    this.reasons.add(step.ordinal, why);
    for (const [rank] of step.ranks) this.ranks = Math.max(this.ranks, rank + 1);
    this.#rows(step);
    this.steps.push(step);
    this.#seat();
    for (const end of step.ended) this.#ended(end, step.ordinal + 1, step.until);
    if (this.steps.length > 1.2 * this.maxSteps) this.#trim();
  }

  #column(entry) {
    const before = this.last;
    const at = this.seconds(entry.started_ns);
    const { plans: [plan], result, outcome, counters } = entry;
    const sampled = result.tokens ?? [];
    return {
      ordinal: this.end, step: result.step,
      at: before ? Math.max(at, before.until) : at, until: this.seconds(entry.ended_ns),
      numbers: plan.request_ids ?? [], slots: plan.slots ?? [], starts: plan.starts ?? [], counts: plan.counts ?? [],
      padding: plan.padding ?? [], held: plan.held ?? [], tokens: outcome?.tokens ?? sampled,
      admitted: plan.admitted ?? [], lookups: plan.lookups ?? [], preempted: plan.preempted ?? [], refused: plan.refused ?? [],
      stop: plan.stop ?? null, ended: outcome?.ended ?? [], kinds: [], drafts: plan.drafts ?? [],
      draftLimit: plan.draft_limit ?? "", proposing: result.proposing ?? null,
      ranks: (result.ranks ?? []).map(([rank, from, to]) => [rank, this.seconds(from), this.seconds(to)]),
      yielded: sampled, running: counters?.num_running ?? 0, waiting: counters?.num_waiting ?? 0,
      free: counters?.num_free_blocks ?? 0,
      capacity: this.segmentAt(this.end)?.capacity ?? 0, useful: 0, worked: 0, tokensComputed: 0,
      need: 0, wanted: before?.wanted ?? 0, needs: before?.needs ?? 0, seats: before?.seats ?? 0, // slot-steps so far:
      // useful ones, those that requests needed, all
      sum: { decode: 0, prefill: 0, recompute: 0, held: 0, void: 0, padding: 0 },
    };
  }

  #rows(step) {
    const held = new Set(step.held);
    const cached = new Map(step.admitted);
    step.numbers.forEach((number, row) => {
      const request = this.#known(number);
      if (request.wait) this.#unknown(request);
      const count = step.counts[row], padding = step.padding[row] ?? 0;
      const kind = held.has(row) ? "held" : request.kindOf(step.starts[row]);
      step.kinds.push(kind);
      step.sum[kind] += count;
      step.sum.padding += padding;
      if (kind !== "held" && kind !== "void") step.useful += 1;
      request.ran(step, row, kind);
      const cell = { count, padding, cached: cached.get(number) ?? 0, joins: cached.has(number) };
      this.#extend(step.ordinal, step.slots[row], number, kind, cell);
    });
    step.worked = step.sum.decode + step.sum.prefill + step.sum.recompute;
    step.tokensComputed = Object.values(step.sum).reduce((sum, one) => sum + one, 0);
    step.need = Math.min(step.capacity, step.numbers.length + step.waiting);
    step.wanted += step.useful;
    step.needs += step.need;
    step.seats += step.capacity;
  }

  #extend(ordinal, slot, number, kind, cell) {
    const lane = this.lanes[slot] ??= [];
    const last = lane[lane.length - 1];
    const alike = last && last.number === number && last.kind === kind && last.end === ordinal;
    if (alike && LASTING.has(kind) && !cell.padding && !last.padding && !cell.joins && !last.joins) {
      last.end += 1;
    } else lane.push({ slot, number, kind, first: ordinal, end: ordinal + 1, ...cell });
  }

  #known(number) {
    if (!this.requests.has(number)) this.requests.set(number, new Request(number, {}, null));
    return this.requests.get(number);
  }

  #ended([number, reason, numOutput, message], ordinal, seconds) {
    const request = this.#known(number);
    this.#unqueue(request, ordinal, seconds);
    request.ended = { ordinal, seconds, reason, numOutput, message: message ?? "" };
  }

  #trim() {
    this.steps.splice(0, this.steps.length - this.maxSteps);
    this.first = this.last.ordinal + 1 - this.steps.length;
    const from = this.first;
    this.lanes.forEach((lane) => lane.splice(0, firstEndingAfter(lane, from)));
    this.waits = this.waits.filter((wait) => wait.to === null || wait.to > from);
    this.marks = this.marks.filter((mark) => mark.at >= from);
    this.reasons.forget(from);
    const kept = this.segments.findLastIndex((one) => one.first <= from);
    this.segments.splice(0, Math.max(0, kept));
    for (const [number, request] of this.requests) if (request.ended?.ordinal <= from) this.requests.delete(number);
  }
}

// Returns a moment as a fractional step of the ordered `steps`; between two steps the end of the earlier one.
export function ordinalAt(steps, seconds) {
  let low = 0, high = steps.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (steps[middle].at <= seconds) low = middle + 1;
    else high = middle;
  }
  const step = steps[Math.max(0, low - 1)];
  return step.ordinal + Math.min(1, Math.max(0, (seconds - step.at) / (step.until - step.at || 1)));
}

// Returns the index of the first of the ordered `spans` that ends after `ordinal`.
export function firstEndingAfter(spans, ordinal) {
  let low = 0, high = spans.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (spans[middle].end > ordinal) high = middle;
    else low = middle + 1;
  }
  return low;
}
