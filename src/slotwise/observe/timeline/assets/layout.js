// Layout of the picture: bands from top to bottom, each {top, height}, and the strips of the band of lanes: a lane for
// each slot, and one thin line for a run of slots that never had a request.
const GUTTER = { wide: 92, narrow: 62 };
const NARROW = 640; // pixels
const BANDS = ["heads", "queue", "reasons", "lanes", "axis", "ranks", "blocks", "time", "tokens", "crowd", "overview"];
const ROOMY = { heads: 26, queue: 78, reasons: 18, axis: 22, blocks: 38, time: 38, tokens: 38, crowd: 38, overview: 30 };
const TIGHT = { heads: 24, queue: 56, reasons: 18, axis: 20, blocks: 27, time: 27, tokens: 27, crowd: 27, overview: 22 };
const GAPS = { heads: 2, queue: 3, reasons: 4, lanes: 0, axis: 6, ranks: 0, blocks: 6, time: 6, tokens: 6, crowd: 8, overview: 0 };
const PITCH = { least: 7, most: 32 };
const RANK = 9; // pixels of a rank's line
const FOLD = { least: 3, height: 18 }; // slots of a run that is folded, pixels of its strip

const total = (bands) => BANDS.reduce((sum, name) => sum + (bands[name] ?? 0) + GAPS[name], 0);

// Returns the strips of this many slots from top to bottom, each {first, end, folded}.
export function stripsOf(slots, isUsed) {
  const strips = [];
  for (let first = 0, end; first < slots; first = end) {
    for (end = first; end < slots && !isUsed(end);) end += 1;
    const folded = end - first >= FOLD.least;
    if (!folded) end = first + 1;
    strips.push({ first, end, folded });
  }
  return strips;
}

// Returns the bands of a page of `width` pixels and preferably at most `height`, for these strips and lines of ranks.
export function layOut(width, height, strips, ranks = 0) {
  const narrow = width < NARROW;
  const folds = FOLD.height * strips.filter((one) => one.folded).length;
  const open = strips.filter((one) => !one.folded).length;
  const lines = ranks && RANK * ranks + GAPS.blocks;
  const roomy = total(ROOMY) + lines + PITCH.least * open + folds <= height;
  const bands = { ...(roomy ? ROOMY : TIGHT), ranks: lines };
  const fitting = Math.floor((height - total(bands) - folds) / Math.max(1, open));
  const pitch = Math.min(PITCH.most, Math.max(PITCH.least, fitting));
  const left = narrow ? GUTTER.narrow : GUTTER.wide;
  const layout = { left, narrow, pitch, slots: strips.at(-1).end, strips: [], stripOf: [] };
  layout.width = width - layout.left - (narrow ? 8 : 14);
  let top = 0;
  for (const name of BANDS) {
    layout[name] = { top, height: bands[name] ?? pitch * open + folds };
    top += layout[name].height + GAPS[name];
  }
  layout.height = top;
  top = layout.lanes.top;
  for (const { first, end, folded } of strips) {
    const strip = { first, end, folded, top, height: folded ? FOLD.height : pitch };
    layout.strips.push(strip);
    for (let slot = first; slot < end; slot++) layout.stripOf[slot] = strip;
    top += strip.height;
  }
  layout.right = layout.left + layout.width;
  return layout;
}
