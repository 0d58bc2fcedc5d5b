"""The matrix product of a few rows of bfloat16 and a packed panel of 32 outputs, by `tiles.py`.

    rows 1 ... 16     sums 0 1                left 4
    rows 17 ... 32    sums 0 1 / 2 3          left 4 5       right 6 7: 16 outputs each

A single row is multiplied by vectors, with the sums of a tile: for each strip of 32 inputs the even and the odd
products are added in order, then both to the result, each operation as in `tiles.py`.  From 17 rows on, every tile that
is loaded serves two products, which hides the loads.  The depth runs in the same order for any number of rows, and a
row's sums do not depend on other rows of its tile: its result is always the same, bit for bit.  Operands are packed as
for `gemm_bf16.py`; rows of activations fill whole tiles, and results past the last row are computed and dropped.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types

from slotwise.compute.kernels.cpu.jit.compiler import ElementType
from slotwise.compute.kernels.cpu.jit.llvm import LINE, WORD, Loop, behind, fma, number, prefetch, read, spread, write
from slotwise.compute.kernels.cpu.products.gemm import added, finish_row, for_each_form, no_sums, read_floats
from slotwise.compute.kernels.cpu.products.gemm_bf16 import LINE_BYTES, PANEL, STRIP_PAIRS, Bf16Panel
from slotwise.compute.kernels.cpu.products.tiles import MEMORY_BYTES, ROW_BYTES, ROWS, TILE_BYTES, WORDS, Tiles, halves

# Rows multiplied at once.
TALLEST = 2 * ROWS
SUMS_ROW_BYTES = PANEL * 4
# Of software tiles, then of sums.
SCRATCH_BYTES = MEMORY_BYTES + TALLEST * SUMS_ROW_BYTES
# The first tiles of left and right operands; sums come before them.
LEFT, RIGHT = 4, 6


def emit_gemm(builder: ir.IRBuilder, tiles: Tiles, height: ir.Value, panel: Bf16Panel) -> None:
    """The weights of a `panel` times `height` rows, at most `TALLEST`, plus bias, to rows of bfloat16."""
    with builder.if_else(builder.icmp_signed("==", height, number(1))) as (alone, together):
        with alone, tiles.vectors():
            _add_row(builder, tiles, panel)
        with together, builder.if_else(builder.icmp_signed(">", height, number(ROWS))) as (two, one):
            with two:
                _add_all(builder, tiles, 2, panel)
            with one:
                _add_all(builder, tiles, 1, panel)
    _finish(builder, height, panel)


def _add_all(builder: ir.IRBuilder, tiles: Tiles, blocks: int, panel: Bf16Panel) -> None:
    """Store the sums of `blocks` times 16 rows in the scratch memory."""
    places = [(row, half) for row in range(blocks) for half in (0, 1)]
    for row, half in places:
        tiles.zero(2 * row + half)
    asked_of_a_strip = builder.mul(panel.step, number(STRIP_PAIRS))
    strips = Loop(builder, panel.strips, 1, [panel.x, panel.weights, panel.asked])
    x, weights, asked = strips.values
    lines = Loop(builder, asked_of_a_strip, LINE, [])
    prefetch(builder, builder.add(asked, lines.index))
    lines.close([])
    for row in range(blocks):
        tiles.load(LEFT + row, behind(builder, x, row * TILE_BYTES), ROW_BYTES)
    for half in (0, 1):
        tiles.load(RIGHT + half, behind(builder, weights, half * ROW_BYTES), LINE_BYTES)
        for row in range(blocks):
            tiles.add_bf16(2 * row + half, LEFT + row, RIGHT + half)
    strips.close([builder.add(x, panel.strip_bytes), behind(builder, weights, STRIP_PAIRS * LINE_BYTES),
                  builder.add(asked, asked_of_a_strip)])
    for row, half in places:
        offset = MEMORY_BYTES + row * ROWS * SUMS_ROW_BYTES + half * ROW_BYTES
        tiles.store(2 * row + half, behind(builder, panel.scratch, offset), SUMS_ROW_BYTES)


def _add_row(builder: ir.IRBuilder, tiles: Tiles, panel: Bf16Panel) -> None:
    """Store the sums of one row in the scratch memory."""
    strips = Loop(builder, panel.strips, 1, [panel.x, panel.weights, panel.asked, *no_sums(2)])
    x, weights, asked, *sums = strips.values
    pairs = Loop(builder, number(STRIP_PAIRS), 1, [x, weights, asked, *no_sums(4)])
    column, line, ahead, *products = pairs.values
    prefetch(builder, ahead)
    prefetch(builder, builder.add(ahead, builder.lshr(panel.step, number(1))))
    ours = halves(builder, tiles, spread(builder, read(builder, column, WORD, 4), WORDS))
    longer = []
    for half in (0, 1):
        theirs = halves(builder, tiles, read(builder, behind(builder, line, half * ROW_BYTES), WORDS, 4))
        so_far = products[2 * half : 2 * half + 2]
        longer += [tiles.flushed(fma(builder, *each)) for each in zip(ours, theirs, so_far, strict=True)]
    _, weights, asked, *products = pairs.close([
        behind(builder, column, 4), behind(builder, line, LINE_BYTES), builder.add(ahead, panel.step), *longer])
    totals = [tiles.flushed(builder.fadd(*products[2 * half : 2 * half + 2])) for half in (0, 1)]
    sums = strips.close([builder.add(x, panel.strip_bytes), weights, asked, *(
        tiles.flushed(builder.fadd(*each)) for each in zip(sums, totals, strict=True))])[3:]
    for half in (0, 1):
        write(builder, sums[half], behind(builder, panel.scratch, MEMORY_BYTES + half * ROW_BYTES))


def _finish(builder: ir.IRBuilder, height: ir.Value, panel: Bf16Panel) -> None:
    """Store the rows of sums plus bias, or of gates times up projection."""
    bias = read_floats(builder, panel.bias, 2)

    def of_form(kind: ElementType, *, is_gated: bool) -> None:
        rows = Loop(builder, height, 1, [behind(builder, panel.scratch, MEMORY_BYTES), panel.target])
        place, target = rows.values
        results = added(builder, read_floats(builder, place, 2), bias)
        finish_row(builder, results, target, kind, is_gated=is_gated)
        rows.close([behind(builder, place, SUMS_ROW_BYTES), builder.add(target, panel.stride)])

    for_each_form(builder, panel.form, types.uint16, of_form)
