"""The product of `gemm_int.py` by `tiles.py`: a group of 64 inputs is the depth of one tile.

    rows 1 ... 16     sums 0 1                left 4
    rows 17 ... 32    sums 0 1 / 2 3          left 4 5       right 6 7: 16 outputs each

A group's bytes are a tile as they are packed; nibbles become bytes in the thread's memory first.  After each group its
integers go through memory, too: they are converted to floats and added row by row, in the order and with the roundings
of `gemm_int.py`, so results are the same, bit for bit.  Results past the last row are computed and dropped.
"""

from __future__ import annotations

from llvmlite import ir

from slotwise.compute.kernels.cpu.jit.compiler import ElementType
from slotwise.compute.kernels.cpu.jit.llvm import (
    LINE,
    SINGLE,
    WORD,
    Loop,
    behind,
    number,
    prefetch,
    read,
    spread,
    write,
)
from slotwise.compute.kernels.cpu.products.gemm import added, finish_row, for_either_kind, no_sums, read_floats
from slotwise.compute.kernels.cpu.products.gemm_int import (
    STEPS_OF_A_GROUP,
    WORDS,
    IntPanel,
    add_group,
    group_panel,
    weights_of_two_quads,
)
from slotwise.compute.kernels.cpu.products.quantize import BYTES, COLUMNS, GROUP
from slotwise.compute.kernels.cpu.products.tiles import MEMORY_BYTES, ROW_BYTES, ROWS, Tiles

# Rows multiplied at once.
TALLEST = 2 * ROWS
SUMS_ROW_BYTES = COLUMNS * 4
# Bytes of a panel's weights.
QUAD_BYTES = 4 * COLUMNS
# A thread's memory after software tiles: a group's integer sums, sums in float32, and a group's nibbles as bytes.
INTEGERS = MEMORY_BYTES
SUMS = INTEGERS + TALLEST * SUMS_ROW_BYTES
UNPACKED = SUMS + TALLEST * SUMS_ROW_BYTES
SCRATCH_BYTES = UNPACKED + BYTES[8]
# The first tiles of left and right operands; sums come before them.
LEFT, RIGHT = 4, 6


def emit_gemm(
    builder: ir.IRBuilder, tiles: Tiles, height: ir.Value, bits: int, panel: IntPanel, kind: ElementType
) -> None:
    """The weights of a `panel` times `height` rows, at most `TALLEST`, plus bias, to rows of `kind`."""
    rows = Loop(builder, height, 1, [behind(builder, panel.scratch, SUMS)])
    _write_row(builder, no_sums(2), rows.values[0])
    rows.close([behind(builder, rows.values[0], SUMS_ROW_BYTES)])
    groups = Loop(builder, panel.groups, 1, [])
    group = group_panel(builder, bits, panel, groups.index)
    lines = Loop(builder, builder.mul(panel.step, number(STEPS_OF_A_GROUP)), LINE, [])
    prefetch(builder, builder.add(group.asked, lines.index))
    lines.close([])
    weights = group.weights if bits == 8 else _unpack(builder, group)
    with builder.if_else(builder.icmp_signed(">", height, number(ROWS))) as (two, one):
        with two:
            _multiply(builder, tiles, 2, group, weights)
        with one:
            _multiply(builder, tiles, 1, group, weights)
    _add_integers(builder, height, group, read_floats(builder, behind(builder, group.weights, BYTES[bits]), 2))
    groups.close([])
    _finish(builder, height, panel, kind)


def _unpack(builder: ir.IRBuilder, group: IntPanel) -> ir.Value:
    """A group's nibbles as bytes; returns their address."""
    target = behind(builder, group.scratch, UNPACKED)
    turns = Loop(builder, number(STEPS_OF_A_GROUP), 1, [group.weights, target])
    source, place = turns.values
    for quad, halves in enumerate(weights_of_two_quads(builder, source, 4)):
        for half, weights in enumerate(halves):
            write(builder, weights, behind(builder, place, quad * QUAD_BYTES + half * ROW_BYTES))
    turns.close([behind(builder, source, QUAD_BYTES), behind(builder, place, 2 * QUAD_BYTES)])
    return target


def _multiply(builder: ir.IRBuilder, tiles: Tiles, blocks: int, group: IntPanel, weights: ir.Value) -> None:
    """Store a group's integers of `blocks` times 16 rows."""
    for row in range(blocks):
        tiles.load(LEFT + row, behind(builder, group.x, row * ROWS * GROUP), GROUP)
    for half in (0, 1):
        tiles.load(RIGHT + half, behind(builder, weights, half * ROW_BYTES), QUAD_BYTES)
        for row in range(blocks):
            tiles.zero(2 * row + half)
            tiles.add_int8(2 * row + half, LEFT + row, RIGHT + half)
            offset = INTEGERS + row * ROWS * SUMS_ROW_BYTES + half * ROW_BYTES
            tiles.store(2 * row + half, behind(builder, group.scratch, offset), SUMS_ROW_BYTES)


def _add_integers(builder: ir.IRBuilder, height: ir.Value, group: IntPanel, of_weights: list[ir.Value]) -> None:
    """Add a group's integers, with each row's correction, to the sums."""
    rows = Loop(builder, height, 1, [behind(builder, group.scratch, INTEGERS), behind(builder, group.scratch, SUMS),
                                     group.scales])
    integers, place, scales = rows.values
    correction = spread(builder, read(builder, behind(builder, scales, 4), WORD, 1), WORDS)
    totals = [builder.add(read(builder, behind(builder, integers, half * ROW_BYTES), WORDS), correction)
              for half in (0, 1)]
    sums = add_group(builder, totals, read_floats(builder, place, 2), read(builder, scales, SINGLE, 1), of_weights)
    _write_row(builder, sums, place)
    rows.close([behind(builder, integers, SUMS_ROW_BYTES), behind(builder, place, SUMS_ROW_BYTES),
                behind(builder, scales, 8)])


def _write_row(builder: ir.IRBuilder, sums: list[ir.Value], place: ir.Value) -> None:
    for half, vector in enumerate(sums):
        write(builder, vector, behind(builder, place, half * ROW_BYTES))


def _finish(builder: ir.IRBuilder, height: ir.Value, panel: IntPanel, kind: ElementType) -> None:
    """Store the rows of sums plus bias, or of gates times up projection, as `kind`."""
    bias = read_floats(builder, panel.bias, 2)

    def of_kind(*, is_gated: bool) -> None:
        rows = Loop(builder, height, 1, [behind(builder, panel.scratch, SUMS), panel.target])
        place, target = rows.values
        finish_row(builder, added(builder, read_floats(builder, place, 2), bias), target, kind, is_gated=is_gated)
        rows.close([behind(builder, place, SUMS_ROW_BYTES), builder.add(target, panel.stride)])

    for_either_kind(builder, panel.is_gated, of_kind)
