"""The product of a few rows of small integers and a packed panel of 32 outputs, with a scale for each 64 inputs.

    sums[rows, 32]  +=  for each group of 64 along depth:  scale(row, group) * scale(group, column) * (q . (w - zero))

`quantize.py` packs both operands: weights are unsigned bytes of 7 bits (`zero` 64) or nibbles (`zero` 8), activations
signed bytes up to `LIMIT`.  Instructions of 512 bits per 64 products, or twice as many of 256:

    VNNI: bytes multiplied and added to 32 bits (`vpdpbusd`)                          1
    nibbles: pairs added in 16 bits (`pmaddubsw`), widened after eight of them        2.2
    7 bits: the same, widened after two                                               2.5
    for comparison: each pair widened to 32 bits                                      3
    for comparison: bfloat16 widened to float32                                       4 and more

Nothing can overflow, so every processor computes the same integers; they are converted to floats once a group, always
in the same order, so a row does not depend on other rows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

from llvmlite import ir

from slotwise.compute.kernels.cpu.jit.compiler import ElementType
from slotwise.compute.kernels.cpu.jit.llvm import (
    BYTE,
    LINE,
    SHORT,
    SINGLE,
    WORD,
    Loop,
    all_of,
    behind,
    fma,
    number,
    prefetch,
    read,
    spread,
    switch,
)
from slotwise.compute.kernels.cpu.processor import AVX512
from slotwise.compute.kernels.cpu.products.gemm import FLOATS, added, finish_row, for_either_kind, no_sums, read_floats
from slotwise.compute.kernels.cpu.products.quantize import BYTES, GROUP, RECORD
from slotwise.compute.kernels.cpu.simd import add_fours, pairs_of_bytes, pairs_of_shorts

# Heights of a tile for which there are enough registers.
HEIGHTS = range(1, 7) if AVX512 else range(1, 3)
TALLEST = HEIGHTS[-1]
# Quads whose pairs are added in 16 bits, by bits of a weight.
RUN = {8: 2, 4: 8}
# Steps of two quads.
STEPS_OF_A_GROUP = GROUP // 8
ASKED = {bits: -(-RECORD[bits] // STEPS_OF_A_GROUP // LINE) for bits in RECORD}
"""Lines prefetched with each step, by bits: the processor would wait for a line that is left out."""

BYTES_64, _SHORTS, WORDS = (ir.VectorType(kind, lanes) for kind, lanes in ((BYTE, 64), (SHORT, 32), (WORD, 16)))

Add: TypeAlias = Callable[[ir.IRBuilder, ir.Value, ir.Value, ir.Value], ir.Value]
"""`add(builder, so_far, unsigned, signed)`: the sums after 64 products of bytes."""


class IntPanel(NamedTuple):
    """Addresses and strides of a panel's weights and of the rows it is multiplied with.

    Args:
        scales: scales and corrections of the rows.
        group_rows: rows of activations in a group.
        asked, step: what to prefetch, and bytes of it with each step, at most ASKED lines.
        scratch: memory of the thread.
    """

    weights: ir.Value
    x: ir.Value
    scales: ir.Value
    group_rows: ir.Value
    groups: ir.Value
    target: ir.Value
    stride: ir.Value
    bias: ir.Value
    is_gated: ir.Value
    asked: ir.Value
    step: ir.Value
    scratch: ir.Value


class IntWeights(NamedTuple):
    """Bits of a weight, and whether VNNI multiplies it."""

    bits: int
    by_vnni: bool


def _add_pairs(builder: ir.IRBuilder, so_far: ir.Value, unsigned: ir.Value, signed: ir.Value) -> ir.Value:
    """64 products of bytes, added in pairs to int16 x 32."""
    return builder.add(so_far, pairs_of_bytes(builder, unsigned, signed))


_add_fours: Add = functools.partial(add_fours, by_vnni=True, is_wide=False)


def weights_of_two_quads(builder: ir.IRBuilder, address: ir.Value, bits: int) -> list[list[ir.Value]]:
    """Weights of two quads: for each, 16 columns of either half, as unsigned bytes."""
    stored = [read(builder, behind(builder, address, place * 64), BYTES_64, 1) for place in range(bits // 2)]
    if bits == 8:
        return [stored[:2], stored[2:]]
    return [[builder.and_(pair, all_of(BYTES_64, 15)) for pair in stored],
            [builder.lshr(pair, all_of(BYTES_64, 4)) for pair in stored]]


def _add_two_quads(
    builder: ir.IRBuilder, rows: int, bits: int, panel: IntPanel, place: ir.Value, sums: Sequence[ir.Value], add: Add
) -> list[ir.Value]:
    """`sums`, two vectors per row, after the products of two quads at `place` in the group; prefetches meanwhile."""
    for line in range(ASKED[bits]):
        part = builder.udiv(builder.mul(panel.step, number(line)), number(ASKED[bits]))
        prefetch(builder, builder.add(panel.asked, builder.add(builder.mul(place, panel.step), part)))
    weights = builder.add(panel.weights, builder.mul(place, number(128 * bits // 4)))
    x, sums = builder.add(panel.x, builder.mul(place, number(8))), list(sums)
    for quad, halves in enumerate(weights_of_two_quads(builder, weights, bits)):
        for row in range(rows):
            four = read(builder, behind(builder, x, row * GROUP + quad * 4), WORD, 1)
            four = builder.bitcast(spread(builder, four, WORDS), BYTES_64)
            for half in (0, 1):
                sums[2 * row + half] = add(builder, sums[2 * row + half], halves[half], four)
    return sums


def _group(builder: ir.IRBuilder, rows: int, weights: IntWeights, panel: IntPanel) -> list[ir.Value]:
    """One group's integers, two vectors of int32 per row: corrections first, then all quads.

    Loops and not copies: with all loads in sight LLVM would hoist them and run out of registers.
    """
    bits = weights.bits
    start = [spread(builder, read(builder, behind(builder, panel.scales, row * 8 + 4), WORD, 1), WORDS)
             for row in range(rows) for _ in (0, 1)]
    if weights.by_vnni:
        turns = Loop(builder, number(STEPS_OF_A_GROUP), 1, start)
        return turns.close(_add_two_quads(builder, rows, bits, panel, turns.index, turns.values, _add_fours))
    runs = Loop(builder, number(GROUP // 4 // RUN[bits]), 1, start)
    first, nothing = builder.mul(runs.index, number(RUN[bits] // 2)), [all_of(_SHORTS, 0)] * len(start)
    if RUN[bits] == 2:
        sums = _add_two_quads(builder, rows, bits, panel, first, nothing, _add_pairs)
    else:
        turns = Loop(builder, number(RUN[bits] // 2), 1, nothing)
        place = builder.add(first, turns.index)
        sums = turns.close(_add_two_quads(builder, rows, bits, panel, place, turns.values, _add_pairs))
    return runs.close([builder.add(total, pairs_of_shorts(builder, shorts, all_of(_SHORTS, 1)))
                       for total, shorts in zip(runs.values, sums, strict=True)])


def group_panel(builder: ir.IRBuilder, bits: int, panel: IntPanel, group: ir.Value) -> IntPanel:
    """A `panel` moved to one of its groups."""
    passed = builder.mul(group, panel.group_rows)
    step = builder.mul(panel.step, number(STEPS_OF_A_GROUP))
    return panel._replace(
        weights=builder.add(panel.weights, builder.mul(group, number(RECORD[bits]))),
        x=builder.add(panel.x, builder.mul(passed, number(GROUP))),
        scales=builder.add(panel.scales, builder.mul(passed, number(8))),
        asked=builder.add(panel.asked, builder.mul(group, step)))


def add_group(
    builder: ir.IRBuilder, totals: Sequence[ir.Value], so_far: Sequence[ir.Value], of_row: ir.Value,
    of_weights: Sequence[ir.Value],
) -> list[ir.Value]:
    """A row's sums `so_far` after those of a group, `totals` in int32, and the scales of the row and of the weights."""
    own = spread(builder, of_row, FLOATS)
    return [fma(builder, builder.sitofp(total, FLOATS), builder.fmul(own, weight), before)
            for total, weight, before in zip(totals, of_weights, so_far, strict=True)]


