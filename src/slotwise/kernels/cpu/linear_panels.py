"""Products with panels of packed weights: what the kernels of `linear_bf16.py`, `linear_fp16.py` and `linear_int.py`
have in common.

A product is items of a block of rows times a panel of outputs, which threads take (`work_queue.py`).  A thread prepares
a block's rows (packs or quantises them) once for all panels that it multiplies with them, and multiplies a panel by
tiles of rows.  Meanwhile its next panel is prefetched, a share of it with each tile:

    one tile                        its own panel, a little ahead of what is read
    the first tile of a panel       the same, if the panel was not prefetched: the thread's first one, a stolen one, or
                                    one behind a panel of one tile
    any other                       its share of the next panel

What differs is a `Method`, and a `Layout` of the packed weights.  Results that lie behind the last output are computed
and dropped.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from slotwise.kernels.cpu.jit.compiler import Compiled, kernel
from slotwise.kernels.cpu.launcher import THREAD_COUNTER, KernelLauncher
from slotwise.kernels.cpu.linear import (
    DEPTH,
    OUT,
    OUTPUTS,
    SCRATCH,
    SCRATCH_BYTES,
    STORED,
    THREADS,
    Packed,
    RowBlock,
    block_at,
    num_blocks,
    panel_after,
)
from slotwise.kernels.cpu.simd import INT64, Real, bytes_of, fetch_add, load, store
from slotwise.kernels.cpu.work_queue import NOTHING, pop, rows_of_a_block, upcoming
from slotwise.kernels.interface import Linear


class Layout(NamedTuple):
    """How weights and a thread's memory are laid out; sizes are in bytes."""

    columns: int  # outputs of a panel
    unit: int  # inputs that are packed together
    steps: int  # of a unit: memory is prefetched with each
    line: int  # weights of a step
    behind: int  # what else a panel has behind its weights
    tallest: int  # rows of a tile
    whole: int  # a block of rows is filled up to a multiple of it
    ahead: int  # between what is read and what is prefetched of the same panel
    block: int  # rows prepared at once
    row: int  # of a prepared row, for a unit
    results: int  # in a thread's memory, before the results of a tile
    rows: int  # before the prepared rows
    widened: int = 0  # behind the prepared rows, for a unit of a panel that is widened there


class Tile(NamedTuple):
    """A panel and the rows that it is multiplied with: addresses, and strides in bytes."""

    weights: int
    bias: int
    rows: int  # of the tile
    first: int  # of them in the block
    block_rows: int  # with those that fill it up
    x: int  # the block's prepared rows
    memory: int  # of the thread
    target: int
    stride: int
    is_gated: int
    asked: int  # what to prefetch
    step: int  # of it with each step of the layout


@kernel
def _nothing(memory: int) -> None:
    """What a method without a beginning or an end does."""


class Method(NamedTuple):
    """The parts of a kernel.

    prepare(words, first, rows, block_rows, target)     rows `first ... first + rows` of x as `multiply` reads them
    multiply(words, tile)                               a `Tile`
    begin(memory), end(memory)                          around all that a thread multiplies
    """

    prepare: Callable[[int, int, int, int, int], None]
    multiply: Callable[[int, Tile], None]
    begin: Callable[[int], None] = _nothing
    end: Callable[[int], None] = _nothing


@kernel
def _filled_up(rows: int, whole: int) -> int:
    return (rows + whole - 1) // whole * whole


