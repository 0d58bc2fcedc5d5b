"""Products with quantised weights: 7 bits (`int8`) or 4 (`int4`), with a scale for each 64 inputs of an output.

Activations are quantised at run time, each token by itself, with a scale for each 64 of its numbers ("group-wise", as
in ZeroQuant, Yao et al., 2022), so an outlier affects only its group, and a token's result does not depend on its
batch-mates, bit for bit.  `gemm_int.py` multiplies the integers.

A group's scale is the one of a few that leaves the least squared error: clipping the largest weight a little pays
where there are 15 steps, as in Banner et al., "Post training 4-bit quantization", 2019.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from torch import Tensor

from slotwise.kernels.cpu.compiled import Compiled
from slotwise.kernels.cpu.gemm_int import (
    COLUMNS,
    GATES,
    GROUP,
    HEIGHTS,
    LIMIT,
    RECORD,
    STEPS_OF_A_GROUP,
    ZERO,
    int_gemm,
    spread,
)
from slotwise.kernels.cpu.launcher import HEADER, THREAD_COUNTER, KernelLauncher
from slotwise.kernels.cpu.packing import paired, whole
from slotwise.kernels.cpu.parts import kernel
from slotwise.kernels.cpu.simd import (
    BFLOAT16,
    FLOAT32,
    INT64,
    bytes_of,
    fetch_add,
    fill,
    load,
    store,
)
from slotwise.kernels.cpu.vectors import all_of, call
from slotwise.kernels.cpu.work_queue import NOTHING, pop, rows_of_a_block, upcoming
from slotwise.kernels.interface import Linear

BITS = {"int8": 8, "int4": 4}  # bits of a weight
STEPS = {8: 63, 4: 7}  # integers on either side of zero
CLIPS = {8: (1.0,), 4: (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7)}  # of a group's largest weight
BLOCK_BYTES = 1 << 18  # of activations quantised at once: a part of a typical second-level cache
TALLEST = HEIGHTS[-1]
ROOM_BYTES = TALLEST * COLUMNS * 4
AHEAD = 8192  # bytes of weights between what is read and what is prefetched, where a panel is read but once
INTEGER_8, INTEGER_4, VNNI_8, VNNI_4 = np.uint8(0), np.int8(0), np.uint16(0), np.int16(0)  # kinds of `int_gemm`
NUMBERS_8, NUMBERS_4 = ((np.float32(LIMIT[bits]), ZERO[bits], RECORD[bits]) for bits in (8, 4))

INFINITE, NO_NUMBER = 0x7F800000, 0x7FC00000  # bits of a float32
WITHOUT_PLACES = 1.5 * 2**23

_INT, _FLOAT = ir.IntType(32), ir.FloatType()
_BYTES, _WHOLES, _FLOATS = (ir.VectorType(kind, GROUP) for kind in (ir.IntType(8), _INT, _FLOAT))

X, WEIGHT, BIAS, OUT, TOKENS, DEPTH, OUTPUTS, STORED, BLOCK, SCRATCH, SCRATCH_BYTES, THREADS = range(
    HEADER, HEADER + 12
)


@intrinsic
def _quantise_group(typingctx, x, target, told, limit, zero, kind):
    """Quantise 64 numbers at `x` to bytes at `target`, up to `limit`; stores their scale and correction at `told`.

    The scale of a group with a NaN is NaN, and of one with an infinity infinite.
    """

    def codegen(context, builder, signature, args):
        x, target, told, limit, zero, _ = args
        bits = _bits(builder, x, kind)
        largest = _largest(builder, bits)
        tiny = ir.Constant(_FLOAT, 1e-30)
        factor = builder.fdiv(limit, builder.select(builder.fcmp_ordered(">", largest, tiny), largest, tiny))
        steps = _whole(builder, _floats(builder, bits), factor)
        correction = builder.mul(_total(builder, steps), builder.neg(builder.trunc(zero, _INT)))
        # Kernels are compiled as if floats never were NaN, so a NaN is detected, and stored, by its bits.
        no_number = builder.icmp_unsigned(">", builder.bitcast(largest, _INT), ir.Constant(_INT, INFINITE))
        scale = builder.bitcast(builder.fdiv(largest, limit), _INT)
        scale = builder.select(no_number, ir.Constant(_INT, NO_NUMBER), scale)
        for value, address, offset in ((steps, target, 0), (scale, told, 0), (correction, told, 4)):
            place = builder.add(address, ir.Constant(ir.IntType(64), offset))
            builder.store(value, builder.inttoptr(place, value.type.as_pointer())).align = 4
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64, types.float32, types.int64, kind), codegen


def _bits(builder, address, kind):
    """The stored bits of 64 numbers."""
    stored = ir.VectorType(ir.IntType(kind.bitwidth), GROUP)
    value = builder.load(builder.inttoptr(address, stored.as_pointer()))
    value.align = 2
    return value


def _largest(builder, bits):
    """The largest magnitude, a float32; NaN where there is one.  Without signs, bits order by magnitude."""
    width = bits.type.element.width
    sizes = builder.and_(bits, all_of(bits.type, (1 << width - 1) - 1))
    largest = call(builder, f"llvm.vector.reduce.umax.v{GROUP}i{width}", bits.type.element, sizes)
    return builder.bitcast(_as_float32(builder, largest, _INT), _FLOAT)


def _floats(builder, bits):
    return builder.bitcast(_as_float32(builder, bits, _WHOLES), _FLOATS)


def _as_float32(builder, bits, wide):
    """The same numbers as bits of float32: a bfloat16 is the upper half of one."""
    if bits.type == wide:
        return bits
    sixteen = all_of(wide, 16) if isinstance(wide, ir.VectorType) else ir.Constant(wide, 16)
    return builder.shl(builder.zext(bits, wide), sixteen)


def _whole(builder, values, factor):
    """`values` times `factor`, rounded to bytes: adds a number so large that a float32 has no fraction bits left."""
    added = call(builder, f"llvm.fma.v{GROUP}f32", _FLOATS, values, spread(builder, factor, _FLOATS),
                 all_of(_FLOATS, WITHOUT_PLACES))
    return builder.trunc(builder.bitcast(added, _WHOLES), _BYTES)


def _total(builder, steps):
    """The sum of 64 signed bytes, by LLVM's instruction for unsigned ones."""
    unsigned = builder.zext(builder.xor(steps, all_of(_BYTES, 128)), _WHOLES)
    return builder.sub(call(builder, f"llvm.vector.reduce.add.v{GROUP}i32", _INT, unsigned),
                       ir.Constant(_INT, 128 * GROUP))


