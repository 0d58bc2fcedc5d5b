// The page: a history, a view of it, and what is said about the place that is pointed at.
import { Demo } from "./demo.js";
import { attach, KEYS, listen } from "./hands.js";
import { History } from "./history.js";
import { layOut } from "./layout.js";
import { KINDS, Palette } from "./palette.js";
import { ScreenPen } from "./pen.js";
import { drawPicture, drawPointer, pointedAt } from "./picture.js";
import { savePng, saveSvg, saveTrace } from "./save.js";
import { packed, readLines, Service } from "./service.js";
import { duration, requestStory, stepStory } from "./story.js";
import { View } from "./view.js";

const $ = (id) => document.getElementById(id);
const SMALL = 1000; // pixels of a window whose page is scrolled rather than filled
const WHOLE = 600; // steps of a saved log that are shown at once
const BESIDE = 150; // milliseconds between two readings of what changes without being pointed at
const NOWHERE = { band: null, ordinal: null, slot: null, span: null, number: null };

class Page {
  constructor() {
    this.canvas = $("picture");
    this.over = $("pointer");
    this.pointed = NOWHERE;
    this.pinned = null;
    this.dirty = false;
    this.saved = false;
    this.told = 0; // when the words were last brought up to date
    const chosen = localStorage.getItem("slotwise-theme");
    this.dark = chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    this.begin();
    this.paint();
    attach(this.canvas, this);
    listen(this);
    new ResizeObserver(() => this.changed()).observe($("stage"));
    addEventListener("resize", () => this.changed());
  }

  // Nothing is known yet.
  begin() {
    const unit = this.view?.unit ?? "steps";
    this.history = new History();
    this.view = new View(this.history);
    this.view.unit = unit;
    [this.pointed, this.pinned] = [NOWHERE, null];
  }

  take(entries) {
    for (const entry of entries) this.history.take(entry);
    if (entries.some((entry) => entry.kind === "run" || entry.configured)) controls(this);
    this.view.advance();
    this.changed();
  }

  changed() {
    if (this.dirty) return;
    this.dirty = true;
    requestAnimationFrame(() => this.draw());
  }

  paint() {
    document.documentElement.classList.toggle("dark", this.dark);
    this.palette = new Palette(this.dark);
    this.pens = null;
    legend(this.palette);
    this.changed();
  }

  // The picture is as wide as its place; it fills the window, unless the page has to be scrolled anyway.
  measure() {
    const { clientWidth: width, clientHeight: height } = $("stage");
    const tall = innerWidth <= SMALL ? Math.max(560, innerHeight * 0.8) : height;
    const [low, high] = this.view.shown;
    const slots = Math.max(this.history.capacity(low, Math.max(high, low + 1)), this.#used(low, high), 1);
    const layout = layOut(width, tall, slots);
    this.view.left = layout.left;
    this.view.width = layout.width;
    const density = devicePixelRatio || 1;
    for (const canvas of [this.canvas, this.over]) {
      const size = [Math.round(width * density), Math.round(layout.height * density)];
      if (canvas.width === size[0] && canvas.height === size[1] && this.pens) continue;
      [canvas.width, canvas.height] = size;
      [canvas.style.width, canvas.style.height] = [`${width}px`, `${layout.height}px`];
      canvas.getContext("2d").setTransform(density, 0, 0, density, 0, 0);
    }
    this.pens ??= [this.canvas, this.over].map((canvas) => new ScreenPen(canvas.getContext("2d"), this.palette, density));
    return layout;
  }

  #used(low, high) {
    let used = this.history.lanes.length;
    while (used && !this.history.lanes[used - 1].some((span) => span.end > low && span.first < high)) used -= 1;
    return used;
  }

  scene(pen) {
    return { history: this.history, view: this.view, layout: this.layout, palette: this.palette, pen, lit: this.pinned };
  }

  draw() {
    this.dirty = false;
    this.layout = this.measure();
    drawPicture(this.scene(this.pens[0]), this.layout.height);
    this.drawPointer();
    $("empty").hidden = this.history.steps.length > 0 || this.history.run === null;
    $("pause").setAttribute("aria-pressed", String(!this.view.following));
    const now = performance.now();
    if (now - this.told > BESIDE) {
      this.told = now;
      this.tell();
    }
  }

  drawPointer() {
    const [, pen] = this.pens;
    pen.context.clearRect(0, 0, this.canvas.width, this.canvas.height);
    drawPointer(this.scene(pen), { ...this.pointed, number: this.pointed.number ?? this.pinned });
  }

  pointedAt(x, y) { return this.layout ? pointedAt(this.scene(null), x, y) : NOWHERE; }

