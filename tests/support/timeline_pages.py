"""What a person would see on the page, read from its pixels."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from support.timeline_logs import Cell

WINDOW = 60  # steps looked at together: each is more than ten pixels wide
PLAIN = {"prefill": "strong", "decode": "soft"}
PIXELS = """([low, high]) => {
  const { view, layout, palette, canvas } = slotwise;
  const copy = new OffscreenCanvas(canvas.width, canvas.height);
  const context = copy.getContext("2d", { willReadFrequently: true });
  context.drawImage(canvas, 0, 0);
  const image = context.getImageData(0, 0, canvas.width, canvas.height);
  const hex = (x, y) => "#" + [0, 1, 2].map((part) =>
    image.data[4 * (Math.floor(y) * canvas.width + Math.floor(x)) + part].toString(16).padStart(2, "0")).join("");
  const steps = [];
  for (let ordinal = low; ordinal < high; ordinal++) {
    const x = view.x(view.start(ordinal)), width = view.x(view.stop(ordinal)) - x, slots = [];
    for (let slot = 0; slot < layout.slots; slot++) {
      const { top, height, folded } = layout.stripOf[slot], middle = top + height / 2;
      const column = [];
      const [first, end] = folded ? [middle - 1, middle + 1] : [top + 1, top + height - 4];
      for (let y = first; y < end; y++) column.push(hex(x + 0.7 * width, y));
      slots.push(column);
    }
    steps.push(slots);
  }
  const { hues, lane, loss_tint: tint, rule, page } = palette;
  return { steps, hues, lane, tint, rule, page };
}"""


WRITTEN = """(band) => {
  const [pen] = slotwise.pens, { text } = pen, { layout } = slotwise, { top, height } = layout[band], found = [];
  pen.text = (words, x, y, ink, how) => {
    text.call(pen, words, x, y, ink, how);
    const inside = y >= top && y < top + height && x >= layout.left;
    if (inside) found.push([words, x + pen.context.measureText(words).width]);
  };
  slotwise.draw();
  delete pen.text;
  return [found, layout.right];
}"""


def written(page: Any, band: str) -> list[str]:
    """The words drawn in a band of the picture; all of them must lie within it."""
    found, right = page.evaluate(WRITTEN, band)
    assert all(end <= right for _, end in found), (found, right)
    return [words for words, _ in found]


@contextmanager
def looked_at(chromium: Any, url: str, *, width: int = 1280, dark: bool = False) -> Iterator[tuple[Any, list[str]]]:
    """The page at `url`, and everything that its console complained about."""
    page = chromium.new_page(viewport={"width": width, "height": 900}, color_scheme="dark" if dark else "light")
    complaints: list[str] = []
    page.on("console", lambda message: complaints.append(message.text) if message.type != "debug" else None)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    try:
        page.goto(url)
        page.wait_for_function("window.slotwise")
        yield page, complaints
    finally:
        page.close()


def frame(page: Any) -> None:
    """Wait until what was changed is drawn."""
    page.evaluate("""() => { slotwise.changed(); return new Promise((done) =>
        requestAnimationFrame(() => requestAnimationFrame(done))); }""")


def compare(page: Any, steps: list[dict[int, Cell]], first: int = 0) -> dict[str, int]:
    """Raises AssertionError where a cell is not drawn as it should be.  How many cells of each kind were seen.

    Args:
        steps: what each slot should show, of each step from `first` on.
    """
    seen: dict[str, int] = {}
    for low in range(first, first + len(steps), WINDOW):
        high = min(low + WINDOW, first + len(steps))
        page.evaluate("([low, high]) => slotwise.view.show(low, high)", [low, max(high, low + 8)])
        frame(page)
        found = page.evaluate(PIXELS, [low, high])
        for step, drawn in zip(steps[low - first:high - first], found["steps"], strict=True):
            assert max(step, default=-1) < len(drawn), "a slot is not shown"
            for slot, column in enumerate(drawn):
                kind = _check(column, step.get(slot), found)
                seen[kind] = seen.get(kind, 0) + 1
    return seen


def _check(column: list[str], cell: Cell | None, page: dict[str, Any]) -> str:
    colours = set(column)
    if cell is None:
        assert colours <= {page["lane"], page["tint"]} or colours == {page["rule"]}, (column, "should be empty")
        return "empty"
    hue = page["hues"][cell.number % len(page["hues"])]
    if cell.kind in PLAIN:
        colour = hue[PLAIN[cell.kind]]
        part = column.count(colour) / len(column)
        wanted = cell.computed / (cell.computed + cell.beside)
        if cell.kind == "decode" and not cell.beside:
            assert part > 0.3, (cell, column)  # but for a number
            assert hue["strong"] not in colours
        else:
            assert abs(part - wanted) < 0.25 or wanted < 0.1, (cell, part, wanted)
    else:
        assert len(colours) > 2 and page["lane"] not in colours, (cell, column)  # a pattern
        assert (hue["strong"] in colours) == (cell.kind == "recompute"), (cell, column)
    return cell.kind
