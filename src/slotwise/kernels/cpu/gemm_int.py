"""The product of small integers: a few rows of quantised activations times 32 columns of quantised weights.

    sums[rows, 32]  +=  for each group of 64 along depth:  scale(row, group) * scale(group, column) * (q . (w - zero))

Weights are unsigned bytes of 7 bits (`zero` 64) or nibbles (`zero` 8), activations signed bytes up to `LIMIT`.  Bytes
are multiplied and added in pairs to 16 bits (`pmaddubsw`), a few pairs are added there, and only then widened: with 7
7 bits two pairs fit, with nibbles eight.  That takes 2.5 and 2.2 instructions for 64 products where one after the
other, in 32 bits, takes 3, and bfloat16 widened to float32 4 and more.  With VNNI all of it is one (`vpdpbusd`).
Nothing can overflow, so every processor computes the same integers; they are converted to floats once a group, always
in the same order, so a row does not depend on the rows beside it.

    weights       panels of 32 columns x groups x [ bytes | scales float32[32] ]
        bytes     7 bits: 16 quads of depth x 32 columns x 4; nibbles: quads 2i and 2i + 1 share a byte, the first low
    activations   groups x rows x int8[64], groups x rows x (scale float32, -sum int32)
"""

from __future__ import annotations

import functools

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from slotwise.kernels.cpu.processor import AVX2, AVX512
from slotwise.kernels.cpu.simd import round_to_bfloat16
from slotwise.kernels.cpu.vectors import all_of, ask, silu

GROUP = 64  # of depth; shares a scale
COLUMNS = 32
GATES = COLUMNS // 2  # of a panel that is half gates, half what they gate
LIMIT = {8: 63, 4: 127}  # of a quantised activation, by the bits of a weight
ZERO = {8: 64, 4: 8}  # a weight of zero
BYTES = {8: COLUMNS * GROUP, 4: COLUMNS * GROUP // 2}  # of a group's weights
RECORD = {bits: size + 4 * COLUMNS for bits, size in BYTES.items()}  # bytes of a group with its scales
STEPS_OF_A_GROUP = GROUP // 8  # two quads at once
ASKED = 2  # lines prefetched with each
RUN = {8: 2, 4: 8}  # quads whose pairs are added in 16 bits
HEIGHTS = (1, 2, 3, 4, 6) if AVX512 else (1, 2)  # of a tile, as registers allow
WEIGHTS = {types.uint8: (8, False), types.int8: (4, False), types.uint16: (8, True), types.int16: (4, True)}
"""Bits of a weight, and whether VNNI multiplies it, by the type of the `weight_kind` of `int_gemm`."""

_I8, _I16, _I32, _I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
_B64, _W32, _D16, _F16 = (
    ir.VectorType(kind, lanes) for kind, lanes in ((_I8, 64), (_I16, 32), (_I32, 16), (ir.FloatType(), 16)))


def _number(value):
    return ir.Constant(_I64, value)


def _read(builder, address, offset, kind):
    place = builder.inttoptr(builder.add(address, _number(offset)), kind.as_pointer())
    value = builder.load(place)
    value.align = 1
    return value


def spread(builder, scalar, vector):
    """`scalar` in every lane."""
    lone = builder.insert_element(ir.Constant(vector, ir.Undefined), scalar, ir.Constant(_I32, 0))
    zeros = ir.Constant(ir.VectorType(_I32, vector.count), [0] * vector.count)
    return builder.shuffle_vector(lone, ir.Constant(vector, ir.Undefined), zeros)


def _pick(builder, vector, lanes):
    lanes = list(lanes)
    return builder.shuffle_vector(
        vector, ir.Constant(vector.type, ir.Undefined), ir.Constant(ir.VectorType(_I32, len(lanes)), lanes))


def _call(builder, name, result, left, right):
    function = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(result, [left.type, right.type]), f"llvm.x86.{name}")
    return builder.call(function, [left, right])


