"""The gated delta rule and its short convolution (`DeltaShape`), token by token.

A state is advanced in place, in the block of the token, after the state of the block before is copied there; rows on
trial use a copy that is dropped.  So a row's result does not depend on how its tokens are divided among steps.  Threads
take a tile of a row's channels, then a head of a row: its state, 64 KiB for 128 by 128, stays in a core's own cache.

Arithmetic is float32, rounded once, where a result is stored.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slotwise.compute.kernels.cpu.cache import CpuCache
from slotwise.compute.kernels.cpu.jit.compiler import kernel, specialized
from slotwise.compute.kernels.cpu.launcher import HEADER, THREAD_COUNTER, KernelLauncher
from slotwise.compute.kernels.cpu.pointwise import inverse_rms
from slotwise.compute.kernels.cpu.simd import (
    BFLOAT16,
    FLOAT32,
    INT32,
    INT64,
    LOG2_E,
    ZERO,
    Real,
    bytes_of,
    exp2,
    fetch_add,
    fill,
    float32,
    float64,
    float_of,
    load,
    log,
    sigmoid,
    sqrt,
    store,
)
from slotwise.compute.kernels.interface import LENGTH_EPS, DeltaShape, DeltaWeights, RaggedBatch

# Channels that a thread takes.
TILE = 512
# From here on softplus(x) is x in float32.
LARGE = float32(20)
TINY = float32(LENGTH_EPS)

# Arguments in words after the header: of both kernels, of the convolution, of the rule.
(CACHE, BLOCK_BYTES, TABLES, TABLE_WIDTH, QUERY_STARTS, CONTEXT_LENS, ROWS, BLOCK, MIXED, CHANNELS, VALUES,
 CONVOLVED, ON_TRIAL, ROOM) = range(HEADER, HEADER + 14)
TAPS, TAP_WEIGHTS, INPUTS_AT = range(HEADER + 14, HEADER + 17)
(GATES, OUT, RATE, STEP_BIAS, NORM, EPS_BITS, KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM) = range(
    HEADER + 14, HEADER + 24)


@kernel
def _state_of(words: int, row: int, position: int) -> int:
    """Address of the block that holds a position of a row."""
    table = load(words, TABLES, INT64) + row * load(words, TABLE_WIDTH, INT64) * 4
    block = load(table, position // load(words, BLOCK, INT64), INT32)
    return load(words, CACHE, INT64) + block * load(words, BLOCK_BYTES, INT64)


@kernel
def _first_position(words: int, row: int) -> int:
    """The position of a row's first token in this step."""
    starts = load(words, QUERY_STARTS, INT64)
    return load(load(words, CONTEXT_LENS, INT64), row, INT32) - load(starts, row + 1, INT32) + load(starts, row, INT32)


@kernel
def _is_on_trial(words: int, row: int) -> bool:
    """Whether a row's states must not change."""
    flags = load(words, ON_TRIAL, INT64)
    return flags != 0 and load(flags, row, INT32) != 0


@kernel
def _carry(before: int, state: int, count: int) -> None:
    """Begin a state with the one before it, or with zeros if `before` is 0."""
    if before == 0:
        fill(state, count, ZERO)
    elif before != state:
        for i in range(count):
            store(state, i, load(before, i, FLOAT32), FLOAT32)


@kernel
def _convolve_token(
    words: int, token: int, first: int, count: int, inputs: int, stride: int, sums: int, kind: Real,
) -> None:
    """The convolution and SiLU of `count` channels from `first` on; `inputs` are their last, in steps of `stride`."""
    channels, taps, size = load(words, CHANNELS, INT64), load(words, TAPS, INT64), bytes_of(kind)
    x = load(words, MIXED, INT64) + (token * (channels + load(words, VALUES, INT64)) + first) * size
    out = load(words, CONVOLVED, INT64) + (token * channels + first) * 4
    weights = load(words, TAP_WEIGHTS, INT64) + first * 4
    own = weights + (taps - 1) * channels * 4
    for i in range(count):
        store(sums, i, load(x, i, kind) * load(own, i, FLOAT32), FLOAT32)
    place = inputs
    for _ in range(taps - 1):
        for i in range(count):
            store(sums, i, load(sums, i, FLOAT32) + load(place, i, FLOAT32) * load(weights, i, FLOAT32), FLOAT32)
        place += stride
        weights += channels * 4
    for i in range(count):
        value = load(sums, i, FLOAT32)
        store(out, i, value * sigmoid(value), FLOAT32)
    place = inputs
    for _ in range(taps - 2):
        behind = place + stride
        for i in range(count):
            store(place, i, load(behind, i, FLOAT32), FLOAT32)
        place = behind
    if taps > 1:
        for i in range(count):
            store(place, i, load(x, i, kind), FLOAT32)


