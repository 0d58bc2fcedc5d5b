"""Numbers as small integers with scales: weights when they are packed, activations at run time.

Two layouts share this file.  Weights that are tensors are quantized here, with a scale for each 64 inputs of an output
(`linear_int.py`).  Matrices in a checkpoint's own format keep its codes (`linear_blocks.py`): only the activations are
quantized, in units of 16, 32 or 64 numbers.

Each token is quantized by itself, group by group ("group-wise", as in ZeroQuant, Yao et al., 2022), so an outlier
affects only its group, and a token's result does not depend on its batch-mates, bit for bit.

A group of weights gets the one of a few scales that leaves the least squared error: clipping the largest weight a
little pays where there are 15 steps, as in Banner et al., "Post training 4-bit quantization", 2019.

    weights       panels of 32 columns x groups x [ bytes | scales float32[32] ]
        bytes     7 bits: 16 quads of depth x 32 columns x 4; nibbles: quads 2i and 2i + 1 share a byte, the first low
    activations   groups x rows x int8[64], groups x rows x (scale float32, -sum int32)
    of blocks     units x rows x int8[unit], units x rows x facts: the scale float32, then -zero * sum(q) int32, or for
                  formats with minimums -scale * sum(q) float32
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from llvmlite import ir
from numba import types
from torch import Tensor

from slotwise.compute.kernels.cpu.jit.compiler import FLOAT, INT, KIND, ElementType, intrinsic, kernel
from slotwise.compute.kernels.cpu.jit.llvm import (
    BYTE,
    SHORT,
    SINGLE,
    WORD,
    all_of,
    behind,
    call,
    fast,
    read,
    spread,
    write,
)
from slotwise.compute.kernels.cpu.products.block_layout import BlockLayout
from slotwise.compute.kernels.cpu.products.linear import DEPTH, SOURCES, RowBlock, in_panels, x_at
from slotwise.compute.kernels.cpu.simd import (
    FLOAT32,
    INT32,
    INT64,
    ZERO,
    Real,
    bytes_of,
    fill,
    float_of,
    load,
    store,
)

BITS = {"int8": 8, "int4": 4}
"""The bits of a weight by the names of options; `engine/config.py` lists the same names."""

# Inputs that share a scale, and outputs of a panel.
GROUP = 64
COLUMNS = 32

# By the bits of a weight: the largest quantized activation; the integers of a weight on either side of zero; the shares
# of a group's largest weight that are tried; the code of zero; bytes of a group's weights, without and with scales.
LIMIT = {8: 63, 4: 127}
STEPS = {8: 63, 4: 7}
CLIPS = {8: (1.0,), 4: (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7)}
ZERO_WEIGHT = {8: 64, 4: 8}
BYTES = {8: COLUMNS * GROUP, 4: COLUMNS * GROUP // 2}
RECORD = {bits: size + 4 * COLUMNS for bits, size in BYTES.items()}

# Bits of a float32.
INFINITE, NAN = 0x7F800000, 0x7FC00000
# So large that a float32 of this size has no fraction bits left: adding it rounds to integers.
WITHOUT_FRACTION = 1.5 * 2**23

# Of a unit of activations for packed blocks: bytes of its two facts, and the largest quantized number.
FACTS = 8
UNIT_LIMIT = 127.0
# Their arguments follow those of every product.
STRIDE, TABLE, ZERO_AND_FACTOR = range(SOURCES + 1, SOURCES + 4)

_INTEGERS, _WHOLES, _FLOATS = (ir.VectorType(kind, GROUP) for kind in (BYTE, WORD, SINGLE))


def _quantize_group(
    builder: ir.IRBuilder, x: ir.Value, target: ir.Value, scales: ir.Value, limit: ir.Value, zero: ir.Value,
    kind: ElementType,
) -> None:
    bits = read(builder, x, ir.VectorType(SHORT if kind == types.uint16 else WORD, GROUP), align=2)
    largest = _largest(builder, bits)
    tiny = ir.Constant(SINGLE, 1e-30)
    factor = builder.fdiv(limit, builder.select(builder.fcmp_ordered(">", largest, tiny), largest, tiny))
    steps = _rounded(builder, builder.bitcast(_as_float32(builder, bits, _WHOLES), _FLOATS), factor)
    correction = builder.mul(_total(builder, steps), builder.neg(builder.trunc(zero, WORD)))
    # Kernels are compiled as if floats never were NaN, so a NaN is detected, and stored, by its bits.
    is_nan = builder.icmp_unsigned(">", builder.bitcast(largest, WORD), ir.Constant(WORD, INFINITE))
    scale = builder.bitcast(builder.fdiv(largest, limit), WORD)
    scale = builder.select(is_nan, ir.Constant(WORD, NAN), scale)
    write(builder, steps, target)
    write(builder, scale, scales)
    write(builder, correction, behind(builder, scales, 4))


quantize_group: Callable[[int, int, int, float, int, Real], None] = intrinsic(
    _quantize_group, INT, INT, INT, FLOAT, INT, KIND)
"""`quantize_group(x, target, scales, limit, zero, kind)`: quantize 64 numbers at `x` to bytes at `target`, up to
`limit`; stores their scale and correction at `scales`.  A group with a NaN has the scale NaN, one with an infinity an
infinite scale.
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