@kernel
def _quantise_rest(x, count, room, target, told, limit, zero, kind):
    """Quantise a group of fewer than 64 numbers, padded with zeros in the scratch `room`."""
    for i in range(count):
        store(room, i, load(x, i, kind), FLOAT32)
    fill(room + count * 4, GROUP - count, np.float32(0))
    _quantise_group(room, target, told, limit, zero, FLOAT32)


@kernel
def _quantise_block(words, first, rows, target, room, limit, zero, kind):
    """Rows `first ... first + rows` of x as groups of bytes, then as groups of scales and corrections."""
    depth = load(words, DEPTH, INT64)
    groups = (depth + GROUP - 1) // GROUP
    told = target + groups * rows * GROUP
    for row in range(rows):
        x = load(words, X, INT64) + (first + row) * depth * bytes_of(kind)
        for group in range(depth // GROUP):
            place = group * rows + row
            _quantise_group(
                x + group * GROUP * bytes_of(kind), target + place * GROUP, told + place * 8, limit, zero, kind)
        if depth % GROUP:
            place, done = (groups - 1) * rows + row, depth // GROUP * GROUP
            _quantise_rest(x + done * bytes_of(kind), depth - done, room, target + place * GROUP, told + place * 8,
                           limit, zero, kind)


@kernel
def _multiply(words, room, first, row, panel, following, kind, weight_kind, record):
    """Multiply one tile: a panel with rows from `first + row` on; returns the number of rows.

    Meanwhile it prefetches its share of the panel at `following`; a tile that is the only one, its own panel, a little
    ahead.  A panel wider than the rest of the output is stored to the scratch `room` first.
    """
    block, stored = load(words, BLOCK, INT64), load(words, STORED, INT64)
    groups, rows = (load(words, DEPTH, INT64) + GROUP - 1) // GROUP, min(block, load(words, TOKENS, INT64) - first)
    height = 1
    for size in HEIGHTS:
        if size <= rows - row:
            height = size
    tiles, weight = (rows + TALLEST - 1) // TALLEST, load(words, WEIGHT, INT64) + panel * groups * record
    share = (record // STEPS_OF_A_GROUP + tiles - 1) // tiles
    asked = weight + AHEAD if tiles == 1 else following + row // TALLEST * share * STEPS_OF_A_GROUP * groups
    is_gated = stored != load(words, OUTPUTS, INT64)
    width = GATES if is_gated else COLUMNS
    left, size = stored - panel * width, bytes_of(kind)
    place, stride = load(words, OUT, INT64) + ((first + row) * stored + panel * width) * size, stored * size
    target, step = (place, stride) if left >= width else (room, width * size)
    held = room + ROOM_BYTES
    int_gemm(height, weight, held + row * GROUP, held + groups * rows * GROUP + row * 8, rows, groups, target, step,
             load(words, BIAS, INT64) + panel * COLUMNS * 4, is_gated, asked, share, weight_kind, kind)
    if left < width:
        for i in range(height):
            for column in range(left):
                store(place + i * stride, column, load(target + i * step, column, kind), kind)
    return height


@kernel
def _product(words, kind, weight_kind, numbers):
    limit, zero, record = numbers
    tokens, block, threads = load(words, TOKENS, INT64), load(words, BLOCK, INT64), load(words, THREADS, INT64)
    panels, blocks = (load(words, OUTPUTS, INT64) + COLUMNS - 1) // COLUMNS, (tokens + block - 1) // block
    panel_bytes = (load(words, DEPTH, INT64) + GROUP - 1) // GROUP * record
    thread = fetch_add(words + THREAD_COUNTER, 1)
    room = load(words, SCRATCH, INT64) + thread * load(words, SCRATCH_BYTES, INT64)
    held = -1
    item = pop(words, thread, threads, blocks * panels)
    while item != NOTHING:
        first, panel = item // panels * block, item % panels
        rows = min(block, tokens - first)
        if first != held:
            _quantise_block(words, first, rows, room + ROOM_BYTES, room, limit, zero, kind)
            held = first
        after = upcoming(words, thread, threads, blocks * panels)
        following = load(words, WEIGHT, INT64) + (panel if after == NOTHING else after % panels) * panel_bytes
        row = 0
        while row < rows:
            row += _multiply(words, room, first, row, panel, following, kind, weight_kind, record)
        item = pop(words, thread, threads, blocks * panels)


def _integer_8_bfloat16(words):
    _product(words, BFLOAT16, INTEGER_8, NUMBERS_8)


def _integer_8_float32(words):
    _product(words, FLOAT32, INTEGER_8, NUMBERS_8)


def _integer_4_bfloat16(words):
    _product(words, BFLOAT16, INTEGER_4, NUMBERS_4)


def _integer_4_float32(words):
    _product(words, FLOAT32, INTEGER_4, NUMBERS_4)


def _vnni_8_bfloat16(words):
    _product(words, BFLOAT16, VNNI_8, NUMBERS_8)


def _vnni_8_float32(words):
    _product(words, FLOAT32, VNNI_8, NUMBERS_8)


def _vnni_4_bfloat16(words):
    _product(words, BFLOAT16, VNNI_4, NUMBERS_4)


def _vnni_4_float32(words):
    _product(words, FLOAT32, VNNI_4, NUMBERS_4)


PRODUCT = {  # by bits, type of the activations, and path
    (8, torch.bfloat16, "integer"): Compiled(_integer_8_bfloat16, "void(int64)"),
    (8, torch.float32, "integer"): Compiled(_integer_8_float32, "void(int64)"),
    (4, torch.bfloat16, "integer"): Compiled(_integer_4_bfloat16, "void(int64)"),
    (4, torch.float32, "integer"): Compiled(_integer_4_float32, "void(int64)"),
    (8, torch.bfloat16, "vnni"): Compiled(_vnni_8_bfloat16, "void(int64)"),
    (8, torch.float32, "vnni"): Compiled(_vnni_8_float32, "void(int64)"),
    (4, torch.bfloat16, "vnni"): Compiled(_vnni_4_bfloat16, "void(int64)"),
    (4, torch.float32, "vnni"): Compiled(_vnni_4_float32, "void(int64)"),
}


def quantise(weight: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """`weight [out, in]` as integers `[out, groups, 64]` (int8) and their scales `[out, groups]` (float32)."""
    padded = F.pad(weight, (0, -weight.shape[1] % GROUP)).float().unflatten(1, (-1, GROUP))
    largest = padded.abs().amax(dim=2, keepdim=True).clamp_min(1e-30)
    best, least = None, torch.full_like(largest, torch.inf)
    for clip in CLIPS[bits]:
        scale = largest * (clip / STEPS[bits])
        steps = (padded / scale).round_().clamp_(-STEPS[bits] - (bits == 4), STEPS[bits])
        error = (steps * scale - padded).square_().sum(dim=2, keepdim=True)
        better = error < least
        least = torch.where(better, error, least)
        best = (steps, scale) if best is None else tuple(
            torch.where(better, new, old) for new, old in zip((steps, scale), best, strict=True))
    steps, scale = best
    return steps.to(torch.int8), scale.squeeze(2)


def pack(steps: Tensor, scales: Tensor, bits: int) -> Tensor:
    """The result of `quantise` as the panels that `gemm_int.py` reads: `[panels, groups, bytes]`."""
    outputs, groups = scales.shape
    more = -outputs % COLUMNS
    unsigned = F.pad(steps + ZERO[bits], (0, 0, 0, 0, 0, more), value=ZERO[bits]).to(torch.uint8)
    quads = unsigned.view(-1, COLUMNS, groups, GROUP // 4, 4).permute(0, 2, 3, 1, 4)
    if bits == 4:
        quads = quads[:, :, 0::2] | quads[:, :, 1::2] << 4
    told = F.pad(scales, (0, 0, 0, more)).view(-1, COLUMNS, groups).transpose(1, 2).contiguous()
    return torch.cat((quads.flatten(2), told.view(torch.uint8)), dim=2)


def weight_bytes(outputs: int, depth: int, bits: int) -> int:
    """Bytes of a packed `weight [outputs, depth]`."""
    return -(-outputs // COLUMNS) * -(-depth // GROUP) * RECORD[bits]


def int_linear(weight: Tensor, bias: Tensor | None, bits: int, path: str, launcher: KernelLauncher) -> Linear:
    """`weight [out, in]`, quantised to `bits` and packed for many products, by one of `paths.QUANTISED`."""
    return _packed(weight, bias, (bits, path), len(weight), launcher)


def int_gated(weight: Tensor, bias: Tensor | None, bits: int, path: str, launcher: KernelLauncher) -> Linear:
    """silu(gate) * up of products with `weight [gates, then as many of what they gate; in]`."""
    added = None if bias is None else paired(bias, GATES)
    return _packed(paired(weight, GATES), added, (bits, path), len(weight) // 2, launcher)


def _packed(weight: Tensor, bias: Tensor | None, how: tuple[int, str], stored: int, launcher: KernelLauncher) -> Linear:
    """Products with `weight`, whose outputs yield `stored` numbers."""
    (outputs, depth), (bits, path) = weight.shape, how
    panels = pack(*quantise(weight, bits), bits)
    added = whole(torch.zeros(outputs) if bias is None else bias.float(), COLUMNS)
    code, groups = PRODUCT[bits, weight.dtype, path], panels.shape[1]
    row_bytes = groups * (GROUP + 8)
    most = max(TALLEST, BLOCK_BYTES // row_bytes // TALLEST * TALLEST)
    floats = (4 * TALLEST * COLUMNS + most * row_bytes + 63) // 64 * 16

    def product(x: Tensor) -> Tensor:
        x = x.contiguous()
        out = launcher.empty((*x.shape[:-1], stored), x.dtype)
        tokens = x.numel() // depth
        launcher.give(
            x.data_ptr(), panels.data_ptr(), added.data_ptr(), out.data_ptr(), tokens, depth, outputs, stored,
            rows_of_a_block(tokens, most, launcher.threads), launcher.scratch(launcher.threads * floats), floats * 4,
            launcher.threads,
        )
        launcher.together(code)
        return out

    return product
