// Where everything is: bands from top to bottom, each {top, height}.
const GUTTER = { wide: 92, narrow: 54 };
const NARROW = 640; // pixels
const BANDS = [["heads", 26], ["queue", 78], ["reasons", 18], ["lanes", 0], ["axis", 22], ["blocks", 38], ["time", 38],
  ["tokens", 38], ["crowd", 38], ["overview", 30]];
const GAP = 8;
const AFTER = { heads: 2, queue: 3, reasons: 4, lanes: 0, axis: 6 };
const PITCH = { least: 7, most: 30 };

// Bands of a page `width` pixels wide that should be no taller than `height`, for this many slots.
export function layOut(width, height, slots) {
  const narrow = width < NARROW;
  const gaps = BANDS.reduce((sum, [name]) => sum + (AFTER[name] ?? GAP), 0);
  const fixed = BANDS.reduce((sum, [, tall]) => sum + tall, 0) + gaps;
  const pitch = Math.min(PITCH.most, Math.max(PITCH.least, Math.floor((height - fixed) / Math.max(1, slots))));
  const layout = { left: narrow ? GUTTER.narrow : GUTTER.wide, narrow, pitch, slots };
  layout.width = width - layout.left - (narrow ? 8 : 14);
  let top = 0;
  for (const [name, tall] of BANDS) {
    layout[name] = { top, height: name === "lanes" ? pitch * slots : tall };
    top += layout[name].height + (AFTER[name] ?? GAP);
  }
  layout.height = top - GAP;
  layout.right = layout.left + layout.width;
  return layout;
}
