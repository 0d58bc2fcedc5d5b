"""The slot x step chart: a lane for each slot, time to the right, a hue for each request.

A request's hue is useful work, dark for a prompt and light for decode.  Red hatching, here and in the timeline, marks
waste: padding, or a row computed after its last token.  An empty slot is blank.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise

from markupsafe import Markup

from slotwise.measure.bench.report.data import ChartSpan, Pad, SlotChart
from slotwise.measure.bench.report.plots import Axis, canvas, group, percent, tag

HUES = 10
FEW_REQUESTS = 400  # up to this number, each request is a group with a tooltip
KINDS = {
    "prefill": "prompt", "decode": "decode", "held": "wasted: finished, but held", "padding": "wasted: padding",
    "idle": "paused or preempted", "empty": "empty",
}
SWATCH = 14
PADDING = 40  # pixels above and below the lanes
SLIVER = 0.15  # of the page's width


def lane_height(slots: int) -> float:
    """Pixels from one lane to the next: few slots get tall lanes, many still fit on a screen."""
    return min(24.0, max(6.0, 208.0 / max(slots, 1)))


def with_idle(spans: Sequence[ChartSpan]) -> list[ChartSpan]:
    """The spans, and the gaps between two of the same request in the same slot, where it was not computed."""
    gaps = [
        ChartSpan(before.slot, before.end, after.first - before.end, "idle", before.request, 0)
        for before, after in pairwise(spans)
        if before.slot == after.slot and before.request == after.request and before.end < after.first]
    return [*spans, *gaps]


def draw(lanes: SlotChart, edges: Sequence[float], axis: Axis, wider: float, words: tuple[str, str]) -> Markup:
    """The chart of one discipline; step s lies from `edges[s]` to `edges[s + 1]` on `axis`.

    `wider` is its width in page widths; `words` are its title, and the text at its end.
    """
    title, finish = words
    used, shown = _shown(lanes)
    pitch = lane_height(shown)
    height = shown * pitch
    width = 1000.0 * wider
    places = [axis.place(edge) * width for edge in edges]
    end = axis.place(edges[-1])
    cells = _Cells(places, pitch)
    drawn = [tag("path", d=cells.lane(slot), class_="lane") for slot in range(shown)]
    drawn += _requests(with_idle(lanes.spans), cells)
    drawn.append(_path("padding", cells.padding(lanes)))
    drawn.append(_path("start", "".join(cells.start(span) for span in _starts(lanes.spans))))
    return tag(
        "svg", tag("title", title), *_grid(axis, height), canvas(drawn, height, width),
        *_names(lanes.slots, used, shown, pitch),
        tag("line", x1=percent(end), x2=percent(end), y1=-4, y2=height + 4, class_="end"),
        tag("text", finish, x=percent(end), dx=7, y=height / 2 + 4, class_="finish"),
        class_="lanes", role="img", aria_label=title, height=height_of(lanes))


def _shown(lanes: SlotChart) -> tuple[int, int]:
    """Slots up to the last one used, and the lanes drawn: one lane stands for all unused slots if these are many."""
    used = max((span.slot + 1 for span in lanes.spans), default=0)
    return used, lanes.slots if lanes.slots - used < 3 else used + 1


def height_of(lanes: SlotChart) -> int:
    """Height of the chart in pixels, with its axis."""
    _, shown = _shown(lanes)
    return round(shown * lane_height(shown) + PADDING)


def zoom(axis: Axis, end: float) -> float:
    """Width of a chart in page widths: 1, unless the chart that ends at `end` would be a sliver."""
    part = end / axis.high
    return 1.0 if part >= SLIVER or part <= 0 else min(5.0, 2 * SLIVER / part)


class _Cells:
    """Steps and slots as rectangles: the data of paths."""

    def __init__(self, places: Sequence[float], pitch: float) -> None:
        self._places, self._pitch = places, pitch
        self._gap = 2.0 if pitch >= 12 else 1.0

    def lane(self, slot: int) -> str:
        return self._box(slot, 0, len(self._places) - 1)

    def of(self, span: ChartSpan) -> str:
        if span.kind == "idle":
            return self._box(span.slot, span.first, span.end, 0.42, 0.58)
        return self._box(span.slot, span.first, span.end)

    def start(self, span: ChartSpan) -> str:
        top, bottom = self._rows(span.slot)
        return f"M{self._places[span.first]:.2f} {top:.2f}V{bottom:.2f}"

    def padding(self, lanes: SlotChart) -> str:
        """Padding fills the share of a cell that it has of the cell's tokens."""
        return "".join(
            self._box(pad.slot, pad.step, pad.step + 1, 1 - part)
            for pad, part in zip(lanes.pads, padded_parts(lanes.spans, lanes.pads), strict=True))

    def _rows(self, slot: int) -> tuple[float, float]:
        return slot * self._pitch + self._gap / 2, (slot + 1) * self._pitch - self._gap / 2

    def _box(self, slot: int, first: int, end: int, upper: float = 0.0, lower: float = 1.0) -> str:
        top, bottom = self._rows(slot)
        high, low = top + upper * (bottom - top), top + lower * (bottom - top)
        left, right = self._places[first], self._places[end]
        return f"M{left:.2f} {high:.2f}H{right:.2f}V{low:.2f}H{left:.2f}z"


