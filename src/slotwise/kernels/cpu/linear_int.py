"""Products of small integers: weights of 7 bits (`int8`) or 4 (`int4`), with a scale for each 64 inputs of an output.

    sums[rows, 32]  +=  for each group of 64 along depth:  scale(row, group) * scale(group, column) * (q . (w - zero))

`quantize.py` makes the integers: weights are unsigned bytes of 7 bits (`zero` 64) or nibbles (`zero` 8), activations
signed bytes up to `LIMIT`.  Instructions per 64 products:

    VNNI: bytes multiplied and added to 32 bits (`vpdpbusd`)                          1
    nibbles: pairs added in 16 bits (`pmaddubsw`), widened after eight of them        2.2
    7 bits: the same, widened after two                                               2.5
    for comparison: each pair widened to 32 bits                                      3
    for comparison: bfloat16 widened to float32                                       4 and more

Nothing can overflow, so every processor computes the same integers; they are converted to floats once a group, always
in the same order, so a row does not depend on the rows beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, NewType, TypeAlias

import numpy as np
import torch
from llvmlite import ir
from numba import types
from torch import Tensor

from slotwise.kernels.cpu.jit.compiler import kernel, specialised
from slotwise.kernels.cpu.jit.intrinsic import INT, KIND, ElementType, intrinsic
from slotwise.kernels.cpu.launcher import THREAD_COUNTER, KernelLauncher
from slotwise.kernels.cpu.linear import (
    BIAS,
    BLOCK,
    DEPTH,
    OUT,
    OUTPUTS,
    SCRATCH,
    SCRATCH_BYTES,
    STORED,
    THREADS,
    TOKENS,
    WEIGHT,
    Packed,
    in_panels,
)
from slotwise.kernels.cpu.llvm import (
    BYTE,
    SHORT,
    SINGLE,
    WORD,
    Loop,
    all_of,
    behind,
    call,
    fma,
    number,
    prefetch,
    read,
    round_to_bfloat16,
    silu,
    spread,
    switch,
    write,
)
from slotwise.kernels.cpu.processor import AVX2, AVX512
from slotwise.kernels.cpu.quantize import (
    BYTES,
    COLUMNS,
    GROUP,
    LIMIT,
    RECORD,
    ZERO_WEIGHT,
    pack,
    quantise,
    quantise_block,
)
from slotwise.kernels.cpu.simd import BFLOAT16, FLOAT32, INT64, Real, bytes_of, fetch_add, load, store
from slotwise.kernels.cpu.work_queue import NOTHING, pop, rows_of_a_block, upcoming
from slotwise.kernels.interface import Linear

GATES = COLUMNS // 2  # of a panel that is half gates, half what they gate
HEIGHTS = (1, 2, 3, 4, 6) if AVX512 else (1, 2)  # of a tile, as registers allow
TALLEST = HEIGHTS[-1]
RUN = {8: 2, 4: 8}  # quads whose pairs are added in 16 bits
STEPS_OF_A_GROUP = GROUP // 8  # two quads at once
ASKED = 2  # lines prefetched with each
AHEAD = 8192  # bytes of weights between what is read and what is prefetched, where a panel is read but once
BLOCK_BYTES = 1 << 18  # of activations quantised at once: a part of a typical second-level cache
ROOM_BYTES = TALLEST * COLUMNS * 4

WeightKind = NewType("WeightKind", np.generic)
WEIGHTS = {types.uint8: (8, False), types.int8: (4, False), types.uint16: (8, True), types.int16: (4, True)}
"""Bits of a weight, and whether VNNI multiplies it, by the type of a `WeightKind`."""

_BYTES, _SHORTS, _WORDS, _FLOATS = (
    ir.VectorType(kind, lanes) for kind, lanes in ((BYTE, 64), (SHORT, 32), (WORD, 16), (SINGLE, 16)))

Add: TypeAlias = Callable[[ir.IRBuilder, ir.Value, ir.Value, ir.Value], ir.Value]
"""`add(builder, so_far, unsigned, signed)`: the sums after 64 products of bytes."""


class _Panel(NamedTuple):
    """Addresses and strides of a panel's weights and of the rows it is multiplied with."""

    weights: ir.Value
    x: ir.Value
    scales: ir.Value  # scales and corrections of the rows
    group_rows: ir.Value
    groups: ir.Value
    target: ir.Value
    stride: ir.Value
    bias: ir.Value
    is_gated: ir.Value
    asked: ir.Value  # what to prefetch
    step: ir.Value  # bytes of it with each two quads


