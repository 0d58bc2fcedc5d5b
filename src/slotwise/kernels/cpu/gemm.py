"""The matrix product of all kernels here: a few float32 rows times a panel of stored columns.

    C[rows, LANES * vectors]  (+)=  A[rows, depth] @ B[depth, LANES * vectors]

Every accumulator lives in a register while `depth` runs (Goto and van de Geijn, "Anatomy of high-performance matrix
multiplication", 2008).  Linear layers call it with packed weights as B; attention with keys (tokens are columns) and
with values (dimensions are columns), so a block of the cache is read once for all query heads that share it.

A is laid out in *strips*: 64 columns of all rows, then the next 64, so that the step from row to row is a constant the
address mode can hold.  A row's result does not depend on the rows beside it, bit for bit.
"""

from __future__ import annotations

import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from slotwise.kernels.cpu.compiled import Compiled
from slotwise.kernels.cpu.parts import kernel
from slotwise.kernels.cpu.processor import AVX512, LANES, PAIR
from slotwise.kernels.cpu.simd import BFLOAT16, FLOAT32, INT8
from slotwise.kernels.cpu.vectors import ask

STRIP = 64  # columns of A that lie side by side
STRIP_ROW_BYTES = 4 * STRIP
# The tallest tile of each width in vectors: the accumulators, and the columns they are made of, must fit 32 registers,
# or 16.
TALLEST = {1: 8, 2: 14, 4: 6} if AVX512 else {1: 8, 2: 6, 4: 2}
TALLEST_1, TALLEST_2, TALLEST_4 = TALLEST.values()
LINE = 64  # bytes of a cache line

_FLOAT, _INT32, _INT64 = ir.FloatType(), ir.IntType(32), ir.IntType(64)
_VECTOR = ir.VectorType(_FLOAT, LANES)
_WIDE, _NARROW, _BYTES = (ir.VectorType(ir.IntType(bits), LANES) for bits in (32, 16, 8))


def _constant(value):
    return ir.Constant(_INT64, value)


def _load(builder, address, kind):
    """A vector of floats as they are, or of bfloat16 or int8 widened by two instructions."""
    stored = {types.int8: _BYTES, types.uint16: _NARROW, types.float32: _VECTOR}[kind]
    value = builder.load(builder.inttoptr(address, stored.as_pointer()))
    value.align = kind.bitwidth // 8
    if kind == types.int8:
        return builder.sitofp(builder.sext(value, _WIDE), _VECTOR)
    if kind == types.uint16:
        value = builder.bitcast(builder.shl(builder.zext(value, _WIDE), ir.Constant(_WIDE, [16] * LANES)), _VECTOR)
    return value


def _broadcast(builder, address):
    scalar = builder.load(builder.inttoptr(address, _FLOAT.as_pointer()))
    lone = builder.insert_element(ir.Constant(_VECTOR, ir.Undefined), scalar, ir.Constant(_INT32, 0))
    return builder.shuffle_vector(lone, ir.Constant(_VECTOR, ir.Undefined), ir.Constant(_WIDE, [0] * LANES))


def _upper_halves(builder):
    """A mask of every second element of a pair of vectors, for `_load_pair`; None where loads cannot be masked.

    It passes through an empty inline assembly, or LLVM would rebuild the constant in every iteration of a loop.
    """
    if not AVX512:
        return None
    bits = builder.asm(ir.FunctionType(_INT32, [_INT32]), "", "=r,0", [ir.Constant(_INT32, 0xAAAAAAAA)], False)
    return builder.bitcast(bits, ir.VectorType(ir.IntType(1), 2 * LANES))


