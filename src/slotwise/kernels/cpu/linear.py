"""Products with weights that are packed once.

Bfloat16 is widened to float32 on its way into registers, by `gemm.py`; `onednn.py` is better only where the processor
multiplies bfloat16 faster than float32.  float32 products take the same path, which makes a token's result independent
of its batch-mates, bit for bit.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from slotwise.kernels.cpu.cache import stored_order
from slotwise.kernels.cpu.compiled import Compiled
from slotwise.kernels.cpu.gemm import MULTIPLY, STRIP, STRIP_ROW_BYTES, call_multiply
from slotwise.kernels.cpu.launcher import HEADER, THREAD_COUNTER, KernelLauncher
from slotwise.kernels.cpu.parts import kernel
from slotwise.kernels.cpu.processor import PAIR
from slotwise.kernels.cpu.simd import BFLOAT16, FLOAT32, INT64, ZERO, bytes_of, fetch_add, fill, load, store
from slotwise.kernels.interface import Linear

PANEL = 32  # outputs computed together: the weights of each PAIR of them lie together
TILE = 12  # rows multiplied at once
AHEAD = 4096  # bytes of weights between what is read and what is prefetched
BLOCK_FLOATS = 1 << 16  # of rows widened at once: a quarter of a typical second-level cache

MULTIPLY_ADDRESS, X, WEIGHT, BIAS, OUT, TOKENS, DEPTH, OUTPUTS, BLOCK, SCRATCH, SCRATCH_BYTES = range(
    HEADER, HEADER + 11
)


@kernel
def _widen_block(words, first, rows, target, kind):
    """Rows `first ... first + rows` of x, as strips of float32."""
    depth = load(words, DEPTH, INT64)
    for row in range(rows):
        x = load(words, X, INT64) + (first + row) * depth * bytes_of(kind)
        for start in range(0, depth, STRIP):
            strip = target + (start * rows + row * STRIP) * 4
            for i in range(min(STRIP, depth - start)):
                store(strip, i, load(x, start + i, kind), FLOAT32)


@kernel
def _store_tile(words, sums, first, rows, panel, kind):
    """Store a tile's sums plus bias to the output."""
    outputs, bias, column = load(words, OUTPUTS, INT64), load(words, BIAS, INT64), panel * PANEL
    columns = min(PANEL, outputs - column)
    for row in range(rows):
        source = sums + row * PANEL * 4
        if bias != 0:
            for i in range(columns):
                store(source, i, load(source, i, FLOAT32) + load(bias, column + i, kind), FLOAT32)
        target = load(words, OUT, INT64) + ((first + row) * outputs + column) * bytes_of(kind)
        for i in range(columns):
            store(target, i, load(source, i, FLOAT32), kind)


@kernel
def _product(words, kind):
    tokens, depth, block = load(words, TOKENS, INT64), load(words, DEPTH, INT64), load(words, BLOCK, INT64)
    panels = (load(words, OUTPUTS, INT64) + PANEL - 1) // PANEL
    items = (tokens + block - 1) // block * panels
    panel_bytes = depth * PANEL * bytes_of(kind)
    sums = load(words, SCRATCH, INT64) + fetch_add(words + THREAD_COUNTER, 1) * load(words, SCRATCH_BYTES, INT64)
    strips = sums + TILE * PANEL * 4
    held = -1
    item = fetch_add(words, 1)
    while item < items:
        first, panel = item // panels * block, item % panels
        rows = min(block, tokens - first)
        if first != held:
            _widen_block(words, first, rows, strips, kind)
            held = first
        weight = load(words, WEIGHT, INT64) + panel * panel_bytes
        for row in range(0, rows, TILE):
            count = min(TILE, rows - row)
            fill(sums, TILE * PANEL, ZERO)
            call_multiply(load(words, MULTIPLY_ADDRESS, INT64), count, PANEL, strips + row * STRIP_ROW_BYTES,
                          rows * STRIP_ROW_BYTES, weight, PAIR * bytes_of(kind), depth * PAIR * bytes_of(kind), depth,
                          sums, PANEL * 4, AHEAD)
            _store_tile(words, sums, first + row, count, panel, kind)
        item = fetch_add(words, 1)


def _product_bfloat16(words):
    _product(words, BFLOAT16)


def _product_float32(words):
    _product(words, FLOAT32)


PRODUCT = {
    torch.bfloat16: Compiled(_product_bfloat16, "void(int64)"),
    torch.float32: Compiled(_product_float32, "void(int64)"),
}


def pack_panels(weight: Tensor) -> Tensor:
    """`weight [out, in]` as `[out / PAIR, in, PAIR]`, zeros up to whole panels, columns in the order they are read."""
    outputs, depth = weight.shape
    filled = F.pad(weight, (0, 0, 0, -outputs % PANEL)).view(-1, PAIR, depth)
    return filled[:, stored_order(PAIR, weight.dtype)].transpose(1, 2).contiguous()


def tiled_linear(weight: Tensor, bias: Tensor | None, launcher: KernelLauncher) -> Linear:
    """`weight [out, in]` through `gemm.py`."""
    outputs, depth = weight.shape
    panels = pack_panels(weight)
    code, multiply = PRODUCT[weight.dtype], MULTIPLY[weight.dtype]
    block = max(TILE, BLOCK_FLOATS // depth // TILE * TILE)
    floats = TILE * PANEL + block * -(-depth // STRIP) * STRIP

    def product(x: Tensor) -> Tensor:
        x = x.contiguous()
        out = launcher.empty((*x.shape[:-1], outputs), x.dtype)
        launcher.give(
            multiply.address, x.data_ptr(), panels.data_ptr(), 0 if bias is None else bias.data_ptr(), out.data_ptr(),
            x.numel() // depth, depth, outputs, block, launcher.scratch(launcher.threads * floats), floats * 4,
        )
        launcher.together(code)
        return out

    return product
