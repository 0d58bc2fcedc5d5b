"""Products of float32 with panels of 32 outputs (AVX-512), by `gemm_bf16.py` with one input in the place of a pair.

`linear_bf16.py` packs both operands in the same way:

    weights       strips x 16 inputs x 32 outputs
    activations   strips x rows x 16 inputs
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
import torch.nn.functional as F
from llvmlite import ir
from numba import types
from torch import Tensor

from slotwise.compute.kernels.cpu.jit.compiler import INT, intrinsic, kernel
from slotwise.compute.kernels.cpu.launcher import KernelLauncher
from slotwise.compute.kernels.cpu.processor import AVX512
from slotwise.compute.kernels.cpu.products import gemm_bf16
from slotwise.compute.kernels.cpu.products.gemm import GATED, PLAIN, WIDE
from slotwise.compute.kernels.cpu.products.gemm_bf16 import LINE_BYTES, PANEL, STRIP_PAIRS, STRIP_ROW_BYTES, Bf16Panel
from slotwise.compute.kernels.cpu.products.linear import (
    DEPTH,
    Method,
    PanelLayout,
    Tile,
    in_panels,
    panel_product,
)
from slotwise.compute.kernels.cpu.products.linear_bf16 import AHEAD, BLOCK_BYTES, pack_rows
from slotwise.compute.kernels.cpu.simd import FLOAT32, INT64, load
from slotwise.compute.kernels.interface import Linear

STRIP = STRIP_PAIRS  # inputs of a row that lie together: a cache line
RESULT_BYTES = gemm_bf16.TALLEST * PANEL * 4  # of a tile


def has_fp32_gemm() -> bool:
    """Whether this processor has the registers for such panels."""
    return AVX512


def _gemm(builder: ir.IRBuilder, height: ir.Value, *addresses: ir.Value) -> None:
    gemm_bf16.emit_gemm(builder, height, Bf16Panel._make(addresses), types.float32)


gemm = cast("Callable[..., None]", intrinsic(_gemm, *[INT] * (1 + len(Bf16Panel._fields))))


@kernel
def _pack_block(words: int, first: int, rows: int, strip_rows: int, target: int) -> None:
    pack_rows(words, first, rows, strip_rows, target, FLOAT32)


@kernel
def _multiply(words: int, tile: Tile) -> None:
    strips = (load(words, DEPTH, INT64) + STRIP - 1) // STRIP
    gemm(tile.rows, tile.weights, tile.x + tile.first * STRIP_ROW_BYTES, tile.block_rows * STRIP_ROW_BYTES, strips,
         tile.target, tile.stride, tile.bias, tile.form, tile.asked, tile.step, tile.memory)


PRODUCT = panel_product("float32_in_panels", Method(_pack_block, _multiply), PanelLayout(
    columns=PANEL, unit=STRIP, steps=STRIP, line=LINE_BYTES, behind=0, tallest=gemm_bf16.TALLEST, whole=1, ahead=AHEAD,
    block=BLOCK_BYTES, row=STRIP_ROW_BYTES, results=0, rows=RESULT_BYTES, odd=1), FLOAT32)


def fp32_linear(weight: Tensor, bias: Tensor | None, launcher: KernelLauncher, form: int = PLAIN) -> Linear:
    """`weight [out, in]` of float32, packed for many products.

    Args:
        form: of results, as in `gemm.py`; GATED: `weight [gates, then up projection; in]`.
    """
    outputs, depth = weight.shape
    padded = F.pad(in_panels(weight, PANEL, is_gated=form == GATED), (0, -depth % STRIP))
    panels = padded.view(-1, PANEL, padded.shape[1]).transpose(1, 2).contiguous()
    added = in_panels(torch.zeros(outputs) if bias is None else bias.float(), PANEL, is_gated=form == GATED)
    return PRODUCT.linear(panels, added, (outputs, depth), launcher, PLAIN if form == WIDE else form)
