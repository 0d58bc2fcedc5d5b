"""The short convolution of layers with a recurrent state (`StateShape`), and how kernels reach states in the cache.

A state is advanced in place, in the block of the token, after the state of the block before is copied there; rows on
trial use a copy that is dropped.  So a row's result does not depend on how its tokens are divided among steps.  Threads
take a tile of a row's channels.

Arithmetic is float32, rounded once, where a result is stored.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slotwise.compute.kernels.cpu.cache import CpuCache
from slotwise.compute.kernels.cpu.jit.compiler import kernel, specialized
from slotwise.compute.kernels.cpu.launcher import HEADER, THREAD_COUNTER, KernelLauncher
from slotwise.compute.kernels.cpu.simd import (
    BFLOAT16,
    FLOAT32,
    INT32,
    INT64,
    ZERO,
    Real,
    bytes_of,
    fetch_add,
    fill,
    load,
    prefetch_soon,
    sigmoid,
    store,
)
from slotwise.compute.kernels.interface import ConvolutionShape, ConvolutionWeights, RaggedBatch, StateShape

# Channels that a thread takes.
TILE = 512

# Arguments in words after the header: of all kernels with states, and of this one.
(CACHE, BLOCK_BYTES, TABLES, TABLE_WIDTH, QUERY_STARTS, CONTEXT_LENS, ROWS, BLOCK, ON_TRIAL, ROOM) = range(
    HEADER, HEADER + 10)
FIRST = HEADER + 10
# Numbers of X and of what is next to it lie STRIDE numbers apart from token to token; FACTOR and GATE are 0 where X is
# convolved as it is, and results pass SiLU.
(X, STRIDE, FACTOR, GATE, OUT, CHANNELS, TAPS, TAP_WEIGHTS, BIAS, INPUTS_AT) = range(FIRST, FIRST + 10)


@kernel
def state_of(words: int, row: int, position: int) -> int:
    """Address of the block that holds a position of a row."""
    table = load(words, TABLES, INT64) + row * load(words, TABLE_WIDTH, INT64) * 4
    block = load(table, position // load(words, BLOCK, INT64), INT32)
    return load(words, CACHE, INT64) + block * load(words, BLOCK_BYTES, INT64)


@kernel
def first_position(words: int, row: int) -> int:
    """The position of a row's first token in this step."""
    starts = load(words, QUERY_STARTS, INT64)
    return load(load(words, CONTEXT_LENS, INT64), row, INT32) - load(starts, row + 1, INT32) + load(starts, row, INT32)


@kernel
def is_on_trial(words: int, row: int) -> bool:
    """Whether a row's states must not change."""
    flags = load(words, ON_TRIAL, INT64)
    return flags != 0 and load(flags, row, INT32) != 0


@kernel
def carry(before: int, state: int, count: int) -> None:
    """Begin a state with the one before it, or with zeros if `before` is 0."""
    if before == 0:
        fill(state, count, ZERO)
    elif before != state:
        for i in range(count):
            store(state, i, load(before, i, FLOAT32), FLOAT32)


@kernel
def _convolve_token(
    words: int, token: int, first: int, count: int, inputs: int, stride: int, room: int, kind: Real, kept: Real,
) -> None:
    """The convolution of `count` channels from `first` on; `inputs` are their last, in steps of `stride`."""
    channels, taps, size = load(words, CHANNELS, INT64), load(words, TAPS, INT64), bytes_of(kind)
    at = (token * load(words, STRIDE, INT64) + first) * size
    x, factor, gate = load(words, X, INT64) + at, load(words, FACTOR, INT64), load(words, GATE, INT64)
    out = load(words, OUT, INT64) + (token * channels + first) * bytes_of(kept)
    weights, bias = load(words, TAP_WEIGHTS, INT64) + first * 4, load(words, BIAS, INT64)
    sums, fresh = room, room + TILE * 4
    for i in range(count):
        store(fresh, i, load(x, i, kind), FLOAT32)
    if factor != 0:
        factor += at
        for i in range(count):
            store(fresh, i, load(fresh, i, FLOAT32) * load(factor, i, kind), FLOAT32)
    own = weights + (taps - 1) * channels * 4
    for i in range(count):
        store(sums, i, load(fresh, i, FLOAT32) * load(own, i, FLOAT32), FLOAT32)
    place = inputs
    for _ in range(taps - 1):
        for i in range(count):
            store(sums, i, load(sums, i, FLOAT32) + load(place, i, FLOAT32) * load(weights, i, FLOAT32), FLOAT32)
        place += stride
        weights += channels * 4
    if bias != 0:
        bias += first * 4
        for i in range(count):
            store(sums, i, load(sums, i, FLOAT32) + load(bias, i, FLOAT32), FLOAT32)
    if gate != 0:
        gate += at
        for i in range(count):
            store(out, i, load(sums, i, FLOAT32) * load(gate, i, kind), kept)
    else:
        for i in range(count):
            value = load(sums, i, FLOAT32)
            store(out, i, value * sigmoid(value), kept)
    place = inputs
    for _ in range(taps - 2):
        behind = place + stride
        for i in range(count):
            store(place, i, load(behind, i, FLOAT32), FLOAT32)
        place = behind
    if taps > 1:
        for i in range(count):
            store(place, i, load(fresh, i, FLOAT32), FLOAT32)


