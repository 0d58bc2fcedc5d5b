"""Numbers as small integers with a scale for each 64 of them: weights when they are packed, activations at run time.

Each token is quantised by itself, group by group ("group-wise", as in ZeroQuant, Yao et al., 2022), so an outlier
affects only its group, and a token's result does not depend on its batch-mates, bit for bit.

A group of weights gets the one of a few scales that leaves the least squared error: clipping the largest weight a
little pays where there are 15 steps, as in Banner et al., "Post training 4-bit quantization", 2019.

    weights       panels of 32 columns x groups x [ bytes | scales float32[32] ]
        bytes     7 bits: 16 quads of depth x 32 columns x 4; nibbles: quads 2i and 2i + 1 share a byte, the first low
    activations   groups x rows x int8[64], groups x rows x (scale float32, -sum int32)
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from llvmlite import ir
from numba import types
from torch import Tensor

from slotwise.kernels.cpu.jit.compiler import kernel
from slotwise.kernels.cpu.jit.intrinsic import FLOAT, INT, KIND, ElementType, intrinsic
from slotwise.kernels.cpu.linear import DEPTH, in_panels, x_at
from slotwise.kernels.cpu.llvm import (
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
from slotwise.kernels.cpu.simd import FLOAT32, INT64, ZERO, Real, bytes_of, fill, load, store

BITS = {"int8": 8, "int4": 4}  # bits of a weight; engine/config.py lists the same names
GROUP = 64  # of depth; shares a scale
COLUMNS = 32  # of a panel
LIMIT = {8: 63, 4: 127}  # of a quantised activation, by the bits of a weight
STEPS = {8: 63, 4: 7}  # integers of a weight on either side of zero
CLIPS = {8: (1.0,), 4: (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7)}  # of a group's largest weight
ZERO_WEIGHT = {8: 64, 4: 8}  # a weight of zero
BYTES = {8: COLUMNS * GROUP, 4: COLUMNS * GROUP // 2}  # of a group's weights
RECORD = {bits: size + 4 * COLUMNS for bits, size in BYTES.items()}  # bytes of a group with its scales

INFINITE, NO_NUMBER = 0x7F800000, 0x7FC00000  # bits of a float32
WITHOUT_PLACES = 1.5 * 2**23

_INTEGERS, _WHOLES, _FLOATS = (ir.VectorType(kind, GROUP) for kind in (BYTE, WORD, SINGLE))


def _quantise_group(
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
    no_number = builder.icmp_unsigned(">", builder.bitcast(largest, WORD), ir.Constant(WORD, INFINITE))
    scale = builder.bitcast(builder.fdiv(largest, limit), WORD)
    scale = builder.select(no_number, ir.Constant(WORD, NO_NUMBER), scale)
    write(builder, steps, target)
    write(builder, scale, scales)
    write(builder, correction, behind(builder, scales, 4))


quantise_group: Callable[[int, int, int, float, int, Real], None] = intrinsic(
    _quantise_group, INT, INT, INT, FLOAT, INT, KIND)
"""`quantise_group(x, target, scales, limit, zero, kind)`: quantise 64 numbers at `x` to bytes at `target`, up to
`limit`; stores their scale and correction at `scales`.  A group with a NaN has the scale NaN, one with an infinity an
infinite scale.
"""


def _largest(builder: ir.IRBuilder, bits: ir.Value) -> ir.Value:
    """The largest magnitude, a float32; NaN where there is one.  Without signs, bits order by magnitude."""
    width = bits.type.element.width
    sizes = builder.and_(bits, all_of(bits.type, (1 << width - 1) - 1))
    largest = call(builder, f"llvm.vector.reduce.umax.v{GROUP}i{width}", bits.type.element, sizes)
    return builder.bitcast(_as_float32(builder, largest, WORD), SINGLE)


def _as_float32(builder: ir.IRBuilder, bits: ir.Value, wide: ir.Type) -> ir.Value:
    """The same numbers as bits of float32: a bfloat16 is the upper half of one."""
    if bits.type == wide:
        return bits
    sixteen = all_of(wide, 16) if isinstance(wide, ir.VectorType) else ir.Constant(wide, 16)
    return builder.shl(builder.zext(bits, wide), sixteen)


def _rounded(builder: ir.IRBuilder, values: ir.Value, factor: ir.Value) -> ir.Value:
    """`values` times `factor`, rounded to bytes: adds a number so large that a float32 has no fraction bits left."""
    added = fast(builder, f"llvm.fma.v{GROUP}f32", _FLOATS, values, spread(builder, factor, _FLOATS),
                 all_of(_FLOATS, WITHOUT_PLACES))
    return builder.trunc(builder.bitcast(added, _WHOLES), _INTEGERS)


def _total(builder: ir.IRBuilder, steps: ir.Value) -> ir.Value:
    """The sum of 64 signed bytes, by LLVM's instruction for unsigned ones."""
    unsigned = builder.zext(builder.xor(steps, all_of(_INTEGERS, 128)), _WHOLES)
    return builder.sub(call(builder, f"llvm.vector.reduce.add.v{GROUP}i32", WORD, unsigned),
                       ir.Constant(WORD, 128 * GROUP))


@kernel
def _quantise_rest(
    x: int, count: int, room: int, target: int, scales: int, limit: float, zero: int, kind: Real
) -> None:
    """Quantise a group of fewer than 64 numbers, padded with zeros in the scratch `room`."""
    for i in range(count):
        store(room, i, load(x, i, kind), FLOAT32)
    fill(room + count * 4, GROUP - count, ZERO)
    quantise_group(room, target, scales, limit, zero, FLOAT32)


@kernel
def quantise_block(
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
            quantise_group(
                x + group * GROUP * bytes_of(kind), target + place * GROUP, scales + place * 8, limit, zero, kind)
        if depth % GROUP:
            place, done = (groups - 1) * padded + row, depth // GROUP * GROUP
            _quantise_rest(x + done * bytes_of(kind), depth - done, room, target + place * GROUP, scales + place * 8,
                           limit, zero, kind)


def quantise(weight: Tensor, bits: int) -> tuple[Tensor, Tensor]:
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
    """The result of `quantise` as panels: `[panels, groups, bytes]`."""
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
