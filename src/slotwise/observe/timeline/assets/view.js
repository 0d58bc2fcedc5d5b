// The visible part of the history, and the positions of its steps and seconds on the page.
const LEAST = { steps: 8, seconds: 0.002 };
const WIDTH = 160; // steps shown while following a run

export class View {
  constructor(history) {
    this.history = history;
    this.unit = "steps";
    this.from = 0; // in this unit
    this.to = WIDTH;
    this.following = true;
    this.anchor = null; // ordinal of a step that stays in view while following the end
    this.left = 0; // pixels
    this.width = 1;
  }

  get scale() { return this.width / (this.to - this.from); } // pixels per unit
  x(value) { return this.left + (value - this.from) * this.scale; }
  value(x) { return this.from + (x - this.left) / this.scale; }

  // The start and end of a step, in this unit.
  start(ordinal) {
    if (this.unit === "steps") return ordinal;
    const { history } = this;
    return history.step(ordinal)?.at ?? (ordinal < history.first ? history.steps[0]?.at : history.last?.until) ?? 0;
  }

  stop(ordinal) {
    return this.unit === "steps" ? ordinal + 1 : this.history.step(ordinal)?.until ?? this.start(ordinal);
  }

  // The position of a moment given both as a fractional step and in seconds.
  place(ordinal, seconds) {
    if (this.unit === "seconds" && seconds !== null) return seconds;
    return this.unit === "steps" ? ordinal : this.start(Math.floor(ordinal));
  }

  // The step at a position; between two steps the earlier one.
  ordinal(value) {
    if (this.unit === "steps") return Math.floor(value);
    const { steps, first } = this.history;
    let low = 0, high = steps.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (steps[middle].at <= value) low = middle + 1;
      else high = middle;
    }
    return first + low - 1;
  }

  // Steps in view, [low, high).
  get shown() {
    const { first, end } = this.history;
    const low = Math.max(first, this.ordinal(this.from)), high = Math.min(end, this.ordinal(this.to) + 1);
    return [Math.min(low, end), Math.max(low, high)];
  }

  get extent() {
    const { history } = this;
    if (this.unit === "steps") return [history.first, Math.max(history.end, history.first + LEAST.steps)];
    return [history.steps[0]?.at ?? 0, history.last?.until ?? 1];
  }

  measure(unit) {
    if (unit === this.unit) return;
    const [low, high] = this.shown;
    this.unit = unit;
    if (high > low) [this.from, this.to] = [this.start(low), this.stop(high - 1)];
    this.#settle();
  }

  // Moves to the end of the history while following.
  advance() {
    if (!this.following) return;
    const [low, end] = this.extent, width = this.to - this.from;
    if (this.anchor === null) {
      this.from = Math.max(low, end - width);
      this.to = this.from + Math.max(width, this.#few);
    } else {
      this.from = this.start(this.anchor);
      this.to = Math.max(end, this.from + this.#few);
    }
  }

  follow() {
    if (this.unit === "steps" && (this.anchor !== null || this.to - this.from > 4 * WIDTH)) this.from = this.to - WIDTH;
    this.following = true;
    this.anchor = null;
    this.advance();
  }

  // Follows the end and keeps the next step in view.
  keep() {
    this.following = true;
    this.anchor = this.history.end;
  }

  pan(pixels) {
    this.following = false;
    this.from -= pixels / this.scale;
    this.to = this.from + this.width / this.scale;
    this.#settle(this.width / this.scale);
  }

  zoom(factor, x = this.left + this.width / 2) {
    const fixed = this.following ? this.to : this.value(x);
    const [low, high] = this.extent;
    const asked = (this.to - this.from) / factor;
    const width = Math.min(Math.max(asked, LEAST[this.unit]), Math.max(1.1 * (high - low), this.#few));
    const part = (fixed - this.from) / (this.to - this.from);
    this.from = fixed - part * width;
    this.to = this.from + width;
    this.anchor = null;
    if (!this.following) this.#settle(width);
  }

  show(from, to) {
    this.following = false;
    this.anchor = null;
    [this.from, this.to] = [this.start(from), Math.max(this.stop(to - 1), this.start(from) + LEAST[this.unit])];
  }

  fit() { this.show(this.history.first, Math.max(this.history.end, this.history.first + 1)); }

  get #few() { return this.unit === "steps" ? 60 : 0.25; }

  // Limits the part of the page beyond the history to half.
  #settle(width = this.to - this.from) {
    const [low, high] = this.extent;
    this.from = Math.min(Math.max(this.from, low - width / 2), high - width / 2);
    this.to = this.from + width;
  }
}
