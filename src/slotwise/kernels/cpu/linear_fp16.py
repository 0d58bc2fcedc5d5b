"""Products of bfloat16 in half precision, for processors that multiply halves (AVX-512 FP16) but no faster bfloat16.

A half has three bits more than a bfloat16 and a far smaller range.  So every output's weights, and every token's
numbers, are scaled by a power of two, which loses only numbers below 2**-28 of the largest.  A vector holds
twice as many halves as float32, and nothing is widened on its way.

Products are added at three levels: those of a chain in fp16 registers, the chains of a group in fp16 memory, groups in
float32.  The rounding error grows with the square root of a chain's length, and is half of the error of rounding a
result to bfloat16.

    weights       panels of 64 outputs, or of 32 gates and what they gate
                  [ half[depth, 64] | scale float32[64] | bias float32[64] ]
    activations   chains x rows x [ half, the same half ][32]: each pair is broadcast by the load itself
                  scale float32[rows]

A row's result does not depend on the rows beside it, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from llvmlite import ir
from torch import Tensor

from slotwise.kernels.cpu.jit.compiler import Compiled, kernel
from slotwise.kernels.cpu.jit.intrinsic import FLOAT, INT, intrinsic
from slotwise.kernels.cpu.launcher import THREAD_COUNTER, KernelLauncher
from slotwise.kernels.cpu.linear import (
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
from slotwise.kernels.cpu.llvm import (
    HALF,
    LONG,
    SHORT,
    SINGLE,
    WORD,
    Loop,
    all_of,
    behind,
    call,
    fma,
    number,
    prefetch,
    read,
    round_to_bfloat16,
    silu,
    spread,
    switch,
    widened,
    write,
)
from slotwise.kernels.cpu.processor import has
from slotwise.kernels.cpu.simd import BFLOAT16, FLOAT32, INT64, ZERO, fetch_add, fill, float_of, load, store
from slotwise.kernels.cpu.work_queue import NOTHING, pop, rows_of_a_block, upcoming
from slotwise.kernels.interface import Linear

CHAIN = 32  # products added in registers
GROUP = 4  # chains whose sums are added in fp16
LANES = 32  # halves of a vector
PANEL = 2 * LANES  # outputs computed together
GATES = PANEL // 2  # of a panel that is half gates, half what they gate
TALLEST = 13  # rows of a tile: its accumulators, two vectors of weights and the broadcast pair fit into 32 registers
PAIR_BYTES = 4
STRIP_ROW_BYTES = CHAIN * PAIR_BYTES
SUMS_BYTES = TALLEST * PANEL * 4  # of a tile's sums in float32; a group's in fp16 come behind them
TILE_BYTES = TALLEST * PANEL * (4 + 2)
ROOM_BYTES = PANEL * 4  # of one float32 per output: its scale, its bias
TOP = 4  # numbers are shifted below 2**TOP: the sum of a group stays below 2**15, and a half holds nearly 2**16
SMALLEST_EXPONENT = TOP  # biased exponent of a bfloat16: the smallest for which the shift is still a float
AHEAD = 16384  # bytes of weights between what is read and what is prefetched, where a panel is read but once
PACKED_AT_ONCE = 1 << 20  # weights, which stay in a cache from one of torch's operators to the next
BLOCK_PAIRS = 1 << 16  # of rows packed at once: an eighth of the second-level cache of such processors

_HALVES, _FLOATS = ir.VectorType(HALF, LANES), ir.VectorType(SINGLE, LANES // 2)
_WORDS, _SHORTS = (ir.VectorType(kind, LANES // 2) for kind in (WORD, SHORT))


def has_fp16_gemm() -> bool:
    """Whether this processor has fp16 instructions."""
    return has("avx512fp16")


def _to_fp16(builder: ir.IRBuilder, source: ir.Value, target: ir.Value, factor: ir.Value) -> None:
    scaled = builder.fmul(widened(builder, read(builder, source, _SHORTS, 2)), spread(builder, factor, _FLOATS))
    halves = builder.fptrunc(scaled, ir.VectorType(HALF, 16))
    once = builder.zext(builder.bitcast(halves, _SHORTS), _WORDS)
    write(builder, builder.or_(once, builder.shl(once, all_of(_WORDS, 16))), target)


to_fp16: Callable[[int, int, float], None] = intrinsic(_to_fp16, INT, INT, FLOAT)
"""`to_fp16(source, target, factor)`: 16 bfloat16, times `factor`, as 16 pairs of one half twice."""


def _largest_size(builder: ir.IRBuilder, address: ir.Value, count: ir.Value) -> ir.Value:
    lanes = ir.VectorType(SHORT, CHAIN)
    turns = Loop(builder, count, CHAIN, [all_of(lanes, 0)])
    place = builder.add(address, builder.shl(turns.index, number(1)))
    sizes = builder.and_(read(builder, place, lanes, 2), all_of(lanes, 0x7FFF))
    (largest,) = turns.close([call(builder, f"llvm.umax.v{CHAIN}i16", lanes, *turns.values, sizes)])
    return builder.zext(call(builder, f"llvm.vector.reduce.umax.v{CHAIN}i16", SHORT, largest), LONG)


largest_size: Callable[[int, int], int] = intrinsic(_largest_size, INT, INT, returns=INT)
"""`largest_size(address, count)`: the largest of `count` bfloat16 by magnitude, as bits without the sign; `count` is a
multiple of CHAIN."""


def _add_chain(
    builder: ir.IRBuilder, rows: int, a: ir.Value, b: ir.Value, asked: ir.Value, step: ir.Value
) -> list[ir.Value]:
    """The products of one chain: the addresses behind it, then two vectors of halves per row."""
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
            wide = builder.fpext(builder.shuffle_vector(vector, vector, lanes), _FLOATS)
            _add_to(builder, sums, 2 * index + part, wide)


def _fp16_gemm(builder: ir.IRBuilder, height: ir.Value, *arguments: ir.Value) -> None:
    """All chains of a tile.  Those of a group are added in memory, behind the sums."""
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


fp16_gemm: Callable[..., None] = intrinsic(_fp16_gemm, *[INT] * 8)
"""`fp16_gemm(height, a, strip_bytes, b, chains, sums, asked, step)`: `sums[height, 64] +=` the product of pairs from
`a` on, `strip_bytes` from chain to chain, and a panel at `b`.  Meanwhile memory from `asked` on is prefetched, `step`
bytes (up to two lines) per step of depth."""


def _finish(
    builder: ir.IRBuilder, sums: ir.Value, rows: ir.Value, scales: ir.Value, of_outputs: ir.Value, target: ir.Value,
    stride: ir.Value, *, is_gated: bool,
) -> None:
    vectors = PANEL * 4 // 64
    of_weights, bias = ([read(builder, behind(builder, of_outputs, start + v * 64), _FLOATS, 2) for v in range(vectors)]
                        for start in (0, ROOM_BYTES))
    turns = Loop(builder, rows, 1, [sums, scales, target])
    row, scale, place = turns.values
    factor = spread(builder, read(builder, scale, SINGLE, 2), _FLOATS)
    own = [builder.fmul(read(builder, behind(builder, row, v * 64), _FLOATS, 2), factor) for v in range(vectors)]
    results = [fma(builder, *one) for one in zip(own, of_weights, bias, strict=True)]
    if is_gated:
        results = [builder.fmul(silu(builder, gate), up) for gate, up in zip(results[:2], results[2:], strict=True)]
    for v, result in enumerate(results):
        write(builder, round_to_bfloat16(builder, result), behind(builder, place, v * 32), align=2)
    turns.close([behind(builder, row, PANEL * 4), behind(builder, scale, 4), builder.add(place, stride)])


def _finishing(*, is_gated: bool) -> Callable[[int, int, int, int, int, int], None]:
    """`finish(sums, rows, scales, of_outputs, target, stride)`: store rows of scaled sums plus bias as bfloat16.

    `scales` has a float32 per row.  Behind `of_outputs` come the panel's scales, then its bias.  `stride` is in bytes.
    """
    def finish(builder: ir.IRBuilder, *arguments: ir.Value) -> None:
        _finish(builder, *arguments, is_gated=is_gated)

    return cast("Callable[[int, int, int, int, int, int], None]", intrinsic(finish, *[INT] * 6))


finish_rows, finish_gated_rows = _finishing(is_gated=False), _finishing(is_gated=True)


@kernel
def _pack_fp16_block(words: int, first: int, rows: int, target: int, scales: int) -> None:
    """Pack rows `first ... first + rows` of x as strips of pairs, and store each row's scale.

    A row with an infinity or a NaN is shifted like one of very large numbers, and keeps both.
    """
    depth = load(words, DEPTH, INT64)
    for row in range(rows):
        x = load(words, X, INT64) + (first + row) * depth * 2
        exponent = max(largest_size(x, depth) >> 7, SMALLEST_EXPONENT)
        shift = float_of((2 * 127 + TOP - 1 - exponent) << 23)
        store(scales, row, float_of((exponent - TOP + 1) << 23), FLOAT32)
        for start in range(0, depth, CHAIN):
            strip = target + (start * rows + row * CHAIN) * PAIR_BYTES
            to_fp16(x + start * 2, strip, shift)
            to_fp16(x + start * 2 + 32, strip + 64, shift)


@kernel
def _store_tile(words: int, sums: int, scales: int, of_outputs: int, first: int, rows: int, panel: int) -> None:
    """Store a tile's sums to the output; a panel of gates and what they gate yields half as many numbers.

    A panel wider than the rest of the output is stored to scratch first, where groups were added.
    """
    stored = load(words, STORED, INT64)
    is_gated = stored != load(words, OUTPUTS, INT64)
    width = GATES if is_gated else PANEL
    place, stride = load(words, OUT, INT64) + (first * stored + panel * width) * 2, stored * 2
    left = stored - panel * width
    target, step = (place, stride) if left >= width else (sums + SUMS_BYTES, width * 2)
    if is_gated:
        finish_gated_rows(sums, rows, scales, of_outputs, target, step)
    else:
        finish_rows(sums, rows, scales, of_outputs, target, step)
    if left < width:
        for row in range(rows):
            for i in range(left):
                store(place + row * stride, i, load(target + row * step, i, BFLOAT16), BFLOAT16)


@kernel
def _scales(words: int, sums: int) -> int:
    """Address of a thread's row scales: behind its packed rows, which come behind its sums."""
    return sums + TILE_BYTES + load(words, BLOCK, INT64) * load(words, DEPTH, INT64) * PAIR_BYTES


