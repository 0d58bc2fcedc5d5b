"""Products of bfloat16 in half precision, for processors that multiply halves (AVX-512 FP16) but no faster bfloat16.

A half has three bits more than a bfloat16 and a far smaller range.  So every output's weights, and every token's
numbers, are shifted by a power of two, which loses nothing but what is below 2**-28 of the largest.  A vector holds
twice as many halves as float32, and nothing is widened on its way.  The rounding error of adding in halves is half of
that of rounding a result to bfloat16 (see `gemm_fp16.py`).

    weights       panels of 64 outputs, or of 32 gates and what they gate
                  [ half[depth, 64] | scale float32[64] | bias float32[64] ]
    activations   chains x rows x [ half, the same half ][32]: each pair is broadcast by the load itself
                  scale float32[rows]

A row's result does not depend on the rows beside it, bit for bit.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slotwise.kernels.cpu.compiled import Compiled
from slotwise.kernels.cpu.gemm_fp16 import (
    CHAIN,
    GATES,
    PAIR_BYTES,
    PANEL,
    ROOM_BYTES,
    STRIP_ROW_BYTES,
    SUMS_BYTES,
    TALLEST,
    TILE_BYTES,
    finish_gated_rows,
    finish_rows,
    fp16_gemm,
    largest_size,
    to_fp16,
)
from slotwise.kernels.cpu.launcher import HEADER, THREAD_COUNTER, KernelLauncher
from slotwise.kernels.cpu.packing import paired, whole
from slotwise.kernels.cpu.parts import kernel
from slotwise.kernels.cpu.processor import has
from slotwise.kernels.cpu.simd import BFLOAT16, FLOAT32, INT64, ZERO, fetch_add, fill, float_of, load, store
from slotwise.kernels.cpu.work_queue import NOTHING, pop, rows_of_a_block, upcoming
from slotwise.kernels.interface import Linear

TOP = 4  # numbers are shifted below 2**TOP: the sum of a group stays below 2**15, and a half holds nearly 2**16
SMALLEST_EXPONENT = TOP  # biased exponent of a bfloat16: the smallest for which the shift is still a float
AHEAD = 16384  # bytes of weights between what is read and what is prefetched, where a panel is read but once
PACKED_AT_ONCE = 1 << 20  # weights, which stay in a cache from one of torch's operators to the next
BLOCK_PAIRS = 1 << 16  # of rows packed at once: an eighth of the second-level cache of such processors

X, WEIGHT, OUT, TOKENS, DEPTH, OUTPUTS, STORED, BLOCK, SCRATCH, SCRATCH_BYTES, THREADS = range(HEADER, HEADER + 11)


def has_fp16_gemm() -> bool:
    """Whether this processor has fp16 instructions."""
    return has("avx512fp16")


@kernel
def _pack_fp16_block(words, first, rows, target, scales):
    """Pack rows `first ... first + rows` of x as strips of pairs, and store each row's scale.

    A row with an infinity or a NaN is shifted like one of very large numbers, and keeps both.
    """
    depth = load(words, DEPTH, INT64)
    for row in range(rows):
        x = load(words, X, INT64) + (first + row) * depth * 2
        exponent = max(largest_size(x, depth) >> 7, SMALLEST_EXPONENT)
        shift = float_of((2 * 127 + TOP - 1 - exponent) << 23)
        store(scales, row, float_of((exponent - TOP + 1) << 23), FLOAT32)
        for start in range(0, depth, CHAIN):
            strip = target + (start * rows + row * CHAIN) * PAIR_BYTES
            to_fp16(x + start * 2, strip, shift)
            to_fp16(x + start * 2 + 32, strip + 64, shift)


@kernel
def _store_tile(words, sums, scales, of_outputs, first, rows, panel):
    """Store a tile's sums to the output; a panel of gates and what they gate yields half as many numbers.

    A panel wider than the rest of the output is stored to scratch first, where groups were added.
    """
    stored = load(words, STORED, INT64)
    is_gated = stored != load(words, OUTPUTS, INT64)
    width = GATES if is_gated else PANEL
    place, stride = load(words, OUT, INT64) + (first * stored + panel * width) * 2, stored * 2
    left = stored - panel * width
    target, step = (place, stride) if left >= width else (sums + SUMS_BYTES, width * 2)
    if is_gated:
        finish_gated_rows(sums, rows, scales, of_outputs, target, step)
    else:
        finish_rows(sums, rows, scales, of_outputs, target, step)
    if left < width:
        for row in range(rows):
            for i in range(left):
                store(place + row * stride, i, load(target + row * step, i, BFLOAT16), BFLOAT16)


@kernel
def _scales(words, sums):
    """Address of a thread's row scales: behind its packed rows, which come behind its sums."""
    return sums + TILE_BYTES + load(words, BLOCK, INT64) * load(words, DEPTH, INT64) * PAIR_BYTES


