"""Products of bfloat16 as it is: by instructions that multiply its pairs (AVX-512 BF16), or by AMX's tiles.

Neither weights nor activations are widened or scaled, and sums are float32: `gemm_bf16.py`, `gemm_tiles.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NewType, cast

import numpy as np
import torch
import torch.nn.functional as F
from llvmlite import ir
from numba import types
from torch import Tensor

from slotwise.kernels.cpu import gemm_bf16, gemm_tiles, tiles
from slotwise.kernels.cpu.gemm_bf16 import GATES, LINE_BYTES, PANEL, STRIP, STRIP_PAIRS, STRIP_ROW_BYTES, Panel
from slotwise.kernels.cpu.jit.compiler import kernel, specialised
from slotwise.kernels.cpu.jit.intrinsic import INT, KIND, ElementType, intrinsic
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
from slotwise.kernels.cpu.llvm import LONG, read, write
from slotwise.kernels.cpu.processor import has
from slotwise.kernels.cpu.simd import BFLOAT16, INT64, ZERO, fetch_add, load, store
from slotwise.kernels.cpu.work_queue import NOTHING, pop, rows_of_a_block, upcoming
from slotwise.kernels.interface import Linear

AHEAD = 8192  # bytes of weights between what is read and what is prefetched, where a panel is read but once
ROOM_BYTES = gemm_tiles.SCRATCH_BYTES + gemm_tiles.TALLEST * PANEL * 2  # before the packed rows of a thread
BLOCK_BYTES = 1 << 18  # of rows packed at once: a quarter of the second-level cache of such processors

Multiplier = NewType("Multiplier", np.generic)
PAIRS, HARDWARE, SOFTWARE = (Multiplier(kind(0)) for kind in (np.uint8, np.int8, np.uint16))
TILES: dict[ElementType, Callable[[ir.IRBuilder, ir.Value], tiles.Tiles]] = {
    types.int8: tiles.HardwareTiles, types.uint16: tiles.SoftwareTiles}
"""By the type of a `Multiplier`; that of PAIRS uses none."""

TILE = {"bf16": (gemm_bf16.TALLEST, 1), "amx": (gemm_tiles.TALLEST, tiles.ROWS)}
"""Rows multiplied at once, and what a block of rows is padded to a multiple of, by path."""


def has_bf16_gemm() -> bool:
    """Whether this processor multiplies pairs of bfloat16."""
    return has("avx512bf16")


@functools.cache
def amx_obstacle() -> str:
    """Why this process cannot multiply by AMX; empty where it can, and a product was right."""
    if why := tiles.obstacle():
        return why
    x, weight = (torch.arange(96 * rows).mul(7).remainder(17).sub(8).view(rows, 96) for rows in (40, 64))
    actual = bf16_linear(weight.bfloat16(), None, KernelLauncher(1), path="amx")(x.bfloat16())
    return "" if torch.equal(actual, (x @ weight.T).bfloat16()) else "its products are wrong here"


def _gemm(builder: ir.IRBuilder, height: ir.Value, *arguments: ir.Value) -> None:
    *addresses, multiplier = arguments
    panel = Panel._make(addresses)
    if multiplier in TILES:
        gemm_tiles.emit_gemm(builder, TILES[multiplier](builder, panel.scratch), height, panel)
    else:
        gemm_bf16.emit_gemm(builder, height, panel)


bf16_gemm: Callable[..., None] = intrinsic(_gemm, *[INT] * (1 + len(Panel._fields)), KIND)
"""`bf16_gemm(height, *panel, multiplier)`: the weights of a `Panel` times `height` rows, plus bias, to bfloat16.

