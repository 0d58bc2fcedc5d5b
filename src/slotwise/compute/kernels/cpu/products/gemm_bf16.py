"""The matrix product of a few rows of bfloat16 and a packed panel of 32 outputs, with sums in float32.

    sums[rows, 32]  =  for each pair of inputs, in order:  += x[2i + 1] * w[2i + 1], += x[2i] * w[2i]

One instruction (`vdpbf16ps`, AVX-512 BF16) adds the products of a pair to 16 sums; every sum stays in a register while
the depth runs, in the same order for any number of rows.  So a row's result does not depend on the other rows, bit for
bit.  Bias, the gate and rounding are applied to the sums in registers.  In float32 (`linear_fp32.py`) one input takes
the place of a pair.

`linear_bf16.py` packs both operands:

    weights       strips x 16 pairs x 32 outputs x [ bfloat16[2] ]
    activations   strips x rows x 16 pairs x [ bfloat16[2] ]
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from llvmlite import ir
from numba import types

from slotwise.compute.kernels.cpu.jit.compiler import ElementType
from slotwise.compute.kernels.cpu.jit.llvm import (
    BRAIN,
    WORD,
    Loop,
    behind,
    call,
    fma,
    number,
    prefetch,
    read,
    spread,
    switch,
)
from slotwise.compute.kernels.cpu.products.gemm import FLOATS, added, finish_row, for_each_form, no_sums, read_floats

# Inputs of a row that lie together: a cache line.
STRIP = 32
STRIP_PAIRS = STRIP // 2
STRIP_ROW_BYTES = 2 * STRIP
# Outputs computed together, and bytes of their weights for one pair of inputs.
PANEL = 32
LINE_BYTES = 4 * PANEL
# Rows of a tile: its sums, two vectors of weights and the broadcast pair fit into 32 registers.
TALLEST = 14

_WORDS, _BRAINS = ir.VectorType(WORD, 16), ir.VectorType(BRAIN, 32)


class Bf16Panel(NamedTuple):
    """Addresses and strides of a panel's weights, and of the rows it is multiplied with.

    Args:
        strip_bytes: of the activations, from strip to strip.
        stride: bytes from a row of results to the next.
        form: of results, as in `gemm.py`.
        asked, step: what to prefetch, and bytes of it with each pair of inputs, at most LINE_BYTES.
        scratch: memory of the thread.
    """

    weights: ir.Value
    x: ir.Value
    strip_bytes: ir.Value
    strips: ir.Value
    target: ir.Value
    stride: ir.Value
    bias: ir.Value
    form: ir.Value
    asked: ir.Value
    step: ir.Value
    scratch: ir.Value


def _dot(builder: ir.IRBuilder, sums: ir.Value, left: ir.Value, right: ir.Value) -> ir.Value:
    if left.type == FLOATS:
        return fma(builder, left, right, sums)
    return call(builder, "llvm.x86.avx512bf16.dpbf16ps.512", FLOATS, sums, left, right)


def dot_pairs(
    builder: ir.IRBuilder, column: ir.Value, line: ir.Value, sums: Sequence[ir.Value], vectors: int,
    kind: ElementType = types.uint16,
) -> list[ir.Value]:
    """`sums`, so many vectors a row, plus the products of a pair of inputs: of a line and the rows of a strip.

    In float32 it is one input.
    """
    vector = FLOATS if kind == types.float32 else _BRAINS
    weights = [read(builder, behind(builder, line, v * 64), vector, 4) for v in range(vectors)]
    results = []
    for row in range(len(sums) // vectors):
        pair = read(builder, behind(builder, column, row * STRIP_ROW_BYTES), WORD, 4)
        factor = builder.bitcast(spread(builder, pair, _WORDS), vector)
        results += [_dot(builder, sums[vectors * row + v], factor, weights[v]) for v in range(vectors)]
    return results


def _add_strip(builder: ir.IRBuilder, panel: Bf16Panel, sums: list[ir.Value], kind: ElementType) -> list[ir.Value]:
    """The addresses after a strip, then two vectors of sums per row."""
    turns = Loop(builder, number(STRIP_PAIRS), 1, [panel.x, panel.weights, panel.asked, *sums])
    column, line, asked, *sums = turns.values
    prefetch(builder, asked)
    prefetch(builder, builder.add(asked, builder.lshr(panel.step, number(1))))
    results = dot_pairs(builder, column, line, sums, 2, kind)
    return turns.close([behind(builder, column, 4), behind(builder, line, LINE_BYTES),
                        builder.add(asked, panel.step), *results])


def _add_all(builder: ir.IRBuilder, rows: int, panel: Bf16Panel, kind: ElementType) -> list[ir.Value]:
    """Two vectors of sums per row."""
    nothing = no_sums(2 * rows)
    strips = Loop(builder, panel.strips, 1, [panel.x, panel.weights, panel.asked, *nothing])
    x, weights, asked, *sums = strips.values
    _, weights, asked, *sums = _add_strip(builder, panel._replace(x=x, weights=weights, asked=asked), sums, kind)
    return strips.close([builder.add(x, panel.strip_bytes), weights, asked, *sums])[3:]


def _finish(builder: ir.IRBuilder, panel: Bf16Panel, sums: list[ir.Value], kind: ElementType) -> None:
    bias = read_floats(builder, panel.bias, 2)

    def of_form(kind: ElementType, *, is_gated: bool) -> None:
        target = panel.target
        for row in range(len(sums) // 2):
            results = added(builder, sums[2 * row : 2 * row + 2], bias)
            finish_row(builder, results, target, kind, is_gated=is_gated)
            target = builder.add(target, panel.stride)

    for_each_form(builder, panel.form, kind, of_form)


def emit_gemm(builder: ir.IRBuilder, height: ir.Value, panel: Bf16Panel, kind: ElementType = types.uint16) -> None:
    """The weights of a `panel` times `height` rows, at most `TALLEST`, plus bias, to rows of results.

    Rows, weights and results are of type `kind`; results of the form WIDE are float32.
    """
    switch(builder, height, range(1, TALLEST + 1),
           lambda rows: _finish(builder, panel, _add_all(builder, rows, panel, kind), kind))
