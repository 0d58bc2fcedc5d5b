"""The rules of Mamba-2 (`StateSpaceShape`) and Mamba (`SelectiveShape`), token by token.

Threads take a head of a row, or a tile of a row's channels, over all of the row's tokens in the step: its part of the
state stays in a core's own cache.  States lie in the cache as `convolution.py` says.

Arithmetic is float32, rounded once, where a result is stored.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slotwise.compute.kernels.cpu.cache import CpuCache
from slotwise.compute.kernels.cpu.convolution import (
    BLOCK,
    FIRST,
    QUERY_STARTS,
    ROOM,
    ROWS,
    carry,
    convolve,
    first_position,
    is_on_trial,
    of_states,
    state_of,
)
from slotwise.compute.kernels.cpu.jit.compiler import kernel
from slotwise.compute.kernels.cpu.launcher import THREAD_COUNTER, KernelLauncher
from slotwise.compute.kernels.cpu.simd import (
    FLOAT32,
    INT32,
    INT64,
    LOG2_E,
    ONE,
    ZERO,
    Real,
    bytes_of,
    exp2,
    fetch_add,
    float32,
    float_of,
    for_floats,
    larger,
    load,
    prefetch_soon,
    sigmoid,
    smaller,
    sqrt,
    store,
)
from slotwise.compute.kernels.cpu.threads import NOTHING, pop
from slotwise.compute.kernels.interface import (
    RaggedBatch,
    SelectiveInputs,
    SelectiveShape,
    SelectiveWeights,
    StateSpaceShape,
    StateSpaceWeights,
)

# Channels that a thread takes.
TILE = 256
# Bytes between the line of a head's state that is advanced and what is prefetched: the next head's lies behind it.
AHEAD = 4096

# Arguments in words after those of all kernels with states.
(CONVOLVED, MIXED, STEPS_AT, OUT, RATE, STEP_BIAS, SKIP, HEADS, HEAD_DIM, GROUPS, STATE_SIZE, LEAST, LARGEST,
 THREADS) = range(FIRST, FIRST + 14)
# Of Mamba's rule: addresses of its inputs, and the numbers from token to token.
(X, X_STRIDE, STEPS, STEPS_STRIDE, B, B_STRIDE, C, C_STRIDE, Z, Z_STRIDE, S_OUT, S_RATE, S_SKIP, CHANNELS, PER_GROUP,
 S_STATE_SIZE) = range(FIRST, FIRST + 16)
# Of the gate: results and z by token, in groups that are normed by themselves.
(TOKENS, RESULTS, G_Z, G_Z_STRIDE, G_OUT, VALUES, GROUP_SIZE, WEIGHT, EPS_BITS, NORM_FIRST) = range(FIRST, FIRST + 10)


_S1, _S2, _S3, _S4, _S5, _S6 = (float32(1 / odd) for odd in (3, 5, 7, 9, 11, 13))


@kernel
def _softplus(x: float) -> float:
    """`log(1 + exp(x))` without a branch or a call, so that loops over it vectorize; small steps keep their digits.

    With e = exp(-|x|) and s = e / (2 + e), log(1 + e) is 2 artanh(s), a series in s up to 1/3.
    """
    power = exp2(smaller(x, -x) * LOG2_E)
    s = power / (float32(2) + power)
    t = s * s
    series = ((((((_S6 * t + _S5) * t + _S4) * t + _S3) * t + _S2) * t + _S1) * t + ONE) * s
    return larger(x, ZERO) + float32(2) * series


@kernel
def _advance_head(
    state: int, b: int, c: int, x: int, out: int, size: int, width: int, decay: float, step: float, skip: float,
    ahead: int,
) -> None:
    """`state = decay * state + outer(step * x, b)`, and `out = state @ c + skip * x`; `state [width, size]`.

    Prefetches memory `ahead` bytes behind each line of the state, unless that is 0.
    """
    for i in range(width):
        value = load(x, i, FLOAT32)
        known, line, total = step * value, state + i * size * 4, ZERO
        if ahead != 0:
            prefetch_soon(line + ahead, size * 4)
        for n in range(size):
            number = decay * load(line, n, FLOAT32) + known * load(b, n, FLOAT32)
            store(line, n, number, FLOAT32)
            total += number * load(c, n, FLOAT32)
        store(out, i, total + skip * value, FLOAT32)


@kernel
def _space_token(words: int, token: int, head: int, state: int, ahead: int, kind: Real) -> None:
    """Advance a head's state by a token; `ahead` is that of `_advance_head`."""
    heads, width, groups = load(words, HEADS, INT64), load(words, HEAD_DIM, INT64), load(words, GROUPS, INT64)
    size, values = load(words, STATE_SIZE, INT64), heads * width
    channels = values + 2 * groups * size
    convolved = load(words, CONVOLVED, INT64) + token * channels * 4
    mixed = load(words, MIXED, INT64) + token * (values + channels + heads) * bytes_of(kind)
    raw = load(mixed, load(words, STEPS_AT, INT64) + head, kind) + load(load(words, STEP_BIAS, INT64), head, FLOAT32)
    step = smaller(larger(_softplus(raw), float_of(load(words, LEAST, INT64))), float_of(load(words, LARGEST, INT64)))
    x, out = convolved + head * width * 4, load(words, OUT, INT64) + (token * values + head * width) * 4
    b = convolved + (values + head // (heads // groups) * size) * 4
    decay = exp2(load(load(words, RATE, INT64), head, FLOAT32) * step * LOG2_E)
    skip = load(load(words, SKIP, INT64), head, FLOAT32)
    _advance_head(state, b, b + groups * size * 4, x, out, size, width, decay, step, skip, ahead)


@kernel
def _space(words: int, kind: Real) -> None:
    """Every head of every row, over the row's tokens."""
    heads, block, starts = load(words, HEADS, INT64), load(words, BLOCK, INT64), load(words, QUERY_STARTS, INT64)
    width, threads = load(words, HEAD_DIM, INT64), load(words, THREADS, INT64)
    floats = load(words, STATE_SIZE, INT64) * width
    thread = fetch_add(words + THREAD_COUNTER, 1)
    trial = load(words, ROOM, INT64) + thread * floats * 4
    work = load(words, ROWS, INT64) * heads
    last, item = NOTHING, pop(words, thread, threads, work)
    while item != NOTHING:
        row, head = item // heads, item % heads
        at = head * floats * 4
        position = first_position(words, row)
        state = state_of(words, row, position - 1) + at if position > 0 else 0
        if item != last + 1 or head == 0:  # its first lines are not prefetched yet
            prefetch_soon(state, AHEAD)
        last = item
        start, on_trial = load(starts, row, INT32), is_on_trial(words, row)
        for token in range(start, load(starts, row + 1, INT32)):
            if token == start or (position % block == 0 and not on_trial):
                own = trial if on_trial else state_of(words, row, position) + at
                carry(state, own, floats)
                state = own
            _space_token(words, token, head, state, AHEAD if token == start else 0, kind)
            position += 1
        item = pop(words, thread, threads, work)


@kernel
def _gate(words: int, kind: Real) -> None:
    """Results, normed group by group unless there is no weight, and gated by silu(z), before the norm or after it."""
    values, group = load(words, VALUES, INT64), load(words, GROUP_SIZE, INT64)
    weight, norm_first = load(words, WEIGHT, INT64), load(words, NORM_FIRST, INT64)
    eps, tokens = float_of(load(words, EPS_BITS, INT64)), load(words, TOKENS, INT64)
    token = fetch_add(words, 1)
    while token < tokens:
        y = load(words, RESULTS, INT64) + token * values * 4
        z = load(words, G_Z, INT64) + token * load(words, G_Z_STRIDE, INT64) * bytes_of(kind)
        out = load(words, G_OUT, INT64) + token * values * bytes_of(kind)
        if norm_first == 0:
            for i in range(values):
                gate = load(z, i, kind)
                store(y, i, load(y, i, FLOAT32) * gate * sigmoid(gate), FLOAT32)
        if weight != 0:
            for first in range(0, values, group):
                part, own, squares = y + first * 4, weight + first * 4, ZERO
                for i in range(group):
                    value = load(part, i, FLOAT32)
                    squares += value * value
                factor = ONE / sqrt(squares / float32(group) + eps)
                for i in range(group):
                    store(part, i, load(part, i, FLOAT32) * factor * load(own, i, FLOAT32), FLOAT32)
        if norm_first != 0:
            for i in range(values):
                gate = load(z, i, kind)
                store(y, i, load(y, i, FLOAT32) * gate * sigmoid(gate), FLOAT32)
        for i in range(values):
            store(out, i, load(y, i, FLOAT32), kind)
        token = fetch_add(words, 1)


@kernel
def _selective_token(
    words: int, token: int, first: int, count: int, state: int, stride: int, room: int, kind: Real,
) -> None:
    """Advance the state of `count` channels from `first` on, in steps of `stride`.

    `room` is for dt, dt * x and the results of a tile.
    """
    size, channels = load(words, S_STATE_SIZE, INT64), load(words, CHANNELS, INT64)
    scale, group = bytes_of(kind), first // load(words, PER_GROUP, INT64) * size
    x = load(words, X, INT64) + (token * load(words, X_STRIDE, INT64) + first) * scale
    steps = load(words, STEPS, INT64) + (token * load(words, STEPS_STRIDE, INT64) + first) * scale
    z = load(words, Z, INT64) + (token * load(words, Z_STRIDE, INT64) + first) * scale
    b = load(words, B, INT64) + (token * load(words, B_STRIDE, INT64) + group) * scale
    c = load(words, C, INT64) + (token * load(words, C_STRIDE, INT64) + group) * scale
    out = load(words, S_OUT, INT64) + (token * channels + first) * scale
    rate, skip = load(words, S_RATE, INT64) + first * 4, load(words, S_SKIP, INT64) + first * 4
    step, known, sums = room, room + TILE * 4, room + 2 * TILE * 4
    for i in range(count):
        dt, value = _softplus(load(steps, i, kind)), load(x, i, kind)
        store(step, i, dt * LOG2_E, FLOAT32)
        store(known, i, dt * value, FLOAT32)
        store(sums, i, load(skip, i, FLOAT32) * value, FLOAT32)
    for n in range(size):
        of_b, of_c = load(b, n, kind), load(c, n, kind)
        for i in range(count):
            decay = exp2(load(step, i, FLOAT32) * load(rate, i, FLOAT32))
            value = decay * load(state, i, FLOAT32) + of_b * load(known, i, FLOAT32)
            store(state, i, value, FLOAT32)
            store(sums, i, load(sums, i, FLOAT32) + of_c * value, FLOAT32)
        state += stride
        rate += channels * 4
    for i in range(count):
        gate = load(z, i, kind)
        store(out, i, load(sums, i, FLOAT32) * gate * sigmoid(gate), kind)


@kernel
def _selective(words: int, kind: Real) -> None:
    """Every tile of channels of every row, over the row's tokens."""
    channels, size, block = load(words, CHANNELS, INT64), load(words, S_STATE_SIZE, INT64), load(words, BLOCK, INT64)
    per_group, starts = load(words, PER_GROUP, INT64), load(words, QUERY_STARTS, INT64)
    tiles = (per_group + TILE - 1) // TILE  # of a group
    trial = load(words, ROOM, INT64) + fetch_add(words + THREAD_COUNTER, 1) * (size + 3) * TILE * 4
    work = load(words, ROWS, INT64) * (channels // per_group) * tiles
    item = fetch_add(words, 1)
    while item < work:
        row, tile = item // (channels // per_group * tiles), item % (channels // per_group * tiles)
        first = tile // tiles * per_group + tile % tiles * TILE
        count = min(TILE, per_group - tile % tiles * TILE)
        position = first_position(words, row)
        state = state_of(words, row, position - 1) + first * 4 if position > 0 else 0
        start, on_trial = load(starts, row, INT32), is_on_trial(words, row)
        stride = TILE * 4 if on_trial else channels * 4
        for token in range(start, load(starts, row + 1, INT32)):
            if token == start or (position % block == 0 and not on_trial):
                own = trial if on_trial else state_of(words, row, position) + first * 4
                for n in range(size):
                    carry(state + n * channels * 4 if state != 0 else 0, own + n * stride, count)
                state = own
            _selective_token(words, token, first, count, state, stride, trial + size * TILE * 4, kind)
            position += 1
        item = fetch_add(words, 1)


SPACE = for_floats(_space)
GATE = for_floats(_gate)
SELECTIVE = for_floats(_selective)


def state_space(
    launcher: KernelLauncher, mixed: Tensor, weights: StateSpaceWeights, cache: CpuCache, batch: RaggedBatch,
    shape: StateSpaceShape, bits: tuple[int, int, int],
) -> Tensor:
    """`StateKernels.state_space`; `bits` are those of the bounds of steps, and of `weights.eps`, as float32."""
    mixed, tokens, kind = mixed.contiguous(), len(mixed), mixed.dtype
    floats = shape.state_size * shape.head_dim
    convolved = convolve(launcher, mixed[:, shape.values :], weights.convolution, cache, batch, shape, torch.float32)
    results = launcher.empty((tokens, shape.values), torch.float32)
    launcher.give(
        *of_states(launcher, cache, batch, floats), convolved.data_ptr(), mixed.data_ptr(),
        shape.values + shape.channels, results.data_ptr(), weights.rate.data_ptr(), weights.step_bias.data_ptr(),
        weights.skip.data_ptr(), shape.num_heads, shape.head_dim, shape.num_groups, shape.state_size, *bits[:2],
        launcher.threads)
    launcher.together(SPACE[kind])
    out = launcher.empty((tokens, shape.values), kind)
    launcher.give(
        *of_states(launcher, cache, batch, 0), tokens, results.data_ptr(), mixed.data_ptr(), mixed.stride(0),
        out.data_ptr(), shape.values, shape.values // max(1, shape.norm_groups),
        0 if weights.norm is None else weights.norm.data_ptr(), bits[2], int(shape.is_normed_first))
    launcher.together(GATE[kind])
    return out


def selective_scan(
    launcher: KernelLauncher, inputs: SelectiveInputs, weights: SelectiveWeights, cache: CpuCache, batch: RaggedBatch,
    shape: SelectiveShape,
) -> Tensor:
    """`StateKernels.selective_scan`."""
    out = launcher.empty((len(inputs.x), shape.size), inputs.x.dtype)
    places = [number for tensor in inputs for number in (tensor.data_ptr(), tensor.stride(0))]
    launcher.give(
        *of_states(launcher, cache, batch, (shape.state_size + 3) * TILE), *places, out.data_ptr(),
        weights.rate.data_ptr(), weights.skip.data_ptr(), shape.size, shape.size // shape.num_groups,
        shape.state_size)
    launcher.together(SELECTIVE[inputs.x.dtype])
    return out
