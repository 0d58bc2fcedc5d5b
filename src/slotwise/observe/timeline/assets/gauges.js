// Below the lanes, on the same scale: the axis; curves of cache, time, tokens, running and waiting requests; overview.
import { label } from "./queue.js";

const TICKS = [1, 2, 5];

export function drawAxis({ history, view, layout, palette, pen }) {
  const { axis, left, right, width } = layout;
  const span = view.to - view.from;
  const apart = nice(span / Math.max(2, width / 110), view.unit === "steps" ? 1 : 1e-4);
  const [low, high] = view.extent;
  const digits = Math.max(0, -Math.floor(Math.log10(apart)));
  const first = Math.ceil(Math.max(low, view.from) / apart) * apart, last = Math.min(high, view.to) + 1e-9;
  for (let tick = first; tick <= last; tick += apart) {
    const x = view.x(tick);
    pen.line(x, axis.top, x, axis.top + 4, palette.quiet);
    const words = view.unit === "steps" ? String(Math.round(tick)) : `${tick.toFixed(digits)} s`;
    const half = 4 * words.length;
    if (x + half > right || x - half < left - 4) continue;
    pen.text(words, x, axis.top + 17, palette.quiet, { size: 11, align: "center" });
  }
  const name = view.unit === "steps" ? "step" : "time";
  pen.text(name, left - 8, axis.top + 16, palette.quiet, { size: 11, align: "right" });
}

// Returns the distance of the axis' ticks: 1, 2 or 5 times a power of ten.
function nice(about, least) {
  const power = 10 ** Math.floor(Math.log10(about));
  return Math.max(least, power * (TICKS.find((one) => one * power >= about) ?? 10));
}

export function drawGauges(scene) {
  const { history, view, layout, palette } = scene;
  const [low, high] = view.shown;
  const last = history.step(high - 1);
  const total = history.run?.limits.num_blocks ?? 0;
  const columns = gather(view, history, low, high);
  const blocks = (step) => total - step.free, milliseconds = (step) => 1e3 * (step.until - step.at);
  const tokens = (step) => step.tokensComputed;
  const words = layout.narrow ? ["cache", "time", "tokens", "run/wait", ""]
    : ["cache blocks", "step time", "tokens a step", "run / wait", ` of ${total}`];
  area(scene, columns, layout.blocks, blocks, palette.series, total);
  area(scene, columns, layout.time, milliseconds, palette.series);
  const most = area(scene, columns, layout.tokens, tokens, palette.loss);
  area(scene, columns, layout.tokens, (step) => step.worked, palette.series, most, true);
  drawCrowd(scene, columns);
  const { pen } = scene;
  label(pen, palette, layout, layout.blocks, words[0], last && `${blocks(last)}${words[4]}`);
  label(pen, palette, layout, layout.time, words[1], last && `${milliseconds(last).toFixed(1)} ms`);
  label(pen, palette, layout, layout.tokens, words[2], last && String(tokens(last)));
  label(pen, palette, layout, layout.crowd, words[3], last && `${last.running} / ${last.waiting}`);
}

// Returns steps grouped by their first pixel, {x, right, steps}: each curve shows the highest value of a group.
function gather(view, history, low, high) {
  const columns = [];
  let column = null;
  for (let ordinal = low; ordinal < high; ordinal++) {
    const x = view.x(view.start(ordinal)), step = history.step(ordinal);
    if (!column || x - column.x >= 1) columns.push(column = { x, right: x, steps: [] });
    column.right = Math.max(x + 0.5, view.x(view.stop(ordinal)));
    column.steps.push(step);
  }
  return columns;
}

function highest(steps, of) {
  let most = 0;
  for (const step of steps) most = Math.max(most, of(step));
  return most;
}

// Draws a filled curve, scaled to `most` or to its highest value; returns the scale.
function area({ layout, palette, pen }, columns, band, of, fill, most = 0, over = false) {
  const values = columns.map((column) => highest(column.steps, of));
  const scale = most || values.reduce((one, other) => Math.max(one, other), 0) || 1;
  if (!over) pen.rect(layout.left, band.top, layout.width, band.height, palette.lane);
  const bottom = band.top + band.height;
  const outline = columns.flatMap((column, index) => {
    const y = bottom - band.height * Math.min(1, values[index] / scale), next = columns[index + 1];
    const idle = next && next.x > column.right + 1 ? [[column.right, bottom], [next.x, bottom]] : [];
    return [[column.x, y], [column.right, y], ...idle];
  });
  if (!outline.length) return scale;
  outline.push([outline[outline.length - 1][0], bottom], [outline[0][0], bottom]);
  pen.clipped(layout.left, band.top, layout.width, band.height, () => pen.shape(outline, fill));
  return scale;
}

function drawCrowd({ layout, palette, pen }, columns) {
  const { crowd } = layout;
  pen.rect(layout.left, crowd.top, layout.width, crowd.height, palette.lane);
  const steps = columns.flatMap((one) => one.steps);
  const scale = Math.max(1, highest(steps, (step) => Math.max(step.running, step.waiting)));
  const curve = (of) => columns.flatMap((column) => {
    const y = crowd.top + crowd.height - 1 - (crowd.height - 3) * highest(column.steps, of) / scale;
    return [[column.x, y], [column.right, y]];
  });
  if (!columns.length) return;
  pen.clipped(layout.left, crowd.top, layout.width, crowd.height, () => {
    pen.curve(curve((step) => step.waiting), palette.loss, 1.5, [4, 2]);
    pen.curve(curve((step) => step.running), palette.series, 1.75);
  });
}

// Draws the whole history: the share of useful slots, and the part in view.
export function drawOverview({ history, view, layout, palette, pen }) {
  const { overview, left, width } = layout;
  const [low, high] = view.extent;
  pen.rect(left, overview.top, width, overview.height, palette.lane);
  const place = (value) => left + width * (value - low) / (high - low), bottom = overview.top + overview.height;
  const bars = Math.min(Math.floor(width / 2), history.steps.length);
  const outline = [];
  for (let bar = 0; bar < bars; bar++) {
    const from = history.first + Math.floor(bar * history.steps.length / bars);
    const to = Math.max(from + 1, history.first + Math.floor((bar + 1) * history.steps.length / bars));
    const y = bottom - (overview.height - 2) * (history.useful(from, to) ?? 0);
    outline.push([place(view.start(from)), y], [place(view.stop(to - 1)), y]);
  }
  if (bars) pen.shape([[outline[0][0], bottom], ...outline, [outline[outline.length - 1][0], bottom]], palette.series);
  const x = place(Math.max(low, view.from)), right = place(Math.min(high, view.to));
  pen.faint(0.16, () => pen.rect(x, overview.top, Math.max(3, right - x), overview.height, palette.ink));
  pen.curve([[x, overview.top], [right, overview.top], [right, overview.top + overview.height],
    [x, overview.top + overview.height], [x, overview.top]], palette.ink, 1.5);
  label(pen, palette, layout, overview, layout.narrow ? "all" : "everything", "");
}