Meanwhile memory from `asked` on is prefetched.  Rows at `target` have 32 numbers, or 16 where the panel `is_gated`.
"""


def _begin(builder: ir.IRBuilder, scratch: ir.Value, multiplier: ElementType) -> None:
    if multiplier in TILES:
        TILES[multiplier](builder, scratch).begin()


def _end(builder: ir.IRBuilder, scratch: ir.Value, multiplier: ElementType) -> None:
    if multiplier in TILES:
        TILES[multiplier](builder, scratch).end()


begin, end = (cast("Callable[[int, Multiplier], None]", intrinsic(emit, INT, KIND)) for emit in (_begin, _end))
"""`begin(scratch, multiplier)`, `end(scratch, multiplier)`: around all uses of `bf16_gemm` by a thread."""


def _copy_line(builder: ir.IRBuilder, source: ir.Value, target: ir.Value) -> None:
    write(builder, read(builder, source, ir.VectorType(LONG, 8), 2), target)


copy_line: Callable[[int, int], None] = intrinsic(_copy_line, INT, INT)
"""`copy_line(source, target)`: copy 64 bytes."""


@kernel
def _pack_block(words: int, first: int, rows: int, padded: int, target: int) -> None:
    """Pack rows `first ... first + rows` of x as strips of `padded` rows, the last strip filled up with zeros."""
    depth = load(words, DEPTH, INT64)
    whole = depth // STRIP * STRIP
    for row in range(rows):
        x = load(words, X, INT64) + (first + row) * depth * 2
        strip = target + row * STRIP_ROW_BYTES
        for start in range(0, whole, STRIP):
            copy_line(x + start * 2, strip)
            strip += padded * STRIP_ROW_BYTES
        if whole < depth:
            for i in range(STRIP):
                store(strip, i, load(x, whole + i, BFLOAT16) if whole + i < depth else ZERO, BFLOAT16)


@kernel
def _padded(rows: int, whole: int) -> int:
    return (rows + whole - 1) // whole * whole


@kernel
def _multiply(
    words: int, scratch: int, first: int, rows: int, panel: int, following: int, is_cold: int, multiplier: Multiplier,
    tile: tuple[int, int],
) -> None:
    """Multiply one panel with a block of rows, tile by tile, while the panel at `following` is prefetched.

    If this panel was not prefetched, its first tile prefetches it; a single tile always does.  A panel wider than the
    rest of the output is stored to scratch memory first.
    """
    tallest, whole = tile
    stored, strips = load(words, STORED, INT64), (load(words, DEPTH, INT64) + STRIP - 1) // STRIP
    is_gated = stored != load(words, OUTPUTS, INT64)
    width = GATES if is_gated else PANEL
    left, stride = stored - panel * width, stored * 2
    weight = load(words, WEIGHT, INT64) + panel * strips * STRIP_PAIRS * LINE_BYTES
    bias = load(words, BIAS, INT64) + panel * PANEL * 4
    results, x = scratch + gemm_tiles.SCRATCH_BYTES, scratch + ROOM_BYTES
    tiles = (rows + tallest - 1) // tallest
    share = (LINE_BYTES + tiles - 1) // tiles
    row = 0
    for turn in range(tiles):
        # Of equal heights, for a low tile costs nearly as much.
        count = min(_padded((rows - row + tiles - turn - 1) // (tiles - turn), whole), rows - row)
        asked, step = following + turn * share * strips * STRIP_PAIRS, share
        if tiles == 1 or (turn == 0 and is_cold):
            asked, step = weight + AHEAD, LINE_BYTES
        place = load(words, OUT, INT64) + ((first + row) * stored + panel * width) * 2
        target, target_stride = (place, stride) if left >= width else (results, width * 2)
        bf16_gemm(count, weight, x + row * STRIP_ROW_BYTES, _padded(rows, whole) * STRIP_ROW_BYTES, strips, target,
                  target_stride, bias, is_gated, asked, step, scratch, multiplier)
        if left < width:
            for i in range(count):
                for column in range(left):
                    store(place + i * stride, column, load(target + i * target_stride, column, BFLOAT16), BFLOAT16)
        row += count


@kernel
def _product(words: int, multiplier: Multiplier, tile: tuple[int, int]) -> None:
    tokens, depth, block = load(words, TOKENS, INT64), load(words, DEPTH, INT64), load(words, BLOCK, INT64)
    panels, threads = (load(words, OUTPUTS, INT64) + PANEL - 1) // PANEL, load(words, THREADS, INT64)
    blocks, panel_bytes = (tokens + block - 1) // block, (depth + STRIP - 1) // STRIP * STRIP_PAIRS * LINE_BYTES
    thread = fetch_add(words + THREAD_COUNTER, 1)
    scratch = load(words, SCRATCH, INT64) + thread * load(words, SCRATCH_BYTES, INT64)
    held, after = -1, NOTHING
    begin(scratch, multiplier)
    item = pop(words, thread, threads, blocks * panels)
    while item != NOTHING:
        first, panel, is_cold = item // panels * block, item % panels, item != after
        rows = min(block, tokens - first)
        if first != held:
            _pack_block(words, first, rows, _padded(rows, tile[1]), scratch + ROOM_BYTES)
            held = first
        after = upcoming(words, thread, threads, blocks * panels)
        following = load(words, WEIGHT, INT64) + (panel if after == NOTHING else after % panels) * panel_bytes
        _multiply(words, scratch, first, rows, panel, following, is_cold, multiplier, tile)
        item = pop(words, thread, threads, blocks * panels)
    end(scratch, multiplier)


PRODUCT = {
    "bf16": specialised(_product, PAIRS, TILE["bf16"]),
    "amx": specialised(_product, HARDWARE, TILE["amx"]),
    "software tiles": specialised(_product, SOFTWARE, TILE["amx"]),
}


def pack(weight: Tensor) -> Tensor:
    """Whole panels of `weight [out, in]`: `[panels, strips * 16 pairs, 32 outputs, 2]`, with zeros behind the depth."""
    filled = F.pad(weight, (0, -weight.shape[1] % STRIP))
    return filled.view(-1, PANEL, filled.shape[1] // 2, 2).transpose(1, 2).contiguous()


def bf16_linear(
    weight: Tensor, bias: Tensor | None, launcher: KernelLauncher, *, is_gated: bool = False, path: str = "bf16"
) -> Linear:
    """`weight [out, in]` of bfloat16, packed for many products by a `path` of `PRODUCT`.

    Args:
        is_gated: `weight [gates, then as many of what they gate; in]`; the result is silu(gate) * up.
    """
    outputs, depth = weight.shape
    panels = pack(in_panels(weight, PANEL, is_gated=is_gated))
    added = in_panels(torch.zeros(outputs) if bias is None else bias.float(), PANEL, is_gated=is_gated)
    row_bytes = -(-depth // STRIP) * STRIP_ROW_BYTES
    tallest, whole = TILE.get(path, TILE["amx"])
    most = max(tallest, BLOCK_BYTES // row_bytes // tallest * tallest)

    def block_rows(tokens: int) -> int:
        rows = rows_of_a_block(tokens, most, launcher.threads)
        return -(-rows // whole) * whole

    packed = Packed(
        PRODUCT[path], panels, added, depth, panels.shape[0] * PANEL if is_gated else outputs,
        outputs // 2 if is_gated else outputs, block_rows, (ROOM_BYTES + most * row_bytes + 63) // 64 * 16)
    return packed.product(launcher)