@kernel
def _multiply(words: int, sums: int, first: int, rows: int, panel: int, following: int, is_cold: int) -> None:
    """Multiply one panel with a block of rows, tile by tile, while the panel at `following` is prefetched.

    If this panel was not prefetched, its first tile prefetches it; a single tile always does.
    """
    depth = load(words, DEPTH, INT64)
    weight_bytes = depth * PANEL * 2
    strips, scales = sums + TILE_BYTES, _scales(words, sums)
    weight = load(words, WEIGHT, INT64) + panel * (weight_bytes + 2 * ROOM_BYTES)
    tiles = (rows + TALLEST - 1) // TALLEST
    share = (2 * PANEL + tiles - 1) // tiles
    row = 0
    for tile in range(tiles):
        count = (rows - row + tiles - tile - 1) // (tiles - tile)  # equal heights: a low tile costs nearly as much
        asked, step = following + tile * share * depth, share
        if tiles == 1 or (tile == 0 and is_cold):
            asked, step = weight + AHEAD, 2 * PANEL
        fill(sums, TILE_BYTES // 4, ZERO)
        fp16_gemm(count, strips + row * STRIP_ROW_BYTES, rows * STRIP_ROW_BYTES, weight, depth // CHAIN, sums, asked,
                  step)
        _store_tile(words, sums, scales + row * 4, weight + weight_bytes, first + row, count, panel)
        row += count


def _product(words: int) -> None:
    tokens, depth, block = load(words, TOKENS, INT64), load(words, DEPTH, INT64), load(words, BLOCK, INT64)
    panels, threads = (load(words, OUTPUTS, INT64) + PANEL - 1) // PANEL, load(words, THREADS, INT64)
    blocks, panel_bytes = (tokens + block - 1) // block, depth * PANEL * 2 + 2 * ROOM_BYTES
    thread = fetch_add(words + THREAD_COUNTER, 1)
    sums = load(words, SCRATCH, INT64) + thread * load(words, SCRATCH_BYTES, INT64)
    held, after = -1, NOTHING
    item = pop(words, thread, threads, blocks * panels)
    while item != NOTHING:
        first, panel, is_cold = item // panels * block, item % panels, item != after
        rows = min(block, tokens - first)
        if first != held:
            _pack_fp16_block(words, first, rows, sums + TILE_BYTES, _scales(words, sums))
            held = first
        after = upcoming(words, thread, threads, blocks * panels)
        following = load(words, WEIGHT, INT64) + (panel if after == NOTHING else after % panels) * panel_bytes
        _multiply(words, sums, first, rows, panel, following, is_cold)
        item = pop(words, thread, threads, blocks * panels)


PRODUCT = Compiled(_product)


def fits(weight: Tensor) -> bool:
    """Whether `weight [out, in]` can be multiplied here: its depth is whole chains."""
    return weight.dtype == torch.bfloat16 and weight.shape[1] % CHAIN == 0


def fp16_linear(weight: Tensor, bias: Tensor | None, launcher: KernelLauncher, *, is_gated: bool = False) -> Linear:
    """`weight [out, in]`, which `fits`, packed for many products.

    Args:
        is_gated: `weight [gates, then as many of what they gate; in]`; the result is silu(gate) * up.
    """
    outputs, depth = weight.shape
    panels = pack(in_panels(weight, PANEL, is_gated=is_gated),
                  None if bias is None else in_panels(bias, PANEL, is_gated=is_gated))
    most = max(TALLEST, BLOCK_PAIRS // depth // TALLEST * TALLEST)
    packed = Packed(
        PRODUCT, panels, None, depth, outputs, outputs // 2 if is_gated else outputs,
        lambda tokens: rows_of_a_block(tokens, most, launcher.threads),
        (TILE_BYTES // 4 + most + most * depth + 15) // 16 * 16)
    return packed.product(launcher)


def pack(weight: Tensor, bias: Tensor | None) -> Tensor:
    """Whole panels of `weight [out, in]` as halves, their scales and bias, `[panels, bytes]`."""
    outputs, depth = weight.shape
    panels = torch.empty(outputs // PANEL, PANEL * (2 * depth + 4 + 4), dtype=torch.uint8)
    halves, scales, added = panels.split([PANEL * 2 * depth, PANEL * 4, PANEL * 4], dim=1)
    together = max(1, PACKED_AT_ONCE // (PANEL * depth))
    places = halves.view(torch.float16).unflatten(1, (depth, PANEL)).split(together)
    worth = scales.view(torch.float32).split(together)
    for place, scale, piece in zip(places, worth, weight.split(together * PANEL), strict=True):
        _, exponents = torch.frexp(piece.abs().amax(dim=1).float().clamp_min(2.0**-100))
        up, down = (torch.ldexp(torch.ones(len(piece)), shift) for shift in (TOP - exponents, exponents - TOP))
        shifted = piece.float().mul_(up[:, None]).half()
        place.copy_(shifted.view(-1, PANEL, depth).transpose(1, 2))
        scale.copy_(down.view(-1, PANEL))
    added.view(torch.float32).copy_(torch.zeros(()) if bias is None else bias.view(-1, PANEL))
    return panels
