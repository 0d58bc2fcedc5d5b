"""Products of bfloat16 in half precision, for processors that multiply halves (AVX-512 FP16) but no faster bfloat16.

A half has three bits more than a bfloat16 and a far smaller range.  So every output's weights, and every token's
numbers, are shifted by a power of two, which loses nothing but what is 2**-29 of the largest beside it.  Products are
added in halves for `CHAIN` of depth, which costs 0.4 of what rounding the result to bfloat16 does, and from there
on in float32.  A vector holds twice as many halves as float32, and nothing is widened on its way.

    weights       panels of 64 outputs:  [ half[depth, 64] | scale float32[64] ]
    activations   chains x rows x [ half, the same half ][32]: each pair is spread over a vector by the load itself
                  scale float32[rows]

A row's result does not depend on the rows beside it, bit for bit.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from torch import Tensor

from slotwise.kernels.base import Linear
from slotwise.kernels.cpu.compiled import Compiled
from slotwise.kernels.cpu.dot import spread
from slotwise.kernels.cpu.processor import has
from slotwise.kernels.cpu.simd import (
    BFLOAT16,
    FLOAT32,
    INT64,
    ZERO,
    fetch_add,
    fill,
    float_of,
    kernel,
    load,
    store,
)
from slotwise.kernels.cpu.team import HEADER, THREAD_COUNTER, Team
from slotwise.kernels.cpu.tile import Loop

CHAIN = 32  # products added in halves
LANES = 32  # halves of a vector
PANEL = 2 * LANES  # outputs computed together
TALLEST = 13  # rows of a tile: its accumulators, two vectors of weights and what is spread fit into 32 registers
TOP = 5  # numbers are shifted below 2**TOP: the sum of a chain stays below 2**15, and a half holds nearly 2**16
SMALLEST_EXPONENT = TOP  # of a bfloat16, as its bits have it, for which the shift still is a float
PAIR_BYTES = 4
STRIP_ROW_BYTES = CHAIN * PAIR_BYTES
AHEAD = 16384  # bytes of weights between what is read and what is asked for, where a panel is read but once
BLOCK_PAIRS = 1 << 17  # of rows halved at once: a quarter of the second-level caches that such processors have

X, WEIGHT, BIAS, OUT, TOKENS, DEPTH, OUTPUTS, BLOCK, SCRATCH, SCRATCH_BYTES, THREADS = range(HEADER, HEADER + 11)

_FLOAT, _INT32, _INT64 = ir.FloatType(), ir.IntType(32), ir.IntType(64)
_HALVES, _FLOATS = ir.VectorType(ir.HalfType(), LANES), ir.VectorType(_FLOAT, LANES // 2)
_WORDS, _SHORTS = (ir.VectorType(ir.IntType(bits), LANES // 2) for bits in (32, 16))


def multiplies_halves() -> bool:
    """Whether this processor has instructions for them."""
    return has("avx512fp16")


def _number(value):
    return ir.Constant(_INT64, value)


def _place(builder, address, offset, kind):
    return builder.inttoptr(builder.add(address, _number(offset)), kind.as_pointer())


def _read(builder, address, offset, kind):
    value = builder.load(_place(builder, address, offset, kind))
    value.align = 2
    return value


@intrinsic
def _halve(typingctx, source, target, factor):
    """16 bfloat16 from `source`, times `factor`, to as many pairs of one half at `target`."""

    def codegen(context, builder, signature, args):
        source, target, factor = args
        sixteen = ir.Constant(_WORDS, [16] * 16)
        wide = builder.shl(builder.zext(_read(builder, source, 0, _SHORTS), _WORDS), sixteen)
        scaled = builder.fmul(builder.bitcast(wide, _FLOATS), spread(builder, factor, _FLOATS))
        halves = builder.fptrunc(scaled, ir.VectorType(ir.HalfType(), 16))
        once = builder.zext(builder.bitcast(halves, _SHORTS), _WORDS)
        pairs = builder.or_(once, builder.shl(once, sixteen))
        builder.store(pairs, _place(builder, target, 0, _WORDS)).align = 4
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.float32), codegen


def _ask(builder, address):
    """Have a line of the second-level cache on its way."""
    byte = ir.IntType(8).as_pointer()
    function = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(ir.VoidType(), [byte, _INT32, _INT32, _INT32]), "llvm.prefetch.p0")
    for_reading, second_level, data = (ir.Constant(_INT32, number) for number in (0, 2, 1))
    builder.call(function, [builder.inttoptr(address, byte), for_reading, second_level, data])


def _add_chain(builder, rows, a, b, asked, step):
    """The products of one chain: two vectors of halves a row."""
    fma = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(_HALVES, [_HALVES] * 3), f"llvm.fma.v{LANES}f16")
    turns = Loop(builder, _number(CHAIN), 1, [a, b, asked, *[ir.Constant(_HALVES, [0.0] * LANES)] * (2 * rows)])
    column, line, asked, *sums = turns.values
    _ask(builder, asked)
    _ask(builder, builder.add(asked, builder.lshr(step, _number(1))))
    weights = [_read(builder, line, v * 2 * LANES, _HALVES) for v in (0, 1)]
    results = []
    for row in range(rows):
        pair = _read(builder, column, row * STRIP_ROW_BYTES, _INT32)
        factor = builder.bitcast(spread(builder, pair, _WORDS), _HALVES)
        results += [builder.call(fma, [factor, weights[v], sums[2 * row + v]]) for v in (0, 1)]
    return turns.close([builder.add(column, _number(PAIR_BYTES)), builder.add(line, _number(2 * PANEL)),
                        builder.add(asked, step), *results])


def _emit(builder, rows, operands):
    """All chains for one height of a tile."""
    a, strip_bytes, b, chains, sums, asked, step = operands
    strips = Loop(builder, chains, 1, [a, b, asked])
    strip, line, asked = strips.values
    _, after, asked, *halves = _add_chain(builder, rows, strip, line, asked, step)
    for number, vector in enumerate(halves):
        for part in (0, 1):
            lanes = ir.Constant(ir.VectorType(_INT32, 16), list(range(16 * part, 16 * part + 16)))
            wide = builder.fpext(builder.shuffle_vector(vector, vector, lanes), _FLOATS)
            place = _place(builder, sums, (2 * number + part) * 64, _FLOATS)
            so_far = builder.load(place)
            so_far.align = 4
            builder.store(builder.fadd(so_far, wide), place).align = 4
    strips.close([builder.add(strip, strip_bytes), after, asked])


@intrinsic
def _half_tile(typingctx, height, a, strip_bytes, b, chains, sums, asked, step):
    """`sums[height, 64] +=` the product of pairs from `a` on, `strip_bytes` from chain to chain, and a panel at `b`.

    Meanwhile memory from `asked` on is asked for, `step` bytes (up to two lines) for each of depth.
    """

    def codegen(context, builder, signature, args):
        end = builder.append_basic_block("end")
        choice = builder.switch(args[0], end)
        for rows in range(1, TALLEST + 1):
            block = builder.append_basic_block(f"rows{rows}")
            choice.add_case(_number(rows), block)
            builder.position_at_end(block)
            _emit(builder, rows, args[1:])
            builder.branch(end)
        builder.position_at_end(end)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 8), codegen


@kernel
def _halve_block(words, first, rows, target, scales):
    """Rows `first ... first + rows` of x as strips of pairs; what each must be multiplied by afterwards.

    A row that holds an infinity or a NaN is shifted like one of very large numbers, and keeps both.
    """
    depth = load(words, DEPTH, INT64)
    for row in range(rows):
        x = load(words, X, INT64) + (first + row) * depth * 2
        largest = 0
        for i in range(depth):
            largest = max(largest, _size_bits(x, i))
        exponent = max(largest >> 7, SMALLEST_EXPONENT)
        shift = float_of((2 * 127 + TOP - 1 - exponent) << 23)
        store(scales, row, float_of((exponent - TOP + 1) << 23), FLOAT32)
        for start in range(0, depth, CHAIN):
            strip = target + (start * rows + row * CHAIN) * PAIR_BYTES
            _halve(x + start * 2, strip, shift)
            _halve(x + start * 2 + 32, strip + 64, shift)


@intrinsic
def _size_bits(typingctx, address, index):
    """Bits of a bfloat16 without its sign, which order numbers by size."""

    def codegen(context, builder, signature, args):
        short = ir.IntType(16)
        base = builder.inttoptr(args[0], short.as_pointer())
        bits = builder.load(builder.gep(base, [args[1]], source_etype=short), typ=short)
        return builder.zext(builder.and_(bits, ir.Constant(short, 0x7FFF)), _INT64)

    return types.int64(types.int64, types.int64), codegen


@kernel
def _store_tile(words, sums, scales, first, rows, column, of_weights):
    """Sums of one tile in their own size, plus bias, to the output."""
    outputs, bias = load(words, OUTPUTS, INT64), load(words, BIAS, INT64)
    columns = min(PANEL, outputs - column)
    for row in range(rows):
        source, scale = sums + row * PANEL * 4, load(scales, row, FLOAT32)
        target = load(words, OUT, INT64) + ((first + row) * outputs + column) * 2
        for i in range(columns):
            store(source, i, load(source, i, FLOAT32) * scale * load(of_weights, i, FLOAT32), FLOAT32)
        if bias != 0:
            for i in range(columns):
                store(source, i, load(source, i, FLOAT32) + load(bias, column + i, BFLOAT16), FLOAT32)
        for i in range(columns):
            store(target, i, load(source, i, FLOAT32), BFLOAT16)


def _product(words):
    tokens, depth, block = load(words, TOKENS, INT64), load(words, DEPTH, INT64), load(words, BLOCK, INT64)
    panels = (load(words, OUTPUTS, INT64) + PANEL - 1) // PANEL
    items = (tokens + block - 1) // block * panels
    weight_bytes = depth * PANEL * 2
    sums = load(words, SCRATCH, INT64) + fetch_add(words + THREAD_COUNTER, 1) * load(words, SCRATCH_BYTES, INT64)
    strips = sums + TALLEST * PANEL * 4
    scales = strips + block * depth * PAIR_BYTES
    threads, panel_bytes = load(words, THREADS, INT64), weight_bytes + PANEL * 4
    held, is_first = -1, True
    item = fetch_add(words, 1)
    while item < items:
        first, panel = item // panels * block, item % panels
        rows = min(block, tokens - first)
        if first != held:
            _halve_block(words, first, rows, strips, scales)
            held = first
        weight = load(words, WEIGHT, INT64) + panel * panel_bytes
        tiles = (rows + TALLEST - 1) // TALLEST
        asked, step = weight + AHEAD, 2 * PANEL
        following = load(words, WEIGHT, INT64) + (item + threads) % panels * panel_bytes
        share = (2 * PANEL + tiles - 1) // tiles
        row = 0
        for tile in range(tiles):
            count = (rows - row + tiles - tile - 1) // (tiles - tile)  # equal heights: a low tile costs nearly as much
            if tile > 0 or (tiles > 1 and not is_first):
                asked, step = following + tile * share * depth, share
            fill(sums, count * PANEL, ZERO)
            _half_tile(count, strips + row * STRIP_ROW_BYTES, rows * STRIP_ROW_BYTES, weight, depth // CHAIN, sums,
                       asked, step)
            _store_tile(words, sums, scales + row * 4, first + row, count, panel * PANEL, weight + weight_bytes)
            row += count
        is_first = False
        item = fetch_add(words, 1)


PRODUCT = Compiled(_product, "void(int64)")


def fits(weight: Tensor) -> bool:
    """Whether `weight [out, in]` can be multiplied here: by whole chains."""
    return weight.dtype == torch.bfloat16 and weight.shape[1] % CHAIN == 0


def pack(weight: Tensor) -> Tensor:
    """`weight [out, in]` as panels of halves and their scales, `[panels, bytes]`."""
    filled = F.pad(weight, (0, 0, 0, -len(weight) % PANEL)).float()
    _, exponents = torch.frexp(filled.abs().amax(dim=1, keepdim=True).clamp_min(2.0**-100))
    halves = torch.ldexp(filled, TOP - exponents).half().view(-1, PANEL, weight.shape[1]).transpose(1, 2)
    scales = torch.ldexp(torch.ones_like(exponents, dtype=torch.float32), exponents - TOP).view(-1, PANEL)
    return torch.cat((halves.contiguous().flatten(1).view(torch.uint8), scales.view(torch.uint8)), dim=1)


def half_linear(weight: Tensor, bias: Tensor | None, team: Team) -> Linear:
    """`weight [out, in]`, which `fits`, packed for many products."""
    outputs, depth = weight.shape
    panels = pack(weight)
    block = max(TALLEST, BLOCK_PAIRS // depth // TALLEST * TALLEST)
    floats = (TALLEST * PANEL + block + block * depth + 15) // 16 * 16

    def product(x: Tensor) -> Tensor:
        x = x.contiguous()
        out = team.empty((*x.shape[:-1], outputs), x.dtype)
        team.give(
            x.data_ptr(), panels.data_ptr(), 0 if bias is None else bias.data_ptr(), out.data_ptr(),
            x.numel() // depth, depth, outputs, block, team.scratch(team.threads * floats), floats * 4, team.threads,
        )
        team.together(PRODUCT)
        return out

    return product
