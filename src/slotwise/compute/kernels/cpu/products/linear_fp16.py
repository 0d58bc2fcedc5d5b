"""Products of bfloat16 in half precision, for processors that multiply halves (AVX-512 FP16) but no faster bfloat16.

A half has three bits more than a bfloat16 and a far smaller range.  So every output's weights, and every token's
numbers, are scaled by a power of two, which loses only numbers below 2**-28 of the largest.  A vector holds
twice as many halves as float32, and nothing is widened on its way: `gemm_fp16.py`.

A row's result does not depend on the other rows, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from llvmlite import ir
from torch import Tensor

from slotwise.compute.kernels.cpu.jit.compiler import FLOAT, INT, intrinsic, kernel
from slotwise.compute.kernels.cpu.jit.llvm import (
    HALF,
    LONG,
    SHORT,
    SINGLE,
    WORD,
    Loop,
    all_of,
    call,
    number,
    read,
    spread,
    widened,
    write,
)
from slotwise.compute.kernels.cpu.launcher import KernelLauncher
from slotwise.compute.kernels.cpu.processor import has
from slotwise.compute.kernels.cpu.products import gemm_fp16
from slotwise.compute.kernels.cpu.products.gemm import GATED, PLAIN
from slotwise.compute.kernels.cpu.products.gemm_fp16 import (
    CHAIN,
    PAIR_BYTES,
    PANEL,
    ROOM_BYTES,
    STRIP_ROW_BYTES,
    SUMS_BYTES,
    TALLEST,
    TILE_BYTES,
)
from slotwise.compute.kernels.cpu.products.linear import (
    BLOCK,
    DEPTH,
    Method,
    PanelLayout,
    Tile,
    in_panels,
    panel_product,
    x_at,
)
from slotwise.compute.kernels.cpu.simd import BFLOAT16, FLOAT32, INT64, ZERO, fill, float_of, load, store
from slotwise.compute.kernels.interface import Linear

# Numbers are shifted below 2**TOP: the sum of a group stays below 2**15, and a half holds nearly 2**16.
TOP = 4
# The smallest biased exponent of a bfloat16 for which the shift is still a float.
SMALLEST_EXPONENT = TOP
# Bytes of weights between what is read and what is prefetched, where a panel is read only once.
AHEAD = 16384
# Weights packed at once: they stay in a cache from one of torch's operators to the next.
PACKED_AT_ONCE = 1 << 20
# Bytes of rows packed at once: an eighth of the second-level cache of such processors.
BLOCK_BYTES = 1 << 18

_SHORTS, _WORDS, _FLOATS = (ir.VectorType(kind, 16) for kind in (SHORT, WORD, SINGLE))


def has_fp16_gemm() -> bool:
    """Whether this processor has fp16 instructions."""
    return has("avx512fp16")


def _to_fp16(builder: ir.IRBuilder, source: ir.Value, target: ir.Value, factor: ir.Value) -> None:
    scaled = builder.fmul(widened(builder, read(builder, source, _SHORTS, 2)), spread(builder, factor, _FLOATS))
    halves = builder.fptrunc(scaled, ir.VectorType(HALF, 16))
    once = builder.zext(builder.bitcast(halves, _SHORTS), _WORDS)
    write(builder, builder.or_(once, builder.shl(once, all_of(_WORDS, 16))), target)


to_fp16: Callable[[int, int, float], None] = intrinsic(_to_fp16, INT, INT, FLOAT)
"""`to_fp16(source, target, factor)`: 16 bfloat16, times `factor`, as 16 pairs of the same half."""


def _largest_size(builder: ir.IRBuilder, address: ir.Value, count: ir.Value) -> ir.Value:
    lanes = ir.VectorType(SHORT, CHAIN)
    turns = Loop(builder, count, CHAIN, [all_of(lanes, 0)])
    place = builder.add(address, builder.shl(turns.index, number(1)))
    sizes = builder.and_(read(builder, place, lanes, 2), all_of(lanes, 0x7FFF))
    (largest,) = turns.close([call(builder, f"llvm.umax.v{CHAIN}i16", lanes, *turns.values, sizes)])
    return builder.zext(call(builder, f"llvm.vector.reduce.umax.v{CHAIN}i16", SHORT, largest), LONG)


largest_size: Callable[[int, int], int] = intrinsic(_largest_size, INT, INT, returns=INT)
"""`largest_size(address, count)`: the largest of `count` bfloat16 by magnitude, as bits without the sign; `count` is a
multiple of CHAIN."""


fp16_gemm: Callable[..., None] = intrinsic(gemm_fp16.emit_gemm, *[INT] * 8)
"""`fp16_gemm(height, a, strip_bytes, b, chains, sums, asked, step)`: `sums[height, 64] +=` the product of pairs from
`a` on, `strip_bytes` from chain to chain, and a panel at `b`.  Meanwhile memory from `asked` on is prefetched, `step`
bytes (up to two lines) per step of depth."""

finish_rows: Callable[[int, int, int, int, int, int, int], None] = intrinsic(gemm_fp16.emit_finish, *[INT] * 7)
"""`finish_rows(form, sums, rows, scales, of_outputs, target, stride)`: store rows of scaled sums plus bias, in
a form of `gemm.py`.

