"""The product of `gemm_blocks.py` by `tiles.py`: a unit's codes are unpacked to bytes, the depth of one tile.

    rows 1 ... 16     sums 0 1                left 4
    rows 17 ... 32    sums 0 1 / 2 3          left 4 5       right 6 7: 16 outputs each

A unit of 16 or 32 fills a part of the tile's depth; zeros follow it.  After each unit its integers go through
memory and are added to the sums in the order and with the roundings of `gemm_blocks.py`: results are the same, bit for
bit, so few rows are multiplied by vectors and many by tiles.
"""

from __future__ import annotations

from collections.abc import Callable

from llvmlite import ir
from numba import types

from slotwise.compute.kernels.cpu.jit.compiler import INT, KIND, ElementType, intrinsic
from slotwise.compute.kernels.cpu.jit.llvm import Loop, all_of, behind, number, read, write
from slotwise.compute.kernels.cpu.products import tiles as tiles_of
from slotwise.compute.kernels.cpu.products.block_layout import COLUMNS, STEP, BlockLayout
from slotwise.compute.kernels.cpu.products.gemm import no_sums, read_floats
from slotwise.compute.kernels.cpu.products.gemm_blocks import (
    VECTORS,
    WORDS,
    BlockPanel,
    Unpack,
    add_unit,
    factors_of_unit,
    finish,
    prefetch_step,
    start_of_unit,
)
from slotwise.compute.kernels.cpu.products.quantize import FACTS
from slotwise.compute.kernels.cpu.products.tiles import MEMORY_BYTES, ROW_BYTES, ROWS, TILE_BYTES, Tiles

# Rows multiplied at once.
TALLEST = 2 * ROWS
SUMS_ROW_BYTES = COLUMNS * 4
# Bytes of unpacked weights.
QUAD_BYTES = 4 * COLUMNS
# The memory after software tiles: a unit's integer sums, sums in float32, and a unit's codes, or levels, as bytes.
INTEGERS = MEMORY_BYTES
SUMS = INTEGERS + TALLEST * SUMS_ROW_BYTES
UNPACKED = SUMS + TALLEST * SUMS_ROW_BYTES
SCRATCH_BYTES = UNPACKED + VECTORS * TILE_BYTES
# The first tiles of left and right operands; sums come before them.
LEFT, RIGHT = 4, 6
KINDS: dict[ElementType, tiles_of.Kind] = {
    types.uint32: tiles_of.HardwareTiles, types.uint64: tiles_of.SoftwareTiles}
"""The tiles of a path, by its type in `linear_blocks.PATHS`; other paths multiply without tiles."""