  point(pointed) {
    this.pointed = pointed ?? NOWHERE;
    if (this.layout) this.drawPointer();
    this.tell();
  }

  pin(number) {
    this.pinned = number === this.pinned ? null : number;
    this.tell();
    this.changed();
  }

  // Point at the cell beside the one that is pointed at.
  walk(across, down) {
    const [low, high] = this.view.shown;
    const ordinal = Math.min(high - 1, Math.max(low, (this.pointed.ordinal ?? low) + across));
    const slot = Math.min(this.layout.slots - 1, Math.max(0, (this.pointed.slot ?? 0) + down));
    const span = this.history.spanAt(slot, ordinal);
    this.point({ band: "lanes", ordinal, slot, span, number: span?.number ?? null });
  }

  tell() {
    const { history } = this;
    const request = history.requests.get(this.pointed.number ?? this.pinned);
    const step = this.pointed.ordinal === null ? null : history.step(this.pointed.ordinal);
    const parts = [];
    if (request) parts.push(...told(`request ${request.number}`, requestStory(history, request), request.id, this.palette.of(request.number).soft));
    if (step) parts.push(...told(`step ${step.ordinal}`, stepStory(history, step), this.pointed.slot === null ? "" : `slot ${this.pointed.slot}`));
    if (!parts.length) parts.push(Object.assign(document.createElement("p"), { textContent: history.steps.length
      ? "Point at a request for its story; click to keep it." : "" }));
    $("story").replaceChildren(...parts);
  }
}

function told(title, facts, aside, colour) {
  const head = document.createElement("h2"), list = document.createElement("dl");
  if (colour) head.append(Object.assign(document.createElement("i"), { style: `background:${colour}` }));
  head.append(title);
  if (aside) head.append(Object.assign(document.createElement("small"), { textContent: aside, title: aside }));
  for (const [term, detail] of facts) {
    list.append(Object.assign(document.createElement("dt"), { textContent: term }),
      Object.assign(document.createElement("dd"), { textContent: detail }));
  }
  return [head, list];
}

function legend(palette) {
  $("legend").replaceChildren(...KINDS.map(([kind, words], index) => {
    const swatch = document.createElement("canvas"), density = devicePixelRatio || 1;
    [swatch.width, swatch.height, swatch.style.width, swatch.style.height] = [30 * density, 14 * density, "30px", "14px"];
    const context = swatch.getContext("2d");
    context.scale(density, density);
    new ScreenPen(context, palette, density).rect(0, 0, 30, 14, palette.fill(kind, Math.min(index, 3) % 2));
    const item = document.createElement("li");
    item.append(swatch, words);
    return item;
  }));
}

// What the controls show is what the service does.
function controls(page) {
  const { run } = page.history;
  if (!run) return;
  $("model").textContent = [run.model.split("/").pop(), run.dtype, run.device].filter(Boolean).join(" · ");
  const segment = page.history.segments[page.history.segments.length - 1];
  $("batching").value = segment.kind;
  const most = run.limits.max_num_seqs;
  const choices = [...new Set([1, 2, 4, 8, 12, 16, 32, 64, 128, 256].filter((one) => one < most).concat(most, segment.capacity))];
  $("slots").replaceChildren(...choices.sort((one, other) => one - other).map((one) => new Option(one, one)));
  $("slots").value = segment.capacity;
}

function actions(page, demo) {
  const click = (id, act) => $(id).addEventListener("click", act);
  page.actions = {
    pause() {
      if (page.view.following) page.view.following = false;
      else page.view.follow();
    },
    unit() { measure(page.view.unit === "steps" ? "seconds" : "steps"); },
    theme() {
      page.dark = !page.dark;
      localStorage.setItem("slotwise-theme", page.dark ? "dark" : "light");
      page.paint();
    },
    help() { $("keys").showModal(); },
    neighbour(by) {
      const known = [...page.history.requests.keys()].sort((one, other) => one - other);
      if (known.length) page.pin(known[Math.max(0, known.indexOf(page.pinned) + by) % known.length]);
    },
    compare() { if (!page.saved && !$("compare").disabled) compare(page, demo); },
  };
  const measure = (unit) => {
    page.view.measure(unit);
    for (const id of ["steps", "seconds"]) $(id).setAttribute("aria-pressed", String(id === unit));
    page.changed();
  };
  for (const id of ["steps", "seconds"]) click(id, () => measure(id));
  for (const [id, act] of Object.entries({
    pause: () => page.actions.pause(), in: () => page.view.zoom(1.6), out: () => page.view.zoom(1 / 1.6), all: () => page.view.fit(),
    theme: () => page.actions.theme(), help: () => page.actions.help(), compare: () => page.actions.compare(),
    first: () => page.actions.compare(), png: () => savePng(page.scene(null), page.layout.right + 14, page.layout.height),
    svg: () => saveSvg(page.scene(null), page.layout.right + 14, page.layout.height), trace: () => saveTrace(page.history),
  })) click(id, () => { act(); page.changed(); });
  click("save", (event) => { if (event.target.closest("button")) $("save").open = false; });
  $("file").addEventListener("change", async ({ target }) => {
    if (target.files[0]) await openLog(page, target.files[0].stream(), target.files[0].name);
    $("save").open = false;
  });
  for (const [words, meaning] of KEYS) {
    $("keys").querySelector("dl").append(Object.assign(document.createElement("dt"), { textContent: words }),
      Object.assign(document.createElement("dd"), { textContent: meaning }));
  }
  return click;
}