`scales` has a float32 per row.  At `of_outputs` lie the panel's scales, then its bias.  `stride` is in bytes.
"""


@kernel
def _scales(words: int, strips: int) -> int:
    """Address of the scales of a thread's packed rows, which follow the rows."""
    return strips + load(words, BLOCK, INT64) * load(words, DEPTH, INT64) * PAIR_BYTES


@kernel
def _pack_block(words: int, first: int, rows: int, _padded: int, target: int) -> None:
    """Pack rows `first ... first + rows` of x as strips of pairs, and store each row's scale.

    A row with an infinity or a NaN is shifted like one of very large numbers, and keeps both.
    """
    depth, scales = load(words, DEPTH, INT64), _scales(words, target)
    for row in range(rows):
        x = x_at(words, first + row, BFLOAT16)
        exponent = max(largest_size(x, depth) >> 7, SMALLEST_EXPONENT)
        shift = float_of((2 * 127 + TOP - 1 - exponent) << 23)
        store(scales, row, float_of((exponent - TOP + 1) << 23), FLOAT32)
        for start in range(0, depth, CHAIN):
            strip = target + (start * rows + row * CHAIN) * PAIR_BYTES
            to_fp16(x + start * 2, strip, shift)
            to_fp16(x + start * 2 + 32, strip + 64, shift)


@kernel
def _multiply(words: int, tile: Tile) -> None:
    """Sums lie in the thread's memory, then the sums of a group, and results that do not fit into the output."""
    depth, sums = load(words, DEPTH, INT64), tile.memory
    fill(sums, TILE_BYTES // 4, ZERO)
    fp16_gemm(tile.rows, tile.x + tile.first * STRIP_ROW_BYTES, tile.block_rows * STRIP_ROW_BYTES, tile.weights,
              depth // CHAIN, sums, tile.asked, tile.step)
    finish_rows(tile.form, sums, tile.rows, _scales(words, tile.x) + tile.first * 4,
                tile.weights + depth * PANEL * 2, tile.target, tile.stride)


_LAYOUT = PanelLayout(
    columns=PANEL, unit=CHAIN, steps=CHAIN, line=2 * PANEL, behind=2 * ROOM_BYTES, tallest=TALLEST, whole=1,
    ahead=AHEAD, block=BLOCK_BYTES, row=STRIP_ROW_BYTES + 4, results=SUMS_BYTES, rows=2 * SUMS_BYTES)
PRODUCT = panel_product("bfloat16_in_halves", Method(_pack_block, _multiply), _LAYOUT, BFLOAT16)


def fits(weight: Tensor) -> bool:
    """Whether `weight [out, in]` can be multiplied here: its depth is whole chains."""
    return weight.dtype == torch.bfloat16 and weight.shape[1] % CHAIN == 0


def fp16_linear(weight: Tensor, bias: Tensor | None, launcher: KernelLauncher, form: int = PLAIN) -> Linear:
    """`weight [out, in]`, which `fits`, packed for many products.

    Args:
        form: of results, as in `gemm.py`; GATED: `weight [gates, then up projection; in]`.
    """
    outputs, depth = weight.shape
    panels = pack(in_panels(weight, PANEL, is_gated=form == GATED),
                  None if bias is None else in_panels(bias, PANEL, is_gated=form == GATED))
    return PRODUCT.linear(panels, None, (outputs, depth), launcher, form)


def pack(weight: Tensor, bias: Tensor | None) -> Tensor:
    """Whole panels of `weight [out, in]` as halves, their scales and bias, `[panels, bytes]`."""
    outputs, depth = weight.shape
    panels = torch.empty(outputs // PANEL, PANEL * (2 * depth + 4 + 4), dtype=torch.uint8)
    halves, scales, added = panels.split([PANEL * 2 * depth, PANEL * 4, PANEL * 4], dim=1)
    together = max(1, PACKED_AT_ONCE // (PANEL * depth))
    places = halves.view(torch.float16).unflatten(1, (depth, PANEL)).split(together)
    worth = scales.view(torch.float32).split(together)
    for place, scale, piece in zip(places, worth, weight.split(together * PANEL), strict=True):
        _, exponents = torch.frexp(piece.abs().amax(dim=1).float().clamp_min(2.0**-100))
        up, down = (torch.ldexp(torch.ones(len(piece)), shift) for shift in (TOP - exponents, exponents - TOP))
        shifted = piece.float().mul_(up[:, None]).half()
        place.copy_(shifted.view(-1, PANEL, depth).transpose(1, 2))
        scale.copy_(down.view(-1, PANEL))
    added.view(torch.float32).copy_(torch.zeros(()) if bias is None else bias.view(-1, PANEL))
    return panels
