// When each of the ranks that compute a model worked: a line for each, on the scale of the lanes.
import { ordinalAt } from "./history.js";
import { label } from "./queue.js";

export function drawRanks({ history, view, layout, palette, pen }) {
  const { ranks: band, left, width } = layout;
  if (!history.ranks || !band.height) return;
  const [low, high] = view.shown, pitch = band.height / history.ranks;
  const x = (moment) => view.x(view.place(ordinalAt(history.steps, moment), moment));
  pen.clipped(left, band.top, width, band.height, () => {
    for (let rank = 0; rank < history.ranks; rank++) {
      pen.rect(left, band.top + rank * pitch, width, pitch - 2, palette.lane);
    }
    for (let ordinal = low; ordinal < Math.min(history.end, high + history.ranks); ordinal++) { // those begun early, too
      for (const [rank, from, to] of history.step(ordinal).ranks) {
        pen.rect(x(from), band.top + rank * pitch, Math.max(0.5, x(to) - x(from)), pitch - 2, palette.series);
      }
    }
  });
  label(pen, palette, layout, band, "ranks", "");
}