def _rounded(builder: ir.IRBuilder, values: ir.Value, factor: ir.Value) -> ir.Value:
    """`values` times `factor`, rounded to bytes."""
    added = fast(builder, f"llvm.fma.v{GROUP}f32", _FLOATS, values, spread(builder, factor, _FLOATS),
                 all_of(_FLOATS, WITHOUT_FRACTION))
    return builder.trunc(builder.bitcast(added, _WHOLES), _INTEGERS)


def _total(builder: ir.IRBuilder, steps: ir.Value) -> ir.Value:
    """The sum of 64 signed bytes, by LLVM's instruction for unsigned ones."""
    unsigned = builder.zext(builder.xor(steps, all_of(_INTEGERS, 128)), _WHOLES)
    return builder.sub(call(builder, f"llvm.vector.reduce.add.v{GROUP}i32", WORD, unsigned),
                       ir.Constant(WORD, 128 * GROUP))


@kernel
def _quantize_rest(
    x: int, count: int, room: int, target: int, scales: int, limit: float, zero: int, kind: Real
) -> None:
    """Quantize a group of fewer than 64 numbers, padded with zeros in the scratch `room`."""
    for i in range(count):
        store(room, i, load(x, i, kind), FLOAT32)
    fill(room + count * 4, GROUP - count, ZERO)
    quantize_group(room, target, scales, limit, zero, FLOAT32)


