"""Products of bfloat16 as it is, for processors whose instructions multiply its pairs (AVX-512 BF16): `gemm_bf16.py`.

Neither weights nor activations are widened or scaled, and sums are float32.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from slotwise.kernels.cpu.gemm_bf16 import (
    GATES,
    LINE_BYTES,
    PANEL,
    STRIP,
    STRIP_PAIRS,
    STRIP_ROW_BYTES,
    TALLEST,
    bf16_gemm,
    copy_line,
)
from slotwise.kernels.cpu.jit.compiler import Compiled, kernel
from slotwise.kernels.cpu.launcher import THREAD_COUNTER, KernelLauncher
from slotwise.kernels.cpu.linear import (
    BIAS,
    BLOCK,
    DEPTH,
    OUT,
    OUTPUTS,
    SCRATCH,
    SCRATCH_BYTES,
    STORED,
    THREADS,
    TOKENS,
    WEIGHT,
    Packed,
    X,
    in_panels,
)
from slotwise.kernels.cpu.processor import has
from slotwise.kernels.cpu.simd import BFLOAT16, INT64, ZERO, fetch_add, load, store
from slotwise.kernels.cpu.work_queue import NOTHING, pop, rows_of_a_block, upcoming
from slotwise.kernels.interface import Linear

ROOM_BYTES = TALLEST * PANEL * 2  # of a tile's results, where the output is narrower than a panel
AHEAD = 8192  # bytes of weights between what is read and what is prefetched, where a panel is read but once
BLOCK_BYTES = 1 << 18  # of rows packed at once: a quarter of the second-level cache of such processors


def has_bf16_gemm() -> bool:
    """Whether this processor multiplies pairs of bfloat16."""
    return has("avx512bf16")


@kernel
def _pack_block(words: int, first: int, rows: int, target: int) -> None:
    """Pack rows `first ... first + rows` of x as strips, the last one filled up with zeros."""
    depth = load(words, DEPTH, INT64)
    whole = depth // STRIP * STRIP
    for row in range(rows):
        x = load(words, X, INT64) + (first + row) * depth * 2
        strip = target + row * STRIP_ROW_BYTES
        for start in range(0, whole, STRIP):
            copy_line(x + start * 2, strip)
            strip += rows * STRIP_ROW_BYTES
        if whole < depth:
            for i in range(STRIP):
                store(strip, i, load(x, whole + i, BFLOAT16) if whole + i < depth else ZERO, BFLOAT16)


@kernel
def _multiply(words: int, room: int, first: int, rows: int, panel: int, following: int, is_cold: int) -> None:
    """Multiply one panel with a block of rows, tile by tile, while the panel at `following` is prefetched.

    If this panel was not prefetched, its first tile prefetches it; a single tile always does.  A panel wider than the
    rest of the output is stored to the scratch `room` first.
    """
    stored, strips = load(words, STORED, INT64), (load(words, DEPTH, INT64) + STRIP - 1) // STRIP
    is_gated = stored != load(words, OUTPUTS, INT64)
    width = GATES if is_gated else PANEL
    left, stride = stored - panel * width, stored * 2
    weight = load(words, WEIGHT, INT64) + panel * strips * STRIP_PAIRS * LINE_BYTES
    bias = load(words, BIAS, INT64) + panel * PANEL * 4
    tiles = (rows + TALLEST - 1) // TALLEST
    share = (LINE_BYTES + tiles - 1) // tiles
    row = 0
    for tile in range(tiles):
        count = (rows - row + tiles - tile - 1) // (tiles - tile)  # equal heights: a low tile costs nearly as much
        asked, step = following + tile * share * strips * STRIP_PAIRS, share
        if tiles == 1 or (tile == 0 and is_cold):
            asked, step = weight + AHEAD, LINE_BYTES
        place = load(words, OUT, INT64) + ((first + row) * stored + panel * width) * 2
        target, target_stride = (place, stride) if left >= width else (room, width * 2)
        bf16_gemm(count, weight, room + ROOM_BYTES + row * STRIP_ROW_BYTES, rows * STRIP_ROW_BYTES, strips, target,
                  target_stride, bias, is_gated, asked, step)
        if left < width:
            for i in range(count):
                for column in range(left):
                    store(place + i * stride, column, load(target + i * target_stride, column, BFLOAT16), BFLOAT16)
        row += count


def _product(words: int) -> None:
    tokens, depth, block = load(words, TOKENS, INT64), load(words, DEPTH, INT64), load(words, BLOCK, INT64)
    panels, threads = (load(words, OUTPUTS, INT64) + PANEL - 1) // PANEL, load(words, THREADS, INT64)
    blocks, panel_bytes = (tokens + block - 1) // block, (depth + STRIP - 1) // STRIP * STRIP_PAIRS * LINE_BYTES
    thread = fetch_add(words + THREAD_COUNTER, 1)
    room = load(words, SCRATCH, INT64) + thread * load(words, SCRATCH_BYTES, INT64)
    held, after = -1, NOTHING
    item = pop(words, thread, threads, blocks * panels)
    while item != NOTHING:
        first, panel, is_cold = item // panels * block, item % panels, item != after
        rows = min(block, tokens - first)
        if first != held:
            _pack_block(words, first, rows, room + ROOM_BYTES)
            held = first
        after = upcoming(words, thread, threads, blocks * panels)
        following = load(words, WEIGHT, INT64) + (panel if after == NOTHING else after % panels) * panel_bytes
        _multiply(words, room, first, rows, panel, following, is_cold)
        item = pop(words, thread, threads, blocks * panels)


PRODUCT = Compiled(_product)


def pack(weight: Tensor) -> Tensor:
    """Whole panels of `weight [out, in]`: `[panels, strips * 16 pairs, 32 outputs, 2]`, with zeros behind the depth."""
    filled = F.pad(weight, (0, -weight.shape[1] % STRIP))
    return filled.view(-1, PANEL, filled.shape[1] // 2, 2).transpose(1, 2).contiguous()


def bf16_linear(weight: Tensor, bias: Tensor | None, launcher: KernelLauncher, *, is_gated: bool = False) -> Linear:
    """`weight [out, in]` of bfloat16, packed for many products.

    Args:
        is_gated: `weight [gates, then as many of what they gate; in]`; the result is silu(gate) * up.
    """
    outputs, depth = weight.shape
    panels = pack(in_panels(weight, PANEL, is_gated=is_gated))
    added = in_panels(torch.zeros(outputs) if bias is None else bias.float(), PANEL, is_gated=is_gated)
    row_bytes = -(-depth // STRIP) * STRIP_ROW_BYTES
    most = max(TALLEST, BLOCK_BYTES // row_bytes // TALLEST * TALLEST)
    packed = Packed(
        PRODUCT, panels, added, depth, panels.shape[0] * PANEL if is_gated else outputs,
        outputs // 2 if is_gated else outputs, lambda tokens: rows_of_a_block(tokens, most, launcher.threads),
        (ROOM_BYTES + most * row_bytes + 63) // 64 * 16)
    return packed.product(launcher)