class _TiledProduct:
    """Emits the product of a panel and at most `TALLEST` rows; `memory` is a thread's."""

    def __init__(
        self, builder: ir.IRBuilder, tiles: Tiles, layout: BlockLayout, panel: BlockPanel, memory: ir.Value,
    ) -> None:
        self._builder, self._tiles, self._layout, self._panel, self._memory = builder, tiles, layout, panel, memory
        self._unpack = Unpack(builder, layout, panel.table)

    def emit(self, height: ir.Value, kind: ElementType) -> None:
        builder, layout, panel = self._builder, self._layout, self._panel
        rows = Loop(builder, height, 1, [behind(builder, self._memory, SUMS)])
        _write_row(builder, no_sums(VECTORS), rows.values[0])
        rows.close([behind(builder, rows.values[0], SUMS_ROW_BYTES)])
        for line in range(layout.unit // 4 * VECTORS, ROWS * VECTORS):
            write(builder, all_of(WORDS, 0), behind(builder, self._memory, UNPACKED + line * ROW_BYTES))
        units = layout.record // layout.unit
        records = Loop(builder, panel.records, 1, [])
        record = builder.add(panel.weights, builder.mul(records.index, number(layout.record_bytes)))
        turns = Loop(builder, number(units), 1, [])
        passed = builder.add(builder.mul(records.index, number(units)), turns.index)
        self._add_unit(record, turns.index, passed, height)
        turns.close([])
        records.close([])
        self._finish(height, kind)

    def _add_unit(self, record: ir.Value, unit: ir.Value, passed: ir.Value, height: ir.Value) -> None:
        """Add the products of a unit of a record, which `passed` units precede in the panel."""
        builder, layout, panel = self._builder, self._layout, self._panel
        self._write_bytes(record, unit, passed)
        place = builder.mul(passed, panel.unit_rows)
        x = builder.add(panel.x, builder.mul(place, number(layout.unit)))
        with builder.if_else(builder.icmp_signed(">", height, number(ROWS))) as (two, one):
            with two:
                self._multiply(2, x)
            with one:
                self._multiply(1, x)
        scales, minimums = factors_of_unit(builder, layout, record, unit)
        rows = Loop(builder, height, 1, [
            behind(builder, self._memory, INTEGERS), behind(builder, self._memory, SUMS),
            builder.add(panel.facts, builder.mul(place, number(FACTS)))])
        integers, sums, facts = rows.values
        start = start_of_unit(builder, layout, facts)
        totals = [builder.add(read(builder, behind(builder, integers, half * ROW_BYTES), WORDS), start)
                  for half in range(VECTORS)]
        _write_row(builder, add_unit(
            builder, totals, read_floats(builder, sums, VECTORS), facts, (scales, minimums)), sums)
        rows.close([behind(builder, integers, SUMS_ROW_BYTES), behind(builder, sums, SUMS_ROW_BYTES),
                    behind(builder, facts, FACTS)])

    def _write_bytes(self, record: ir.Value, unit: ir.Value, passed: ir.Value) -> None:
        """Unpack a unit as the rows of both right tiles; prefetches meanwhile."""
        builder, of_unit = self._builder, number(self._layout.unit // STEP)
        steps = Loop(builder, of_unit, 1, [behind(builder, self._memory, UNPACKED)])
        (target,) = steps.values
        prefetch_step(builder, self._layout, self._panel, builder.add(builder.mul(passed, of_unit), steps.index))
        quads = self._unpack.quads(record, builder.add(builder.mul(unit, of_unit), steps.index))
        for quad, halves in enumerate(quads):
            for half, codes in enumerate(halves):
                write(builder, codes, behind(builder, target, quad * QUAD_BYTES + half * ROW_BYTES))
        steps.close([behind(builder, target, len(quads) * QUAD_BYTES)])

    def _multiply(self, blocks: int, x: ir.Value) -> None:
        """Store a unit's integers of `blocks` times 16 rows.  Bytes past a row's end are multiplied by zeros."""
        builder, tiles, memory, unit = self._builder, self._tiles, self._memory, self._layout.unit
        for row in range(blocks):
            tiles.load(LEFT + row, behind(builder, x, row * ROWS * unit), unit)
        for half in range(VECTORS):
            tiles.load(RIGHT + half, behind(builder, memory, UNPACKED + half * ROW_BYTES), QUAD_BYTES)
            for row in range(blocks):
                tiles.zero(2 * row + half)
                tiles.add_int8(2 * row + half, LEFT + row, RIGHT + half)
                offset = INTEGERS + row * ROWS * SUMS_ROW_BYTES + half * ROW_BYTES
                tiles.store(2 * row + half, behind(builder, memory, offset), SUMS_ROW_BYTES)

    def _finish(self, height: ir.Value, kind: ElementType) -> None:
        """Store the rows of sums plus bias, or of gates times up projection; `kind` is that of the activations."""
        builder, panel = self._builder, self._panel
        rows = Loop(builder, height, 1, [behind(builder, self._memory, SUMS), panel.target])
        place, target = rows.values
        finish(builder, read_floats(builder, place, VECTORS), panel._replace(target=target), kind)
        rows.close([behind(builder, place, SUMS_ROW_BYTES), builder.add(target, panel.stride)])


def _write_row(builder: ir.IRBuilder, sums: list[ir.Value], place: ir.Value) -> None:
    for half, vector in enumerate(sums):
        write(builder, vector, behind(builder, place, half * ROW_BYTES))


def _tile_gemm(builder: ir.IRBuilder, height: ir.Value, memory: ir.Value, *arguments: ir.Value) -> None:
    *addresses, layout, path, kind = arguments
    if path in KINDS:
        tiles, panel = KINDS[path](builder, memory), BlockPanel._make(addresses)
        _TiledProduct(builder, tiles, layout.instance_class.NUMBERS, panel, memory).emit(height, kind)


def _begin(builder: ir.IRBuilder, memory: ir.Value, path: ElementType) -> None:
    if path in KINDS:
        KINDS[path](builder, memory).begin()


def _end(builder: ir.IRBuilder, memory: ir.Value, path: ElementType) -> None:
    if path in KINDS:
        KINDS[path](builder, memory).end()


tile_gemm: Callable[..., None] = intrinsic(_tile_gemm, INT, INT, *[INT] * len(BlockPanel._fields), KIND, KIND, KIND)
"""`tile_gemm(height, memory, *panel, layout, path, kind)`: `block_gemm` for at most `TALLEST` rows, by a path with
tiles; nothing by other paths.  Up to a tile is read past the rows of `x`.
"""
begin_tiles: Callable[..., None] = intrinsic(_begin, INT, KIND)
end_tiles: Callable[..., None] = intrinsic(_end, INT, KIND)
"""`begin_tiles(memory, path)` and `end_tiles(memory, path)`: around all that a thread multiplies."""
