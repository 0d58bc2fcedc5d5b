"""Products with weights that are packed once.

Where the processor multiplies bfloat16 itself (AMX, AVX-512 BF16) oneDNN does it best, through the operators torch's
own compiler uses.  They are private, so they are tried and `F.linear` stands in.  On any other processor oneDNN
emulates bfloat16 at a fifth of the speed of float32, and `tile.py` widens weights on their way into registers instead.
float32 products take the same path, which makes a token's result independent of its batch-mates, bit for bit.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from numba import njit
from torch import Tensor

from slotwise.kernels.base import Linear
from slotwise.kernels.cpu.compiled import Compiled
from slotwise.kernels.cpu.openmp import HEADER, MAX_ARGUMENTS, Team
from slotwise.kernels.cpu.simd import BFLOAT16, FASTMATH, FLOAT32, INT64, array, bytes_of, fetch_add, narrow, widen
from slotwise.kernels.cpu.tile import MULTIPLY, STRIP, STRIP_ROW_BYTES, call_multiply

PANEL = 32  # outputs whose weights lie together
TILE = 12  # rows multiplied at once
BLOCK_FLOATS = 1 << 16  # of rows widened at once: a quarter of a typical second-level cache

MULTIPLY_ADDRESS, X, WEIGHT, BIAS, OUT, TOKENS, DEPTH, OUTPUTS, BLOCK, SCRATCH, SCRATCH_BYTES = range(
    HEADER, HEADER + 11
)


@njit(fastmath=FASTMATH)
def _widen_block(words, first, rows, target_at, kind):
    """Rows `first ... first + rows` of x, as strips of float32."""
    depth = words[DEPTH]
    for row in range(rows):
        x = array(words[X] + (first + row) * depth * bytes_of(kind), depth, kind)
        for start in range(0, depth, STRIP):
            strip = array(target_at + (start * rows + row * STRIP) * 4, STRIP, FLOAT32)
            for i in range(min(STRIP, depth - start)):
                strip[i] = widen(x[start + i])


@njit(fastmath=FASTMATH)
def _store_tile(words, sums_at, first, rows, panel, kind):
    """Sums of one tile plus bias, to the output."""
    outputs, column = words[OUTPUTS], panel * PANEL
    columns = min(PANEL, outputs - column)
    for row in range(rows):
        sums = array(sums_at + row * PANEL * 4, PANEL, FLOAT32)
        if words[BIAS] != 0:
            bias = array(words[BIAS] + column * bytes_of(kind), columns, kind)
            for i in range(columns):
                sums[i] += widen(bias[i])
        out = array(words[OUT] + ((first + row) * outputs + column) * bytes_of(kind), columns, kind)
        for i in range(columns):
            out[i] = narrow(sums[i], kind)


@njit(fastmath=FASTMATH)
def _product(words_at, kind):
    words = array(words_at, HEADER + MAX_ARGUMENTS, INT64)
    depth, block = words[DEPTH], words[BLOCK]
    panels = (words[OUTPUTS] + PANEL - 1) // PANEL
    blocks = (words[TOKENS] + block - 1) // block
    sums_at = words[SCRATCH] + fetch_add(words_at + 64, 1) * words[SCRATCH_BYTES]
    sums = array(sums_at, TILE * PANEL, FLOAT32)
    strips = sums_at + TILE * PANEL * 4
    held = -1
    item = fetch_add(words_at, 1)
    while item < blocks * panels:
        first, panel = item // panels * block, item % panels
        rows = min(block, words[TOKENS] - first)
        if first != held:
            _widen_block(words, first, rows, strips, kind)
            held = first
        weight = words[WEIGHT] + panel * depth * PANEL * bytes_of(kind)
        for row in range(0, rows, TILE):
            count = min(TILE, rows - row)
            sums[:] = 0
            call_multiply(words[MULTIPLY_ADDRESS], count, PANEL, strips + row * STRIP_ROW_BYTES, rows * STRIP_ROW_BYTES,
                          weight, PANEL * bytes_of(kind), depth, sums_at, PANEL * 4)
            _store_tile(words, sums_at, first + row, count, panel, kind)
        item = fetch_add(words_at, 1)


def _product_bfloat16(words_at):
    _product(words_at, BFLOAT16)


def _product_float32(words_at):
    _product(words_at, FLOAT32)


PRODUCT = {
    torch.bfloat16: Compiled(_product_bfloat16, "void(int64)"),
    torch.float32: Compiled(_product_float32, "void(int64)"),
}


def pack_panels(weight: Tensor) -> Tensor:
    """`weight [out, in]` as panels `[out / 32, in, 32]`, padded with zeros."""
    outputs, depth = weight.shape
    filled = F.pad(weight, (0, 0, 0, -outputs % PANEL))
    return filled.view(-1, PANEL, depth).transpose(1, 2).contiguous()


def tiled_linear(weight: Tensor, bias: Tensor | None, team: Team) -> Linear:
    """`weight [out, in]` through `tile.py`."""
    outputs, depth = weight.shape
    panels = pack_panels(weight)
    code, multiply = PRODUCT[weight.dtype], MULTIPLY[weight.dtype]
    block = max(TILE, BLOCK_FLOATS // depth // TILE * TILE)
    floats = TILE * PANEL + block * -(-depth // STRIP) * STRIP

    def product(x: Tensor) -> Tensor:
        x = x.contiguous()
        out = x.new_empty(*x.shape[:-1], outputs)
        team.give(
            multiply.address, x.data_ptr(), panels.data_ptr(), 0 if bias is None else bias.data_ptr(), out.data_ptr(),
            x.numel() // depth, depth, outputs, block, team.scratch(team.threads * floats), floats * 4,
        )
        team.together(code)
        return out

    return product


@functools.cache
def processor_multiplies_bfloat16() -> bool:
    """Whether products of bfloat16 are an instruction of this processor."""
    checks = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")  # private: absent means no
    return any(getattr(torch.cpu, check, bool)() for check in checks)


def onednn_linear(weight: Tensor, bias: Tensor | None) -> Linear:
    """`weight [out, in]` packed by oneDNN; plain `F.linear` where its private operators are missing or refuse."""
    try:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight)
        apply = torch.ops.mkldnn._linear_pointwise
        apply(weight.new_zeros(1, weight.shape[1]), packed, bias, "none", [], "")
    except (AttributeError, RuntimeError):
        return lambda x: F.linear(x, weight, bias)
    return lambda x: apply(x, packed, bias, "none", [], "")