@kernel
def _convolve_row(words: int, row: int, first: int, count: int, sums: int, kind: Real) -> None:
    """`sums` has room for those of a tile, and for its inputs on trial."""
    channels, taps, block = load(words, CHANNELS, INT64), load(words, TAPS, INT64), load(words, BLOCK, INT64)
    starts, at = load(words, QUERY_STARTS, INT64), load(words, INPUTS_AT, INT64) + first * 4
    position = _first_position(words, row)
    inputs = _state_of(words, row, position - 1) + at if position > 0 else 0
    start, on_trial = load(starts, row, INT32), _is_on_trial(words, row)
    stride = TILE * 4 if on_trial else channels * 4
    for token in range(start, load(starts, row + 1, INT32)):
        if token == start or (position % block == 0 and not on_trial):
            own = sums + TILE * 4 if on_trial else _state_of(words, row, position) + at
            for tap in range(taps - 1):
                before = inputs + tap * channels * 4 if inputs != 0 else 0
                _carry(before, own + tap * stride, count)
            inputs = own
        _convolve_token(words, token, first, count, inputs, stride, sums, kind)
        position += 1


@kernel
def _convolve(words: int, kind: Real) -> None:
    """All rows' queries, keys and values, convolved; each row's last inputs to its blocks."""
    channels = load(words, CHANNELS, INT64)
    tiles = (channels + TILE - 1) // TILE
    sums = load(words, ROOM, INT64) + fetch_add(words + THREAD_COUNTER, 1) * load(words, TAPS, INT64) * TILE * 4
    work = load(words, ROWS, INT64) * tiles
    item = fetch_add(words, 1)
    while item < work:
        first = item % tiles * TILE
        _convolve_row(words, item // tiles, first, min(TILE, channels - first), sums, kind)
        item = fetch_add(words, 1)


@kernel
def _copy(source: int, target: int, count: int) -> float:
    """Copies numbers; returns the sum of their squares."""
    squares = ZERO
    for i in range(count):
        value = load(source, i, FLOAT32)
        store(target, i, value, FLOAT32)
        squares += value * value
    return squares


@kernel
def _decay(rate: float, x: float) -> float:
    """`exp(rate * softplus(x))`.  In float32 `1 + exp(x)` would round a slow decay away."""
    softplus = float64(x) if x > LARGE else log(float64(1) + float64(exp2(x * LOG2_E)))
    return exp2(rate * float32(softplus) * LOG2_E)


@kernel
def _recall(state: int, key: int, keys: int, target: int, width: int) -> None:
    """`key @ state`."""
    fill(target, width, ZERO)
    for k in range(keys):
        factor, line = load(key, k, FLOAT32), state + k * width * 4
        for i in range(width):
            store(target, i, load(target, i, FLOAT32) + factor * load(line, i, FLOAT32), FLOAT32)


@kernel
def _update(state: int, query: int, keys: int, error: int, out: int, width: int, decay: float) -> None:
    """`state = decay * state + outer(key, error)`, and `out = query @ state`; keys lie behind queries."""
    fill(out, width, ZERO)
    for k in range(keys):
        asked, known, line = load(query, k, FLOAT32), load(query, keys + k, FLOAT32), state + k * width * 4
        for i in range(width):
            value = decay * load(line, i, FLOAT32) + known * load(error, i, FLOAT32)
            store(line, i, value, FLOAT32)
            store(out, i, load(out, i, FLOAT32) + asked * value, FLOAT32)


@kernel
def _rule_token(words: int, token: int, head: int, state: int, room: int, kind: Real) -> None:
    """Advance a head's state by a token, and store its result, normed and gated.

    `room` is for the query and the key, then the error, then the result.
    """
    keys, width, size = load(words, KEY_DIM, INT64), load(words, VALUE_DIM, INT64), bytes_of(kind)
    heads, key_heads = load(words, VALUE_HEADS, INT64), load(words, KEY_HEADS, INT64)
    channels, values = load(words, CHANNELS, INT64), heads * width
    convolved = load(words, CONVOLVED, INT64) + token * channels * 4
    query_at = convolved + head // (heads // key_heads) * keys * 4
    gates = load(words, GATES, INT64) + token * 2 * heads * size
    error, out = room + 2 * keys * 4, room + (2 * keys + width) * 4
    query_length = sqrt((_copy(query_at, room, keys) + TINY) * float32(keys))
    key_length = sqrt(_copy(query_at + key_heads * keys * 4, room + keys * 4, keys) + TINY)
    for k in range(keys):
        store(room, k, load(room, k, FLOAT32) / query_length, FLOAT32)
        store(room, keys + k, load(room, keys + k, FLOAT32) / key_length, FLOAT32)
    beta = sigmoid(load(gates, head, kind))
    decay = _decay(load(load(words, RATE, INT64), head, FLOAT32),
                   load(gates, heads + head, kind) + load(load(words, STEP_BIAS, INT64), head, FLOAT32))
    value = convolved + (2 * key_heads * keys + head * width) * 4
    _recall(state, room + keys * 4, keys, error, width)
    for i in range(width):
        store(error, i, beta * (load(value, i, FLOAT32) - decay * load(error, i, FLOAT32)), FLOAT32)
    _update(state, room, keys, error, out, width, decay)
    factor = inverse_rms(out, width, float_of(load(words, EPS_BITS, INT64)), FLOAT32)
    z = load(words, MIXED, INT64) + (token * (channels + values) + channels + head * width) * size
    target, norm = load(words, OUT, INT64) + (token * values + head * width) * size, load(words, NORM, INT64)
    for i in range(width):
        gate = load(z, i, kind)
        store(target, i, load(out, i, FLOAT32) * factor * load(norm, i, FLOAT32) * gate * sigmoid(gate), kind)


@kernel
def _rule(words: int, kind: Real) -> None:
    """Every head of every row, over the row's tokens."""
    heads, block, starts = load(words, VALUE_HEADS, INT64), load(words, BLOCK, INT64), load(words, QUERY_STARTS, INT64)
    keys, width = load(words, KEY_DIM, INT64), load(words, VALUE_DIM, INT64)
    trial = load(words, ROOM, INT64) + fetch_add(words + THREAD_COUNTER, 1) * (keys * width + 2 * (keys + width)) * 4
    room = trial + keys * width * 4
    work = load(words, ROWS, INT64) * heads
    item = fetch_add(words, 1)
    while item < work:
        row, head = item // heads, item % heads
        at = head * keys * width * 4
        position = _first_position(words, row)
        state = _state_of(words, row, position - 1) + at if position > 0 else 0
        start, on_trial = load(starts, row, INT32), _is_on_trial(words, row)
        for token in range(start, load(starts, row + 1, INT32)):
            if token == start or (position % block == 0 and not on_trial):
                own = trial if on_trial else _state_of(words, row, position) + at
                _carry(state, own, keys * width)
                state = own
            _rule_token(words, token, head, state, room, kind)
            position += 1
        item = fetch_add(words, 1)


CONVOLVE = {
    torch.bfloat16: specialized(_convolve, BFLOAT16),
    torch.float32: specialized(_convolve, FLOAT32),
}
RULE = {
    torch.bfloat16: specialized(_rule, BFLOAT16),
    torch.float32: specialized(_rule, FLOAT32),
}


def gated_delta(
    launcher: KernelLauncher, mixed: Tensor, gates: Tensor, weights: DeltaWeights, cache: CpuCache, batch: RaggedBatch,
    shape: DeltaShape, eps_bits: int,
) -> Tensor:
    """`DeltaKernels.gated_delta`; `eps_bits` are the bits of `weights.eps` as float32."""
    mixed, gates, tables, tokens = mixed.contiguous(), gates.contiguous(), batch.block_tables, len(mixed)
    convolved = launcher.empty((tokens, shape.channels), torch.float32)
    out = launcher.empty((tokens, shape.values), mixed.dtype)
    keys, width = shape.key_dim, shape.value_dim
    room = launcher.scratch(launcher.threads * max(shape.taps * TILE, keys * width + 2 * (keys + width)))
    common = (
        cache.address, cache.block_bytes, tables.data_ptr(), tables.stride(0), batch.query_starts.data_ptr(),
        batch.context_lens.data_ptr(), len(batch.context_lens), cache.block_size, mixed.data_ptr(), shape.channels,
        shape.values, convolved.data_ptr(), 0 if batch.on_trial is None else batch.on_trial.data_ptr(), room)
    launcher.give(*common, shape.taps, weights.convolution.data_ptr(), shape.rule_floats * 4)
    launcher.together(CONVOLVE[mixed.dtype])
    launcher.give(
        *common, gates.data_ptr(), out.data_ptr(), weights.rate.data_ptr(), weights.step_bias.data_ptr(),
        weights.norm.data_ptr(), eps_bits, shape.num_key_heads, shape.num_value_heads, keys, width)
    launcher.together(RULE[mixed.dtype])
    return out
