"""Products of bfloat16 widened to float32, and of float32, with panels of 32 outputs (AVX2).

    C[rows, 16]  =  A[rows, depth] @ B[depth, 16], then plus bias, and the gate: in registers

A panel is two *streams* of 16 outputs, two vectors of eight.  One or two rows are multiplied with both streams at a
time, because that many sums are needed to hide the time of a multiplication; more rows with one stream after the other,
six rows at most: 12 sums, two vectors of weights and a broadcast number fit into 16 registers.  A stream of a gated
product has eight gates, then the eight outputs of the up projection that they multiply.

    weights        streams x inputs x 16 outputs; in bfloat16 those of two vectors alternate (`cache.py`)
    activations    strips x rows x 16 inputs, float32

A sum runs over the inputs in order, so a row's result does not depend on the other rows, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import torch
import torch.nn.functional as F
from llvmlite import ir
from torch import Tensor

from slotwise.compute.kernels.cpu.cache import stored_order
from slotwise.compute.kernels.cpu.jit.compiler import INT, KIND, ElementType, intrinsic, kernel
from slotwise.compute.kernels.cpu.jit.llvm import SINGLE, Loop, all_of, behind, fma, number, prefetch, read, switch
from slotwise.compute.kernels.cpu.launcher import KernelLauncher
from slotwise.compute.kernels.cpu.processor import AVX2, LANES
from slotwise.compute.kernels.cpu.products.gemm import (
    GATED,
    PLAIN,
    WIDE,
    added,
    broadcast,
    finish_row,
    for_each_form,
    load_columns,
)
from slotwise.compute.kernels.cpu.products.gemm_bf16 import Bf16Panel
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
from slotwise.compute.kernels.cpu.simd import (
    BFLOAT16,
    FLOAT32,
    INT64,
    ZERO,
    Real,
    load,
    store,
)
from slotwise.compute.kernels.interface import Linear

PANEL, STREAM, STREAMS = 32, 16, 2
VECTORS = STREAM // LANES
# Inputs of a row that lie together: a cache line.
STRIP = 16
STRIP_ROW_BYTES = 4 * STRIP
# Rows of the tallest tile, and of the tallest one of both streams at a time.
TALLEST, TALLEST_OF_BOTH = 6, 2
RESULT_BYTES = TALLEST * PANEL * 4  # of a tile
# Bytes of weights between what is read and what is prefetched, where a panel is read only once.
AHEAD = 4096
# Bytes of rows widened at once: a half of the second-level cache of such processors.
BLOCK_BYTES = 1 << 18


def has_widened_gemm() -> bool:
    """Whether such panels are the fastest here."""
    return AVX2


def _sums(
    builder: ir.IRBuilder, rows: int, streams: int, panel: Bf16Panel, ahead: ir.Value, kind: ElementType
) -> list[ir.Value]:
    """`VECTORS` vectors of sums of each row, for the stream at `panel.weights`, or for it and the next.

    Args:
        ahead: bytes prefetched for a stream, from `panel.asked` on.
    """
    row_bytes, each = STREAM * kind.bitwidth // 8, VECTORS * streams
    stream_bytes = builder.mul(panel.strips, number(STRIP * row_bytes))
    nothing = [all_of(ir.VectorType(SINGLE, LANES), 0.0)] * (rows * each)
    strips = Loop(builder, panel.strips, 1, [panel.x, panel.weights, panel.asked, *nothing])
    x, line, asked, *sums = strips.values
    turns = Loop(builder, number(STRIP), 1, [x, line, asked, *sums])
    column, line, asked, *sums = turns.values
    weights: list[ir.Value] = []
    for stream in range(streams):
        prefetch(builder, builder.add(asked, builder.mul(ahead, number(stream))))
        weights += load_columns(builder, builder.add(line, builder.mul(stream_bytes, number(stream))), VECTORS, kind)
    results = []
    for row in range(rows):
        factor = broadcast(builder, behind(builder, column, row * STRIP_ROW_BYTES))
        results += [fma(builder, factor, weights[v], sums[row * each + v]) for v in range(each)]
    _, line, asked, *sums = turns.close([
        behind(builder, column, 4), behind(builder, line, row_bytes), builder.add(asked, panel.step), *results])
    _, _, _, *sums = strips.close([builder.add(x, panel.strip_bytes), line, asked, *sums])
    return [sums[row * each + v] for first in range(0, each, VECTORS) for row in range(rows)
            for v in range(first, first + VECTORS)]


def _finish(builder: ir.IRBuilder, sums: Sequence[ir.Value], stream: ir.Value, panel: Bf16Panel, kind: ElementType
            ) -> None:
    """Store the rows of a stream plus bias, or of gates times up projection, as `kind` or float32."""
    address = builder.add(panel.bias, builder.mul(stream, number(4 * STREAM)))
    bias = [read(builder, behind(builder, address, 4 * LANES * v), sums[v].type) for v in range(VECTORS)]

    def of_form(kind: ElementType, *, is_gated: bool) -> None:
        size = (STREAM // 2 if is_gated else STREAM) * kind.bitwidth // 8
        target = builder.add(panel.target, builder.mul(stream, number(size)))
        for row in range(0, len(sums), VECTORS):
            finish_row(builder, added(builder, sums[row : row + VECTORS], bias), target, kind, is_gated=is_gated)
            target = builder.add(target, panel.stride)

    for_each_form(builder, panel.form, kind, of_form)


def _emit(builder: ir.IRBuilder, height: ir.Value, *arguments: ir.Value) -> None:
    *addresses, kind = arguments
    whole = Bf16Panel._make(addresses)
    inputs = builder.mul(whole.strips, number(STRIP))
    panel = whole._replace(step=builder.lshr(behind(builder, whole.step, 1), number(1)))  # of a stream
    ahead = builder.mul(inputs, panel.step)

    def of_height(rows: int) -> None:
        if rows <= TALLEST_OF_BOTH:
            sums = _sums(builder, rows, STREAMS, panel, ahead, kind)
            for stream in range(STREAMS):
                of_stream = sums[stream * rows * VECTORS : (stream + 1) * rows * VECTORS]
                _finish(builder, of_stream, number(stream), panel, kind)
            return
        stream_bytes = builder.mul(inputs, number(STREAM * kind.bitwidth // 8))
        streams = Loop(builder, number(STREAMS), 1, [panel.weights, panel.asked])
        weights, asked = streams.values
        own = panel._replace(weights=weights, asked=asked)
        _finish(builder, _sums(builder, rows, 1, own, ahead, kind), streams.index, panel, kind)
        streams.close([builder.add(weights, stream_bytes), builder.add(asked, ahead)])

    switch(builder, height, range(1, TALLEST + 1), of_height)


gemm = cast("Callable[..., None]", intrinsic(_emit, *[INT] * (1 + len(Bf16Panel._fields)), KIND))
"""`gemm(height, *panel, kind)`: the weights of a panel, stored as `kind`, times `height` rows, at most `TALLEST`."""


@kernel
def _widen_rows(words: int, first: int, rows: int, strip_rows: int, target: int, kind: Real) -> None:
    """Rows `first ... first + rows` of x as strips of `strip_rows` rows; the last strip ends with zeros."""
    depth = load(words, DEPTH, INT64)
    whole = depth // STRIP * STRIP
    for row in range(rows):
        x, strip = x_at(words, first + row, kind), target + row * STRIP_ROW_BYTES
        for start in range(0, whole, STRIP):
            for i in range(STRIP):
                store(strip, i, load(x, start + i, kind), FLOAT32)
            strip += strip_rows * STRIP_ROW_BYTES
        if whole < depth:
            for i in range(STRIP):
                store(strip, i, load(x, whole + i, kind) if whole + i < depth else ZERO, FLOAT32)


def _product(name: str, kind: Real) -> PanelProduct:
    line = PANEL * kind.itemsize

    @kernel
    def prepare(words: int, first: int, rows: int, strip_rows: int, target: int) -> None:
        _widen_rows(words, first, rows, strip_rows, target, kind)

    @kernel
    def multiply(words: int, tile: Tile) -> None:
        strips = (load(words, DEPTH, INT64) + STRIP - 1) // STRIP
        gemm(tile.rows, tile.weights, tile.x + tile.first * STRIP_ROW_BYTES, tile.block_rows * STRIP_ROW_BYTES, strips,
             tile.target, tile.stride, tile.bias, tile.form, tile.asked, tile.step, tile.memory, kind)

    return panel_product(name, Method(prepare, multiply), PanelLayout(
        columns=PANEL, unit=STRIP, steps=STRIP, line=line, behind=0, tallest=TALLEST, whole=1, ahead=AHEAD,
        block=BLOCK_BYTES, row=STRIP_ROW_BYTES, results=0, rows=RESULT_BYTES, odd=1), kind)


PRODUCT = {
    torch.bfloat16: _product("bfloat16_widened", BFLOAT16), torch.float32: _product("float32_in_streams", FLOAT32)}


def _in_streams(outputs: Tensor, *, is_gated: bool) -> Tensor:
    """`outputs [out, ...]` in the order of streams, padded with zeros to whole panels."""
    panels = in_panels(outputs, PANEL, is_gated=is_gated)
    if not is_gated:
        return panels
    halves: Tensor = panels.unflatten(0, (-1, 2, STREAMS, STREAM // 2))  # gates and up projection, of both streams
    return halves.transpose(1, 2).flatten(0, 3)


def widened_linear(weight: Tensor, bias: Tensor | None, launcher: KernelLauncher, form: int = PLAIN) -> Linear:
    """`weight [out, in]` of bfloat16 or float32, packed for many products.

    Args:
        form: of results, as in `gemm.py`; GATED: `weight [gates, then up projection; in]`.
    """
    (outputs, depth), kind, is_gated = weight.shape, weight.dtype, form == GATED
    padded = F.pad(_in_streams(weight, is_gated=is_gated), (0, -depth % STRIP))
    streams = padded.view(-1, STREAM, padded.shape[1])
    panels = streams[:, stored_order(STREAM, kind)].transpose(1, 2).contiguous()
    added = _in_streams(torch.zeros(outputs) if bias is None else bias.float(), is_gated=is_gated)
    is_plain = form == WIDE and kind == torch.float32
    return PRODUCT[kind].linear(panels, added, (outputs, depth), launcher, PLAIN if is_plain else form)
