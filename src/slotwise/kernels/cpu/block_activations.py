"""Activations of products with quantised matrices: each unit of 16, 32 or 64 numbers as bytes, with two facts.

    facts    scale float32, then -zero * sum(q) int32, or where there are minimums -scale * sum(q) float32

A token is quantised by itself, unit by unit, so an outlier affects only its unit, and a token's result does not depend
on the rows beside it, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable

from llvmlite import ir
from numba import types

from slotwise.kernels.cpu.block_layout import Layout
from slotwise.kernels.cpu.jit.compiler import kernel
from slotwise.kernels.cpu.jit.intrinsic import FLOAT, INT, KIND, ElementType, intrinsic
from slotwise.kernels.cpu.linear import DEPTH, SOURCES, RowBlock, x_at
from slotwise.kernels.cpu.llvm import BYTE, SHORT, SINGLE, WORD, all_of, behind, call, fast, read, spread, write
from slotwise.kernels.cpu.simd import FLOAT32, INT32, INT64, ZERO, Real, bytes_of, fill, float_of, load, store

FACTS = 8  # bytes
LIMIT = 127.0  # of a quantised activation
INFINITE, NO_NUMBER = 0x7F800000, 0x7FC00000  # bits of a float32
WITHOUT_PLACES = 1.5 * 2**23

STRIDE, TABLE, ZERO_AND_FACTOR = range(SOURCES + 1, SOURCES + 4)  # arguments behind those of every product


def _quantise_unit(
    builder: ir.IRBuilder, x: ir.Value, target: ir.Value, facts: ir.Value, zero: ir.Value, factor: ir.Value,
    layout: ElementType, kind: ElementType,
) -> None:
    shape: Layout = layout.instance_class.NUMBERS
    wholes, floats = (ir.VectorType(each, shape.unit) for each in (WORD, SINGLE))
    bits = read(builder, x, ir.VectorType(SHORT if kind == types.uint16 else WORD, shape.unit), align=2)
    largest = _largest(builder, bits)
    tiny, limit = ir.Constant(SINGLE, 1e-30), ir.Constant(SINGLE, LIMIT)
    by = builder.fdiv(limit, builder.select(builder.fcmp_ordered(">", largest, tiny), largest, tiny))
    # Adds a number so large that a float32 has no fraction bits left.
    values = builder.bitcast(_as_float32(builder, bits, wholes), floats)
    rounded = fast(builder, f"llvm.fma.v{shape.unit}f32", floats, values, spread(builder, by, floats),
                   all_of(floats, WITHOUT_PLACES))
    steps = builder.trunc(builder.bitcast(rounded, wholes), ir.VectorType(BYTE, shape.unit))
    total = call(builder, f"llvm.vector.reduce.add.v{shape.unit}i32", WORD, builder.sext(steps, wholes))
    # Kernels are compiled as if floats never were NaN, so a NaN is detected, and stored, by its bits.
    is_nan = builder.icmp_unsigned(">", builder.bitcast(largest, WORD), ir.Constant(WORD, INFINITE))
    own = builder.fdiv(largest, limit)
    scale = builder.bitcast(builder.fmul(own, factor), WORD)
    write(builder, steps, target)
    write(builder, builder.select(is_nan, ir.Constant(WORD, NO_NUMBER), scale), facts)
    if shape.has_minimums:
        second = builder.fneg(builder.fmul(own, builder.sitofp(total, SINGLE)))
    else:
        second = builder.mul(total, builder.neg(builder.trunc(zero, WORD)))
    write(builder, second, behind(builder, facts, 4))


_quantise: Callable[[int, int, int, int, float, Layout, Real], None] = intrinsic(
    _quantise_unit, INT, INT, INT, INT, FLOAT, KIND, KIND)
"""`_quantise(x, target, facts, zero, factor, layout, kind)`: one unit of numbers at `x` as bytes at `target`; its scale
times `factor` and its second fact at `facts`.  A unit with a NaN has the scale NaN, one with an infinity an infinite
scale.
"""


def _largest(builder: ir.IRBuilder, bits: ir.Value) -> ir.Value:
    """The largest magnitude, a float32; NaN where there is one.  Without signs, bits order by magnitude."""
    element = bits.type.element
    sizes = builder.and_(bits, all_of(bits.type, (1 << element.width - 1) - 1))
    largest = call(builder, f"llvm.vector.reduce.umax.v{bits.type.count}i{element.width}", element, sizes)
    return builder.bitcast(_as_float32(builder, largest, WORD), SINGLE)


def _as_float32(builder: ir.IRBuilder, bits: ir.Value, wide: ir.Type) -> ir.Value:
    """The same numbers as bits of float32: a bfloat16 is the upper half of one."""
    if bits.type == wide:
        return bits
    sixteen = all_of(wide, 16) if isinstance(wide, ir.VectorType) else ir.Constant(wide, 16)
    return builder.shl(builder.zext(bits, wide), sixteen)


@kernel
def quantise_rows(words: int, block: RowBlock, target: int, room: int, layout: Layout, kind: Real) -> None:
    """The rows of a block of a product's x as units of bytes, then as facts.

    An unfinished unit, or inputs in another order, pass through the scratch `room`, padded with zeros.
    """
    depth, (first, rows, _, _, order) = load(words, DEPTH, INT64), block
    zero = load(words, ZERO_AND_FACTOR, INT64) >> 32
    factor = float_of(load(words, ZERO_AND_FACTOR, INT64))
    unit = layout.unit
    units = (depth + layout.record - 1) // layout.record * (layout.record // unit)
    facts = target + units * rows * unit
    for row in range(rows):
        x = x_at(words, first + row, kind)
        for index in range(units):
            begin, place = index * unit, index * rows + row
            own, bytes_at = facts + place * FACTS, target + place * unit
            if order == 0 and begin + unit <= depth:
                _quantise(x + begin * bytes_of(kind), bytes_at, own, zero, factor, layout, kind)
            else:
                count = min(max(depth - begin, 0), unit)
                for i in range(count):
                    source = begin + i if order == 0 else load(order, begin + i, INT32)
                    store(room, i, load(x, source, kind), FLOAT32)
                fill(room + count * 4, unit - count, ZERO)
                _quantise(room, bytes_at, own, zero, factor, layout, FLOAT32)
