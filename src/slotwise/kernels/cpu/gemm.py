"""The matrix product of all kernels here: a few float32 rows times a panel of stored columns.

    C[rows, LANES * vectors]  (+)=  A[rows, depth] @ B[depth, LANES * vectors]

Every accumulator lives in a register while `depth` runs (Goto and van de Geijn, "Anatomy of high-performance matrix
multiplication", 2008).  Linear layers call it with packed weights as B; attention with keys (tokens are columns) and
with values (dimensions are columns), so a block of the cache is read once for all query heads that share it.

A is laid out in *strips*: 64 columns of all rows, then the next 64, so that the step from row to row is a constant the
address mode can hold.  It is of float32, or of bfloat16 where B is multiplied in pairs (`gemm_pairs.py`).  A row's
result does not depend on the rows beside it, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from llvmlite import ir
from numba import types

from slotwise.kernels.cpu.gemm_pairs import Operands, accumulate_pairs
from slotwise.kernels.cpu.jit.compiler import Compiled, kernel
from slotwise.kernels.cpu.jit.intrinsic import INT, KIND, ElementType, intrinsic
from slotwise.kernels.cpu.llvm import (
    BYTE,
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
    spread,
    switch,
    widened,
    write,
)
from slotwise.kernels.cpu.processor import AVX512, LANES, PAIR
from slotwise.kernels.cpu.simd import BFLOAT16, FLOAT32, INT8, PAIRS, Real

STRIP = 64  # columns of A that lie side by side
STRIP_ROW_BYTES = 4 * STRIP
# The tallest tile of each width in vectors: the accumulators, and the columns they are made of, must fit 32 registers,
# or 16.
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

def _broadcast(builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
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

def _load_columns(
    builder: ir.IRBuilder, address: ir.Value, vectors: int, kind: ElementType, upper: ir.Value | None
) -> list[ir.Value]:
    """One or two `vectors` that lie together in a row of B."""
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
        panel += _load_columns(builder, place, together, kind, upper)
    for row in range(rows):
        factor = _broadcast(builder, behind(builder, column, row * STRIP_ROW_BYTES))
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
            if count > most:
                tiles = (count + most - 1) // most
                count = (count + tiles - 1) // tiles  # of equal height: a low tile costs nearly what a tall one does
            _tile(count, vectors, a + row * STRIP_ROW_BYTES, strip_bytes, b + column // PAIR * pair_bytes, row_bytes,
                  pair_bytes, depth, c + row * c_row_bytes + column * 4, c_row_bytes, ahead, kind)
            row += count
        column += vectors * LANES

def _compiled(kind: Real) -> Compiled:
    """`_multiply` for one kind of elements of B."""
    def multiply(
        rows: int, columns: int, a: int, strip_bytes: int, b: int, row_bytes: int, pair_bytes: int, depth: int, c: int,
        c_row_bytes: int, ahead: int,
    ) -> None:
        _multiply(rows, columns, a, strip_bytes, b, row_bytes, pair_bytes, depth, c, c_row_bytes, ahead, kind)

    multiply.__name__ = multiply.__qualname__ = f"multiply_{type(kind).__name__}"
    return Compiled(multiply)

MULTIPLY = {torch.int8: _compiled(INT8), torch.bfloat16: _compiled(BFLOAT16), torch.float32: _compiled(FLOAT32)}
"""`multiply(rows, columns, a, strip_bytes, b, row_bytes, pair_bytes, depth, c, c_row_bytes, ahead)`: C += A @ B for any
number of rows and any multiple of `LANES` columns.  In B it is `row_bytes` from a row to the next, `pair_bytes` from
`PAIR` columns to the next; it is prefetched `ahead` bytes before it is read.  Kernels get the address and use
`call_multiply`, so that it is compiled once."""

MULTIPLY_PAIRS = _compiled(PAIRS)
"""The same for rows of bfloat16 and a B of bfloat16."""

def _call(builder: ir.IRBuilder, address: ir.Value, *arguments: ir.Value) -> None:
    builder.call(pointer(builder, address, ir.FunctionType(ir.VoidType(), [LONG] * len(arguments))), arguments)

call_multiply: Callable[..., None] = intrinsic(_call, *[INT] * 12)
"""Call the `MULTIPLY` at the address that comes first, with its arguments."""
