"""The product of a panel of packed blocks (`block_layout.py`) and a few quantized rows, in registers.

    sums[rows, 32]  +=  for each unit of depth:  scale(row, unit) * scale(unit, column) * (q . w - zero * sum(q))
                        or, with minimums,                     ... * (q . w) - minimum(unit, column) * sum(x)

For each two quads, codes are unpacked from their planes, or looked up in a table of 16 by a byte shuffle, and
multiplied with the bytes of all rows.  Integers become floats once a unit, always in the same order, so a row does not
depend on other rows.  Nothing can overflow, so every processor computes the same integers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

from llvmlite import ir
from numba import types

from slotwise.compute.kernels.cpu.jit.compiler import INT, KIND, ElementType, intrinsic
from slotwise.compute.kernels.cpu.jit.llvm import (
    BYTE,
    HALF,
    LINE,
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
    spread,
    switch,
    unknown,
    widened,
)
from slotwise.compute.kernels.cpu.processor import AVX2, AVX512
from slotwise.compute.kernels.cpu.products import block_layout
from slotwise.compute.kernels.cpu.products.block_layout import COLUMNS, PLANES, STEP, BlockLayout
from slotwise.compute.kernels.cpu.products.gemm import FLOATS, added, finish_row, for_each_form, read_floats
from slotwise.compute.kernels.cpu.products.quantize import FACTS
from slotwise.compute.kernels.cpu.simd import add_fours, add_signed_fours, pairs_of_bytes, pairs_of_shorts, pick

# Heights of a tile for which there are enough registers; higher ones than `ROWS_OF_BOTH_HALVES` are multiplied with one
# half of a panel's columns after the other.
HEIGHTS, ROWS_OF_BOTH_HALVES = ((1, 2, 3, 4, 6, 8), 8) if AVX512 else ((1, 2, 3, 4), 2)
TALLEST = HEIGHTS[-1]
# Columns of a vector of sums.
LANES = 16
VECTORS = COLUMNS // LANES


_BYTES, _SHORTS, WORDS = (ir.VectorType(kind, lanes) for kind, lanes in ((BYTE, 64), (SHORT, 32), (WORD, 16)))


class BlockPanel(NamedTuple):
    """Addresses and strides of a panel's weights and of the rows it is multiplied with.

    Args:
        table: 16 bytes.
        facts: of the rows.
        form: of results, as in `gemm.py`.
        asked, step: what to prefetch, and bytes of it with each two quads.
    """

    weights: ir.Value
    records: ir.Value
    table: ir.Value
    x: ir.Value
    facts: ir.Value
    unit_rows: ir.Value
    target: ir.Value
    stride: ir.Value
    bias: ir.Value
    form: ir.Value
    asked: ir.Value
    step: ir.Value


MIDDLE = 128
"""What codes are a distance from, where levels have a sign."""
# The largest sum in 16 bits, and the largest byte of a row.
MOST_OF_SHORTS, MOST_OF_ROW = 32767, 127


def has_signed_levels(layout: BlockLayout) -> bool:
    """Whether the path `integer` multiplies distances of levels from `MIDDLE`, and not the levels themselves.

    On AVX2, pairs of products of 255 and 127 do not fit into 16 bits; those of 128 and 127 do.
    """
    return AVX2 and bool(layout.is_wide and layout.has_zero)


def steps_in_shorts(layout: BlockLayout) -> int:
    """Steps of a unit whose products can be added in 16 bits, a power of two; 0: not even those of one."""
    if layout.has_table or layout.is_wide:
        return 0
    pairs = MOST_OF_SHORTS // (2 * MOST_OF_ROW * ((1 << layout.bits) - 1))
    steps = min(layout.unit, pairs * 4) // STEP
    return 1 << steps.bit_length() - 1 if steps else 0


class Unpack:
    """Unpacks the codes of two quads."""

    def __init__(self, builder: ir.IRBuilder, layout: BlockLayout, table: ir.Value) -> None:
        self._builder = builder
        self._layout = layout
        self._table = None
        if layout.has_table:
            sixteen = read(builder, table, ir.VectorType(BYTE, 16), 1)
            self._table = pick(builder, sixteen, list(range(16)) * 4)

    def quads(self, record: ir.Value, place: ir.Value) -> list[list[ir.Value]]:
        """The two quads at `place` in the record: for each, unsigned bytes of 16 columns of either half."""
        planes, begin, at = [], 0, 0
        for width in PLANES[self._layout.bits]:
            planes.append(self._fields(behind(self._builder, record, begin), place, width, at))
            begin += self._layout.record * COLUMNS * width // 8
            at += width
        joined = planes[0]
        for plane in planes[1:]:
            joined = [[self._builder.or_(*pair) for pair in zip(low, high, strict=True)]
                      for low, high in zip(joined, plane, strict=True)]
        return [[self._level(code) for code in quad] for quad in joined]

    def _fields(self, plane: ir.Value, place: ir.Value, width: int, at: int) -> list[list[ir.Value]]:
        """Fields of `width` bits of two quads, shifted left by `at`."""
        builder = self._builder
        if width == 8:
            begin = builder.add(plane, builder.mul(place, number(4 * LINE)))
            return [[read(builder, behind(builder, begin, (2 * quad + half) * LINE), _BYTES, 1) for half in (0, 1)]
                    for quad in (0, 1)]
        steps = 4 // width  # that share bytes
        begin = builder.add(plane, builder.mul(builder.udiv(place, number(steps)), number(2 * LINE)))
        stored = [builder.bitcast(read(builder, behind(builder, begin, half * LINE), _BYTES, 1), _SHORTS)
                  for half in (0, 1)]
        if steps > 1:
            by = builder.mul(builder.urem(place, number(steps)), number(2 * width))
            shift = spread(builder, builder.trunc(by, SHORT), _SHORTS)
            stored = [builder.lshr(value, shift) for value in stored]
        return [[self._field(value, quad * width, width, at) for value in stored] for quad in (0, 1)]

    def _field(self, value: ir.Value, first: int, width: int, at: int) -> ir.Value:
        """Bits `first ... first + width` of every byte, shifted left by `at`."""
        builder = self._builder
        if first > at:
            value = builder.lshr(value, all_of(_SHORTS, first - at))
        elif at > first:
            value = builder.shl(value, all_of(_SHORTS, at - first))
        return builder.and_(builder.bitcast(value, _BYTES), all_of(_BYTES, ((1 << width) - 1) << at))

    def _level(self, code: ir.Value) -> ir.Value:
        if self._table is None:
            return code
        if AVX512:
            return call(self._builder, "llvm.x86.avx512.pshuf.b.512", _BYTES, self._table, code)
        return _shuffle_in_parts(self._builder, self._table, code)


def _shuffle_in_parts(builder: ir.IRBuilder, table: ir.Value, code: ir.Value) -> ir.Value:
    """The byte shuffle of narrower registers; without one, a selection by each code."""
    if AVX2:
        half = ir.VectorType(BYTE, 32)
        parts = [call(builder, "llvm.x86.avx2.pshuf.b", half, *(pick(builder, vector, lanes)
                                                                 for vector in (table, code)))
                 for lanes in (range(32), range(32, 64))]
        return builder.shuffle_vector(*parts, ir.Constant(ir.VectorType(WORD, 64), list(range(64))))
    found = all_of(_BYTES, 0)
    for level in range(16):
        is_it = builder.icmp_unsigned("==", code, all_of(_BYTES, level))
        found = builder.select(is_it, pick(builder, table, [level] * 64), found)
    return found


def factors(builder: ir.IRBuilder, layout: BlockLayout, record: ir.Value, group: ir.Value, *, minimum: bool
             ) -> list[ir.Value]:
    """Scales or minimums of a group, for 16 columns of either half, as float32."""
    size = {block_layout.BYTE: 1, block_layout.NIBBLE: 1, block_layout.SINGLE: 4}.get(layout.kind, 2)
    begin = behind(builder, record, layout.minimums_at if minimum and layout.kind != block_layout.NIBBLE
                   else layout.scales_at)
    begin = builder.add(begin, builder.mul(group, number(COLUMNS * size)))
    units = behind(builder, record, layout.minimum_units_at if minimum else layout.units_at)
    made = []
    for half in range(VECTORS):
        address = behind(builder, begin, half * LANES * size)
        if layout.kind == block_layout.SINGLE:
            made.append(read(builder, address, FLOATS))
        elif layout.kind == block_layout.BRAIN:
            made.append(widened(builder, read(builder, address, ir.VectorType(SHORT, LANES), 2)))
        elif layout.kind == block_layout.HALF:
            made.append(_of_halves(builder, address))
        else:
            small = read(builder, address, ir.VectorType(BYTE, LANES), 1)
            if layout.kind == block_layout.NIBBLE:
                four = all_of(small.type, 4)
                small = builder.lshr(small, four) if minimum else builder.and_(small, all_of(small.type, 15))
            whole = builder.sitofp(builder.sext(small, WORDS), FLOATS)
            product = builder.fmul(whole, _of_halves(builder, behind(builder, units, half * LANES * 2)))
            # Without the fence LLVM would multiply the unit with the scale of a row first, in some tiles only.
            made.append(call(builder, f"llvm.arithmetic.fence.v{LANES}f32", FLOATS, product))
    return made


def factors_of_unit(builder: ir.IRBuilder, layout: BlockLayout, record: ir.Value, unit: ir.Value
                    ) -> tuple[list[ir.Value], list[ir.Value]]:
    """Scales of a unit of a record, and minimums for formats that have them."""
    group = builder.udiv(unit, number(layout.record // layout.unit // layout.groups))
    return (factors(builder, layout, record, group, minimum=False),
            factors(builder, layout, record, group, minimum=True) if layout.has_minimums else [])


def start_of_unit(builder: ir.IRBuilder, layout: BlockLayout, facts: ir.Value) -> ir.Value:
    """The start of a row's integers of a unit: its correction, for formats with a zero."""
    if not layout.has_zero:
        return all_of(WORDS, 0)
    return spread(builder, read(builder, behind(builder, facts, 4), WORD), WORDS)


