// The page: a history, a view of it, and the text about the element under the pointer.
import { attach, listen } from "./hands.js";
import { History } from "./history.js";
import { layOut, stripsOf } from "./layout.js";
import { KINDS, Palette } from "./palette.js";
import { ScreenPen } from "./pen.js";
import { drawPicture, drawPointer, pointedAt } from "./picture.js";
import { requestStory, stepStory } from "./story.js";
import { View } from "./view.js";

export const $ = (id) => document.getElementById(id);
const SMALL = 1000; // pixels of window width up to which the page scrolls instead of filling the window
const BESIDE = 150; // milliseconds between two updates of the text
const SWATCH = [30, 14];
const NOWHERE = { band: null, ordinal: null, slot: null, fold: null, span: null, number: null };
const TOUCHED = matchMedia("(hover: none)").matches; // by a finger, which cannot point

export class Page {
  constructor() {
    this.canvas = $("picture");
    this.over = $("pointer");
    this.pointed = NOWHERE;
    this.pinned = null;
    this.dirty = false;
    this.textDue = 0;  // the timer of a text that waits
    this.saved = false;
    this.unfolded = false; // whether slots that never had a request have lanes
    this.textUpdatedAt = 0; // time of the last update of the text
    this.ahead = 0; // milliseconds by which the server's calendar is ahead of this machine's
    this.onScheduling = () => {};
    this.onEntries = () => {};
    this.wanted = ""; // the name of a request to show once it is there
    this.actions = {}; // of keys and buttons
    this.begin();
    this.readTheme();
    attach(this.canvas, this);
    listen(this);
    new ResizeObserver(() => this.changed()).observe($("stage"));
    addEventListener("resize", () => this.changed());
  }

  // Starts with an empty history.
  begin() {
    const unit = this.view?.unit ?? "steps";
    this.history = new History();
    this.view = new View(this.history);
    this.view.unit = unit;
    [this.pointed, this.pinned] = [NOWHERE, null];
  }

  // Seconds of the history now, on the server's clock: however long ago its last step was.
  get now() {
    const { run } = this.history;
    return this.history.seconds(run.started_ns) + (Date.now() + this.ahead) / 1e3 - run.started_unix;
  }

  take(entries) {
    for (const entry of entries) this.history.take(entry);
    if (entries.some((entry) => entry.kind === "run" || entry.inputs?.configured)) this.onScheduling();
    this.view.advance();
    this.onEntries();
    this.changed();
  }

  changed() {
    if (this.dirty) return;
    this.dirty = true;
    requestAnimationFrame(() => this.draw());
  }

  readTheme() {
    const chosen = localStorage.getItem("slotwise-theme");
    this.dark = chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    this.paint();
  }

  paint() {
    document.documentElement.classList.toggle("dark", this.dark);
    this.palette = new Palette(this.dark);
    this.pens = null;
    legend(this.palette);
    this.changed();
  }

  // Sizes the picture to the width of its container; it fills the window unless the page scrolls.
  measure() {
    const { clientWidth: width, clientHeight: height } = $("stage");
    const tall = innerWidth <= SMALL ? Math.max(560, innerHeight * 0.8) : height;
    const [low, high] = this.view.shown;
    const slots = Math.max(this.history.capacity(low, Math.max(high, low + 1)), this.#used(low, high), 1);
    const strips = stripsOf(slots, (slot) => this.history.lanes[slot]?.length > 0);
    $("fold").hidden = !strips.some((strip) => strip.folded);
    const layout = layOut(width, tall, this.unfolded ? stripsOf(slots, () => true) : strips, this.history.ranks);
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
    const pen = (canvas) => new ScreenPen(canvas.getContext("2d"), this.palette, density);
    this.pens ??= [pen(this.canvas), pen(this.over)];
    return layout;
  }

  #used(low, high) {
    let used = this.history.lanes.length;
    while (used && !this.history.lanes[used - 1].some((span) => span.end > low && span.first < high)) used -= 1;
    return used;
  }

  get size() { return [this.layout.right + 14, this.layout.height]; }