def _pick(builder: ir.IRBuilder, vector: ir.Value, lanes: Sequence[int]) -> ir.Value:
    chosen = ir.Constant(ir.VectorType(WORD, len(lanes)), list(lanes))
    return builder.shuffle_vector(vector, ir.Constant(vector.type, ir.Undefined), chosen)


def _in_halves(builder: ir.IRBuilder, name: str, result: ir.Type, left: ir.Value, right: ir.Value) -> ir.Value:
    """Apply an AVX2 instruction to both halves of two vectors."""
    count, half = left.type.count, ir.VectorType(result.element, result.count // 2)
    parts = [call(builder, f"llvm.x86.{name}", half, *(_pick(builder, vector, lanes) for vector in (left, right)))
             for lanes in (range(count // 2), range(count // 2, count))]
    return builder.shuffle_vector(*parts, ir.Constant(ir.VectorType(WORD, result.count), list(range(result.count))))


def _add_pairs(builder: ir.IRBuilder, so_far: ir.Value, unsigned: ir.Value, signed: ir.Value) -> ir.Value:
    """64 products of bytes, added in pairs to int16 x 32."""
    if AVX512:
        pairs = call(builder, "llvm.x86.avx512.pmaddubs.w.512", _SHORTS, unsigned, signed)
    elif AVX2:
        pairs = _in_halves(builder, "avx2.pmadd.ub.sw", _SHORTS, unsigned, signed)
    else:
        pairs = builder.add(*(builder.mul(
            builder.zext(_pick(builder, unsigned, range(odd, 64, 2)), _SHORTS),
            builder.sext(_pick(builder, signed, range(odd, 64, 2)), _SHORTS)) for odd in (0, 1)))
    return builder.add(so_far, pairs)


def _widen_pairs(builder: ir.IRBuilder, shorts: ir.Value) -> ir.Value:
    """Pairs of int16 added: int32 x 16."""
    ones = all_of(_SHORTS, 1)
    if AVX512:
        return call(builder, "llvm.x86.avx512.pmaddw.d.512", _WORDS, shorts, ones)
    if AVX2:
        return _in_halves(builder, "avx2.pmadd.wd", _WORDS, shorts, ones)
    return builder.add(*(builder.sext(_pick(builder, shorts, range(odd, 32, 2)), _WORDS) for odd in (0, 1)))


def _add_fours(builder: ir.IRBuilder, so_far: ir.Value, unsigned: ir.Value, signed: ir.Value) -> ir.Value:
    """64 products of bytes, added in fours to int32 x 16."""
    return call(builder, "llvm.x86.avx512.vpdpbusd.512", _WORDS, so_far, builder.bitcast(unsigned, _WORDS),
                builder.bitcast(signed, _WORDS))


def _weights_of_two_quads(builder: ir.IRBuilder, address: ir.Value, bits: int) -> list[list[ir.Value]]:
    """Weights of two quads: for each, 16 columns of either half, as unsigned bytes."""
    stored = [read(builder, behind(builder, address, place * 64), _BYTES, 1) for place in range(bits // 2)]
    if bits == 8:
        return [stored[:2], stored[2:]]
    return [[builder.and_(pair, all_of(_BYTES, 15)) for pair in stored],
            [builder.lshr(pair, all_of(_BYTES, 4)) for pair in stored]]


def _add_two_quads(
    builder: ir.IRBuilder, rows: int, bits: int, panel: _Panel, place: ir.Value, sums: Sequence[ir.Value], add: Add
) -> list[ir.Value]:
    """`sums`, two vectors a row, after all products of the two quads at `place` in the group; prefetches meanwhile."""
    for line in range(ASKED):
        part = builder.udiv(builder.mul(panel.step, number(line)), number(ASKED))
        prefetch(builder, builder.add(panel.asked, builder.add(builder.mul(place, panel.step), part)))
    weights = builder.add(panel.weights, builder.mul(place, number(128 * bits // 4)))
    x, sums = builder.add(panel.x, builder.mul(place, number(8))), list(sums)
    for quad, halves in enumerate(_weights_of_two_quads(builder, weights, bits)):
        for row in range(rows):
            four = read(builder, behind(builder, x, row * GROUP + quad * 4), WORD, 1)
            four = builder.bitcast(spread(builder, four, _WORDS), _BYTES)
            for half in (0, 1):
                sums[2 * row + half] = add(builder, sums[2 * row + half], halves[half], four)
    return sums


def _group(builder: ir.IRBuilder, rows: int, kind: ElementType, panel: _Panel) -> list[ir.Value]:
    """One group's integers, two vectors of int32 per row: corrections first, then all quads.

    Loops and not copies: with all loads in sight LLVM would hoist them and run out of registers.
    """
    bits, by_vnni = WEIGHTS[kind]
    start = [spread(builder, read(builder, behind(builder, panel.scales, row * 8 + 4), WORD, 1), _WORDS)
             for row in range(rows) for _ in (0, 1)]
    if by_vnni:
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
    return runs.close([builder.add(total, _widen_pairs(builder, shorts))
                       for total, shorts in zip(runs.values, sums, strict=True)])


def _all_groups(builder: ir.IRBuilder, rows: int, kind: ElementType, panel: _Panel) -> list[ir.Value]:
    """The sums of a tile, two vectors a row."""
    bits, _ = WEIGHTS[kind]
    groups = Loop(builder, panel.groups, 1, [all_of(_FLOATS, 0.0)] * (2 * rows))
    record = builder.add(panel.weights, builder.mul(groups.index, number(RECORD[bits])))
    passed = builder.mul(groups.index, panel.group_rows)
    scales = builder.add(panel.scales, builder.mul(passed, number(8)))
    step = builder.mul(panel.step, number(STEPS_OF_A_GROUP))
    totals = _group(builder, rows, kind, panel._replace(
        weights=record, x=builder.add(panel.x, builder.mul(passed, number(GROUP))), scales=scales,
        asked=builder.add(panel.asked, builder.mul(groups.index, step))))
    results = []
    for place, (total, so_far) in enumerate(zip(totals, groups.values, strict=True)):
        own = spread(builder, read(builder, behind(builder, scales, place // 2 * 8), SINGLE, 1), _FLOATS)
        of_weights = read(builder, behind(builder, record, BYTES[bits] + place % 2 * 64), _FLOATS, 1)
        results.append(fma(builder, builder.sitofp(total, _FLOATS), builder.fmul(own, of_weights), so_far))
    return groups.close(results)


def _store_rows(builder: ir.IRBuilder, sums: list[ir.Value], panel: _Panel, kind: ElementType) -> None:
    """Store each row's two vectors plus bias, or for a panel of gates their one product, as `kind`."""
    def put(row: int, half: int, value: ir.Value) -> None:
        if kind == types.uint16:
            value = round_to_bfloat16(builder, value)
        place = builder.add(panel.target, builder.mul(panel.stride, number(row)))
        write(builder, value, behind(builder, place, half * kind.bitwidth * 2), align=2)

    added = [read(builder, behind(builder, panel.bias, half * 64), _FLOATS, 1) for half in (0, 1)]
    sums = [builder.fadd(value, added[place % 2]) for place, value in enumerate(sums)]
    with builder.if_else(builder.icmp_signed("!=", panel.is_gated, number(0))) as (gated, plain):
        with gated:
            for row, (gate, up) in enumerate(zip(sums[::2], sums[1::2], strict=True)):
                put(row, 0, builder.fmul(silu(builder, gate), up))
        with plain:
            for place, value in enumerate(sums):
                put(place // 2, place % 2, value)


def _int_gemm(builder: ir.IRBuilder, height: ir.Value, *arguments: ir.Value) -> None:
    *addresses, weight_kind, kind = arguments
    panel = _Panel._make(addresses)
    switch(builder, height, HEIGHTS, lambda rows: _store_rows(
        builder, _all_groups(builder, rows, weight_kind, panel), panel, kind))


int_gemm: Callable[..., None] = intrinsic(_int_gemm, *[INT] * 12, KIND, KIND)
"""`int_gemm(height, *panel, weight_kind, kind)`: the weights of a `_Panel` times `height` (of `HEIGHTS`) rows, plus
bias, to rows of `kind`.

Meanwhile memory from `asked` on is prefetched, `step` bytes (up to ASKED lines) with each two quads of depth.  Rows at
`target` lie `stride` bytes apart; they have 32 numbers, or 16 where the panel `is_gated`.  A group has `group_rows`
rows of activations in all.
"""


@kernel
def _multiply(
    words: int, room: int, first: int, row: int, panel: int, following: int, kind: Real, weight_kind: WeightKind,
    record: int,
) -> int:
    """Multiply one tile: a panel with rows from `first + row` on; returns the number of rows.

    Meanwhile it prefetches its share of the panel at `following`; a tile that is the only one, its own panel, a little
    ahead.  A panel wider than the rest of the output is stored to the scratch `room` first.
    """
    block, stored = load(words, BLOCK, INT64), load(words, STORED, INT64)
    groups, rows = (load(words, DEPTH, INT64) + GROUP - 1) // GROUP, min(block, load(words, TOKENS, INT64) - first)
    height = 1
    for size in HEIGHTS:
        if size <= rows - row:
            height = size
    tiles, weight = (rows + TALLEST - 1) // TALLEST, load(words, WEIGHT, INT64) + panel * groups * record
    share = (record // STEPS_OF_A_GROUP + tiles - 1) // tiles
    asked = weight + AHEAD if tiles == 1 else following + row // TALLEST * share * STEPS_OF_A_GROUP * groups
    is_gated = stored != load(words, OUTPUTS, INT64)
    width = GATES if is_gated else COLUMNS
    left, size = stored - panel * width, bytes_of(kind)
    place, stride = load(words, OUT, INT64) + ((first + row) * stored + panel * width) * size, stored * size
    target, step = (place, stride) if left >= width else (room, width * size)
    held = room + ROOM_BYTES
    int_gemm(height, weight, held + row * GROUP, held + groups * rows * GROUP + row * 8, rows, groups, target, step,
             load(words, BIAS, INT64) + panel * COLUMNS * 4, is_gated, asked, share, weight_kind, kind)
    if left < width:
        for i in range(height):
            for column in range(left):
                store(place + i * stride, column, load(target + i * step, column, kind), kind)
    return height


@kernel
def _product(words: int, kind: Real, weight_kind: WeightKind, numbers: tuple[float, int, int]) -> None:
    limit, zero, record = numbers
    tokens, block, threads = load(words, TOKENS, INT64), load(words, BLOCK, INT64), load(words, THREADS, INT64)
    panels, blocks = (load(words, OUTPUTS, INT64) + COLUMNS - 1) // COLUMNS, (tokens + block - 1) // block
    panel_bytes = (load(words, DEPTH, INT64) + GROUP - 1) // GROUP * record
    thread = fetch_add(words + THREAD_COUNTER, 1)
    room = load(words, SCRATCH, INT64) + thread * load(words, SCRATCH_BYTES, INT64)
    held = -1
    item = pop(words, thread, threads, blocks * panels)
    while item != NOTHING:
        first, panel = item // panels * block, item % panels
        rows = min(block, tokens - first)
        if first != held:
            quantise_block(words, first, rows, room + ROOM_BYTES, room, limit, zero, kind)
            held = first
        after = upcoming(words, thread, threads, blocks * panels)
        following = load(words, WEIGHT, INT64) + (panel if after == NOTHING else after % panels) * panel_bytes
        row = 0
        while row < rows:
            row += _multiply(words, room, first, row, panel, following, kind, weight_kind, record)
        item = pop(words, thread, threads, blocks * panels)


_KINDS = {torch.bfloat16: BFLOAT16, torch.float32: FLOAT32}
_WEIGHT_KINDS = {(8, "integer"): np.uint8(0), (4, "integer"): np.int8(0), (8, "vnni"): np.uint16(0),
                 (4, "vnni"): np.int16(0)}  # as in `WEIGHTS`

PRODUCT = {  # by bits, type of the activations, and path
    (bits, dtype, path): specialised(
        _product, kind, weight_kind, (np.float32(LIMIT[bits]), ZERO_WEIGHT[bits], RECORD[bits]))
    for (bits, path), weight_kind in _WEIGHT_KINDS.items() for dtype, kind in _KINDS.items()}


def int_linear(
    weight: Tensor, bias: Tensor | None, bits: int, path: str, launcher: KernelLauncher, *, is_gated: bool = False
) -> Linear:
    """`weight [out, in]`, quantised to `bits` and packed for many products, by one of `paths.QUANTISED`.

    Args:
        is_gated: `weight [gates, then as many of what they gate; in]`; the result is silu(gate) * up.
    """
    outputs, depth = weight.shape
    panels = pack(*quantise(in_panels(weight, COLUMNS, is_gated=True) if is_gated else weight, bits), bits)
    added = in_panels(torch.zeros(outputs) if bias is None else bias.float(), COLUMNS, is_gated=is_gated)
    row_bytes = panels.shape[1] * (GROUP + 8)
    most = max(TALLEST, BLOCK_BYTES // row_bytes // TALLEST * TALLEST)
    packed = Packed(
        PRODUCT[bits, weight.dtype, path], panels, added, depth, panels.shape[0] * COLUMNS if is_gated else outputs,
        outputs // 2 if is_gated else outputs, lambda tokens: rows_of_a_block(tokens, most, launcher.threads),
        (4 * TALLEST * COLUMNS + most * row_bytes + 63) // 64 * 16)
    return packed.product(launcher)
