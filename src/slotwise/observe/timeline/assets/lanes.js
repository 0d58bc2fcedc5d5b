// Slots as lanes: the work of each request in each slot, the waste, and the admissions.
import { firstEndingAfter } from "./history.js";

const CELLS = 5; // least pixels of a step to draw the lines between steps
const NAMED = 12; // least pixels of a lane to draw request numbers
const FEW = 160; // most admissions in view to draw the lines from the queue
const MORE = 4; // least pixels of a span to round its ends
const THIN = 4; // pixels of the line that stands for a run of slots

export function drawLanes(scene) {
  const { history, view, layout, pen } = scene;
  const { left, width, lanes } = layout;
  const [low, high] = view.shown;
  const joins = joinsShown(scene, low, high);
  pen.clipped(left, lanes.top, width, lanes.height, () => {
    drawGround(scene, low, high);
    drawLeads(scene, joins);
    const named = [];
    for (const { first, folded } of layout.strips) {
      if (!folded) drawLane(scene, history.lanes[first] ?? [], first, low, high, named);
    }
    drawSteps(scene, low, high);
    for (const [span, from, right] of named) drawNumber(scene, span, from, right);
    drawArrows(scene, joins);
  });
  drawNames(scene);
}

// Draws the empty lanes, and marks slots that are empty while requests wait.
function drawGround({ history, view, layout, palette, pen }, low, high) {
  const hungry = joined(history.reasons.all);
  for (const { first, folded } of layout.strips) {
    if (folded) pen.rect(layout.left, rows(layout, first)[0] + THIN / 2, layout.width, 1, palette.rule);
  }
  history.segments.forEach((segment, index) => {
    const end = Math.min(high, history.segments[index + 1]?.first ?? high);
    const first = Math.max(low, segment.first);
    const fill = (from, to, colour) => {
      if (from >= to) return;
      const x = view.x(view.start(from)), width = view.x(view.stop(to - 1)) - x;
      for (const { first: slot, folded } of layout.strips) {
        if (slot >= segment.capacity) return;
        const [top, height] = rows(layout, slot);
        pen.rect(x, top, width, height, folded && colour === palette.lane ? palette.rule : colour);
      }
    };
    fill(first, end, palette.lane);
    for (const run of hungry) fill(Math.max(first, run.first), Math.min(end, run.end), palette.fill("starved"));
  });
}

// Returns adjacent runs merged, whatever their values.
function joined(runs) {
  const found = [];
  for (const { first, end } of runs) {
    const last = found[found.length - 1];
    if (last?.end === first) last.end = end;
    else found.push({ first, end });
  }
  return found;
}

// Returns the top and the height of a slot's lane.
export function rows(layout, slot) {
  const { top, height, folded } = layout.stripOf[slot];
  if (folded) return [top + (height - THIN) / 2, THIN];
  return [top, height - (height >= 12 ? 3 : height >= 9 ? 2 : 1)];
}

// Draws a lane; adds to `named` the spans that may fit a request's number.
function drawLane(scene, spans, slot, low, high, named) {
  const { view, layout, pen } = scene;
  const [top, height] = rows(layout, slot);
  let drawn = -Infinity; // pixels up to which this lane is full
  let before = null;
  for (let index = firstEndingAfter(spans, low); index < spans.length && spans[index].first < high; index++) {
    const span = spans[index], next = spans[index + 1];
    const x = view.x(view.start(span.first)), right = view.x(edge(view, span, next));
    const pauses = before?.number === span.number && before.end < span.first && !span.joins;
    if (pauses) drawPause(scene, before, x, top, height);
    before = span;
    if (right - drawn < 0.4) continue; // it would be invisible
    const from = Math.max(x, drawn);
    drawn = right;
    const ends = right - from >= MORE && next?.number !== span.number && span.kind !== "void" && height > 6;
    const corner = ends ? [0, 4, 4, 0] : 0;
    const seam = next && next.number !== span.number && right - from > 3 && height > 6 ? 1 : 0;
    drawSpan(scene, span, from, right - from - seam, top, height, corner);
    if (height >= NAMED && span.kind === "decode") named.push([span, from, right]);
  }
}

