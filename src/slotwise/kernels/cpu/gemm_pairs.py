"""The loop of a product over depth where bfloat16 is multiplied in pairs, with sums in float32 (AVX-512 BF16).

    sums[rows, columns]  +=  A[rows, 2i + 1] * B[2i + 1, columns], then  A[rows, 2i] * B[2i, columns], for each i

One instruction (`vdpbf16ps`) adds the products of a pair to 16 sums: half of the instructions that float32 takes.  It
wants both rows of B in one vector.  The cache stores two vectors of a row element beside element (`cache.py`), so two
rows exchange halves, and no element changes its place within 32 bits:

    row 2i      0 16  1 17 ...        columns 0 ... 15     0 of row 2i  0 of row 2i + 1  1 of row 2i ...
    row 2i + 1  0 16  1 17 ...   ->   columns 16 ... 31   16 of row 2i 16 of row 2i + 1 17 of row 2i ...

Where depth is odd, the last row of B stands for the one behind it, which may hold anything, and A has a zero there.
"""

from __future__ import annotations

from typing import NamedTuple

from llvmlite import ir

from slotwise.kernels.cpu.llvm import (
    BRAIN,
    SHORT,
    SINGLE,
    WORD,
    Loop,
    all_of,
    behind,
    call,
    number,
    prefetch,
    read,
    spread,
)
from slotwise.kernels.cpu.processor import LANES, has

LINE = 4 * LANES  # bytes of two vectors of bfloat16

_FLOATS, _WORDS = ir.VectorType(SINGLE, LANES), ir.VectorType(WORD, LANES)
_BRAINS, _SHORTS = ir.VectorType(BRAIN, 2 * LANES), ir.VectorType(SHORT, LANES)

_MULTIPLY_ADD = f"llvm.x86.avx512bf16.dpbf16ps.{32 * LANES}"


class Operands(NamedTuple):
    """A and B: their addresses, and strides in bytes."""

    a: ir.Value
    strip_bytes: ir.Value
    b: ir.Value
    row_bytes: ir.Value
    pair_bytes: ir.Value
    depth: ir.Value
    ahead: ir.Value


def pays() -> bool:
    """Whether pairs are faster than float32 here: where there is FP16, too, they take four times as long."""
    return has("avx512bf16") and not has("avx512fp16")


def _two_vectors(builder: ir.IRBuilder, line: ir.Value, below: ir.Value) -> list[ir.Value]:
    """32 columns of the rows at `line` and `below`, in pairs."""
    upper, lower = (read(builder, row, _WORDS, align=2) for row in (line, below))
    half, high = all_of(_WORDS, 16), all_of(_WORDS, 0xFFFF0000)
    return [builder.or_(builder.and_(upper, all_of(_WORDS, 0xFFFF)), builder.shl(lower, half)),
            builder.or_(builder.lshr(upper, half), builder.and_(lower, high))]


def _one_vector(builder: ir.IRBuilder, line: ir.Value, below: ir.Value) -> list[ir.Value]:
    """16 columns, of an odd last vector."""
    upper, lower = (builder.zext(read(builder, row, _SHORTS, align=2), _WORDS) for row in (line, below))
    return [builder.or_(upper, builder.shl(lower, all_of(_WORDS, 16)))]


def accumulate_pairs(
    builder: ir.IRBuilder, rows: int, vectors: int, operands: Operands, start: list[ir.Value], strip: int,
) -> list[ir.Value]:
    """The loop over depth, strip by strip, from the vectors in `start`; returns the accumulators at its end.

    A holds bfloat16, `strip` columns of a row in the first half of the bytes that they have in float32, and a zero
    behind an odd number of them.
    """
    together = min(vectors, 2)
    offsets = [builder.mul(operands.pair_bytes, number(pair)) for pair in range(vectors // together)]
    strips = Loop(builder, operands.depth, strip, [operands.a, operands.b, *start])
    column, line, *sums = strips.values
    left = builder.sub(operands.depth, strips.index)
    length = builder.select(builder.icmp_signed("<", left, number(strip)), left, number(strip))
    turns = Loop(builder, length, 2, [column, line, *sums])
    pair, line, *sums = turns.values
    is_last = builder.icmp_signed(">=", behind(builder, turns.index, 1), length)
    step = builder.select(is_last, number(0), operands.row_bytes)
    panel: list[ir.Value] = []
    for offset in offsets:
        place = builder.add(line, offset)
        below = builder.add(place, step)
        for each in (place, below):
            prefetch(builder, builder.add(each, operands.ahead), together * LINE // 2)
        panel += (_one_vector if together == 1 else _two_vectors)(builder, place, below)
    panel = [builder.bitcast(vector, _BRAINS) for vector in panel]
    results = []
    for row in range(rows):
        both = read(builder, behind(builder, pair, row * 4 * strip), WORD, align=2)
        factor = builder.bitcast(spread(builder, both, _WORDS), _BRAINS)
        for v in range(vectors):
            added = sums[row * vectors + v]
            results.append(call(builder, _MULTIPLY_ADD, _FLOATS, added, panel[v], factor))
    further = builder.add(builder.add(line, operands.row_bytes), operands.row_bytes)
    _, line, *sums = turns.close([behind(builder, pair, 4), further, *results])
    return strips.close([builder.add(column, operands.strip_bytes), line, *sums])[2:]