def add_unit(
    builder: ir.IRBuilder, totals: Sequence[ir.Value], so_far: Sequence[ir.Value], facts: ir.Value,
    of_weights: tuple[Sequence[ir.Value], Sequence[ir.Value]],
) -> list[ir.Value]:
    """A row's sums `so_far` after a unit with the integers `totals`, the row's facts, and scales and minimums."""
    scales, minimums = of_weights
    own = spread(builder, read(builder, facts, SINGLE), FLOATS)
    sums = [fma(builder, builder.sitofp(total, FLOATS), builder.fmul(own, scale), before)
            for total, scale, before in zip(totals, scales, so_far, strict=True)]
    if not minimums:
        return sums
    negative = spread(builder, read(builder, behind(builder, facts, 4), SINGLE), FLOATS)
    return [fma(builder, negative, minimum, before) for minimum, before in zip(minimums, sums, strict=True)]


def prefetch_step(builder: ir.IRBuilder, layout: BlockLayout, panel: BlockPanel, step: ir.Value) -> None:
    """Prefetch a panel's share with the step of two quads that `step` others precede: every line of it."""
    asked = builder.add(panel.asked, builder.mul(step, panel.step))
    lines = -(-layout.record_bytes * STEP // layout.record // LINE)
    for line in range(lines):
        prefetch(builder, builder.add(asked, builder.udiv(builder.mul(panel.step, number(line)), number(lines))))


def finish(builder: ir.IRBuilder, sums: Sequence[ir.Value], panel: BlockPanel, kind: ElementType) -> None:
    """Store rows of two vectors each plus bias, in the panel's form; `kind` is that of the activations."""
    bias = read_floats(builder, panel.bias, VECTORS)

    def of_form(kind: ElementType, *, is_gated: bool) -> None:
        for row in range(len(sums) // VECTORS):
            target = builder.add(panel.target, builder.mul(panel.stride, number(row)))
            of_row = sums[VECTORS * row : VECTORS * (row + 1)]
            finish_row(builder, added(builder, of_row, bias), target, kind, is_gated=is_gated)

    for_each_form(builder, panel.form, kind, of_form)


def _of_halves(builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
    """16 float16 as float32; without an instruction for it, by their bits, which is exact for finite numbers."""
    if AVX2 or AVX512:
        return builder.fpext(read(builder, address, ir.VectorType(HALF, LANES), 2), FLOATS)
    bits = builder.zext(read(builder, address, ir.VectorType(SHORT, LANES), 2), WORDS)
    size = builder.shl(builder.and_(bits, all_of(WORDS, 0x7FFF)), all_of(WORDS, 13))
    scaled = builder.fmul(builder.bitcast(size, FLOATS), all_of(FLOATS, 2.0**112))
    sign = builder.shl(builder.and_(bits, all_of(WORDS, 0x8000)), all_of(WORDS, 16))
    return builder.bitcast(builder.or_(builder.bitcast(scaled, WORDS), sign), FLOATS)


class _RegisterTile:
    """Emits the product of a panel and `rows` rows."""

    def __init__(
        self, builder: ir.IRBuilder, rows: int, layout: BlockLayout, panel: BlockPanel, path: ElementType,
    ) -> None:
        self._builder, self._rows, self._layout, self._panel = builder, rows, layout, panel
        self._unpack = Unpack(builder, layout, panel.table)
        self._by_vnni = path in (types.uint16, types.uint32)
        self._is_signed = path == types.uint8 and has_signed_levels(layout)
        self._in_shorts = 0 if self._by_vnni or AVX512 else steps_in_shorts(layout)

    def sums(self) -> list[ir.Value]:
        """Vectors of float32, two per row."""
        if self._rows <= ROWS_OF_BOTH_HALVES:
            return self._of_halves(range(VECTORS))
        by_half = [self._of_halves(range(half, half + 1)) for half in range(VECTORS)]
        return [sums[row] for row in range(self._rows) for sums in by_half]

    def _of_halves(self, halves: range) -> list[ir.Value]:
        """Some vectors of float32 per row."""
        builder, layout, panel = self._builder, self._layout, self._panel
        units = layout.record // layout.unit
        records = Loop(builder, panel.records, 1, [all_of(FLOATS, 0.0)] * (len(halves) * self._rows))
        record = builder.add(panel.weights, builder.mul(records.index, number(layout.record_bytes)))
        turns = Loop(builder, number(units), 1, records.values)
        passed = builder.add(builder.mul(records.index, number(units)), turns.index)
        return records.close(turns.close(self._add_unit(record, turns.index, passed, turns.values, halves)))

    def _add_unit(
        self, record: ir.Value, unit: ir.Value, passed: ir.Value, so_far: Sequence[ir.Value], halves: range
    ) -> list[ir.Value]:
        """`so_far` plus the products of a unit of a record, which `passed` units precede in the panel."""
        builder, layout, panel = self._builder, self._layout, self._panel
        place = builder.mul(passed, panel.unit_rows)
        facts = builder.add(panel.facts, builder.mul(place, number(FACTS)))
        of_rows = [behind(builder, facts, row * FACTS) for row in range(self._rows)]
        start = [start_of_unit(builder, layout, own) for own in of_rows for _ in halves]
        x = builder.add(panel.x, builder.mul(place, number(layout.unit)))
        totals = self._of_steps(record, unit, passed, x, start, halves)
        scales, minimums = factors_of_unit(builder, layout, record, unit)
        of_weights = scales[halves.start : halves.stop], minimums[halves.start : halves.stop]
        results = []
        for row, own in enumerate(of_rows):
            of_row = slice(len(halves) * row, len(halves) * (row + 1))
            results += add_unit(builder, totals[of_row], so_far[of_row], own, of_weights)
        return results

    def _of_steps(
        self, record: ir.Value, unit: ir.Value, passed: ir.Value, x: ir.Value, start: Sequence[ir.Value], halves: range
    ) -> Sequence[ir.Value]:
        """The integers of a unit, from `start` on; prefetches meanwhile."""
        builder, layout, panel = self._builder, self._layout, self._panel
        steps, in_shorts = layout.unit // STEP, self._in_shorts
        if self._rows == 1:
            asked = builder.add(panel.asked, builder.mul(passed, builder.mul(panel.step, number(steps))))
            prefetch(builder, asked, layout.record_bytes * layout.unit // layout.record)

        def add_step(step: ir.Value, so_far: Sequence[ir.Value]) -> Sequence[ir.Value]:
            if self._rows > 1 and halves.start == 0:
                prefetch_step(builder, layout, panel, builder.add(builder.mul(passed, number(steps)), step))
            return self._add_step(record, unit, x, step, so_far, halves)

        def add_steps(turn: ir.Value, so_far: Sequence[ir.Value]) -> Sequence[ir.Value]:
            first = builder.mul(turn, number(in_shorts))
            shorts = self._in_turns(in_shorts, [all_of(_SHORTS, 0)] * len(so_far), lambda step, sums: add_step(
                builder.add(first, step), sums))
            return [builder.add(before, pairs_of_shorts(builder, short, all_of(_SHORTS, 1)))
                    for before, short in zip(so_far, shorts, strict=True)]

        return self._in_turns(steps // in_shorts, start, add_steps) if in_shorts else self._in_turns(
            steps, start, add_step)

    def _in_turns(
        self, count: int, start: Sequence[ir.Value],
        turn: Callable[[ir.Value, Sequence[ir.Value]], Sequence[ir.Value]],
    ) -> Sequence[ir.Value]:
        """The values after `count` turns.

        Of several rows a loop and not copies: with all loads in sight LLVM would hoist them and run out of registers.
        """
        if self._rows == 1 or count == 1:
            for index in range(count):
                start = turn(number(index), start)
            return start
        turns = Loop(self._builder, number(count) if AVX512 else unknown(self._builder, count), 1, start)
        return turns.close(turn(turns.index, turns.values))

    def _add_step(
        self, record: ir.Value, unit: ir.Value, x: ir.Value, step: ir.Value, so_far: Sequence[ir.Value], halves: range
    ) -> list[ir.Value]:
        """`so_far` plus the products of two quads of a unit."""
        builder, layout = self._builder, self._layout
        sums = list(so_far)
        quads = self._unpack.quads(record, builder.add(builder.mul(unit, number(layout.unit // STEP)), step))
        x = builder.add(x, builder.mul(step, number(STEP)))
        for quad, codes in enumerate(quads):
            @functools.cache
            def four(row: int, quad: int = quad) -> ir.Value:
                word = read(builder, behind(builder, x, row * layout.unit + quad * 4), WORD, 1)
                return builder.bitcast(spread(builder, word, WORDS), _BYTES)

            places = [(row, half) for row in range(self._rows) for half in halves]
            if not AVX512:  # with few registers, a vector of weights serves all rows before the next is unpacked
                for row in range(self._rows):
                    four(row)
                places.sort(key=lambda place: place[1])
            for row, half in places:
                at = len(halves) * row + half - halves.start
                sums[at] = self._add_products(sums[at], codes[half], four(row))
        return sums

    def _add_products(self, so_far: ir.Value, codes: ir.Value, four: ir.Value) -> ir.Value:
        builder = self._builder
        if self._in_shorts:
            return builder.add(so_far, pairs_of_bytes(builder, codes, four))
        if self._is_signed:
            return add_signed_fours(builder, so_far, builder.xor(codes, all_of(_BYTES, MIDDLE)), four)
        return add_fours(
            builder, so_far, codes, four, by_vnni=self._by_vnni, is_wide=bool(self._layout.is_wide))


def _block_gemm(builder: ir.IRBuilder, height: ir.Value, *arguments: ir.Value) -> None:
    *addresses, layout, path, kind = arguments
    panel = BlockPanel._make(addresses)
    shape: BlockLayout = layout.instance_class.NUMBERS
    switch(builder, height, HEIGHTS, lambda rows: finish(
        builder, _RegisterTile(builder, rows, shape, panel, path).sums(), panel, kind))


block_gemm: Callable[..., None] = intrinsic(_block_gemm, *[INT] * 13, KIND, KIND, KIND)
"""`block_gemm(height, *panel, layout, path, kind)`: the weights of a `BlockPanel` times `height` rows, plus bias.

`height` is one of `HEIGHTS`, and activations are of `kind`.  Meanwhile memory from `asked` on is prefetched, `step`
bytes with each two quads of depth.  Rows at `target` lie
`stride` bytes apart; they have 32 numbers, or 16 where the panel has gates.  A unit has `unit_rows` rows of
activations in all.  `path` is one of `PATHS` of `linear_blocks.py`.
"""
