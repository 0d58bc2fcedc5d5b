// The picture of the view, drawn by either pen, and the elements under the pointer.
import { drawAxis, drawGauges, drawOverview } from "./gauges.js";
import { drawLanes, rows } from "./lanes.js";
import { drawHeads, drawQueue, drawReasons, waitsShown } from "./queue.js";
import { drawRanks } from "./ranks.js";

export function drawPicture(scene, height) {
  const { layout, palette, pen } = scene;
  pen.rect(0, 0, layout.right + 14, height, palette.page);
  drawQueue(scene);
  drawReasons(scene);
  drawLanes(scene);
  drawHeads(scene);
  drawAxis(scene);
  drawRanks(scene);
  drawGauges(scene);
  drawOverview(scene);
}

// Returns the element at a pixel: {band, ordinal, slot, fold, span, number}, each null where there is none.
export function pointedAt(scene, x, y) {
  const { history, view, layout } = scene;
  const found = { band: null, ordinal: null, slot: null, fold: null, span: null, number: null };
  for (const name of ["queue", "reasons", "lanes", "axis", "ranks", "blocks", "time", "tokens", "crowd", "overview"]) {
    const { top, height } = layout[name];
    if (y >= top && y < top + height) found.band = name;
  }
  const strip = found.band === "lanes" ? layout.strips.find(({ top, height }) => y < top + height) : null;
  if (strip?.folded) return { ...found, fold: strip };
  if (x < layout.left || x > layout.right || found.band === null || found.band === "overview") return found;
  const value = view.value(x);
  const ordinal = view.ordinal(value);
  if (ordinal >= history.first && ordinal < history.end) found.ordinal = ordinal;
  if (strip) {
    found.slot = strip.first;
    found.span = found.ordinal === null ? null : history.spanAt(found.slot, ordinal);
    found.number = found.span?.number ?? null;
  } else if (found.band === "queue") {
    const shown = waitsShown(scene).find(({ wait, top, height }) => {
      const from = view.place(wait.from ?? history.end, wait.since);
      const to = wait.to === null ? Infinity : view.place(wait.to, wait.until);
      return value >= from && value <= to && y >= top && y <= top + height;
    });
    found.number = shown?.wait.number ?? null;
  }
  return found;
}

// Highlights the column under the pointer, and all spans of its request.
export function drawPointer({ history, view, layout, palette, pen }, pointed) {
  const { ordinal, number } = pointed;
  if (ordinal !== null) {
    const x = view.x(view.start(ordinal)), width = Math.max(1, view.x(view.stop(ordinal)) - x);
    const { top } = layout.queue, height = layout.crowd.top + layout.crowd.height - top;
    pen.faint(0.14, () => pen.rect(x, top, width, height, palette.ink));
  }
  if (number === null) return;
  const [low, high] = view.shown;
  pen.clipped(layout.left - 1, layout.queue.top, layout.width + 2, layout.crowd.top - layout.queue.top, () => {
    history.lanes.slice(0, layout.slots).forEach((lane, slot) => {
      const [top, height] = rows(layout, slot);
      for (const [first, end] of stays(lane, number, low, high)) {
        const x = view.x(view.start(first)), right = view.x(view.stop(end - 1));
        const low = top + height;
        pen.curve([[x, top], [right, top], [right, low], [x, low], [x, top], [right, top]], palette.ink, 2);
      }
    });
  });
}

// Returns a request's stays in a lane, each as [first, end) from its first span to its last.
function stays(lane, number, low, high) {
  const found = [];
  lane.forEach((span, index) => {
    if (span.number !== number || span.end <= low || span.first >= high) return;
    const before = lane[index - 1];
    if (before?.number === number && found.length) found[found.length - 1][1] = span.end;
    else found.push([span.first, span.end]);
  });
  return found;
}