@kernel
def _convolve_row(words: int, row: int, first: int, count: int, room: int, kind: Real, kept: Real) -> None:
    """`room` is for the sums and the inputs of a tile, and for its inputs on trial."""
    channels, taps, block = load(words, CHANNELS, INT64), load(words, TAPS, INT64), load(words, BLOCK, INT64)
    starts, at = load(words, QUERY_STARTS, INT64), load(words, INPUTS_AT, INT64) + first * 4
    position = first_position(words, row)
    inputs = state_of(words, row, position - 1) + at if position > 0 else 0
    for tap in range(taps):  # lines of several arrays, of which each is too short for the processor to foresee
        prefetch_soon(load(words, TAP_WEIGHTS, INT64) + (tap * channels + first) * 4, count * 4)
        if tap > 0 and inputs != 0:
            prefetch_soon(inputs + (tap - 1) * channels * 4, count * 4)
    start, on_trial = load(starts, row, INT32), is_on_trial(words, row)
    stride = TILE * 4 if on_trial else channels * 4
    for token in range(start, load(starts, row + 1, INT32)):
        if token == start or (position % block == 0 and not on_trial):
            own = room + 2 * TILE * 4 if on_trial else state_of(words, row, position) + at
            for tap in range(taps - 1):
                before = inputs + tap * channels * 4 if inputs != 0 else 0
                carry(before, own + tap * stride, count)
            inputs = own
        _convolve_token(words, token, first, count, inputs, stride, room, kind, kept)
        position += 1


@kernel
def _convolve(words: int, kind: Real, kept: Real) -> None:
    """All rows' channels, convolved, stored as `kept`; each row's last inputs to its blocks."""
    channels = load(words, CHANNELS, INT64)
    tiles = (channels + TILE - 1) // TILE
    own = fetch_add(words + THREAD_COUNTER, 1) * (load(words, TAPS, INT64) + 1) * TILE * 4
    room = load(words, ROOM, INT64) + own
    work = load(words, ROWS, INT64) * tiles
    item = fetch_add(words, 1)
    while item < work:
        first = item % tiles * TILE
        _convolve_row(words, item // tiles, first, min(TILE, channels - first), room, kind, kept)
        item = fetch_add(words, 1)


CONVOLVE = {
    (torch.bfloat16, torch.float32): specialized(_convolve, BFLOAT16, FLOAT32),
    (torch.float32, torch.float32): specialized(_convolve, FLOAT32, FLOAT32),
    (torch.bfloat16, torch.bfloat16): specialized(_convolve, BFLOAT16, BFLOAT16),
}


def of_states(launcher: KernelLauncher, cache: CpuCache, batch: RaggedBatch, room: int) -> tuple[int, ...]:
    """The first arguments of kernels with states; each thread has `room` floats of scratch."""
    tables = batch.block_tables
    return (cache.address, cache.block_bytes, tables.data_ptr(), tables.stride(0), batch.query_starts.data_ptr(),
            batch.context_lens.data_ptr(), len(batch.context_lens), cache.block_size,
            0 if batch.on_trial is None else batch.on_trial.data_ptr(), launcher.scratch(launcher.threads * room))


def convolve(
    launcher: KernelLauncher, x: Tensor, weights: ConvolutionWeights, cache: CpuCache, batch: RaggedBatch,
    shape: StateShape, kept: torch.dtype, factor: int = 0, gate: int = 0,
) -> Tensor:
    """`[tokens, channels]` of type `kept`: the convolution of `x`, whose rows may be parts of longer ones, and SiLU.

    With addresses of `factor` and `gate`, laid out as `x`, that of `factor * x`, times `gate`.
    """
    tokens, taps = len(x), shape.taps
    out = launcher.empty((tokens, shape.channels), kept)
    common = of_states(launcher, cache, batch, (taps + 1) * TILE)
    launcher.give(
        *common, x.data_ptr(), x.stride(0), factor, gate, out.data_ptr(), shape.channels, taps, weights.taps.data_ptr(),
        0 if weights.bias is None else weights.bias.data_ptr(), shape.rule_floats * 4)
    launcher.together(CONVOLVE[x.dtype, kept])
    return out


def gated_convolution(
    launcher: KernelLauncher, bcx: Tensor, weights: ConvolutionWeights, cache: CpuCache, batch: RaggedBatch,
    shape: ConvolutionShape,
) -> Tensor:
    """`StateKernels.gated_convolution`."""
    bcx = bcx.contiguous()
    b, c, x = bcx.chunk(3, dim=1)
    return convolve(launcher, x, weights, cache, batch, shape, x.dtype, b.data_ptr(), c.data_ptr())
