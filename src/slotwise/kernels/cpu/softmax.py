"""The softmax over one strip of scores, in registers.

Loops over a part of a strip would be split into whole vectors and a remainder, twice for every row of every block.
Here a strip is always whole vectors, four of 16 lanes, and a mask selects the columns that count.  Scales of an int8
cache (`cache.py`) are applied here: a key's multiplies its score, a value's the weight it gets.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from slotwise.kernels.cpu.gemm import STRIP, STRIP_ROW_BYTES, prefetch
from slotwise.kernels.cpu.processor import LANES
from slotwise.kernels.cpu.vectors import LOWEST, ask, call, exp2

_FLOAT, _INT32 = ir.FloatType(), ir.IntType(32)
_VECTOR, _WIDE = ir.VectorType(_FLOAT, LANES), ir.VectorType(_INT32, LANES)


def _floats(value):
    return ir.Constant(_VECTOR, [value] * LANES)


def _splat(builder, scalar, vector):
    lone = builder.insert_element(ir.Constant(vector, ir.Undefined), scalar, ir.Constant(_INT32, 0))
    return builder.shuffle_vector(lone, ir.Constant(vector, ir.Undefined), ir.Constant(_WIDE, [0] * LANES))


def _reduced(builder, name, vectors, pairwise):
    """Reduce a strip's vectors, a power of two of them, to one number."""
    while len(vectors) > 1:
        vectors = [pairwise(*pair) for pair in zip(vectors[::2], vectors[1::2], strict=True)]
    arguments = tuple(vectors)
    if name == "fadd":
        arguments = (ir.Constant(_FLOAT, 0.0), *arguments)
    return call(builder, f"llvm.vector.reduce.{name}.v{LANES}f32", _FLOAT, *arguments)


def _places(builder, address):
    """Pointers to a strip's vectors."""
    offsets = [ir.Constant(ir.IntType(64), 4 * LANES * v) for v in range(STRIP // LANES)]
    return [builder.inttoptr(builder.add(address, offset), _VECTOR.as_pointer()) for offset in offsets]


def _scaled(builder, vectors, counted, scales):
    """Vectors times the scales of the columns that count; other scales are not read: they may lie outside the cache."""
    mask = ir.VectorType(ir.IntType(1), LANES)
    kind = ir.FunctionType(_VECTOR, [_VECTOR.as_pointer(), _INT32, mask, _VECTOR])
    read = cgutils.get_or_insert_function(builder.module, kind, f"llvm.masked.load.v{LANES}f32.p0")
    return [
        builder.fmul(vector, builder.call(read, [place, ir.Constant(_INT32, 4), counts, _floats(0.0)]))
        for vector, counts, place in zip(vectors, counted, _places(builder, scales), strict=True)]


@intrinsic
def ask_for(typingctx, address):
    """Prefetch a cache line."""

    def codegen(context, builder, signature, args):
        ask(builder, args[0])
        return context.get_dummy_value()

    return types.void(types.int64), codegen


@intrinsic
def ask_for_scales(typingctx, scales, tokens, kind):
    """Prefetch a strip's scales; those of its values lie `tokens` columns behind those of its keys.

    `kind` is a value whose type is that of the cache; only int8 has scales.
    """

    def codegen(context, builder, signature, args):
        scales, tokens, _ = args
        if kind == types.int8:
            of_values = builder.add(scales, builder.shl(tokens, ir.Constant(ir.IntType(64), 2)))
            for address in (scales, of_values):
                prefetch(builder, address, STRIP_ROW_BYTES)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, kind), codegen


@intrinsic
def softmax_strip(typingctx, scores, start, end, top, scales, tokens, kind):
    """Scores of a strip's columns `start ... end` to weights `2**(score - new top)`, those of all others to 0.

    `top` is the largest score so far; returns the new one and the sum of the weights.  The other arguments are those of
    `ask_for_scales`.
    """

    def codegen(context, builder, signature, args):
        scores, start, end, top, scales, tokens, _ = args
        places = _places(builder, scores)
        first, last = (_splat(builder, builder.trunc(bound, _INT32), _WIDE) for bound in (start, end))
        top_vector = _splat(builder, top, _VECTOR)
        larger = lambda left, right: call(builder, f"llvm.maxnum.v{LANES}f32", _VECTOR, left, right)
        counted, values = [], []
        for v, place in enumerate(places):
            columns = ir.Constant(_WIDE, list(range(v * LANES, (v + 1) * LANES)))
            counts = builder.and_(
                builder.icmp_signed(">=", columns, first), builder.icmp_signed("<", columns, last))
            value = builder.load(place)
            value.align = 4
            counted.append(counts)
            values.append(value)
        if kind == types.int8:
            values = _scaled(builder, values, counted, scales)
        values = [builder.select(*pair, top_vector) for pair in zip(counted, values, strict=True)]
        top = _reduced(builder, "fmax", values, larger)
        top = call(builder, "llvm.maxnum.f32", _FLOAT, top, args[3])
        top_vector, weights = _splat(builder, top, _VECTOR), []
        for counts, value in zip(counted, values, strict=True):
            below = builder.fsub(value, top_vector)
            weight = exp2(builder, larger(below, _floats(LOWEST)))
            counts = builder.and_(counts, builder.fcmp_ordered(">=", below, _floats(LOWEST)))
            weights.append(builder.select(counts, weight, _floats(0.0)))
        total = _reduced(builder, "fadd", weights, builder.fadd)
        if kind == types.int8:
            of_values = builder.add(scales, builder.shl(tokens, ir.Constant(ir.IntType(64), 2)))
            weights = _scaled(builder, weights, counted, of_values)
        for place, weight in zip(places, weights, strict=True):
            builder.store(weight, place).align = 4
        return context.make_tuple(builder, signature.return_type, [top, total])

    pair = types.UniTuple(types.float32, 2)
    return pair(types.int64, types.int64, types.int64, types.float32, types.int64, types.int64, kind), codegen
