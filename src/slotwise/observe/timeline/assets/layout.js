// Layout of the picture: bands from top to bottom, each {top, height}.
const GUTTER = { wide: 92, narrow: 62 };
const NARROW = 640; // pixels
const BANDS = ["heads", "queue", "reasons", "lanes", "axis", "blocks", "time", "tokens", "crowd", "overview"];
const ROOMY = { heads: 26, queue: 78, reasons: 18, axis: 22, blocks: 38, time: 38, tokens: 38, crowd: 38, overview: 30 };
const TIGHT = { heads: 24, queue: 56, reasons: 18, axis: 20, blocks: 27, time: 27, tokens: 27, crowd: 27, overview: 22 };
const GAPS = { heads: 2, queue: 3, reasons: 4, lanes: 0, axis: 6, blocks: 6, time: 6, tokens: 6, crowd: 8, overview: 0 };
const PITCH = { least: 7, most: 32 };

const total = (bands) => BANDS.reduce((sum, name) => sum + (bands[name] ?? 0) + GAPS[name], 0);

// Returns the bands of a page of `width` pixels and preferably at most `height`, for this many slots.
export function layOut(width, height, slots) {
  const narrow = width < NARROW;
  const bands = total(ROOMY) + PITCH.least * slots <= height ? ROOMY : TIGHT;
  const pitch = Math.min(PITCH.most, Math.max(PITCH.least, Math.floor((height - total(bands)) / Math.max(1, slots))));
  const layout = { left: narrow ? GUTTER.narrow : GUTTER.wide, narrow, pitch, slots };
  layout.width = width - layout.left - (narrow ? 8 : 14);
  let top = 0;
  for (const name of BANDS) {
    layout[name] = { top, height: bands[name] ?? pitch * slots };
    top += layout[name].height + GAPS[name];
  }
  layout.height = top;
  layout.right = layout.left + layout.width;
  return layout;
}