def padded_parts(spans: Sequence[ChartSpan], pads: Iterable[Pad]) -> list[float]:
    """For each pad, the share of padding among the tokens computed in its slot at its step."""
    begins = [(span.slot, span.first) for span in spans]
    parts = []
    for pad in pads:
        index = bisect_right(begins, (pad.slot, pad.step)) - 1
        own = 0.0
        if index >= 0 and spans[index].slot == pad.slot and pad.step < spans[index].end:
            own = spans[index].tokens / spans[index].steps
        parts.append(pad.tokens / (pad.tokens + max(own, 0.0)))
    return parts


def _requests(spans: Sequence[ChartSpan], cells: _Cells) -> list[Markup]:
    """A group of paths, one for each kind, for every request; for every hue where requests are many."""
    one_each = len({span.request for span in spans}) <= FEW_REQUESTS
    groups: dict[int, list[ChartSpan]] = defaultdict(list)
    for span in spans:
        groups[span.request if one_each else span.request % HUES].append(span)
    return [
        tag("g", tag("title", _story(key, groups[key])) if one_each else Markup(""), *_kinds(groups[key], cells),
            class_=f"h{key % HUES}", data_request=key if one_each else None)
        for key in sorted(groups)]


def _kinds(spans: Sequence[ChartSpan], cells: _Cells) -> list[Markup]:
    return [_path(kind, "".join(cells.of(span) for span in spans if span.kind == kind))
            for kind in ("idle", "prefill", "decode", "held")]


def _story(request: int, spans: Sequence[ChartSpan]) -> str:
    """The tooltip of a request's cells."""
    slots = sorted({span.slot for span in spans})
    taken = {kind: sum(span.steps for span in spans if span.kind == kind) for kind in KINDS}
    prompt = sum(span.tokens for span in spans if span.kind == "prefill")
    parts = [f"{prompt:,.0f} prompt tokens in {_steps(taken['prefill'])}"] if taken["prefill"] else []
    parts += [f"decode {_steps(taken['decode'])}"] if taken["decode"] else []
    parts += [f"held {_steps(taken['held'])} after its last token"] if taken["held"] else []
    parts += [f"not computed in {_steps(taken['idle'])}"] if taken["idle"] else []
    where = f"slot{'s' if len(slots) > 1 else ''} {', '.join(map(str, slots))}"
    first, last = min(span.first for span in spans), max(span.end for span in spans) - 1
    return f"request {request} · {where} · steps {first:,} to {last:,} · {', '.join(parts)}"


def _steps(steps: int) -> str:
    return f"{steps:,} step{'' if steps == 1 else 's'}"


def _starts(spans: Sequence[ChartSpan]) -> list[ChartSpan]:
    """The spans at which a slot changes to another request."""
    return [after for before, after in pairwise(spans)
            if before.slot == after.slot and before.request != after.request]


def _path(kind: str, data: str) -> Markup:
    return tag("path", d=data, class_=kind) if data else Markup("")


def _grid(axis: Axis, height: float) -> list[Markup]:
    places = [(percent(axis.place(tick)), axis.text(tick)) for tick in axis.ticks]
    return [tag("line", x1=place, x2=place, y1=0, y2=height + 4, class_="rule") for place, _ in places] + [
        tag("text", text, x=place, y=height + 18, text_anchor="middle", class_="tick") for place, text in places]


def _names(slots: int, used: int, shown: int, pitch: float) -> list[Markup]:
    """Slot numbers, of every slot if they fit, else every second, fourth, ...; and a label for unused slots."""
    named = shown if shown == slots else used
    every = next(step for step in (1, 2, 4, 8, 16, 32, 64, 1 << 30) if step * pitch >= 13 or step >= slots)
    names = [tag("text", str(slot), x=-8, y=(slot + 0.5) * pitch + 4, text_anchor="end", class_="tick")
             for slot in range(0, named, every)]
    if named < shown:
        hidden = f"{slots - used:,} more slots, never used"
        names.append(tag("text", hidden, x=6, y=(used + 0.5) * pitch + 4, class_="tick"))
    return names


def patterns() -> Markup:
    """The textures of waste, defined once for the page."""
    hatched = (
        tag("pattern", tag("rect", width=size, height=size, class_="loss-ground"),
            tag("path", d=lines, class_="loss-line"), id=kind, width=size, height=size, patternUnits="userSpaceOnUse")
        for kind, size, lines in (("held", 7, "M-1 8L8 -1M-1 1L1 -1M6 8L8 6"), ("padding", 4, "M2 0V4")))
    return tag("svg", tag("defs", *hatched), width=0, height=0, aria_hidden="true", class_="patterns")


def legend(kinds: Iterable[str]) -> Markup:
    """A swatch and a label for each kind, inline in a list."""
    return group(
        tag("li", tag("svg", tag("g", _swatch(kind), class_="h0"), width=SWATCH, height=SWATCH, aria_hidden="true"),
            " " + KINDS[kind])
        for kind in kinds)


def _swatch(kind: str) -> Markup:
    lane = tag("path", d=f"M0 0H{SWATCH}V{SWATCH}H0z", class_="lane")
    if kind == "empty":
        return lane
    top, bottom = (6, 8) if kind == "idle" else (0, SWATCH)
    return lane + tag("path", d=f"M0 {top}H{SWATCH}V{bottom}H0z", class_=kind)
