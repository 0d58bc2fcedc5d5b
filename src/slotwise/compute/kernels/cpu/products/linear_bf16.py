"""Products of bfloat16 by instructions that multiply its pairs (AVX-512 BF16), or by AMX's tiles.

Neither weights nor activations are widened or scaled, and sums are float32: `gemm_bf16.py`, `gemm_tiles.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import cast

import torch
import torch.nn.functional as F
from llvmlite import ir
from torch import Tensor

from slotwise.compute.kernels.cpu.jit.compiler import INT, intrinsic, kernel
from slotwise.compute.kernels.cpu.jit.llvm import LONG, read, write
from slotwise.compute.kernels.cpu.launcher import KernelLauncher
from slotwise.compute.kernels.cpu.processor import has
from slotwise.compute.kernels.cpu.products import gemm_bf16, gemm_tiles, tiles
from slotwise.compute.kernels.cpu.products.gemm import GATED, PLAIN
from slotwise.compute.kernels.cpu.products.gemm_bf16 import (
    LINE_BYTES,
    PANEL,
    STRIP,
    STRIP_PAIRS,
    STRIP_ROW_BYTES,
    Bf16Panel,
)
from slotwise.compute.kernels.cpu.products.linear import (
    DEPTH,
    Method,
    PanelLayout,
    PanelProduct,
    Tile,
    in_panels,
    panel_product,
    x_at,
)
from slotwise.compute.kernels.cpu.simd import BFLOAT16, INT64, ZERO, Real, bytes_of, load, store
from slotwise.compute.kernels.interface import Linear

# Bytes of weights between what is read and what is prefetched, where a panel is read only once.
AHEAD = 8192
# Bytes before the packed rows of a thread.
ROOM_BYTES = gemm_tiles.SCRATCH_BYTES + gemm_tiles.TALLEST * PANEL * 4
# Bytes of rows packed at once: a quarter of the second-level cache of such processors.
BLOCK_BYTES = 1 << 18

TILES: dict[str, tiles.Kind] = {"amx": tiles.HardwareTiles, "software tiles": tiles.SoftwareTiles}
"""The tiles of a path; `bf16` multiplies without tiles."""


def has_bf16_gemm() -> bool:
    """Whether this processor multiplies pairs of bfloat16."""
    return has("avx512bf16")


@functools.cache
def amx_obstacle() -> str:
    """Why this process cannot multiply by AMX; empty where it can, and a test product was right."""
    if why := tiles.obstacle("amx-bf16"):
        return why
    x, weight = (torch.arange(96 * rows).mul(7).remainder(17).sub(8).view(rows, 96) for rows in (40, 64))
    actual = bf16_linear(weight.bfloat16(), None, KernelLauncher(1), path="amx")(x.bfloat16())
    return "" if torch.equal(actual, (x @ weight.T).bfloat16()) else "its products are wrong here"


def gemm_by(path: str) -> Callable[..., None]:
    """`gemm(height, *panel)`: the weights of a `Bf16Panel` times `height` rows, plus bias.

    Meanwhile memory from `asked` on is prefetched.  Rows at `target` have 32 numbers, or 16 where the panel has gates.
    """
    def gemm(builder: ir.IRBuilder, height: ir.Value, *addresses: ir.Value) -> None:
        panel = Bf16Panel._make(addresses)
        if path in TILES:
            gemm_tiles.emit_gemm(builder, TILES[path](builder, panel.scratch), height, panel)
        else:
            gemm_bf16.emit_gemm(builder, height, panel)

    return cast("Callable[..., None]", intrinsic(gemm, *[INT] * (1 + len(Bf16Panel._fields))))


def _copy_line(builder: ir.IRBuilder, source: ir.Value, target: ir.Value) -> None:
    write(builder, read(builder, source, ir.VectorType(LONG, 8), 2), target)


copy_line: Callable[[int, int], None] = intrinsic(_copy_line, INT, INT)
"""`copy_line(source, target)`: copy 64 bytes."""


@kernel
def copy_to_strips(x: int, count: int, strip: int, strip_bytes: int, kind: Real) -> None:
    """Copy `count` numbers at `x` to strips, `strip_bytes` apart, of a cache line each; the last ends with zeros."""
    line = STRIP_ROW_BYTES // bytes_of(kind)
    whole = count // line * line
    for start in range(0, whole, line):
        copy_line(x + start * bytes_of(kind), strip)
        strip += strip_bytes
    if whole < count:
        for i in range(line):
            store(strip, i, load(x, whole + i, kind) if whole + i < count else ZERO, kind)


@kernel
def pack_rows(words: int, first: int, rows: int, strip_rows: int, target: int, kind: Real) -> None:
    """Pack rows `first ... first + rows` of x as strips of `strip_rows` rows."""
    for row in range(rows):
        copy_to_strips(x_at(words, first + row, kind), load(words, DEPTH, INT64), target + row * STRIP_ROW_BYTES,
                       strip_rows * STRIP_ROW_BYTES, kind)


@kernel
def pack_block(words: int, first: int, rows: int, strip_rows: int, target: int) -> None:
    """`pack_rows` of bfloat16."""
    pack_rows(words, first, rows, strip_rows, target, BFLOAT16)


def around(path: str) -> tuple[Callable[[int], None], ...]:
    """The functions that begin and end all that a thread multiplies."""
    return tiles.around(TILES[path]) if path in TILES else ()


def layout_of(path: str) -> PanelLayout:
    tallest, whole = (gemm_tiles.TALLEST, tiles.ROWS) if path in TILES else (gemm_bf16.TALLEST, 1)
    return PanelLayout(
        columns=PANEL, unit=STRIP, steps=STRIP_PAIRS, line=LINE_BYTES, behind=0, tallest=tallest, whole=whole,
        ahead=AHEAD, block=BLOCK_BYTES, row=STRIP_ROW_BYTES, results=gemm_tiles.SCRATCH_BYTES, rows=ROOM_BYTES, odd=1)


def _product(path: str) -> PanelProduct:
    gemm = gemm_by(path)

    @kernel
    def multiply(words: int, tile: Tile) -> None:
        strips = (load(words, DEPTH, INT64) + STRIP - 1) // STRIP
        gemm(tile.rows, tile.weights, tile.x + tile.first * STRIP_ROW_BYTES, tile.block_rows * STRIP_ROW_BYTES, strips,
             tile.target, tile.stride, tile.bias, tile.form, tile.asked, tile.step, tile.memory)

    name = f"bfloat16_by_{path.replace(' ', '_')}"
    return panel_product(name, Method(pack_block, multiply, *around(path)), layout_of(path), BFLOAT16)


PRODUCT = {path: _product(path) for path in ("bf16", *TILES)}


def pack(weight: Tensor) -> Tensor:
    """Whole panels of `weight [out, in]`: `[panels, strips * 16 pairs, 32 outputs, 2]`, with zeros after the depth."""
    filled = F.pad(weight, (0, -weight.shape[1] % STRIP))
    return filled.view(-1, PANEL, filled.shape[1] // 2, 2).transpose(1, 2).contiguous()


def bf16_linear(
    weight: Tensor, bias: Tensor | None, launcher: KernelLauncher, form: int = PLAIN, *, path: str = "bf16"
) -> Linear:
    """`weight [out, in]` of bfloat16, packed for many products by a `path` of `PRODUCT`.

    Args:
        form: of results, as in `gemm.py`; GATED: `weight [gates, then up projection; in]`.
    """
    outputs, depth = weight.shape
    panels = pack(in_panels(weight, PANEL, is_gated=form == GATED))
    added = in_panels(torch.zeros(outputs) if bias is None else bias.float(), PANEL, is_gated=form == GATED)
    return PRODUCT[path].linear(panels, added, (outputs, depth), launcher, form)
