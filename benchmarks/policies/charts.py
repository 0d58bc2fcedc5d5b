"""Charts of runs: the cumulative share of requests over their waits, one curve per policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from slotwise.measure.bench.report.plots import Axis, logarithmic

COLORS = ("#c8500a", "#1d4fbf", "#0b7a75", "#a23a86")
WIDTH, HEIGHT, LEFT, TOP = 560, 200, 54, 46
POINTS = 200  # of a curve


def chart(title: str, measured: str, curves: Mapping[str, Sequence[float]]) -> str:
    """Returns an SVG of cumulative shares over seconds, on a logarithmic axis; colors follow the page's theme."""
    values = [max(value, 1e-4) for curve in curves.values() for value in curve]
    axis = logarithmic(measured, values, _seconds)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LEFT + WIDTH + 20} {TOP + HEIGHT + 44}" role="img" '
        f'font-family="system-ui, sans-serif" font-size="12" aria-label="{escape(title)}">',
        "<style>.ink{fill:#333}.rule{stroke:#8886}@media(prefers-color-scheme:dark){.ink{fill:#ddd}}</style>",
        f'<text class="ink" x="{LEFT}" y="16" font-weight="600">{escape(title)}</text>', *_frame(axis, measured)]
    for place, (label, curve) in enumerate(curves.items()):
        color = COLORS[place % len(COLORS)]
        parts.append(f'<path d="{_path(curve, axis)}" fill="none" stroke="{color}" stroke-width="2"/>')
        x = LEFT + place * 140
        parts.append(f'<rect x="{x}" y="25" width="18" height="4" fill="{color}"/>')
        parts.append(f'<text class="ink" x="{x + 24}" y="31">{escape(label)}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _frame(axis: Axis, measured: str) -> list[str]:
    parts = []
    for share in (0, 25, 50, 75, 100):
        y = TOP + HEIGHT * (1 - share / 100)
        parts.append(f'<line class="rule" x1="{LEFT}" x2="{LEFT + WIDTH}" y1="{y:g}" y2="{y:g}"/>')
        parts.append(f'<text class="ink" x="{LEFT - 8}" y="{y + 4:g}" text-anchor="end">{share}%</text>')
    for tick in axis.ticks:
        x = LEFT + WIDTH * axis.place(tick)
        parts.append(f'<text class="ink" x="{x:.1f}" y="{TOP + HEIGHT + 18}" text-anchor="middle">'
                     f"{_seconds(tick)}</text>")
    parts.append(f'<text class="ink" x="{LEFT + WIDTH}" y="{TOP + HEIGHT + 36}" text-anchor="end">{measured}</text>')
    return parts


def _path(curve: Sequence[float], axis: Axis) -> str:
    ordered = sorted(curve)
    places = sorted({round(point * (len(ordered) - 1) / POINTS) for point in range(POINTS + 1)})
    points = [(LEFT + WIDTH * axis.place(max(ordered[place], 1e-4)),
               TOP + HEIGHT * (1 - (place + 1) / len(ordered))) for place in places]
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)


def _seconds(value: float) -> str:
    return f"{value:g} s" if value >= 1 else f"{value * 1000:g} ms"
