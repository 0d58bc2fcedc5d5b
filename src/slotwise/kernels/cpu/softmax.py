"""The softmax over one strip of scores, in registers.

Loops over a part of a strip would be split into whole vectors and a remainder, twice for every row of every block.
Here a strip is always whole vectors, four of 16 lanes, and a mask selects the columns that count.  Scales of an int8
cache (`cache.py`) are applied here: a key's multiplies its score, a value's the weight it gets.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from llvmlite import ir
from numba import types

from slotwise.kernels.cpu.gemm import STRIP, STRIP_ROW_BYTES
from slotwise.kernels.cpu.jit.compiler import kernel
from slotwise.kernels.cpu.jit.intrinsic import FLOAT, INT, KIND, ElementType, intrinsic
from slotwise.kernels.cpu.llvm import (
    BRAIN,
    LOWEST,
    SHORT,
    SINGLE,
    WORD,
    all_of,
    behind,
    call,
    exp2,
    fast,
    number,
    pointer,
    polynomial,
    prefetch,
    spread,
    write,
)
from slotwise.kernels.cpu.processor import AVX512, LANES
from slotwise.kernels.cpu.simd import FLOAT32, Real, load, store, tanh

UNSEEN = -3e38  # the score of a column that does not count: so far below every maximum that its weight is 0

_VECTOR, _WIDE = ir.VectorType(SINGLE, LANES), ir.VectorType(WORD, LANES)


def _reduced(
    builder: ir.IRBuilder, name: str, vectors: list[ir.Value], pairwise: Callable[[ir.Value, ir.Value], ir.Value]
) -> ir.Value:
    """Reduce a strip's vectors, a power of two of them, to one number."""
    while len(vectors) > 1:
        vectors = [pairwise(*pair) for pair in zip(vectors[::2], vectors[1::2], strict=True)]
    first = [ir.Constant(SINGLE, 0.0)] if name == "fadd" else []
    return fast(builder, f"llvm.vector.reduce.{name}.v{LANES}f32", SINGLE, *first, *vectors)


