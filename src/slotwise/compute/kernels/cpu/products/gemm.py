"""The matrix product that all kernels call, a few rows times a panel of stored columns, and how products finish rows.

    C[rows, LANES * vectors]  (+)=  A[rows, depth] @ B[depth, LANES * vectors]

Every accumulator lives in a register while `depth` runs (Goto and van de Geijn, "Anatomy of high-performance matrix
multiplication", 2008).  Linear layers call it with packed weights as B; attention with keys (tokens are columns) and
with values (dimensions are columns), so a block of the cache is read once for all query heads that share it.

A is laid out in *strips*: 64 columns of all rows, then the next 64, so that the step from row to row is a constant that
the address mode can hold.  A is float32, or bfloat16 where B is multiplied in pairs.  A row's result does not depend on
the other rows, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from llvmlite import ir
from numba import types

from slotwise.compute.kernels.cpu.jit.compiler import INT, KIND, CompiledKernel, ElementType, intrinsic, kernel
from slotwise.compute.kernels.cpu.jit.llvm import (
    BRAIN,
    BYTE,
    FIRST_LEVEL,
    LONG,
    SHORT,
    SINGLE,
    WORD,
    Loop,
    all_of,
    behind,
    call,
    fma,
    number,
    pointer,
    prefetch,
    read,
    round_to_bfloat16,
    silu,
    spread,
    switch,
    widened,
    write,
)
from slotwise.compute.kernels.cpu.processor import AVX512, LANES, PAIR, has
from slotwise.compute.kernels.cpu.simd import BFLOAT16, FLOAT32, INT8, PAIRS, Real

# The loop of a product over depth where bfloat16 is multiplied in pairs, with sums in float32 (AVX-512 BF16).
#
#     sums[rows, columns]  +=  A[rows, 2i + 1] * B[2i + 1, columns], then  A[rows, 2i] * B[2i, columns], for each i
#
# One instruction (`vdpbf16ps`) adds the products of a pair to 16 sums: half of the instructions that float32 takes.  It
# needs both rows of B in one vector.  In the cache the elements of two vectors of a row alternate (`cache.py`), so two
# rows exchange halves, and no element changes its place within 32 bits:
#
#     row 2i      0 16  1 17 ...        columns 0 ... 15     0 of row 2i  0 of row 2i + 1  1 of row 2i ...
#     row 2i + 1  0 16  1 17 ...   ->   columns 16 ... 31   16 of row 2i 16 of row 2i + 1 17 of row 2i ...
#
# Where depth is odd, the last row of B takes the place of the row after it, which may hold anything, and A has a zero
# there.

# Bytes of two vectors of bfloat16.
LINE = 4 * LANES

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


def pairs_pay() -> bool:
    """Whether pairs are faster than float32 here: on processors with FP16 they take four times as long."""
    return has("avx512bf16") and not has("avx512fp16")


def _two_vectors(builder: ir.IRBuilder, line: ir.Value, below: ir.Value) -> list[ir.Value]:
    """32 columns of the rows at `line` and `below`, in pairs."""
    upper, lower = (read(builder, row, _WORDS, align=2) for row in (line, below))
    half, high = all_of(_WORDS, 16), all_of(_WORDS, 0xFFFF0000)
    return [builder.or_(builder.and_(upper, all_of(_WORDS, 0xFFFF)), builder.shl(lower, half)),
            builder.or_(builder.lshr(upper, half), builder.and_(lower, high))]


def _one_vector(builder: ir.IRBuilder, line: ir.Value, below: ir.Value) -> list[ir.Value]:
    """The 16 columns of an odd last vector."""
    upper, lower = (builder.zext(read(builder, row, _SHORTS, align=2), _WORDS) for row in (line, below))
    return [builder.or_(upper, builder.shl(lower, all_of(_WORDS, 16)))]


def accumulate_pairs(
    builder: ir.IRBuilder, rows: int, vectors: int, operands: Operands, start: list[ir.Value], strip: int,
) -> list[ir.Value]:
    """The loop over depth, strip by strip, from the vectors in `start`; returns the accumulators at its end.

    A holds bfloat16: `strip` columns of a row in the first half of the bytes that they take in float32, and a zero
    after an odd number of columns.
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
            prefetch(builder, builder.add(each, operands.ahead), together * LINE // 2, FIRST_LEVEL)
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


# How a product finishes its sums while they are in registers: bias, the gate, rounding.

FLOATS = ir.VectorType(SINGLE, 16)


def read_floats(builder: ir.IRBuilder, address: ir.Value, vectors: int) -> list[ir.Value]:
    """Vectors of float32 that lie together."""
    return [read(builder, behind(builder, address, v * 64), FLOATS, 4) for v in range(vectors)]


def no_sums(vectors: int) -> list[ir.Value]:
    """Vectors of zeros."""
    return [all_of(FLOATS, 0.0)] * vectors


def added(builder: ir.IRBuilder, sums: Sequence[ir.Value], bias: Sequence[ir.Value]) -> list[ir.Value]:
    """Sums plus bias."""
    return [builder.fadd(*pair) for pair in zip(sums, bias, strict=True)]


def finish_row(
    builder: ir.IRBuilder, results: Sequence[ir.Value], target: ir.Value, kind: ElementType, *, is_gated: bool
) -> None:
    """Store a row's vectors of float32 as `kind`, or of a panel of gates their products with the other half."""
    if is_gated:
        half = len(results) // 2
        results = [builder.fmul(silu(builder, gate), up)
                   for gate, up in zip(results[:half], results[half:], strict=True)]
    for v, result in enumerate(results):
        if kind == types.uint16:
            result = round_to_bfloat16(builder, result)
        write(builder, result, behind(builder, target, v * result.type.count * kind.bitwidth // 8), align=2)


PLAIN, GATED, WIDE = range(3)
"""Forms of results: sums in the activations' type, SiLU of gates times up projection, and sums in float32 (logits)."""


class OfForm(Protocol):
    def __call__(self, kind: ElementType, *, is_gated: bool) -> None: ...


def for_each_form(builder: ir.IRBuilder, form: ir.Value, kind: ElementType, emit: OfForm) -> None:
    """`emit` for each form of results, of which one is executed; `kind` is the type of the activations."""
    forms = [PLAIN, GATED] if kind == types.float32 else [PLAIN, GATED, WIDE]
    switch(builder, form, forms, lambda each: emit(
        types.float32 if each == WIDE else kind, is_gated=each == GATED))


# Columns of A that lie side by side.
STRIP = 64
STRIP_ROW_BYTES = 4 * STRIP
# The tallest tile of each width in vectors: the accumulators, and the columns they are made of, must fit into the
# processor's 32 or 16 registers.
TALLEST = {1: 8, 2: 14, 4: 6} if AVX512 else {1: 8, 2: 6, 4: 2}
TALLEST_1, TALLEST_2, TALLEST_4 = TALLEST.values()


_VECTOR = ir.VectorType(SINGLE, LANES)
_WIDE, _NARROW, _BYTES = (ir.VectorType(kind, LANES) for kind in (WORD, SHORT, BYTE))


def _load(builder: ir.IRBuilder, address: ir.Value, kind: ElementType) -> ir.Value:
    """A vector of floats as they are, or of bfloat16 or int8 widened by two instructions."""
    stored = {types.int8: _BYTES, types.uint16: _NARROW, types.float32: _VECTOR}[kind]
    value = read(builder, address, stored, align=kind.bitwidth // 8)
    if kind == types.int8:
        return builder.sitofp(builder.sext(value, _WIDE), _VECTOR)
    return widened(builder, value) if kind == types.uint16 else value


def broadcast(builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
    """The float32 at `address` in every lane."""
    return spread(builder, builder.load(pointer(builder, address, SINGLE)), _VECTOR)


def _upper_halves(builder: ir.IRBuilder) -> ir.Value | None:
    """A mask of every second element of a pair of vectors, for `_load_pair`; None where loads cannot be masked.

    It passes through an empty inline assembly, or LLVM would rebuild the constant in every iteration of a loop.
    """
    if not AVX512:
        return None
    bits = builder.asm(ir.FunctionType(WORD, [WORD]), "", "=r,0", [ir.Constant(WORD, 0xAAAAAAAA)], False)
    return builder.bitcast(bits, ir.VectorType(ir.IntType(1), 2 * LANES))


def _load_pair(builder: ir.IRBuilder, address: ir.Value, upper: ir.Value | None) -> list[ir.Value]:
    """Two vectors of floats from the pairs of bfloat16 at `address` (see `cache.py`).

    A bfloat16 is the upper half of its float.  So the second of each pair is in place once the first is masked out,
    which the processor may do while it loads, and the first is one shift away.
    """
    pairs = read(builder, address, _WIDE, align=2)
    low = builder.shl(pairs, all_of(_WIDE, 16))
    if upper is None:
        high = builder.and_(pairs, all_of(_WIDE, 0xFFFF0000))
    else:
        halves = ir.VectorType(SHORT, 2 * LANES)
        high = call(builder, "llvm.masked.load.v32i16.p0", halves, pointer(builder, address, SHORT),
                    ir.Constant(WORD, 2), upper, all_of(halves, 0))
    return [builder.bitcast(half, _VECTOR) for half in (low, high)]


def load_columns(
    builder: ir.IRBuilder, address: ir.Value, vectors: int, kind: ElementType, upper: ir.Value | None = None
) -> list[ir.Value]:
    """One or two `vectors` that lie together in a row of B.

    Args:
        upper: of `_upper_halves`.
    """
    if kind != types.uint16 or vectors == 1:
        size = LANES * kind.bitwidth // 8
        return [_load(builder, behind(builder, address, v * size), kind) for v in range(vectors)]
    return _load_pair(builder, address, upper)


def _accumulate(
    builder: ir.IRBuilder, rows: int, vectors: int, operands: Operands, kind: ElementType, start: list[ir.Value]
) -> list[ir.Value]:
    """The loop over depth, strip by strip, from the vectors in `start`; returns the accumulators at its end."""
    if kind == types.int16:
        return accumulate_pairs(builder, rows, vectors, operands, start, STRIP)
    together = min(vectors, 2)
    pairs = [builder.mul(operands.pair_bytes, number(pair)) for pair in range(vectors // together)]
    upper = _upper_halves(builder) if kind == types.uint16 else None
    strips = Loop(builder, operands.depth, STRIP, [operands.a, operands.b, *start])
    strip, line, *sums = strips.values
    left = builder.sub(operands.depth, strips.index)
    length = builder.select(builder.icmp_signed("<", left, number(STRIP)), left, number(STRIP))
    turns = Loop(builder, length, 1, [strip, line, *sums])
    column, line, *sums = turns.values
    panel, results = [], []
    for offset in pairs:
        place = builder.add(line, offset)
        prefetch(builder, builder.add(place, operands.ahead), together * LANES * kind.bitwidth // 8)
        panel += load_columns(builder, place, together, kind, upper)
    for row in range(rows):
        factor = broadcast(builder, behind(builder, column, row * STRIP_ROW_BYTES))
        results += [fma(builder, factor, panel[v], sums[row * vectors + v]) for v in range(vectors)]
    _, line, *sums = turns.close([behind(builder, column, 4), builder.add(line, operands.row_bytes), *results])
    return strips.close([builder.add(strip, operands.strip_bytes), line, *sums])[2:]


def _emit(builder: ir.IRBuilder, rows: ir.Value, vectors: ir.Value, *arguments: ir.Value) -> None:
    """The tile's C += A @ B, for each size that a tile may have."""
    *addresses, depth, c, c_row_bytes, ahead, kind = arguments
    operands = Operands._make((*addresses, depth, ahead))

    def of_size(size: int) -> None:
        count, width = divmod(size, 8)
        places = [
            builder.add(c, builder.add(builder.mul(c_row_bytes, number(row)), number(v * LANES * 4)))
            for row in range(count) for v in range(width)]
        start = [_load(builder, place, types.float32) for place in places]
        for place, result in zip(places, _accumulate(builder, count, width, operands, kind, start), strict=True):
            write(builder, result, place)

    sizes = [8 * count + width for width, most in TALLEST.items() for count in range(1, most + 1)]
    switch(builder, builder.add(builder.shl(rows, number(3)), vectors), sizes, of_size)


_tile: Callable[..., None] = intrinsic(_emit, *[INT] * 11, KIND)
"""`_tile(rows, vectors, a, strip_bytes, b, row_bytes, pair_bytes, depth, c, c_row_bytes, ahead, kind)`: C += A @ B for
`rows` and `vectors` as in `TALLEST`; all strides in bytes, `depth` at least 1."""


@kernel
def _multiply(
    rows: int, columns: int, a: int, strip_bytes: int, b: int, row_bytes: int, pair_bytes: int, depth: int, c: int,
    c_row_bytes: int, ahead: int, kind: Real,
) -> None:
    column = 0
    while column < columns:
        vectors, most = 1, TALLEST_1
        if rows <= TALLEST_4 and columns - column >= 4 * LANES:
            vectors, most = 4, TALLEST_4
        elif columns - column >= PAIR:
            vectors, most = 2, TALLEST_2
        row = 0
        while row < rows:
            count = rows - row
            if count > most:  # tiles of nearly equal heights: a low tile costs nearly as much as a tall one
                tiles = (count + most - 1) // most
                count = (count + tiles - 1) // tiles
            _tile(count, vectors, a + row * STRIP_ROW_BYTES, strip_bytes, b + column // PAIR * pair_bytes, row_bytes,
                  pair_bytes, depth, c + row * c_row_bytes + column * 4, c_row_bytes, ahead, kind)
            row += count
        column += vectors * LANES


def _compiled(kind: Real) -> CompiledKernel:
    """`_multiply` for one kind of elements of B."""
    def multiply(
        rows: int, columns: int, a: int, strip_bytes: int, b: int, row_bytes: int, pair_bytes: int, depth: int, c: int,
        c_row_bytes: int, ahead: int,
    ) -> None:
        _multiply(rows, columns, a, strip_bytes, b, row_bytes, pair_bytes, depth, c, c_row_bytes, ahead, kind)

    multiply.__name__ = multiply.__qualname__ = f"multiply_{type(kind).__name__}"
    return CompiledKernel(multiply)


MULTIPLY = {torch.int8: _compiled(INT8), torch.bfloat16: _compiled(BFLOAT16), torch.float32: _compiled(FLOAT32)}
"""`multiply(rows, columns, a, strip_bytes, b, row_bytes, pair_bytes, depth, c, c_row_bytes, ahead)`: C += A @ B for any
number of rows and any multiple of `LANES` columns.  In B it is `row_bytes` from a row to the next, `pair_bytes` from
`PAIR` columns to the next; it is prefetched `ahead` bytes before it is read.  Kernels get the address and use
`call_multiply`, so that it is compiled once."""

MULTIPLY_PAIRS = _compiled(PAIRS)
"""The product for rows of bfloat16 and a B of bfloat16."""


def _call(builder: ir.IRBuilder, address: ir.Value, *arguments: ir.Value) -> None:
    builder.call(pointer(builder, address, ir.FunctionType(ir.VoidType(), [LONG] * len(arguments))), arguments)


call_multiply: Callable[..., None] = intrinsic(_call, *[INT] * 12)
"""Call the `MULTIPLY` at the address that comes first, with its arguments."""