function say(words) { $("said").textContent = words; }

// Buttons that ask the service for something say what went wrong, and wait for its answer.
async function asking(ids, act) {
  for (const id of ids) $(id).disabled = true;
  try {
    await act();
  } catch (error) {
    say(`That did not work: ${error.message}`);
  } finally {
    for (const id of ids) $(id).disabled = false;
  }
}

const DEMO = ["compare", "first", "send", "batching", "slots"];

function compare(page, demo) {
  return asking(DEMO, async () => {
    const parts = [];
    page.view.measure("steps");
    $("steps").setAttribute("aria-pressed", "true");
    $("seconds").setAttribute("aria-pressed", "false");
    page.view.keep();
    await demo.compare((batching) => {
      parts.push({ batching, first: page.history.end });
      say(batching === "static" ? "Static: whoever has finished is held, and the queue waits, until the longest answer of the batch has ended."
        : "Continuous, the same requests: a slot that is freed is taken at the very next step.");
    });
    await settled(page);
    const [first, second] = parts.map((part, index) => worth(page.history, part.first, parts[index + 1]?.first ?? page.history.end));
    if (page.view.following) page.view.show(parts[0].first, page.history.end);
    say(`The same requests: static ${first.words}; continuous ${second.words}: ${(first.seconds / second.seconds).toFixed(1)}× as fast.`);
    page.changed();
  });
}

function worth(history, from, to) {
  const seconds = history.step(to - 1).until - history.step(from).at;
  const share = Math.round(100 * history.useful(from, to));
  return { seconds, words: `took ${to - from} steps and ${duration(seconds)}, ${share}% of its slots used` };
}

// The answer may be here before the record of the step that gave it.
async function settled(page) {
  for (let turn = 0; turn < 40; turn++) {
    await new Promise((done) => setTimeout(done, 50));
    if (page.history.last?.running === 0 && page.history.last?.waiting === 0) return;
  }
}

async function openLog(page, stream, name) {
  page.saved = true;
  document.body.classList.add("saved");
  page.begin();
  try {
    await readLines(stream, (entries) => page.take(entries));
  } catch (error) {
    return say(`${name} is not an event log: ${error.message}`);
  }
  const { first, end } = page.history;
  page.view.show(first, Math.max(first + 1, Math.min(end, first + WHOLE)));
  $("state").className = "";
  $("state").textContent = `${name}: ${page.history.steps.length.toLocaleString("en")} steps`;
  page.changed();
}

function askForKey(wrong) {
  $("wrong").hidden = !wrong;
  $("key").value = "";
  $("door").showModal();
  return new Promise((done) => $("door").addEventListener("close", () => done($("key").value), { once: true }));
}

function live(page, service, demo, click) {
  click("send", () => asking(["send"], () => {
    page.view.follow();
    return demo.send(Math.min(192, Math.max(24, 3 * page.history.segments.at(-1).capacity)));
  }));
  for (const id of ["batching", "slots"]) {
    $(id).addEventListener("change", () => asking([id], async () => {
      await demo.schedule(id === "batching" ? { batching: $(id).value } : { max_num_seqs: Number($(id).value) });
    }));
  }
  service.follow(() => page.begin(), (entries) => { if (!page.saved) page.take(entries); }, (state) => {
    if (page.saved) return;
    $("state").className = state;
    $("state").textContent = state === "live" ? "live" : "no connection";
  });
}

let asked = null; // for a key: one question at a time
const service = new Service((wrong) => asked ??= askForKey(wrong).finally(() => { asked = null; }));
const page = new Page();
const demo = new Demo(service, () => page.history);
const click = actions(page, demo);
window.slotwise = page; // for whoever looks closer
if ($("log")) openLog(page, packed($("log").textContent), $("log").dataset.name);
else live(page, service, demo, click);