// Returns the end of a span: on the time axis the start of the request's next one, since it keeps its slot.
function edge(view, span, next) {
  const goesOn = next?.number === span.number && next.first === span.end;
  return goesOn ? view.start(span.end) : view.stop(span.end - 1);
}

function drawSpan({ palette, pen, lit }, span, x, width, top, height, corner) {
  const draw = () => {
    const { number, count = 0, padding = 0, cached = 0 } = span;
    const padded = padding ? height * padding / (count + padding) : 0;
    const found = cached ? Math.max(3, (height - padded) * cached / (count + cached)) : 0;
    const computed = height - padded - found;
    pen.rect(x, top, width, computed, palette.fill(span.kind, number), padded || found ? 0 : corner);
    if (found) pen.rect(x, top + computed, width, found, palette.fill("cached", number));
    if (padded) pen.rect(x, top + height - padded, width, padded, palette.fill("padding", number));
    if (span.kind === "held") pen.rect(x, top + height - 2, width, 2, palette.of(number).line);
  };
  if (lit === null || lit === span.number) draw();
  else pen.faint(0.22, draw);
}

// Draws steps in which a request has a slot and no row, for instance while other prompts run alone.
function drawPause({ view, palette, pen }, before, right, top, height) {
  const x = view.x(view.stop(before.end - 1));
  pen.rect(x, top + 0.42 * height, right - x, Math.max(1, 0.16 * height), palette.of(before.number).soft);
}

function drawNumber({ layout, palette, pen, lit }, span, from, right) {
  const words = String(span.number);
  if (right - from < 8 + 7 * words.length || (lit !== null && lit !== span.number)) return;
  const [top, height] = rows(layout, span.slot);
  pen.text(words, from + 4, top + height / 2 + 4, palette.ink, { size: Math.min(12, height - 3), weight: 600 });
}

function drawSteps({ history, view, layout, palette, pen }, low, high) {
  if (high - low < 1 || layout.width / (high - low) < CELLS) return;
  const { top, height } = layout.lanes;
  for (let ordinal = low; ordinal < high; ordinal++) {
    const x = view.x(view.start(ordinal));
    pen.rect(x - 0.5, top, 1, height, palette.page);
  }
}

// Returns the admissions in view with their slots; none where they are too many to distinguish.
function joinsShown({ history, view, layout, lit }, low, high) {
  const found = [];
  const joining = history.waits.filter((wait) => wait.to !== null && wait.to >= low && wait.to < high
    && (lit === null || lit === wait.number));
  if (joining.length > FEW) return found;
  for (const wait of joining) {
    const request = history.requests.get(wait.number);
    const slot = request?.slots[request.joins.findIndex((one) => one.ordinal === wait.to)];
    if (slot < layout.slots) found.push({ wait, slot, x: view.x(view.start(wait.to)) });
  }
  return found;
}

// Draws lines from the queue to the slots, behind the spans in between.
export function drawLeads({ layout, palette, pen, lit }, joins) {
  for (const { wait, slot, x } of joins) {
    const [top, height] = rows(layout, slot);
    pen.line(x + 0.5, layout.lanes.top - 4, x + 0.5, top + height, palette.of(wait.number).line, lit === null ? 1 : 2);
  }
}

// Draws arrows where requests are admitted.
function drawArrows({ layout, palette, pen }, joins) {
  for (const { slot, x } of joins) {
    const [top, height] = rows(layout, slot);
    const middle = top + height / 2, size = Math.min(5, height / 2);
    pen.shape([[x, middle - size], [x + size, middle], [x, middle + size]], palette.page);
  }
}

function drawNames({ layout, palette, pen }) {
  const every = layout.pitch >= 11 ? 1 : Math.ceil(11 / layout.pitch / 2) * 4;
  for (const { first, end, folded } of layout.strips) {
    if (!folded && first % every) continue;
    const [top, height] = rows(layout, first);
    const words = folded ? `▸ ${end - first} idle` : layout.narrow ? String(first) : `slot ${first}`;
    pen.text(words, layout.left - 8, top + height / 2 + 4, palette.quiet, { size: 11, align: "right" });
  }
}
