"""Draws the loss curve of a run (run.json) as SVG, with nothing but the standard library."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

HERE = Path(__file__).parent
WIDTH, HEIGHT, MARGIN = 640, 320, 48
COLOURS = {"training": "#2f6db3", "held_out": "#c4562b"}


def draw(curve: list[dict[str, float]], decay_start: int) -> str:
    """One line per loss (nats per token) over steps, and a mark where the learning rate starts to fall."""
    last = max(point["step"] for point in curve)
    top = max(max(point["training"], point["held_out"]) for point in curve)

    def x(step: float) -> float:
        return MARGIN + step / last * (WIDTH - 2 * MARGIN)

    def y(loss: float) -> float:
        return HEIGHT - MARGIN - loss / top * (HEIGHT - 2 * MARGIN)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
    ]
    for loss in range(int(top) + 1):
        parts.append(f'<path d="M{x(0)} {y(loss):.1f}H{x(last)}" stroke="#ddd"/>')
        parts.append(f'<text x="{x(0) - 8}" y="{y(loss) + 4:.1f}" text-anchor="end">{loss}</text>')
    for step in (0, last // 2, last):
        parts.append(f'<text x="{x(step):.1f}" y="{y(0) + 18:.1f}" text-anchor="middle">{step}</text>')
    parts.append(f'<path d="M{x(decay_start):.1f} {y(0):.1f}V{y(top):.1f}" stroke="#999" stroke-dasharray="4 4"/>')
    parts.append(f'<text x="{x(decay_start) + 5:.1f}" y="{y(top) + 10:.1f}" fill="#666">decay, short functions</text>')
    for row, (name, colour) in enumerate(COLOURS.items()):
        points = " ".join(f"{x(point['step']):.1f},{y(point[name]):.1f}" for point in curve)
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
        label = f"{name.replace('_', ' ')} {curve[-1][name]:.2f}"
        parts.append(f'<text x="{WIDTH - MARGIN}" y="{30 + 16 * row}" text-anchor="end" fill="{colour}">{label}</text>')
    parts.append(f'<text x="{WIDTH / 2}" y="{HEIGHT - 8}" text-anchor="middle">steps; loss in nats per token</text>')
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, default=HERE / "run.json")
    parser.add_argument("--out", type=Path, default=HERE / "curve.svg")
    arguments = parser.parse_args()
    run = json.loads(arguments.run.read_text())
    recipe = run["recipe"]
    decay_start = round(recipe["steps"] * (1 - recipe["decay_part"]))
    arguments.out.write_text(draw(run["curve"], decay_start))


if __name__ == "__main__":
    main()
