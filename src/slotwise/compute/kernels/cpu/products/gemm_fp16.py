"""The matrix product of a few rows of halves and a packed panel of 64 outputs (AVX-512 FP16).

Products are added at three levels: those of a chain in fp16 registers, the chains of a group in fp16 memory, groups in
float32.  The rounding error grows with the square root of a chain's length, and is half of the error of rounding a
result to bfloat16.

`linear_fp16.py` packs both operands:

    weights       panels of 64 outputs, or of 32 gates and their up projection
                  [ half[depth, 64] | scale float32[64] | bias float32[64] ]
    activations   chains x rows x [ half, the same half ][32]: each pair is broadcast by the load itself
                  scale float32[rows]
"""

from __future__ import annotations

from llvmlite import ir
from numba import types

from slotwise.compute.kernels.cpu.jit.compiler import ElementType
from slotwise.compute.kernels.cpu.jit.llvm import (
    HALF,
    SINGLE,
    WORD,
    Loop,
    all_of,
    behind,
    fma,
    number,
    prefetch,
    read,
    spread,
    switch,
    write,
)
from slotwise.compute.kernels.cpu.products.gemm import FLOATS, finish_row, for_each_form, read_floats

# Products that are added in registers, and chains whose sums are added in fp16.
CHAIN = 32
GROUP = 4
# Halves of a vector, and outputs computed together.
LANES = 32
PANEL = 2 * LANES
# Rows of a tile: its accumulators, two vectors of weights and the broadcast pair fit into 32 registers.
TALLEST = 13
PAIR_BYTES = 4
STRIP_ROW_BYTES = CHAIN * PAIR_BYTES
# Bytes of a tile's sums in float32, and with a group's sums in fp16, which follow them.
SUMS_BYTES = TALLEST * PANEL * 4
TILE_BYTES = TALLEST * PANEL * (4 + 2)
# Bytes of one float32 per output: its scale, or its bias.
ROOM_BYTES = PANEL * 4

_HALVES, _WORDS = ir.VectorType(HALF, LANES), ir.VectorType(WORD, LANES // 2)


def _add_chain(
    builder: ir.IRBuilder, rows: int, a: ir.Value, b: ir.Value, asked: ir.Value, step: ir.Value
) -> list[ir.Value]:
    """The products of one chain: the addresses after it, then two vectors of halves per row."""
    turns = Loop(builder, number(CHAIN), 1, [a, b, asked, *[all_of(_HALVES, 0.0)] * (2 * rows)])
    column, line, asked, *sums = turns.values
    prefetch(builder, asked)
    prefetch(builder, builder.add(asked, builder.lshr(step, number(1))))
    weights = [read(builder, behind(builder, line, v * 2 * LANES), _HALVES, 2) for v in (0, 1)]
    results = []
    for row in range(rows):
        pair = read(builder, behind(builder, column, row * STRIP_ROW_BYTES), WORD, 2)
        factor = builder.bitcast(spread(builder, pair, _WORDS), _HALVES)
        results += [fma(builder, factor, weights[v], sums[2 * row + v]) for v in (0, 1)]
    return turns.close([behind(builder, column, PAIR_BYTES), behind(builder, line, 2 * PANEL),
                        builder.add(asked, step), *results])


def _add_to(builder: ir.IRBuilder, address: ir.Value, index: int, vector: ir.Value) -> None:
    """Add `vector` to vector `index` at `address`."""
    place = behind(builder, address, index * 64)
    write(builder, builder.fadd(read(builder, place, vector.type), vector), place)


def _widen(builder: ir.IRBuilder, rows: int, chains: ir.Value, sums: ir.Value) -> None:
    """Add the halves at `chains` to the float32 in `sums`, and set them to zero."""
    for index in range(2 * rows):
        place = behind(builder, chains, index * 64)
        vector = read(builder, place, _HALVES, 2)
        write(builder, all_of(_HALVES, 0.0), place)
        for part in (0, 1):
            lanes = ir.Constant(ir.VectorType(WORD, 16), list(range(16 * part, 16 * part + 16)))
            wide = builder.fpext(builder.shuffle_vector(vector, vector, lanes), FLOATS)
            _add_to(builder, sums, 2 * index + part, wide)


def emit_gemm(builder: ir.IRBuilder, height: ir.Value, *arguments: ir.Value) -> None:
    """All chains of a tile.  The chains of a group are added in memory, after the sums."""
    a, strip_bytes, b, chains, sums, asked, step = arguments

    def of_height(rows: int) -> None:
        met = behind(builder, sums, SUMS_BYTES)
        strips = Loop(builder, chains, 1, [a, b, asked])
        strip, line, ahead = strips.values
        _, after, ahead, *halves = _add_chain(builder, rows, strip, line, ahead, step)
        for index, vector in enumerate(halves):
            _add_to(builder, met, index, vector)
        is_last = builder.icmp_unsigned("==", builder.urem(strips.index, number(GROUP)), number(GROUP - 1))
        with builder.if_then(is_last, likely=False):
            _widen(builder, rows, met, sums)
        strips.close([builder.add(strip, strip_bytes), after, ahead])
        _widen(builder, rows, met, sums)

    switch(builder, height, range(1, TALLEST + 1), of_height)


def emit_finish(builder: ir.IRBuilder, form: ir.Value, *rows: ir.Value) -> None:
    """Store rows of scaled sums plus bias, in a form of `gemm.py`."""
    for_each_form(builder, form, types.uint16, lambda kind, *, is_gated: _finish(
        builder, *rows, kind=kind, is_gated=is_gated))


def _finish(
    builder: ir.IRBuilder, sums: ir.Value, rows: ir.Value, scales: ir.Value, of_outputs: ir.Value, target: ir.Value,
    stride: ir.Value, *, kind: ElementType, is_gated: bool,
) -> None:
    vectors = PANEL * 4 // 64
    of_weights, bias = (read_floats(builder, behind(builder, of_outputs, start), vectors) for start in (0, ROOM_BYTES))
    turns = Loop(builder, rows, 1, [sums, scales, target])
    row, scale, place = turns.values
    factor = spread(builder, read(builder, scale, SINGLE, 2), FLOATS)
    own = [builder.fmul(each, factor) for each in read_floats(builder, row, vectors)]
    results = [fma(builder, *one) for one in zip(own, of_weights, bias, strict=True)]
    finish_row(builder, results, place, kind, is_gated=is_gated)
    turns.close([behind(builder, row, PANEL * 4), behind(builder, scale, 4), builder.add(place, stride)])
