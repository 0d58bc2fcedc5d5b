"""Half-precision vector code of `linear_fp16.py`.

The products of a chain are added in registers, in fp16; the chains of a group are added in memory, in fp16 too; and
groups in float32.  So the rounding error grows with the root of a chain's length, and little is widened.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from slotwise.kernels.cpu.gemm import Loop
from slotwise.kernels.cpu.gemm_int import spread
from slotwise.kernels.cpu.simd import round_to_bfloat16
from slotwise.kernels.cpu.vectors import ask, silu

CHAIN = 32  # products added in registers
GROUP = 4  # chains whose sums are added in fp16
LANES = 32  # halves of a vector
PANEL = 2 * LANES  # outputs computed together
GATES = PANEL // 2  # of a panel that is half gates, half what they gate
TALLEST = 13  # rows of a tile: its accumulators, two vectors of weights and the broadcast pair fit into 32 registers
PAIR_BYTES = 4
STRIP_ROW_BYTES = CHAIN * PAIR_BYTES
SUMS_BYTES = TALLEST * PANEL * 4  # of a tile's sums in float32; a group's in fp16 come behind them
TILE_BYTES = TALLEST * PANEL * (4 + 2)
ROOM_BYTES = PANEL * 4  # of one float32 per output: its scale, its bias

_FLOAT, _INT32, _INT64 = ir.FloatType(), ir.IntType(32), ir.IntType(64)
_HALVES, _FLOATS = ir.VectorType(ir.HalfType(), LANES), ir.VectorType(_FLOAT, LANES // 2)
_WORDS, _SHORTS = (ir.VectorType(ir.IntType(bits), LANES // 2) for bits in (32, 16))


def _number(value):
    return ir.Constant(_INT64, value)


def _place(builder, address, offset, kind):
    return builder.inttoptr(builder.add(address, _number(offset)), kind.as_pointer())


def _read(builder, address, offset, kind):
    value = builder.load(_place(builder, address, offset, kind))
    value.align = 2
    return value


@intrinsic
def to_fp16(typingctx, source, target, factor):
    """16 bfloat16 from `source`, times `factor`, to `target` as 16 pairs of one half twice."""

    def codegen(context, builder, signature, args):
        source, target, factor = args
        sixteen = ir.Constant(_WORDS, [16] * 16)
        wide = builder.shl(builder.zext(_read(builder, source, 0, _SHORTS), _WORDS), sixteen)
        scaled = builder.fmul(builder.bitcast(wide, _FLOATS), spread(builder, factor, _FLOATS))
        halves = builder.fptrunc(scaled, ir.VectorType(ir.HalfType(), 16))
        once = builder.zext(builder.bitcast(halves, _SHORTS), _WORDS)
        pairs = builder.or_(once, builder.shl(once, sixteen))
        builder.store(pairs, _place(builder, target, 0, _WORDS)).align = 4
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.float32), codegen


@intrinsic
def largest_size(typingctx, address, count):
    """The largest of `count` bfloat16 by magnitude, as bits without the sign; `count` is a multiple of CHAIN."""

    def codegen(context, builder, signature, args):
        address, count = args
        lanes = ir.VectorType(ir.IntType(16), CHAIN)
        constant = lambda number: ir.Constant(lanes, [number] * CHAIN)
        function = lambda name, result, *kinds: cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(result, kinds), f"llvm.{name}.v{CHAIN}i16")
        turns = Loop(builder, count, CHAIN, [constant(0)])
        place = builder.add(address, builder.shl(turns.index, _number(1)))
        sizes = builder.and_(_read(builder, place, 0, lanes), constant(0x7FFF))
        (largest,) = turns.close([builder.call(function("umax", lanes, lanes, lanes), [*turns.values, sizes])])
        return builder.zext(builder.call(function("vector.reduce.umax", ir.IntType(16), lanes), [largest]), _INT64)

    return types.int64(types.int64, types.int64), codegen


def _add_chain(builder, rows, a, b, asked, step):
    """The products of one chain: two vectors of halves per row."""
    fma = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(_HALVES, [_HALVES] * 3), f"llvm.fma.v{LANES}f16")
    turns = Loop(builder, _number(CHAIN), 1, [a, b, asked, *[ir.Constant(_HALVES, [0.0] * LANES)] * (2 * rows)])
    column, line, asked, *sums = turns.values
    ask(builder, asked)
    ask(builder, builder.add(asked, builder.lshr(step, _number(1))))
    weights = [_read(builder, line, v * 2 * LANES, _HALVES) for v in (0, 1)]
    results = []
    for row in range(rows):
        pair = _read(builder, column, row * STRIP_ROW_BYTES, _INT32)
        factor = builder.bitcast(spread(builder, pair, _WORDS), _HALVES)
        results += [builder.call(fma, [factor, weights[v], sums[2 * row + v]]) for v in (0, 1)]
    return turns.close([builder.add(column, _number(PAIR_BYTES)), builder.add(line, _number(2 * PANEL)),
                        builder.add(asked, step), *results])


def _add_to(builder, address, number, kind, vector):
    """Add `vector` to vector `number` at `address`."""
    place = _place(builder, address, number * 64, kind)
    so_far = builder.load(place)
    so_far.align = 4
    builder.store(builder.fadd(so_far, vector), place).align = 4


def _widen(builder, rows, chains, sums):
    """Add the halves at `chains` to the float32 in `sums`, and set them to zero."""
    for number in range(2 * rows):
        place = _place(builder, chains, number * 64, _HALVES)
        vector = builder.load(place)
        vector.align = 4
        builder.store(ir.Constant(_HALVES, [0.0] * LANES), place).align = 4
        for part in (0, 1):
            lanes = ir.Constant(ir.VectorType(_INT32, 16), list(range(16 * part, 16 * part + 16)))
            wide = builder.fpext(builder.shuffle_vector(vector, vector, lanes), _FLOATS)
            _add_to(builder, sums, 2 * number + part, _FLOATS, wide)


def _emit(builder, rows, operands):
    """All chains for one height of a tile.  Those of a group are added in memory, behind the sums."""
    a, strip_bytes, b, chains, sums, asked, step = operands
    met = builder.add(sums, _number(SUMS_BYTES))
    strips = Loop(builder, chains, 1, [a, b, asked])
    strip, line, asked = strips.values
    _, after, asked, *halves = _add_chain(builder, rows, strip, line, asked, step)
    for number, vector in enumerate(halves):
        _add_to(builder, met, number, _HALVES, vector)
    is_last = builder.icmp_unsigned("==", builder.urem(strips.index, _number(GROUP)), _number(GROUP - 1))
    with builder.if_then(is_last, likely=False):
        _widen(builder, rows, met, sums)
    strips.close([builder.add(strip, strip_bytes), after, asked])
    _widen(builder, rows, met, sums)


@intrinsic
def fp16_gemm(typingctx, height, a, strip_bytes, b, chains, sums, asked, step):
    """`sums[height, 64] +=` the product of pairs from `a` on, `strip_bytes` from chain to chain, and a panel at `b`.

    Meanwhile memory from `asked` on is prefetched, `step` bytes (up to two lines) per step of depth.
    """

    def codegen(context, builder, signature, args):
        end = builder.append_basic_block("end")
        choice = builder.switch(args[0], end)
        for rows in range(1, TALLEST + 1):
            block = builder.append_basic_block(f"rows{rows}")
            choice.add_case(_number(rows), block)
            builder.position_at_end(block)
            _emit(builder, rows, args[1:])
            builder.branch(end)
        builder.position_at_end(end)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 8), codegen


def _finish(made):
    """A function that stores rows of scaled sums plus bias, after `made` on each row's vectors, as bfloat16.

    `scales` has a float32 per row.  Behind `of_outputs` come the panel's scales, then its bias.  `stride` is in bytes.
    """

    @intrinsic
    def finish(typingctx, sums, rows, scales, of_outputs, target, stride):
        def codegen(context, builder, signature, args):
            sums, rows, scales, of_outputs, target, stride = args
            vectors = PANEL * 4 // 64
            of_outputs, bias = (
                [_read(builder, of_outputs, start + v * 64, _FLOATS) for v in range(vectors)]
                for start in (0, ROOM_BYTES))
            fma = cgutils.get_or_insert_function(
                builder.module, ir.FunctionType(_FLOATS, [_FLOATS] * 3), f"llvm.fma.v{LANES // 2}f32")
            turns = Loop(builder, rows, 1, [sums, scales, target])
            row, scale, place = turns.values
            factor = spread(builder, _read(builder, scale, 0, _FLOAT), _FLOATS)
            own = [builder.fmul(_read(builder, row, v * 64, _FLOATS), factor) for v in range(vectors)]
            results = [builder.call(fma, list(one)) for one in zip(own, of_outputs, bias, strict=True)]
            for v, result in enumerate(made(builder, results)):
                builder.store(round_to_bfloat16(builder, result), _place(builder, place, v * 32, _SHORTS)).align = 2
            turns.close([builder.add(row, _number(PANEL * 4)), builder.add(scale, _number(4)),
                         builder.add(place, stride)])
            return context.get_dummy_value()

        return types.void(*[types.int64] * 6), codegen

    return finish


finish_rows = _finish(lambda builder, results: results)
finish_gated_rows = _finish(lambda builder, results: [
    builder.fmul(silu(builder, gate), up) for gate, up in zip(results[:2], results[2:], strict=True)])