def _load_pair(builder, address, upper):
    """Two vectors of floats from the pairs of bfloat16 at `address` (see `cache.py`).

    A bfloat16 is the upper half of its float.  So the second of each pair is in place once the first is masked out,
    which the processor may do while it loads, and the first is one shift away.
    """
    pairs = builder.load(builder.inttoptr(address, _WIDE.as_pointer()))
    pairs.align = 2
    low = builder.shl(pairs, ir.Constant(_WIDE, [16] * LANES))
    if upper is None:
        high = builder.and_(pairs, ir.Constant(_WIDE, [0xFFFF0000] * LANES))
    else:
        halves, place = ir.VectorType(ir.IntType(16), 2 * LANES), ir.IntType(16).as_pointer()
        masked = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(halves, [place, _INT32, upper.type, halves]), "llvm.masked.load.v32i16.p0")
        nothing = ir.Constant(halves, [0] * 2 * LANES)
        high = builder.call(masked, [builder.inttoptr(address, place), ir.Constant(_INT32, 2), upper, nothing])
    return [builder.bitcast(half, _VECTOR) for half in (low, high)]


def _load_columns(builder, address, vectors, kind, upper):
    """One or two `vectors` that lie together in a row of B."""
    if kind != types.uint16 or vectors == 1:
        size = LANES * kind.bitwidth // 8
        return [_load(builder, builder.add(address, _constant(v * size)), kind) for v in range(vectors)]
    return _load_pair(builder, address, upper)


def prefetch(builder, address, size):
    """Prefetch `size` bytes from `address` on: the hardware prefetcher stops at the end of every page.

    They go to the second-level cache, which can have more requests in flight than the first.
    """
    for line in range(0, size, LINE):
        ask(builder, builder.add(address, _constant(line)))


class Loop:
    """A loop from 0 to `end` by `step`, with values carried from iteration to iteration; `end` is at least 1."""

    def __init__(self, builder, end, step, start):
        self._builder, self._end, self._step = builder, end, _constant(step)
        before, self._body = builder.block, builder.append_basic_block("turn")
        builder.branch(self._body)
        builder.position_at_end(self._body)
        self.index = builder.phi(_INT64)
        self.index.add_incoming(_constant(0), before)
        self.values = [builder.phi(value.type) for value in start]
        for phi, value in zip(self.values, start, strict=True):
            phi.add_incoming(value, before)

    def close(self, results):
        """End an iteration, which made `results` of the values; they are also the values after the loop."""
        builder, last = self._builder, self._builder.block
        following = builder.add(self.index, self._step)
        for phi, result in zip((self.index, *self.values), (following, *results), strict=True):
            phi.add_incoming(result, last)
        after = builder.append_basic_block("after")
        builder.cbranch(builder.icmp_signed("<", following, self._end), self._body, after)
        builder.position_at_end(after)
        return results