def _in_halves(builder, name, result, left, right):
    """Apply an AVX2 instruction to both halves of two vectors."""
    count = left.type.count
    parts = [_call(builder, name, ir.VectorType(result.element, result.count // 2),
                   *(_pick(builder, vector, half) for vector in (left, right)))
             for half in (range(count // 2), range(count // 2, count))]
    lanes = ir.Constant(ir.VectorType(_I32, result.count), list(range(result.count)))
    return builder.shuffle_vector(*parts, lanes)


def _add_pairs(builder, unsigned, signed):
    """64 products of bytes, added in pairs: int16 x 32."""
    if AVX512:
        return _call(builder, "avx512.pmaddubs.w.512", _W32, unsigned, signed)
    if AVX2:
        return _in_halves(builder, "avx2.pmadd.ub.sw", _W32, unsigned, signed)
    products = [builder.mul(builder.zext(_pick(builder, unsigned, range(odd, 64, 2)), _W32),
                            builder.sext(_pick(builder, signed, range(odd, 64, 2)), _W32)) for odd in (0, 1)]
    return builder.add(*products)


def _widen_pairs(builder, words):
    """Pairs of int16 added: int32 x 16."""
    ones = ir.Constant(_W32, [1] * 32)
    if AVX512:
        return _call(builder, "avx512.pmaddw.d.512", _D16, words, ones)
    if AVX2:
        return _in_halves(builder, "avx2.pmadd.wd", _D16, words, ones)
    return builder.add(*(builder.sext(_pick(builder, words, range(odd, 32, 2)), _D16) for odd in (0, 1)))


def _repeat(builder, count, start, body):
    """`body(index, values)` for each index below `count`, on the values it last returned; returns the last values.

    A loop and not `count` copies: with all loads in sight LLVM would hoist them and run out of registers.
    """
    before, loop, after = builder.block, builder.append_basic_block("loop"), builder.append_basic_block("done")
    builder.branch(loop)
    builder.position_at_end(loop)
    index = builder.phi(_I64)
    index.add_incoming(_number(0), before)
    values = [builder.phi(value.type) for value in start]
    results = body(index, values)
    following = builder.add(index, _number(1))
    index.add_incoming(following, builder.block)
    for phi, first, result in zip(values, start, results, strict=True):
        phi.add_incoming(first, before)
        phi.add_incoming(result, builder.block)
    builder.cbranch(builder.icmp_signed("<", following, count), loop, after)
    builder.position_at_end(after)
    return results


def _two_quads(builder, address, bits):
    """Weights of two quads: for each, 16 columns of either half, as unsigned bytes."""
    stored = [_read(builder, address, place * 64, _B64) for place in range(4 if bits == 8 else 2)]
    if bits == 8:
        return stored[:2], stored[2:]
    low, four = ir.Constant(_B64, [15] * 64), ir.Constant(_B64, [4] * 64)
    return [builder.and_(pair, low) for pair in stored], [builder.lshr(pair, four) for pair in stored]


def _add_two_quads(builder, rows, operands, sums, add):
    """`sums`, two vectors a row, after `add(so_far, unsigned, signed)` of all products of two quads.

    Args:
        operands: bits of a weight, addresses of the quads' weights and of the first row's activations.
    """
    bits, weights, x = operands
    sums = list(sums)
    for quad, halves in enumerate(_two_quads(builder, weights, bits)):
        for row in range(rows):
            four = builder.bitcast(spread(builder, _read(builder, x, row * GROUP + quad * 4, _I32), _D16), _B64)
            for half in (0, 1):
                sums[2 * row + half] = add(sums[2 * row + half], halves[half], four)
    return sums


def _group(builder, rows, weights, operands):
    """One group's integers, two vectors of int32 per row: corrections first, then all quads.

    Args:
        weights: one of `WEIGHTS`.
        operands: addresses of weights, activations, scales and corrections, and of what to prefetch, and bytes of that.
    """
    (bits, by_vnni), (weights, x, told, asked, step) = weights, operands
    start = [spread(builder, _read(builder, told, row * 8 + 4, _I32), _D16) for row in range(rows) for _ in (0, 1)]
    size = 128 * bits // 4  # bytes of two quads' weights

    def two(place, sums, add):
        at = bits, builder.add(weights, builder.mul(place, _number(size))), builder.add(
            x, builder.mul(place, _number(8)))
        for line in range(ASKED):
            ask(builder, builder.add(asked, builder.add(
                builder.mul(place, step), builder.udiv(builder.mul(step, _number(line)), _number(ASKED)))))
        return _add_two_quads(builder, rows, at, sums, add)

    if by_vnni:
        return _repeat(builder, _number(GROUP // 8), start,
                       lambda index, totals: two(index, totals, functools.partial(_add_quad, builder)))

    def run(index, totals):
        first, add = builder.mul(index, _number(RUN[bits] // 2)), functools.partial(_add_in_16_bits, builder)
        if RUN[bits] == 2:
            sums = two(first, [None] * len(totals), add)
        else:
            sums = _repeat(builder, _number(RUN[bits] // 2), [ir.Constant(_W32, [0] * 32)] * len(totals),
                           lambda step, sums: two(builder.add(first, step), sums, add))
        return [builder.add(total, _widen_pairs(builder, words)) for total, words in zip(totals, sums, strict=True)]

    return _repeat(builder, _number(GROUP // 4 // RUN[bits]), start, run)


def _add_quad(builder, so_far, unsigned, signed):
    """64 products of bytes, added in fours to int32 x 16."""
    function = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(_D16, [_D16] * 3), "llvm.x86.avx512.vpdpbusd.512")
    return builder.call(function, [so_far, builder.bitcast(unsigned, _D16), builder.bitcast(signed, _D16)])


def _add_in_16_bits(builder, so_far, unsigned, signed):
    """64 products of bytes, added in pairs to int16 x 32; `so_far` None: to nothing."""
    pairs = _add_pairs(builder, unsigned, signed)
    return pairs if so_far is None else builder.add(so_far, pairs)


def _emit(builder, rows, stored, operands):
    """All groups for one height of a tile, of weights `stored` as one of `WEIGHTS`; returns its rows' sums."""
    weights, x, told, group_rows, groups, asked, step = operands
    bits, _ = stored
    fma = cgutils.get_or_insert_function(builder.module, ir.FunctionType(_F16, [_F16] * 3), "llvm.fma.v16f32")

    def group(index, sums):
        record = builder.add(weights, builder.mul(index, _number(RECORD[bits])))
        passed = builder.mul(index, group_rows)
        line = builder.add(x, builder.mul(passed, _number(GROUP)))
        scales = builder.add(told, builder.mul(passed, _number(8)))
        wanted = builder.add(asked, builder.mul(index, builder.mul(step, _number(STEPS_OF_A_GROUP))))
        totals = _group(builder, rows, stored, (record, line, scales, wanted, step))
        results = []
        for place, (total, so_far) in enumerate(zip(totals, sums, strict=True)):
            own = spread(builder, _read(builder, scales, place // 2 * 8, ir.FloatType()), _F16)
            both = builder.fmul(own, _read(builder, record, BYTES[bits] + place % 2 * 64, _F16))
            results.append(builder.call(fma, [builder.sitofp(total, _F16), both, so_far]))
        return results

    sums = _repeat(builder, groups, [all_of(_F16, 0.0)] * (2 * rows), group)
    return [sums[2 * row : 2 * row + 2] for row in range(rows)]


def _store_rows(builder, rows, operands, kind):
    """Store each row's two vectors plus bias, or for a panel of gates their one product, as `kind`."""
    target, stride, bias, is_gated = operands
    added = [_read(builder, bias, half * 64, _F16) for half in (0, 1)]

    def put(row, half, value):
        if kind == types.uint16:
            value = round_to_bfloat16(builder, value)
        place = builder.add(target, builder.mul(stride, _number(row)))
        place = builder.add(place, _number(half * kind.bitwidth * 2))
        builder.store(value, builder.inttoptr(place, value.type.as_pointer())).align = 2

    rows = [[builder.fadd(*both) for both in zip(row, added, strict=True)] for row in rows]
    with builder.if_else(builder.icmp_signed("!=", is_gated, _number(0))) as (gated, plain):
        with gated:
            for row, (gate, up) in enumerate(rows):
                put(row, 0, builder.fmul(silu(builder, gate), up))
        with plain:
            for row, halves in enumerate(rows):
                for half, value in enumerate(halves):
                    put(row, half, value)


@intrinsic
def int_gemm(
    typingctx, height, weights, x, told, group_rows, groups, target, stride, bias, is_gated, asked, step, weight_kind,
    kind
):
    """A panel's `weights` times `height` (of `HEIGHTS`) rows from `x` and `told` on, plus `bias`, to rows of `kind`.

    Meanwhile memory from `asked` on is prefetched, `step` bytes (up to ASKED lines) with each two quads of depth.  Rows
    at `target` lie `stride` bytes apart; they have 32 numbers, or 16 where the panel `is_gated`.  A group has
    `group_rows` rows of activations in all.  `weight_kind` is a value whose type names the weights (`WEIGHTS`).
    """

    def codegen(context, builder, signature, args):
        end = builder.append_basic_block("end")
        choice = builder.switch(args[0], end)
        for rows in HEIGHTS:
            block = builder.append_basic_block(f"rows{rows}")
            choice.add_case(_number(rows), block)
            builder.position_at_end(block)
            sums = _emit(builder, rows, WEIGHTS[weight_kind], (*args[1:6], *args[10:12]))
            _store_rows(builder, sums, args[6:10], kind)
            builder.branch(end)
        builder.position_at_end(end)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 12, weight_kind, kind), codegen
