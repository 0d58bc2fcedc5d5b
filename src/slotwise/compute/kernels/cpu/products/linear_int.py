"""Products of small integers: weights of 7 bits (`int8`) or 4 (`int4`), with a scale for each 64 inputs of an output.

`quantize.py` makes and packs the integers; `gemm_int.py` multiplies them by instructions on vectors,
`gemm_int_tiles.py` by AMX's tiles.  All paths give the same results, bit for bit.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import cast

import torch
from llvmlite import ir
from torch import Tensor

from slotwise.compute.kernels.cpu.jit.compiler import INT, KIND, intrinsic, kernel
from slotwise.compute.kernels.cpu.launcher import KernelLauncher
from slotwise.compute.kernels.cpu.processor import AVX512, has
from slotwise.compute.kernels.cpu.products import gemm_int, gemm_int_tiles, tiles
from slotwise.compute.kernels.cpu.products.gemm_int import STEPS_OF_A_GROUP, IntPanel, IntWeights
from slotwise.compute.kernels.cpu.products.linear import (
    DEPTH,
    Method,
    PanelLayout,
    PanelProduct,
    Tile,
    in_panels,
    panel_product,
)
from slotwise.compute.kernels.cpu.products.quantize import (
    COLUMNS,
    GROUP,
    LIMIT,
    RECORD,
    ZERO_WEIGHT,
    pack,
    quantize_block,
    quantize_weight,
)
from slotwise.compute.kernels.cpu.simd import BFLOAT16, FLOAT32, INT64, Real, float32, load
from slotwise.compute.kernels.interface import Linear

# Bytes of weights between what is read and what is prefetched, where a panel is read only once.
AHEAD = 8192
# Bytes of activations quantized at once: a part of a typical second-level cache.
BLOCK_BYTES = 1 << 18
TILES: dict[str, tiles.Kind] = {"amx_int8": tiles.HardwareTiles, "software tiles": tiles.SoftwareTiles}
"""The tiles of a path; `vnni` and `integer` multiply without tiles."""


def has_vnni_gemm() -> bool:
    """Whether this processor adds products of bytes in fours: AVX-512 VNNI, or AVX-VNNI where there is no AVX-512."""
    return has("avx512vnni") if AVX512 else has("avxvnni")


@functools.cache
def amx_obstacle() -> str:
    """Why this process cannot multiply by AMX; empty where it can, and a test product was right."""
    if why := tiles.obstacle("amx-int8"):
        return why
    x, weight = (torch.arange(96 * rows).mul(7).remainder(127).sub(63).view(rows, 96).bfloat16() for rows in (40, 64))
    x[:, ::32] = weight[:, ::32] = 63  # the largest of each group: numbers are quantized without loss
    actual = int_linear(weight, None, 8, "amx_int8", KernelLauncher(1))(x)
    return "" if torch.allclose(actual.float(), x.float() @ weight.float().T, rtol=2**-7) else (
        "its products are wrong here")


def _gemm(path: str, bits: int) -> Callable[..., None]:
    """`gemm(height, *panel, kind)`: the weights of an `IntPanel` times `height` rows, plus bias, to rows of `kind`.

    Meanwhile memory from `asked` on is prefetched.  Rows at `target` have 32 numbers, or 16 where the panel `is_gated`.
    """
    def gemm(builder: ir.IRBuilder, height: ir.Value, *arguments: ir.Value) -> None:
        *addresses, kind = arguments
        panel = IntPanel._make(addresses)
        if path in TILES:
            gemm_int_tiles.emit_gemm(builder, TILES[path](builder, panel.scratch), height, bits, panel, kind)
        else:
            gemm_int.emit_gemm(builder, height, IntWeights(bits, path == "vnni"), panel, kind)

    return cast("Callable[..., None]", intrinsic(gemm, *[INT] * (1 + len(IntPanel._fields)), KIND))


def _layout(path: str, bits: int) -> PanelLayout:
    tallest, whole, scratch = (gemm_int_tiles.TALLEST, tiles.ROWS, gemm_int_tiles.SCRATCH_BYTES) if path in TILES else (
        gemm_int.TALLEST, 1, 0)
    return PanelLayout(
        columns=COLUMNS, unit=GROUP, steps=STEPS_OF_A_GROUP, line=RECORD[bits] // STEPS_OF_A_GROUP, behind=0,
        tallest=tallest, whole=whole, ahead=AHEAD, block=BLOCK_BYTES, row=GROUP + 8, results=scratch,
        rows=scratch + 4 * tallest * COLUMNS)


def _product(path: str, bits: int, kind: Real) -> PanelProduct:
    gemm, limit, zero = _gemm(path, bits), float32(LIMIT[bits]), ZERO_WEIGHT[bits]

    @kernel
    def quantize_rows(words: int, first: int, rows: int, padded: int, target: int) -> None:
        """The block as groups of bytes, then of scales and corrections; scratch for a rest lies before the rows."""
        quantize_block(words, first, rows, padded, target, target - 4 * GROUP, limit, zero, kind)

    @kernel
    def multiply(words: int, tile: Tile) -> None:
        groups = (load(words, DEPTH, INT64) + GROUP - 1) // GROUP
        gemm(tile.rows, tile.weights, tile.x + tile.first * GROUP,
             tile.x + groups * tile.block_rows * GROUP + tile.first * 8, tile.block_rows, groups, tile.target,
             tile.stride, tile.bias, tile.is_gated, tile.asked, tile.step, tile.memory, kind)

    around = tiles.around(TILES[path]) if path in TILES else ()
    name = f"int{bits}_{type(kind).__name__}_by_{path.replace(' ', '_')}"
    return panel_product(name, Method(quantize_rows, multiply, *around), _layout(path, bits), kind)


PRODUCT = {
    (bits, dtype, path): _product(path, bits, kind)
    for path in ("vnni", "integer", *TILES) for bits in (8, 4)
    for dtype, kind in ((torch.bfloat16, BFLOAT16), (torch.float32, FLOAT32))}
"""The products, by bits, type of the activations, and path."""


def int_linear(
    weight: Tensor, bias: Tensor | None, bits: int, path: str, launcher: KernelLauncher, *, is_gated: bool = False
) -> Linear:
    """`weight [out, in]`, quantized to `bits` and packed for many products, by one of `paths.QUANTIZED`.

    Args:
        is_gated: `weight [gates, then up projection; in]`; the result is silu(gate) * up.
    """
    outputs, depth = weight.shape
    panels = pack(*quantize_weight(in_panels(weight, COLUMNS, is_gated=True) if is_gated else weight, bits), bits)
    added = in_panels(torch.zeros(outputs) if bias is None else bias.float(), COLUMNS, is_gated=is_gated)
    return PRODUCT[bits, weight.dtype, path].linear(panels, added, (outputs, depth), launcher, is_gated=is_gated)
