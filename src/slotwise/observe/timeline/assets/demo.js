// A mixed workload through the public API, and the comparison of static and continuous batching.
const SLOTS = 12;
const REQUESTS = 48; // of the comparison: four batches
const OUTPUT = { middle: 18, spread: 0.85, least: 3, most: 56 }; // tokens, log-normal
const PROMPT = { middle: 20, spread: 0.9, least: 4, most: 160 };
const TURNS = 1200; // most polls for records, 25 milliseconds apart
const SHARED = 48; // tokens of the prefix of a quarter of the prompts
const FIRST_ID = 64, IDS = 180; // ordinary tokens of any vocabulary
const LATELY = 60; // seconds for which a request counts after its end

// Mulberry32: the same workload in each run.
function random(seed) {
  let state = seed;
  return () => {
    state = (state + 0x6d2b79f5) | 0;
    let mixed = Math.imul(state ^ (state >>> 15), 1 | state);
    mixed = (mixed + Math.imul(mixed ^ (mixed >>> 7), 61 | mixed)) ^ mixed;
    return ((mixed ^ (mixed >>> 14)) >>> 0) / 2 ** 32;
  };
}

function length(draw, { middle, spread, least, most }) {
  const normal = Math.sqrt(-2 * Math.log(1 - draw())) * Math.cos(2 * Math.PI * draw()); // Box and Muller
  return Math.round(Math.min(most, Math.max(least, middle * Math.exp(spread * normal))));
}

export function workload(count, longest, seed = 7) {
  const draw = random(seed);
  const ids = (many) => Array.from({ length: many }, () => FIRST_ID + Math.floor(draw() * IDS));
  const shared = ids(SHARED);
  const most = Math.max(1, Math.floor(longest / 4));
  const prompts = [], outputs = [];
  for (let index = 0; index < count; index++) {
    const own = ids(length(draw, PROMPT));
    prompts.push((index % 4 === 3 ? [...shared, ...own] : own).slice(0, 2 * most));
    outputs.push(Math.min(most, length(draw, OUTPUT)));
  }
  return { prompts, outputs };
}

export class Demo {
  constructor(service, page) {
    this.service = service;
    this.page = page;
    this.name = `timeline-${crypto.getRandomValues(new Uint32Array(2)).join("-")}`; // begins the ids of its requests
    this.count = 0;
  }

  get history() { return this.page.history; }
  get limits() { return this.history.run.limits; }

  // Returns which requests of others a change would affect, as a sentence; "" where there are none.
  get others() {
    const others = [...this.history.requests.values()].filter((one) => !one.id.startsWith(`cmpl-${this.name}-`));
    const active = others.filter((one) => !one.ended).length;
    if (active) return `In progress: ${active} ${active === 1 ? "request" : "requests"} of others.`;
    const ago = this.page.now - Math.max(...others.map((one) => one.ended.seconds));
    return ago < LATELY ? `A request of others ended ${Math.max(1, Math.round(ago))} s ago.` : "";
  }

  // Sends all requests at once; resolves when the last is answered.
  send(count) { return this.#complete(workload(count, this.limits.max_model_len)); }

  schedule(changes) { return this.service.json("/admin/scheduling", { method: "PUT", body: changes }); }

  // Runs the same requests with both batchings, then restores the settings.  `onPart` is called at the start of each.
  // Resolves to the extents of both.
  async compare(onPart) {
    const before = await this.service.json("/admin/scheduling");
    const restore = () => this.schedule(Object.fromEntries(Object.entries(before).filter(([, value]) => value !== null)));
    addEventListener("pagehide", restore);
    try {
      const slots = Math.min(SLOTS, this.limits.max_num_seqs);
      return [await this.#part("static", slots, onPart), await this.#part("continuous", slots, onPart)];
    } finally {
      removeEventListener("pagehide", restore);
      await restore();
    }
  }

  async #part(batching, slots, onPart) {
    const count = Math.floor(REQUESTS * slots / SLOTS);
    const answered = batching === "static" ? await this.#queued(count) : null;
    await this.schedule({ batching, max_num_seqs: slots });
    onPart(batching);
    const { id } = await (answered ? answered() : this.send(count));
    await this.#until((history) => history.extentOf(id).ended === count);
    return this.history.extentOf(id);
  }

  // Queues `count` requests behind one in the only slot, since a static batch takes the requests that wait when it
  // starts.  Resolves to a function that aborts that one, so that they start; to null if that one ended before its
  // record arrived: then none is queued.
  async #queued(count) {
    await this.schedule({ batching: "continuous", max_num_seqs: 1 });
    const guard = new AbortController();
    const longest = Math.floor(this.limits.max_model_len / 2);
    let over = false;
    const guarding = this.#complete({ prompts: [[FIRST_ID]], outputs: [longest] }, guard.signal)
      .catch(() => {}).finally(() => { over = true; });
    await this.#until(({ last }) => over || last?.running === 1);
    if (over) return null;
    const answered = this.send(count);
    await this.#until(({ last }) => over || last?.waiting >= count);
    return () => {
      guard.abort();
      return guarding.then(() => answered);
    };
  }

  // Records arrive after the answers they describe: a moment later, or seconds when both cores are busy.
  async #until(holds) {
    for (let turn = 0; turn < TURNS; turn++) {
      if (holds(this.history)) return;
      await new Promise((done) => setTimeout(done, 25));
    }
    throw new Error("the service's records of it did not come");
  }

  #complete({ prompts, outputs }, signal) {
    const name = `${this.name}-${this.count += 1}`; // also the salt: no prefix hits from earlier runs
    return this.service.json("/v1/completions", { method: "POST", signal, body: {
      prompt: prompts, max_tokens: Math.max(...outputs), bench_output_tokens: outputs, ignore_eos: true, seed: 7,
      cache_salt: name, request_id: name } });
  }
}
