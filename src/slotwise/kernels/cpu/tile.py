"""The one product under everything here: a few float32 rows times a panel of stored columns.

    C[rows, 16 * vectors]  (+)=  A[rows, depth] @ B[depth, 16 * vectors]

Every accumulator lives in a register while `depth` runs (Goto and van de Geijn, "Anatomy of high-performance matrix
multiplication", 2008).  Linear layers call it with packed weights as B; attention with keys (tokens are columns) and
with values (dimensions are columns), so a block of the cache is read once for all query heads that share it.

A is laid out in *strips*: 64 columns of all rows, then the next 64, so that the step from row to row is a constant the
address mode can hold.  A row's result does not depend on the rows beside it, bit for bit.
"""

from __future__ import annotations

import itertools

import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from slotwise.kernels.cpu.cache import LANES
from slotwise.kernels.cpu.compiled import Compiled
from slotwise.kernels.cpu.simd import BFLOAT16, FLOAT32, bytes_of, kernel

STRIP = 64  # columns of A that lie side by side
STRIP_ROW_BYTES = 4 * STRIP
# Heights of a tile: what keeps 2 * rows accumulators within 32 registers of 16 lanes, or fewer and narrower ones.
ROWS = (1, 2, 3, 4, 6, 8, 12) if torch.backends.cpu.get_cpu_capability() == "AVX512" else (1, 2, 3)

_FLOAT, _INT32, _INT64 = ir.FloatType(), ir.IntType(32), ir.IntType(64)
_VECTOR = ir.VectorType(_FLOAT, LANES)
_WIDE, _NARROW = ir.VectorType(_INT32, LANES), ir.VectorType(ir.IntType(16), LANES)


def _constant(value):
    return ir.Constant(_INT64, value)


def _load(builder, address, kind):
    stored = _NARROW if kind == types.uint16 else _VECTOR
    value = builder.load(builder.inttoptr(address, stored.as_pointer()))
    value.align = 2 if kind == types.uint16 else 4
    if kind == types.uint16:
        value = builder.bitcast(builder.shl(builder.zext(value, _WIDE), ir.Constant(_WIDE, [16] * LANES)), _VECTOR)
    return value


def _broadcast(builder, address):
    scalar = builder.load(builder.inttoptr(address, _FLOAT.as_pointer()))
    lone = builder.insert_element(ir.Constant(_VECTOR, ir.Undefined), scalar, ir.Constant(_INT32, 0))
    return builder.shuffle_vector(lone, ir.Constant(_VECTOR, ir.Undefined), ir.Constant(_WIDE, [0] * LANES))


def _prefetch(builder, address):
    """Ask for the cache line at `address`: the processor's own prefetching stops at the end of every page."""
    byte = ir.IntType(8).as_pointer()
    function = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(ir.VoidType(), [byte, _INT32, _INT32, _INT32]), "llvm.prefetch.p0"
    )
    for_reading, keep, data = (ir.Constant(_INT32, number) for number in (0, 2, 1))
    builder.call(function, [builder.inttoptr(address, byte), for_reading, keep, data])


def _accumulate(builder, rows, vectors, operands, start):
    """The loop over depth, from the vectors in `start`: the accumulators at its end."""
    a, strip_bytes, b, row_bytes, depth, ahead, kind = operands
    fma = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(_VECTOR, [_VECTOR] * 3), f"llvm.fma.v{LANES}f32"
    )
    before, loop, after = builder.block, builder.append_basic_block("depth"), builder.append_basic_block("done")
    builder.branch(loop)
    builder.position_at_end(loop)
    k = builder.phi(_INT64)
    k.add_incoming(_constant(0), before)
    sums = [builder.phi(_VECTOR) for _ in start]
    strip = builder.mul(builder.lshr(k, _constant(6)), strip_bytes)
    column = builder.add(builder.add(a, strip), builder.shl(builder.and_(k, _constant(STRIP - 1)), _constant(2)))
    line = builder.add(b, builder.mul(k, row_bytes))
    _prefetch(builder, builder.add(line, ahead))
    width = LANES * (2 if kind == types.uint16 else 4)
    panel = [_load(builder, builder.add(line, _constant(v * width)), kind) for v in range(vectors)]
    results = []
    for row in range(rows):
        factor = _broadcast(builder, builder.add(column, _constant(row * STRIP_ROW_BYTES)))
        results += [builder.call(fma, [factor, panel[v], sums[row * vectors + v]]) for v in range(vectors)]
    following = builder.add(k, _constant(1))
    k.add_incoming(following, loop)
    for phi, first, result in zip(sums, start, results, strict=True):
        phi.add_incoming(first, before)
        phi.add_incoming(result, loop)
    builder.cbranch(builder.icmp_signed("<", following, depth), loop, after)
    builder.position_at_end(after)
    return results