def _places(builder: ir.IRBuilder, address: ir.Value) -> list[ir.Value]:
    """Pointers to a strip's vectors."""
    return [pointer(builder, behind(builder, address, 4 * LANES * v), _VECTOR) for v in range(STRIP // LANES)]


def _scaled(
    builder: ir.IRBuilder, vectors: list[ir.Value], counted: list[ir.Value], scales: ir.Value
) -> list[ir.Value]:
    """Vectors times the scales of the columns that count; other scales are not read: they may lie outside the cache."""
    results = []
    for vector, counts, place in zip(vectors, counted, _places(builder, scales), strict=True):
        loaded = call(builder, f"llvm.masked.load.v{LANES}f32.p0", _VECTOR, place, ir.Constant(WORD, 4), counts,
                      all_of(_VECTOR, 0.0))
        results.append(builder.fmul(vector, loaded))
    return results


def _of_values(builder: ir.IRBuilder, scales: ir.Value, tokens: ir.Value) -> ir.Value:
    """Address of the scales of a strip's values, `tokens` columns behind those of its keys."""
    return builder.add(scales, builder.shl(tokens, number(2)))


ask_for: Callable[[int], None] = intrinsic(prefetch, INT)
"""Prefetch the cache line at an address."""


def _ask_for_scales(builder: ir.IRBuilder, scales: ir.Value, tokens: ir.Value, kind: ElementType) -> None:
    if kind == types.int8:
        for address in (scales, _of_values(builder, scales, tokens)):
            prefetch(builder, address, STRIP_ROW_BYTES)


ask_for_scales: Callable[[int, int, Real], None] = intrinsic(_ask_for_scales, INT, INT, KIND)
"""`ask_for_scales(scales, tokens, kind)`: prefetch a strip's scales; those of its values lie `tokens` columns behind
those of its keys.  `kind` is a value whose type is that of the cache; only int8 has scales."""


def _counted(builder: ir.IRBuilder, start: ir.Value, end: ir.Value) -> list[ir.Value]:
    """For each vector of a strip, which of its columns lie in `start ... end`."""
    first, last = (spread(builder, builder.trunc(bound, WORD), _WIDE) for bound in (start, end))
    masks = []
    for v in range(STRIP // LANES):
        columns = ir.Constant(_WIDE, list(range(v * LANES, (v + 1) * LANES)))
        masks.append(builder.and_(
            builder.icmp_signed(">=", columns, first), builder.icmp_signed("<", columns, last)))
    return masks


def _weights(builder: ir.IRBuilder, below: ir.Value) -> ir.Value:
    """2**x of a vector of numbers that are at most 0; 0 below `LOWEST`, and never a number too small for exp2."""
    is_seen = builder.fcmp_ordered(">=", below, all_of(_VECTOR, LOWEST))
    if not AVX512:
        weights = exp2(builder, _larger(builder, below, all_of(_VECTOR, LOWEST)))
        return builder.select(is_seen, weights, all_of(_VECTOR, 0.0))
    whole = call(builder, f"llvm.rint.v{LANES}f32", _VECTOR, below)
    value = polynomial(builder, builder.fsub(below, whole))
    return call(  # times 2**whole, rounded to nearest (4)
        builder, "llvm.x86.avx512.mask.scalef.ps.512", _VECTOR, value, whole, all_of(_VECTOR, 0.0),
        builder.bitcast(is_seen, SHORT), ir.Constant(WORD, 4))


def _larger(builder: ir.IRBuilder, left: ir.Value, right: ir.Value) -> ir.Value:
    return fast(builder, f"llvm.maxnum.v{LANES}f32", _VECTOR, left, right)


def _softmax_strip(
    builder: ir.IRBuilder, scores: ir.Value, start: ir.Value, end: ir.Value, top: ir.Value, factor: ir.Value,
    scales: ir.Value, tokens: ir.Value, kind: ElementType,
) -> list[ir.Value]:
    places, counted = _places(builder, scores), _counted(builder, start, end)
    values = [builder.load(place) for place in places]
    for value in values:
        value.align = 4
    values = [builder.fmul(value, spread(builder, factor, _VECTOR)) for value in values]
    if kind == types.int8:
        values = _scaled(builder, values, counted, scales)
    values = [builder.select(*pair, all_of(_VECTOR, UNSEEN)) for pair in zip(counted, values, strict=True)]
    highest = _reduced(builder, "fmax", values, lambda *pair: _larger(builder, *pair))
    top = fast(builder, "llvm.maxnum.f32", SINGLE, highest, top)
    highest = spread(builder, top, _VECTOR)
    weights = [_weights(builder, builder.fsub(value, highest)) for value in values]
    total = _reduced(builder, "fadd", weights, builder.fadd)
    if kind == types.int8:
        weights = _scaled(builder, weights, counted, _of_values(builder, scales, tokens))
    _store_weights(builder, scores, weights, kind)
    return [top, total]


def _store_weights(builder: ir.IRBuilder, address: ir.Value, weights: list[ir.Value], kind: ElementType) -> None:
    for v, weight in enumerate(weights):
        if kind == types.int16:
            name = f"llvm.x86.avx512bf16.cvtneps2bf16.{32 * LANES}"
            rounded = call(builder, name, ir.VectorType(BRAIN, LANES), weight)
            bits = builder.bitcast(rounded, ir.VectorType(SHORT, LANES))
            write(builder, bits, behind(builder, address, 2 * LANES * v), align=2)
        else:
            write(builder, weight, behind(builder, address, 4 * LANES * v))


class _SoftmaxStrip(Protocol):
    def __call__(
        self, scores: int, start: int, end: int, top: float, factor: float, scales: int, tokens: int, kind: Real, /
    ) -> tuple[float, float]: ...


softmax_strip: _SoftmaxStrip = intrinsic(
    _softmax_strip, INT, INT, INT, FLOAT, FLOAT, INT, INT, KIND, returns=types.UniTuple(FLOAT, 2))
"""Scores of a strip's columns `start ... end` to weights `2**(factor * score - new top)`, those of all others to 0.

The weights are stored in place of the scores, those of `PAIRS` as bfloat16 in the first half of their bytes.  `top` is
the largest score so far; returns the new one and the sum of the weights.  The other arguments are those of
`ask_for_scales`.
"""


@kernel
def soft_cap(scores: int, factor: float, cap: float) -> None:
    """Cap `factor` times a whole strip of scores, those that count and others; `cap` is in units of log 2."""
    factor = factor / cap
    for i in range(STRIP):
        store(scores, i, cap * tanh(load(scores, i, FLOAT32) * factor), FLOAT32)
