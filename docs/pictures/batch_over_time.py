"""Draws the batch as the engine rebuilt it, step by step: a real run of the built-in model.

usage: python docs/pictures/batch_over_time.py [--out FILE.svg]

Slots are lanes, steps go to the right, each request has a colour.  A prompt's step is dark; decode steps are light.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from slotwise import builtin
from slotwise.compose.engine_builder import build_engine
from slotwise.core.params import SamplingSpec
from slotwise.core.request import RequestSpec
from slotwise.engine.config import EngineConfig
from slotwise.engine.messages import Add
from slotwise.text.tokenizer import Tokenizer

SLOTS, STEPS = 4, 60
PROMPTS = (
    "def is_empty(self):", "def read_lines(path):", "def __repr__(self):", "def close(self):", "def get(self, key):",
    "def parse_header(line):", "def __len__(self):", "def add(a, b):", "def write(self, data):", "def copy(self):",
    "def setUp(self):", "def find(self, name):",
)
ARRIVALS = (0, 0, 0, 0, 0, 2, 6, 9, 14, 20, 26, 33)  # the step before which each prompt arrives
COLOURS = ("#4c78a8", "#f58518", "#54a24b", "#b279a2", "#e45756", "#72b7b2", "#9d755d", "#d67195", "#8a8d0f",
           "#2d9c9c", "#a0522d", "#6f6fd8")
CELL, LANE, LEFT, TOP = 13, 30, 64, 40


@dataclass(frozen=True)
class Cell:
    step: int
    slot: int
    request: int
    tokens: int
    prompt: bool


def run() -> tuple[list[Cell], list[int]]:
    """The rows of every step, and how many requests waited in it."""
    engine, _ = build_engine(EngineConfig(model=str(builtin.path()), max_num_seqs=SLOTS, max_num_batched_tokens=64))
    tokenizer = Tokenizer.load(builtin.path())
    cells, waiting = [], []
    for step in range(STEPS):
        for index, (prompt, arrival) in enumerate(zip(PROMPTS, ARRIVALS, strict=True)):
            if arrival == step:
                params = SamplingSpec(temperature=0.6, max_tokens=28, seed=index)
                engine.handle(Add(str(index), RequestSpec(tokenizer.encode(prompt), params, index)))
        if not engine.has_work:
            break
        record = engine.step()
        columns = zip(record.request_ids, record.slots, record.starts, record.counts, strict=True)
        cells += [Cell(step, slot, int(name), count, start == 0) for name, slot, start, count in columns]
        waiting.append(record.num_waiting)
    return cells, waiting


def draw(cells: list[Cell], waiting: list[int]) -> str:
    """The picture as SVG text; its ink follows the reader's light or dark page."""
    width, height = LEFT + len(waiting) * CELL + 12, TOP + SLOTS * LANE + 62
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="system-ui, sans-serif" '
        'font-size="12" role="img" aria-label="The batch over time">',
        "<style>.ink{fill:#333}.lane{fill:#8884}@media(prefers-color-scheme:dark){.ink{fill:#ddd}}</style>",
        f'<text class="ink" x="{LEFT}" y="18">each column is one forward pass; a freed slot is refilled in the next '
        "one</text>",
    ]
    for slot in range(SLOTS):
        y = TOP + slot * LANE
        parts.append(f'<text class="ink" x="8" y="{y + 17}">slot {slot}</text>')
        parts.append(
            f'<rect class="lane" x="{LEFT}" y="{y}" width="{len(waiting) * CELL}" height="{LANE - 6}" rx="3"/>')
    parts += [_cell(cell) for cell in cells]
    bottom = TOP + SLOTS * LANE
    parts.append(f'<text class="ink" x="8" y="{bottom + 17}">waiting</text>')
    parts += [
        f'<text class="ink" x="{LEFT + step * CELL + 3}" y="{bottom + 17}" font-size="10">{count}</text>'
        for step, count in enumerate(waiting) if count]
    parts.append(
        f'<text class="ink" x="{LEFT}" y="{bottom + 44}">dark: the prompt   ·   light: one token a step   ·   '
        "grey: an empty slot   ·   a colour is a request</text></svg>")
    return "\n".join(parts) + "\n"


def _cell(cell: Cell) -> str:
    x, y = LEFT + cell.step * CELL, TOP + cell.slot * LANE
    title = f"request {cell.request}, step {cell.step}: {cell.tokens} token{'s' if cell.tokens > 1 else ''}"
    return (f'<rect x="{x}" y="{y}" width="{CELL - 1}" height="{LANE - 6}" fill="{COLOURS[cell.request]}" '
            f'opacity="{1 if cell.prompt else 0.55}"><title>{title}</title></rect>')


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".svg"))
    args = parser.parse_args()
    args.out.write_text(draw(*run()))
    print(f"wrote {args.out}")


if __name__ == "__main__":
    main()