  scene(pen) {
    const { history, view, layout, palette, pinned: lit } = this;
    return { history, view, layout, palette, pen, lit };
  }

  draw() {
    this.dirty = false;
    this.layout = this.measure();
    drawPicture(this.scene(this.pens[0]), this.layout.height);
    this.drawPointer();
    $("empty").hidden = this.history.steps.length > 0 || this.history.run === null;
    const words = this.view.following ? "❚❚ pause" : "▶ follow";
    if ($("pause").textContent !== words) $("pause").textContent = words;
    const now = performance.now(), left = this.textUpdatedAt + BESIDE - now;
    if (left < 0) {
      this.textUpdatedAt = now;
      this.tell();
    } else if (!this.textDue) {  // what was drawn last would else never be in the text
      this.textDue = setTimeout(() => { this.textDue = 0; this.changed(); }, left + 1);
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
    this.canvas.style.cursor = this.pointed.fold ? "pointer" : "";
    if (this.layout) this.drawPointer();
    this.tell();
  }

  pin(number) {
    this.pinned = number === this.pinned ? null : number;
    this.tell();
    this.changed();
  }

  // Shows or hides the lanes of slots that never had a request.
  fold() {
    this.unfolded = !this.unfolded;
    $("fold").setAttribute("aria-pressed", String(this.unfolded));
    this.point(null);
    this.changed();
  }

  // Moves the pointer to a neighboring cell.
  walk(across, down) {
    const [low, high] = this.view.shown;
    const ordinal = Math.min(high - 1, Math.max(low, (this.pointed.ordinal ?? low) + across));
    const slots = this.layout.strips.filter((strip) => !strip.folded).map((strip) => strip.first);
    if (!slots.length) return;
    const slot = slots[Math.min(slots.length - 1, Math.max(0, Math.max(0, slots.indexOf(this.pointed.slot)) + down))];
    const span = this.history.spanAt(slot, ordinal);
    this.point({ band: "lanes", ordinal, slot, span, number: span?.number ?? null });
  }

  tell() {
    const { history } = this;
    const request = history.requests.get(this.pointed.number ?? this.pinned);
    const step = this.pointed.ordinal === null ? null : history.step(this.pointed.ordinal);
    const parts = [], { fold } = this.pointed;
    if (fold) {
      parts.push(element("p", `Slots ${fold.first} to ${fold.end - 1} had no request in the stored history. `
        + `${TOUCHED ? "Tap" : "Click"} for their lanes.`));
    }
    if (request) {
      const colour = this.palette.of(request.number).soft;
      parts.push(...section(`request ${request.number}`, requestStory(history, request), request.id, colour));
    }
    if (step) {
      const where = this.pointed.slot === null ? "" : `slot ${this.pointed.slot}`;
      parts.push(...section(`step ${step.ordinal}`, stepStory(history, step), where));
    }
    if (!parts.length && history.steps.length) {
      const how = TOUCHED ? "Tap a request for its story." : "Point at a request for its story; click to keep it.";
      parts.push(element("p", how));
    }
    $("story").replaceChildren(...parts);
  }
}

export function element(kind, words, properties = {}) {
  return Object.assign(document.createElement(kind), { textContent: words, ...properties });
}

function section(title, facts, aside, colour) {
  const head = element("h2", ""), list = element("dl", "");
  if (colour) {
    const swatch = element("i", "");
    swatch.style.background = colour;
    head.append(swatch);
  }
  head.append(title, element("small", aside, { title: aside }));
  for (const [term, detail] of facts) list.append(element("dt", term), element("dd", detail));
  return [head, list];
}

function legend(palette) {
  $("legend").replaceChildren(...KINDS.map(([kind, words], index) => {
    const density = devicePixelRatio || 1, [width, height] = SWATCH;
    const swatch = element("canvas", "", { width: width * density, height: height * density });
    [swatch.style.width, swatch.style.height] = [`${width}px`, `${height}px`];
    const context = swatch.getContext("2d");
    context.scale(density, density);
    new ScreenPen(context, palette, density).rect(0, 0, width, height, palette.fill(kind, index % 2));
    const item = element("li", "");
    item.append(swatch, words);
    return item;
  }));
}