@dataclass(frozen=True, slots=True)
class PanelProduct:
    """A kernel of products with panels that are packed as `layout` says."""

    code: Compiled
    layout: Layout

    def linear(
        self, panels: Tensor, bias: Tensor | None, shape: tuple[int, int], launcher: KernelLauncher, *, is_gated: bool
    ) -> Linear:
        """The product with `panels` of a weight of `shape`, outputs and inputs.

        Args:
            bias: `[outputs]` of float32 in the order of the panels, or None where panels hold their own.
            is_gated: half of the outputs are gates, half what they gate.
        """
        (outputs, depth), layout = shape, self.layout
        units = -(-depth // layout.unit)
        row_bytes = units * layout.row
        most = max(layout.tallest, layout.block // row_bytes // layout.tallest * layout.tallest)

        def block_rows(tokens: int) -> int:
            wanted = rows_of_a_block(tokens, most, launcher.threads)
            return -(-wanted // layout.whole) * layout.whole

        packed = Packed(self.code, launcher.weights.copy(panels), bias, depth, outputs,
                        outputs // 2 if is_gated else outputs, block_rows,
                        (layout.rows + most * row_bytes + units * layout.widened + 63) // 64 * 16)
        return packed.product(launcher)


def _panel_kernel(multiply: Callable[[int, Tile], None], layout: Layout, kind: Real) -> Callable[..., None]:
    """`multiply_panel`: the product of a panel and a block of rows, tile by tile, with a method's `multiply`."""
    @kernel
    def multiply_panel(
        words: int, memory: int, block: RowBlock, panel: int, following: int, is_cold: int
    ) -> None:
        """Multiply one panel with a block of rows, while the panel at `following` is prefetched."""
        first, rows, weights, bias, _ = block
        stored = load(words, STORED, INT64)
        units = (load(words, DEPTH, INT64) + layout.unit - 1) // layout.unit
        is_gated = stored != load(words, OUTPUTS, INT64)
        width = layout.columns // 2 if is_gated else layout.columns
        left, stride = stored - panel * width, stored * bytes_of(kind)
        weights += panel * (units * layout.steps * layout.line + layout.behind)
        tiles = (rows + layout.tallest - 1) // layout.tallest
        share = (layout.line + tiles - 1) // tiles
        row = 0
        for turn in range(tiles):
            # Of equal heights, for a low tile costs nearly as much.
            count = min(_filled_up((rows - row + tiles - turn - 1) // (tiles - turn), layout.whole), rows - row)
            asked, step = following + turn * share * units * layout.steps, share
            if tiles == 1 or (turn == 0 and is_cold):
                asked, step = weights + layout.ahead, layout.line
            place = load(words, OUT, INT64) + (first + row) * stride + panel * width * bytes_of(kind)
            target, target_stride = (
                (place, stride) if left >= width else (memory + layout.results, width * bytes_of(kind)))
            multiply(words, Tile(
                weights, bias + panel * layout.columns * 4, count, row,
                _filled_up(rows, layout.whole), memory + layout.rows, memory, target, target_stride, is_gated, asked,
                step))
            if left < width:
                for i in range(count):
                    for column in range(left):
                        store(place + i * stride, column, load(target + i * target_stride, column, kind), kind)
            row += count

    return multiply_panel


def panel_product(name: str, method: Method, layout: Layout, kind: Real) -> PanelProduct:
    """The kernel of products by a method, with results of `kind`; its name is unique in the module of `multiply`."""
    prepare, multiply, begin, end = method

    multiply_panel = _panel_kernel(multiply, layout, kind)

    def product(words: int) -> None:
        panels = (load(words, OUTPUTS, INT64) + layout.columns - 1) // layout.columns
        threads, items = load(words, THREADS, INT64), num_blocks(words) * panels
        units = (load(words, DEPTH, INT64) + layout.unit - 1) // layout.unit
        panel_bytes = units * layout.steps * layout.line + layout.behind
        thread = fetch_add(words + THREAD_COUNTER, 1)
        memory = load(words, SCRATCH, INT64) + thread * load(words, SCRATCH_BYTES, INT64)
        held, prefetched = -1, NOTHING
        begin(memory)
        item = pop(words, thread, threads, items)
        while item != NOTHING:
            number, panel = item // panels, item % panels
            block = block_at(words, number)
            if number != held:
                prepare(words, block.first, block.rows, _filled_up(block.rows, layout.whole), memory + layout.rows)
                held = number
            after = upcoming(words, thread, threads, items)
            following = panel_after(words, item, after, panels, panel_bytes, layout.ahead)
            multiply_panel(words, memory, block, panel, following, item != prefetched)
            prefetched = after if block.rows > layout.tallest else NOTHING
            item = pop(words, thread, threads, items)
        end(memory)

    source = inspect.unwrap(multiply)
    product.__module__, product.__name__, product.__qualname__ = source.__module__, name, name
    return PanelProduct(Compiled(product, source=source.__code__.co_filename), layout)