@kernel
def _multiply(words, sums, first, rows, panel, following, is_cold):
    """Multiply one panel with a block of rows, tile by tile, while the panel at `following` is prefetched.

    If this panel was not prefetched, its first tile prefetches it; a single tile always does.
    """
    depth = load(words, DEPTH, INT64)
    weight_bytes = depth * PANEL * 2
    strips, scales = sums + TILE_BYTES, _scales(words, sums)
    weight = load(words, WEIGHT, INT64) + panel * (weight_bytes + 2 * ROOM_BYTES)
    tiles = (rows + TALLEST - 1) // TALLEST
    share = (2 * PANEL + tiles - 1) // tiles
    row = 0
    for tile in range(tiles):
        count = (rows - row + tiles - tile - 1) // (tiles - tile)  # equal heights: a low tile costs nearly as much
        asked, step = following + tile * share * depth, share
        if tiles == 1 or (tile == 0 and is_cold):
            asked, step = weight + AHEAD, 2 * PANEL
        fill(sums, TILE_BYTES // 4, ZERO)
        fp16_gemm(count, strips + row * STRIP_ROW_BYTES, rows * STRIP_ROW_BYTES, weight, depth // CHAIN, sums, asked,
                  step)
        _store_tile(words, sums, scales + row * 4, weight + weight_bytes, first + row, count, panel)
        row += count


def _product(words):
    tokens, depth, block = load(words, TOKENS, INT64), load(words, DEPTH, INT64), load(words, BLOCK, INT64)
    panels, threads = (load(words, OUTPUTS, INT64) + PANEL - 1) // PANEL, load(words, THREADS, INT64)
    blocks, panel_bytes = (tokens + block - 1) // block, depth * PANEL * 2 + 2 * ROOM_BYTES
    thread = fetch_add(words + THREAD_COUNTER, 1)
    sums = load(words, SCRATCH, INT64) + thread * load(words, SCRATCH_BYTES, INT64)
    held, after = -1, NOTHING
    item = pop(words, thread, threads, blocks * panels)
    while item != NOTHING:
        first, panel, is_cold = item // panels * block, item % panels, item != after
        rows = min(block, tokens - first)
        if first != held:
            _pack_fp16_block(words, first, rows, sums + TILE_BYTES, _scales(words, sums))
            held = first
        after = upcoming(words, thread, threads, blocks * panels)
        following = load(words, WEIGHT, INT64) + (panel if after == NOTHING else after % panels) * panel_bytes
        _multiply(words, sums, first, rows, panel, following, is_cold)
        item = pop(words, thread, threads, blocks * panels)


PRODUCT = Compiled(_product, "void(int64)")


def fits(weight: Tensor) -> bool:
    """Whether `weight [out, in]` can be multiplied here: its depth is whole chains."""
    return weight.dtype == torch.bfloat16 and weight.shape[1] % CHAIN == 0


def fp16_linear(weight: Tensor, bias: Tensor | None, launcher: KernelLauncher) -> Linear:
    """`weight [out, in]`, which `fits`, packed for many products."""
    outputs = len(weight)
    return _packed(whole(weight, PANEL), None if bias is None else whole(bias, PANEL), outputs, outputs, launcher)


def fp16_gated(weight: Tensor, bias: Tensor | None, launcher: KernelLauncher) -> Linear:
    """silu(gate) * up of products with `weight [gates, then as many of what they gate; in]`, which `fits`."""
    outputs = len(weight)
    return _packed(paired(weight, GATES), None if bias is None else paired(bias, GATES), outputs, outputs // 2,
                   launcher)


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


def _packed(weight: Tensor, bias: Tensor | None, outputs: int, stored: int, launcher: KernelLauncher) -> Linear:
    """Products with whole panels of `outputs`, which yield `stored` numbers."""
    depth, panels = weight.shape[1], pack(weight, bias)
    most = max(TALLEST, BLOCK_PAIRS // depth // TALLEST * TALLEST)
    floats = (TILE_BYTES // 4 + most + most * depth + 15) // 16 * 16

    def product(x: Tensor) -> Tensor:
        x = x.contiguous()
        out = launcher.empty((*x.shape[:-1], stored), x.dtype)
        tokens = x.numel() // depth
        launcher.give(
            x.data_ptr(), panels.data_ptr(), out.data_ptr(), tokens, depth, outputs, stored,
            rows_of_a_block(tokens, most, launcher.threads), launcher.scratch(launcher.threads * floats), floats * 4,
            launcher.threads,
        )
        launcher.together(PRODUCT)
        return out

    return product