def _emit(builder, rows, vectors, operands, c, c_row_bytes):
    """C += A @ B for one size."""
    places = [
        builder.add(c, builder.add(builder.mul(c_row_bytes, _constant(row)), _constant(v * LANES * 4)))
        for row in range(rows) for v in range(vectors)
    ]
    start = [_load(builder, place, types.float32) for place in places]
    for place, result in zip(places, _accumulate(builder, rows, vectors, operands, start), strict=True):
        builder.store(result, builder.inttoptr(place, _VECTOR.as_pointer())).align = 4


@intrinsic
def _tile(typingctx, rows, vectors, a, strip_bytes, b, row_bytes, depth, c, c_row_bytes, ahead, kind):
    """`C += A @ B` for `rows` of `ROWS` and one or two `vectors`; all strides in bytes, `depth` at least 1."""

    def codegen(context, builder, signature, args):
        rows, vectors, a, strip_bytes, b, row_bytes, depth, c, c_row_bytes, ahead, _ = args
        operands = (a, strip_bytes, b, row_bytes, depth, ahead, kind)
        end = builder.append_basic_block("end")
        choice = builder.switch(builder.add(builder.shl(rows, _constant(1)), vectors), end)
        for count, width in itertools.product(ROWS, (1, 2)):
            block = builder.append_basic_block(f"tile{count}x{width}")
            choice.add_case(_constant(2 * count + width), block)
            builder.position_at_end(block)
            _emit(builder, count, width, operands, c, c_row_bytes)
            builder.branch(end)
        builder.position_at_end(end)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 10, kind), codegen


@kernel
def _multiply(rows, columns, a, strip_bytes, b, row_bytes, depth, c, c_row_bytes, ahead, kind):
    column = 0
    while column < columns:
        vectors = min(2, (columns - column) // LANES)
        row = 0
        while row < rows:
            count = 1
            for size in ROWS:
                if size <= rows - row:
                    count = size
            _tile(count, vectors, a + row * STRIP_ROW_BYTES, strip_bytes, b + column * bytes_of(kind), row_bytes, depth,
                  c + row * c_row_bytes + column * 4, c_row_bytes, ahead, kind)
            row += count
        column += vectors * LANES


def _multiply_bfloat16(rows, columns, a, strip_bytes, b, row_bytes, depth, c, c_row_bytes, ahead):
    _multiply(rows, columns, a, strip_bytes, b, row_bytes, depth, c, c_row_bytes, ahead, BFLOAT16)


def _multiply_float32(rows, columns, a, strip_bytes, b, row_bytes, depth, c, c_row_bytes, ahead):
    _multiply(rows, columns, a, strip_bytes, b, row_bytes, depth, c, c_row_bytes, ahead, FLOAT32)


MULTIPLY = {
    torch.bfloat16: Compiled(_multiply_bfloat16, types.void(*[types.int64] * 10)),
    torch.float32: Compiled(_multiply_float32, types.void(*[types.int64] * 10)),
}
"""`multiply(rows, columns, a, strip_bytes, b, row_bytes, depth, c, c_row_bytes, ahead)`: C += A @ B for any number of
rows and any multiple of 16 columns, asking for B `ahead` bytes before it is read.  Kernels get its address and use
`call_multiply`, so that it is compiled once."""


@intrinsic
def call_multiply(typingctx, address, rows, columns, a, strip_bytes, b, row_bytes, depth, c, c_row_bytes, ahead):
    """Call the `MULTIPLY` at `address`."""

    def codegen(context, builder, signature, args):
        function = ir.FunctionType(ir.VoidType(), [_INT64] * 10)
        builder.call(builder.inttoptr(args[0], function.as_pointer()), args[1:])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 11), codegen
