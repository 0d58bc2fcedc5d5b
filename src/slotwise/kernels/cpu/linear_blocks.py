"""Products with quantised matrices (`kernels/matrix.py`), whose packed codes are unpacked in registers.

Activations are quantised by `block_activations.py`; weights stay the codes of their file, in the panels of
`block_layout.py`.  Threads take items, a block of rows times a panel, from `threads.py`.

    a thread's scratch    [ a tile | an unfinished unit | units x rows of bytes | units x rows of facts | of tiles ]

Few rows are multiplied by instructions on vectors (`gemm_blocks.py`), more than `TALLEST` by AMX's tiles, where there
are any (`gemm_block_tiles.py`).
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from slotwise.kernels.cpu import gemm_block_tiles
from slotwise.kernels.cpu.block_activations import FACTS, STRIDE, TABLE, ZERO_AND_FACTOR, quantise_rows
from slotwise.kernels.cpu.block_layout import COLUMNS, LARGEST_UNIT, STEP, Layout, layout_of, levels_of, pack
from slotwise.kernels.cpu.gemm_block_tiles import begin_tiles, end_tiles, tile_gemm
from slotwise.kernels.cpu.gemm_blocks import HEIGHTS, TALLEST, block_gemm
from slotwise.kernels.cpu.jit.compiler import Compiled, kernel, specialised
from slotwise.kernels.cpu.launcher import THREAD_COUNTER, KernelLauncher
from slotwise.kernels.cpu.linear import (
    DEPTH,
    NO_TABLES,
    OUT,
    OUTPUTS,
    SCRATCH,
    SCRATCH_BYTES,
    STORED,
    THREADS,
    RowBlock,
    Tables,
    block_at,
    in_panels,
    num_blocks,
    panel_after,
)
from slotwise.kernels.cpu.simd import BFLOAT16, FLOAT32, INT64, Real, Whole, bytes_of, fetch_add, load, store
from slotwise.kernels.cpu.threads import NOTHING, pop, rows_of_a_block, upcoming
from slotwise.kernels.interface import Linear
from slotwise.kernels.matrix import QuantisedMatrix

GATES = COLUMNS // 2  # of a panel that is half gates, half what they gate
AHEAD = 8192  # bytes of weights between what is read and what is prefetched, where a panel is read but once
BLOCK_BYTES = 1 << 18  # of activations quantised at once: a part of a typical second-level cache
TILE_BYTES = max(TALLEST, gemm_block_tiles.TALLEST) * COLUMNS * 4
HELD = TILE_BYTES + LARGEST_UNIT * 4  # bytes of scratch before the activations

_KINDS = {torch.bfloat16: BFLOAT16, torch.float32: FLOAT32}
PATHS = {"amx_int8": Whole(np.uint32(0)), "vnni": Whole(np.uint16(0)), "integer": Whole(np.uint8(0)),
         "software tiles": Whole(np.uint64(0))}
"""As `gemm_blocks.py` and `gemm_block_tiles.py` tell paths apart."""
TILED = ("amx_int8", "software tiles")
TILED_UNIT = 32  # the smallest unit whose products are sooner by AMX's tiles; a processor with them has VNNI, too
TALL = ZERO_AND_FACTOR + 1  # an argument: rows of the tallest tile


@kernel
def _multiply(
    words: int, room: int, memory: int, block: RowBlock, row: int, panel: int, following: int, kind: Real,
    layout: Layout, path: Whole,
) -> int:
    """Multiply one tile: a panel with rows of a block from `row` on; returns the number of rows.

    Meanwhile it prefetches its share of the panel at `following`; a tile that is the only one, its own panel, a little
    ahead.  A panel wider than the rest of the output is stored to the scratch `room` first.  `memory` is that of tiles.
    """
    stored, (first, rows, weight, bias, _) = load(words, STORED, INT64), block
    records = (load(words, DEPTH, INT64) + layout.record - 1) // layout.record
    units = records * (layout.record // layout.unit)
    tall, height = load(words, TALL, INT64), 1
    for size in HEIGHTS:
        if size <= rows - row:
            height = size
    is_tiled = tall > TALLEST and rows - row > TALLEST
    if is_tiled:
        height = min(tall, rows - row)
    tiles, steps = (rows + tall - 1) // tall, layout.record // STEP
    weight += panel * records * layout.record_bytes
    share = (layout.record_bytes // steps + tiles - 1) // tiles
    asked = weight + AHEAD if tiles == 1 else following + row // tall * share * steps * records
    is_gated = stored != load(words, OUTPUTS, INT64)
    width = GATES if is_gated else COLUMNS
    left, size = stored - panel * width, bytes_of(kind)
    row_bytes = load(words, STRIDE, INT64) * size
    place = load(words, OUT, INT64) + (first + row) * row_bytes + panel * width * size
    target, stride = (place, row_bytes) if left >= width else (room, width * size)
    held = room + HELD
    facts = held + units * rows * layout.unit + row * FACTS
    bias += panel * COLUMNS * 4
    if is_tiled:
        tile_gemm(
            height, memory, weight, records, load(words, TABLE, INT64), held + row * layout.unit, facts, rows, target,
            stride, bias, is_gated, asked, share, layout, path, kind)
    else:
        block_gemm(
            height, weight, records, load(words, TABLE, INT64), held + row * layout.unit, facts, rows, target, stride,
            bias, is_gated, asked, share, layout, path, kind)
    if left < width:
        for i in range(height):
            for column in range(left):
                store(place + i * row_bytes, column, load(target + i * stride, column, kind), kind)
    return height


@kernel
def _product(words: int, kind: Real, layout: Layout, path: Whole) -> None:
    threads, panels = load(words, THREADS, INT64), (load(words, OUTPUTS, INT64) + COLUMNS - 1) // COLUMNS
    items = num_blocks(words) * panels
    panel_bytes = (load(words, DEPTH, INT64) + layout.record - 1) // layout.record * layout.record_bytes
    thread = fetch_add(words + THREAD_COUNTER, 1)
    room = load(words, SCRATCH, INT64) + thread * load(words, SCRATCH_BYTES, INT64)
    memory = room + load(words, SCRATCH_BYTES, INT64) - gemm_block_tiles.SCRATCH_BYTES
    held = -1
    begin_tiles(memory, path)
    item = pop(words, thread, threads, items)
    while item != NOTHING:
        number, panel = item // panels, item % panels
        block = block_at(words, number)
        if number != held:
            quantise_rows(words, block, room + HELD, room + TILE_BYTES, layout, kind)
            held = number
        after = upcoming(words, thread, threads, items)
        following = panel_after(words, item, after, panels, panel_bytes, AHEAD)
        row = 0
        while row < block.rows:
            row += _multiply(words, room, memory, block, row, panel, following, kind, layout, path)
        item = pop(words, thread, threads, items)
    end_tiles(memory, path)


@functools.cache
def compiled(layout: Layout, kind: torch.dtype, path: str) -> Compiled:
    """The kernel for weights in a layout and activations of a type, by one of `PATHS`."""
    return specialised(_product, _KINDS[kind], layout, PATHS[path])


@dataclass(frozen=True, slots=True)
class PackedBlocks:
    """A quantised matrix in panels, for many products."""

    panels: Tensor
    bias: Tensor
    table: Tensor  # 16 levels, where the layout has a table
    order: Tensor | None  # int32, the input at each place
    zero_and_factor: int
    layout: Layout
    depth: int
    outputs: int  # of the panels
    stored: int  # numbers per token in the result: half of the outputs where these are gates and what they gate
    path: str
    threads: int

    def kernel(self, kind: torch.dtype) -> Compiled:
        """The kernel for activations of `kind`."""
        return compiled(self.layout, kind, self.path)

    @property
    def floats(self) -> int:
        """Of scratch memory per thread."""
        behind = gemm_block_tiles.SCRATCH_BYTES if self.path in TILED else 0
        return (HELD + self._most * self._row_bytes + behind + 63) // 64 * 16

    @property
    def block_rows(self) -> Callable[[int], int]:
        """Rows quantised at once, for a number of tokens."""
        return lambda tokens: rows_of_a_block(tokens, self._most, self.threads)

    @property
    def _row_bytes(self) -> int:
        """Of a quantised row."""
        layout = self.layout
        return layout.records(self.depth) * layout.record // layout.unit * (layout.unit + FACTS)

    @property
    def _most(self) -> int:
        """Rows quantised at once."""
        return max(self._tall, BLOCK_BYTES // self._row_bytes // self._tall * self._tall)

    @property
    def _tall(self) -> int:
        """Rows of the tallest tile."""
        return gemm_block_tiles.TALLEST if self.path in TILED else TALLEST

    def arguments(
        self, launcher: KernelLauncher, x: int, out: int, tokens: int, stride: int = 0, tables: Tables = NO_TABLES,
    ) -> tuple[int, ...]:
        """The arguments of the product of `tokens` rows at `x` to `out`; valid until the launcher's next kernel.

        Args:
            stride: numbers of a row of the result; 0: as many as this product gives.
            tables: of the rows; with blocks `tokens` is 1.
        """
        floats = self.floats
        return (
            x, self.panels.data_ptr(), self.bias.data_ptr(), 0 if self.order is None else self.order.data_ptr(), out,
            tokens, self.depth, self.outputs, self.stored, rows_of_a_block(tokens, self._most, self.threads),
            launcher.scratch(launcher.threads * floats), floats * 4, launcher.threads, *tables, stride or self.stored,
            self.table.data_ptr(), self.zero_and_factor, self._tall)

    def multiply(self, x: Tensor, out: Tensor, at: int, launcher: KernelLauncher) -> None:
        """`x [tokens, depth]`, contiguous, to the columns of `out` from `at` on."""
        launcher.give(*self.arguments(
            launcher, x.data_ptr(), out.data_ptr() + at * out.itemsize, len(x), out.shape[1]))
        launcher.together(self.kernel(x.dtype))


def blocks_linear(parts: Sequence[PackedBlocks], launcher: KernelLauncher) -> Linear:
    """The product with matrices of one depth: their outputs one behind the other."""
    starts = [sum(part.stored for part in parts[:place]) for place in range(len(parts))]
    depth, width = parts[0].depth, sum(part.stored for part in parts)

    def product(x: Tensor) -> Tensor:
        rows = x.contiguous().view(-1, depth)
        out = launcher.empty((len(rows), width), x.dtype)
        for part, start in zip(parts, starts, strict=True):
            part.multiply(rows, out, start, launcher)
        return out if x.dim() == rows.dim() else out.view(*x.shape[:-1], width)

    return product


def path_for(layout: Layout, path: str) -> str:
    """The path of a layout where others take `path`; with the same bits."""
    return "vnni" if path == "amx_int8" and layout.unit < TILED_UNIT else path


def pack_blocks(
    matrix: QuantisedMatrix, bias: Tensor | None, path: str, launcher: KernelLauncher, *, is_gated: bool = False
) -> PackedBlocks:
    """Pack `matrix` once for many products.

    Args:
        is_gated: its outputs are gates, then as many of what they gate; the result is silu(gate) * up.

    Raises:
        ValueError: products with its format are not supported.
    """
    layout, levels = layout_of(matrix.format), levels_of(matrix.format)
    panels = pack(matrix, layout, launcher.panels, is_gated=is_gated)
    added = torch.zeros(matrix.outputs) if bias is None else bias.float()
    table = torch.tensor((*levels.table, *[0] * (16 - len(levels.table))), dtype=torch.uint8)
    (factor_bits,) = struct.unpack("<I", struct.pack("<f", levels.factor))
    return PackedBlocks(
        panels, in_panels(added, COLUMNS, is_gated=is_gated), table,
        None if matrix.order is None else matrix.order.argsort().to(torch.int32), levels.zero << 32 | factor_bits,
        layout, matrix.depth, len(panels) * COLUMNS if is_gated else matrix.outputs,
        matrix.outputs // 2 if is_gated else matrix.outputs, path_for(layout, path), launcher.threads)