@kernel
def quantize_block(
    words: int, first: int, rows: int, padded: int, target: int, room: int, limit: float, zero: int, kind: Real
) -> None:
    """Rows `first ... first + rows` of a product's x as groups of bytes, then as groups of scales and corrections.

    A group has `padded` rows; those behind `rows` are left as they are.
    """
    depth = load(words, DEPTH, INT64)
    groups = (depth + GROUP - 1) // GROUP
    scales = target + groups * padded * GROUP
    for row in range(rows):
        x = x_at(words, first + row, kind)
        for group in range(depth // GROUP):
            place = group * padded + row
            quantize_group(
                x + group * GROUP * bytes_of(kind), target + place * GROUP, scales + place * 8, limit, zero, kind)
        if depth % GROUP:
            place, done = (groups - 1) * padded + row, depth // GROUP * GROUP
            _quantize_rest(x + done * bytes_of(kind), depth - done, room, target + place * GROUP, scales + place * 8,
                           limit, zero, kind)


def quantize_weight(weight: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """`weight [out, in]` as integers `[out, groups, 64]` (int8) and their scales `[out, groups]` (float32)."""
    padded = F.pad(weight, (0, -weight.shape[1] % GROUP)).float().unflatten(1, (-1, GROUP))
    largest = padded.abs().amax(dim=2, keepdim=True).clamp_min(1e-30)
    first, *others = CLIPS[bits]
    scale = largest * (first / STEPS[bits])
    steps, least = _at_scale(padded, scale, bits)
    for clip in others:
        another = largest * (clip / STEPS[bits])
        found, error = _at_scale(padded, another, bits)
        is_better = error < least
        least, steps, scale = (
            torch.where(is_better, new, old) for new, old in ((error, least), (found, steps), (another, scale)))
    return steps.to(torch.int8), scale.squeeze(2)


def _at_scale(groups: Tensor, scale: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """`groups [..., 64]` as whole steps of `scale`, and each group's squared error."""
    steps = (groups / scale).round_().clamp_(-STEPS[bits] - (bits == 4), STEPS[bits])
    return steps, (steps * scale - groups).square_().sum(dim=2, keepdim=True)


def pack(steps: Tensor, scales: Tensor, bits: int) -> Tensor:
    """The result of `quantize` as panels: `[panels, groups, bytes]`."""
    outputs, groups = scales.shape
    more = -outputs % COLUMNS
    zero = ZERO_WEIGHT[bits]
    unsigned = F.pad(steps + zero, (0, 0, 0, 0, 0, more), value=zero).to(torch.uint8)
    quads = unsigned.view(-1, COLUMNS, groups, GROUP // 4, 4).permute(0, 2, 3, 1, 4)
    if bits == 4:
        quads = quads[:, :, 0::2] | quads[:, :, 1::2] << 4
    panel_scales = in_panels(scales, COLUMNS).view(-1, COLUMNS, groups).transpose(1, 2).contiguous()
    return torch.cat((quads.flatten(2), panel_scales.view(torch.uint8)), dim=2)


def weight_bytes(outputs: int, depth: int, bits: int) -> int:
    """Bytes of a packed `weight [outputs, depth]`."""
    return -(-outputs // COLUMNS) * -(-depth // GROUP) * RECORD[bits]




def _quantize_unit(
    builder: ir.IRBuilder, x: ir.Value, target: ir.Value, facts: ir.Value, zero: ir.Value, factor: ir.Value,
    layout: ElementType, kind: ElementType,
) -> None:
    shape: BlockLayout = layout.instance_class.NUMBERS
    wholes, floats = (ir.VectorType(each, shape.unit) for each in (WORD, SINGLE))
    bits = read(builder, x, ir.VectorType(SHORT if kind == types.uint16 else WORD, shape.unit), align=2)
    largest = _largest(builder, bits)
    tiny, limit = ir.Constant(SINGLE, 1e-30), ir.Constant(SINGLE, UNIT_LIMIT)
    by = builder.fdiv(limit, builder.select(builder.fcmp_ordered(">", largest, tiny), largest, tiny))
    values = builder.bitcast(_as_float32(builder, bits, wholes), floats)
    rounded = fast(builder, f"llvm.fma.v{shape.unit}f32", floats, values, spread(builder, by, floats),
                   all_of(floats, WITHOUT_FRACTION))
    steps = builder.trunc(builder.bitcast(rounded, wholes), ir.VectorType(BYTE, shape.unit))
    total = call(builder, f"llvm.vector.reduce.add.v{shape.unit}i32", WORD, builder.sext(steps, wholes))
    # Kernels are compiled as if floats never were NaN, so a NaN is detected, and stored, by its bits.
    is_nan = builder.icmp_unsigned(">", builder.bitcast(largest, WORD), ir.Constant(WORD, INFINITE))
    own = builder.fdiv(largest, limit)
    scale = builder.bitcast(builder.fmul(own, factor), WORD)
    write(builder, steps, target)
    write(builder, builder.select(is_nan, ir.Constant(WORD, NAN), scale), facts)
    if shape.has_minimums:
        second = builder.fneg(builder.fmul(own, builder.sitofp(total, SINGLE)))
    else:
        second = builder.mul(total, builder.neg(builder.trunc(zero, WORD)))
    write(builder, second, behind(builder, facts, 4))


quantize_unit: Callable[[int, int, int, int, float, BlockLayout, Real], None] = intrinsic(
    _quantize_unit, INT, INT, INT, INT, FLOAT, KIND, KIND)
"""`quantize_unit(x, target, facts, zero, factor, layout, kind)`: quantize a unit at `x` to bytes at `target`.

Stores its scale times `factor`, then its second fact, at `facts`.  A unit with a NaN has the scale NaN, one with an
infinity an infinite scale.
"""


@kernel
def quantize_rows(words: int, block: RowBlock, target: int, room: int, layout: BlockLayout, kind: Real) -> None:
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
                quantize_unit(x + begin * bytes_of(kind), bytes_at, own, zero, factor, layout, kind)
            else:
                count = min(max(depth - begin, 0), unit)
                for i in range(count):
                    source = begin + i if order == 0 else load(order, begin + i, INT32)
                    store(room, i, load(x, source, kind), FLOAT32)
                fill(room + count * 4, unit - count, ZERO)
                quantize_unit(room, bytes_at, own, zero, factor, layout, FLOAT32)