def _accumulate(builder, rows, vectors, operands, start):
    """The loop over depth, strip by strip, from the vectors in `start`; returns the accumulators at its end."""
    a, strip_bytes, b, row_bytes, pair_bytes, depth, ahead, kind = operands
    fma = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(_VECTOR, [_VECTOR] * 3), f"llvm.fma.v{LANES}f32"
    )
    together = min(vectors, 2)
    pairs = [builder.mul(pair_bytes, _constant(pair)) for pair in range(vectors // together)]
    upper = _upper_halves(builder) if kind == types.uint16 else None
    strips = Loop(builder, depth, STRIP, [a, b, *start])
    strip, line, *sums = strips.values
    left = builder.sub(depth, strips.index)
    length = builder.select(builder.icmp_signed("<", left, _constant(STRIP)), left, _constant(STRIP))
    turns = Loop(builder, length, 1, [strip, line, *sums])
    column, line, *sums = turns.values
    panel, results = [], []
    for offset in pairs:
        place = builder.add(line, offset)
        prefetch(builder, builder.add(place, ahead), together * LANES * kind.bitwidth // 8)
        panel += _load_columns(builder, place, together, kind, upper)
    for row in range(rows):
        factor = _broadcast(builder, builder.add(column, _constant(row * STRIP_ROW_BYTES)))
        results += [builder.call(fma, [factor, panel[v], sums[row * vectors + v]]) for v in range(vectors)]
    _, line, *sums = turns.close([builder.add(column, _constant(4)), builder.add(line, row_bytes), *results])
    return strips.close([builder.add(strip, strip_bytes), line, *sums])[2:]


def _emit(builder, rows, vectors, operands, c, c_row_bytes):
    """C += A @ B for one size of tile."""
    places = [
        builder.add(c, builder.add(builder.mul(c_row_bytes, _constant(row)), _constant(v * LANES * 4)))
        for row in range(rows) for v in range(vectors)
    ]
    start = [_load(builder, place, types.float32) for place in places]
    for place, result in zip(places, _accumulate(builder, rows, vectors, operands, start), strict=True):
        builder.store(result, builder.inttoptr(place, _VECTOR.as_pointer())).align = 4


@intrinsic
def _tile(typingctx, rows, vectors, a, strip_bytes, b, row_bytes, pair_bytes, depth, c, c_row_bytes, ahead, kind):
    """`C += A @ B` for `rows` and `vectors` as in `TALLEST`; all strides in bytes, `depth` at least 1."""

    def codegen(context, builder, signature, args):
        rows, vectors, a, strip_bytes, b, row_bytes, pair_bytes, depth, c, c_row_bytes, ahead, _ = args
        operands = (a, strip_bytes, b, row_bytes, pair_bytes, depth, ahead, kind)
        end = builder.append_basic_block("end")
        choice = builder.switch(builder.add(builder.shl(rows, _constant(3)), vectors), end)
        for count, width in [(count, width) for width, most in TALLEST.items() for count in range(1, most + 1)]:
            block = builder.append_basic_block(f"tile{count}x{width}")
            choice.add_case(_constant(8 * count + width), block)
            builder.position_at_end(block)
            _emit(builder, count, width, operands, c, c_row_bytes)
            builder.branch(end)
        builder.position_at_end(end)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 11, kind), codegen


@kernel
def _multiply(rows, columns, a, strip_bytes, b, row_bytes, pair_bytes, depth, c, c_row_bytes, ahead, kind):
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


def _multiply_bfloat16(rows, columns, a, strip_bytes, b, row_bytes, pair_bytes, depth, c, c_row_bytes, ahead):
    _multiply(rows, columns, a, strip_bytes, b, row_bytes, pair_bytes, depth, c, c_row_bytes, ahead, BFLOAT16)


def _multiply_float32(rows, columns, a, strip_bytes, b, row_bytes, pair_bytes, depth, c, c_row_bytes, ahead):
    _multiply(rows, columns, a, strip_bytes, b, row_bytes, pair_bytes, depth, c, c_row_bytes, ahead, FLOAT32)


def _multiply_int8(rows, columns, a, strip_bytes, b, row_bytes, pair_bytes, depth, c, c_row_bytes, ahead):
    _multiply(rows, columns, a, strip_bytes, b, row_bytes, pair_bytes, depth, c, c_row_bytes, ahead, INT8)


MULTIPLY = {
    torch.int8: Compiled(_multiply_int8, types.void(*[types.int64] * 11)),
    torch.bfloat16: Compiled(_multiply_bfloat16, types.void(*[types.int64] * 11)),
    torch.float32: Compiled(_multiply_float32, types.void(*[types.int64] * 11)),
}
"""`multiply(rows, columns, a, strip_bytes, b, row_bytes, pair_bytes, depth, c, c_row_bytes, ahead)`: C += A @ B for any
number of rows and any multiple of `LANES` columns.  In B it is `row_bytes` from a row to the next, `pair_bytes` from
`PAIR` columns to the next; it is prefetched `ahead` bytes before it is read.  Kernels get the address and use
`call_multiply`, so that it is compiled once."""


@intrinsic
def call_multiply(
    typingctx, address, rows, columns, a, strip_bytes, b, row_bytes, pair_bytes, depth, c, c_row_bytes, ahead
):
    """Call the `MULTIPLY` at `address`."""

    def codegen(context, builder, signature, args):
        function = ir.FunctionType(ir.VoidType(), [_INT64] * 11)
        builder.call(builder.inttoptr(args[0], function.as_pointer()), args[1:])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 12), codegen