def _all_groups(builder: ir.IRBuilder, rows: int, weights: IntWeights, panel: IntPanel) -> list[ir.Value]:
    """The sums of a tile, two vectors per row."""
    groups = Loop(builder, panel.groups, 1, no_sums(2 * rows))
    group = group_panel(builder, weights.bits, panel, groups.index)
    totals = _group(builder, rows, weights, group)
    of_weights = read_floats(builder, behind(builder, group.weights, BYTES[weights.bits]), 2)
    results = []
    for row in range(rows):
        own, both = read(builder, behind(builder, group.scales, row * 8), SINGLE, 1), slice(2 * row, 2 * row + 2)
        results += add_group(builder, totals[both], groups.values[both], own, of_weights)
    return groups.close(results)


def _finish(builder: ir.IRBuilder, sums: list[ir.Value], panel: IntPanel, kind: ElementType) -> None:
    bias = read_floats(builder, panel.bias, 2)

    def of_kind(*, is_gated: bool) -> None:
        for row in range(len(sums) // 2):
            target = builder.add(panel.target, builder.mul(panel.stride, number(row)))
            finish_row(builder, added(builder, sums[2 * row : 2 * row + 2], bias), target, kind, is_gated=is_gated)

    for_either_kind(builder, panel.is_gated, of_kind)


def emit_gemm(builder: ir.IRBuilder, height: ir.Value, weights: IntWeights, panel: IntPanel, kind: ElementType) -> None:
    """The weights of a `panel` times `height` rows, of `HEIGHTS`, plus bias, to rows of `kind`."""
    switch(builder, height, HEIGHTS, lambda rows: _finish(
        builder, _all_groups(builder, rows, weights, panel), panel, kind))
