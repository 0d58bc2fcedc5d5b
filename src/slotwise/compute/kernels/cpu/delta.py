"""The gated delta rule behind its short convolution (`DeltaShape`), token by token.

Threads take a head of a row: its state, 64 KiB for 128 by 128, stays in a core's own cache.  States lie in the cache as
`convolution.py` says.

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
from slotwise.compute.kernels.cpu.pointwise import inverse_rms
from slotwise.compute.kernels.cpu.simd import (
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
    for_floats,
    load,
    log,
    sigmoid,
    sqrt,
    store,
)
from slotwise.compute.kernels.interface import LENGTH_EPS, ConvolutionWeights, DeltaShape, DeltaWeights, RaggedBatch

# From here on softplus(x) is x in float32.
LARGE = float32(20)
TINY = float32(LENGTH_EPS)

# Arguments in words after those of all kernels with states.
(MIXED, CHANNELS, VALUES, CONVOLVED, GATES, OUT, RATE, STEP_BIAS, NORM, EPS_BITS, KEY_HEADS, VALUE_HEADS, KEY_DIM,
 VALUE_DIM, DECAYS, SCALE_BITS, PLAIN_BITS) = range(FIRST, FIRST + 17)
# DECAYS: of a head; PLAIN_BITS: 1.0 where results are multiplied by sigmoid(z) in place of silu(z), else 0.0.


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
def _recall(state: int, key: int, decays: int, keys: int, target: int, width: int) -> None:
    """`key @ (decays * state)`."""
    fill(target, width, ZERO)
    for k in range(keys):
        factor, line = load(key, k, FLOAT32) * load(decays, k, FLOAT32), state + k * width * 4
        for i in range(width):
            store(target, i, load(target, i, FLOAT32) + factor * load(line, i, FLOAT32), FLOAT32)


@kernel
def _update(state: int, query: int, decays: int, keys: int, error: int, out: int, width: int) -> None:
    """`state = decays * state + outer(key, error)`, and `out = query @ state`; keys lie behind queries."""
    fill(out, width, ZERO)
    for k in range(keys):
        asked, known, line = load(query, k, FLOAT32), load(query, keys + k, FLOAT32), state + k * width * 4
        decay = load(decays, k, FLOAT32)
        for i in range(width):
            value = decay * load(line, i, FLOAT32) + known * load(error, i, FLOAT32)
            store(line, i, value, FLOAT32)
            store(out, i, load(out, i, FLOAT32) + asked * value, FLOAT32)


@kernel
def _rule_token(words: int, token: int, head: int, state: int, room: int, kind: Real) -> None:
    """Advance a head's state by a token, and store its result, normed and gated.

    `room` is for the query and the key, then the error, then the result, then the decays of the state's lines.
    """
    keys, width, size = load(words, KEY_DIM, INT64), load(words, VALUE_DIM, INT64), bytes_of(kind)
    heads, key_heads = load(words, VALUE_HEADS, INT64), load(words, KEY_HEADS, INT64)
    channels, values = load(words, CHANNELS, INT64), heads * width
    convolved = load(words, CONVOLVED, INT64) + token * channels * 4
    query_at = convolved + head // (heads // key_heads) * keys * 4
    count = load(words, DECAYS, INT64)
    gates = load(words, GATES, INT64) + token * heads * (1 + count) * size
    error, out = room + 2 * keys * 4, room + (2 * keys + width) * 4
    decays = out + width * 4
    query_length = sqrt((_copy(query_at, room, keys) + TINY) * float32(keys))
    key_length = sqrt(_copy(query_at + key_heads * keys * 4, room + keys * 4, keys) + TINY)
    for k in range(keys):
        store(room, k, load(room, k, FLOAT32) / query_length, FLOAT32)
        store(room, keys + k, load(room, keys + k, FLOAT32) / key_length, FLOAT32)
    beta = float_of(load(words, SCALE_BITS, INT64)) * sigmoid(load(gates, head, kind))
    rate, decay = load(load(words, RATE, INT64), head, FLOAT32), ZERO
    for k in range(keys):
        if k < count:
            at = head * count + k
            decay = _decay(rate, load(gates, heads + at, kind) + load(load(words, STEP_BIAS, INT64), at, FLOAT32))
        store(decays, k, decay, FLOAT32)
    value = convolved + (2 * key_heads * keys + head * width) * 4
    _recall(state, room + keys * 4, decays, keys, error, width)
    for i in range(width):
        store(error, i, beta * (load(value, i, FLOAT32) - load(error, i, FLOAT32)), FLOAT32)
    _update(state, room, decays, keys, error, out, width)
    factor = inverse_rms(out, width, float_of(load(words, EPS_BITS, INT64)), FLOAT32)
    z = load(words, MIXED, INT64) + (token * (channels + values) + channels + head * width) * size
    target, norm = load(words, OUT, INT64) + (token * values + head * width) * size, load(words, NORM, INT64)
    plain = float_of(load(words, PLAIN_BITS, INT64))
    for i in range(width):
        gate = load(z, i, kind)
        weight = (plain + (float32(1) - plain) * gate) * sigmoid(gate)
        store(target, i, load(out, i, FLOAT32) * factor * load(norm, i, FLOAT32) * weight, kind)


@kernel
def _rule(words: int, kind: Real) -> None:
    """Every head of every row, over the row's tokens."""
    heads, block, starts = load(words, VALUE_HEADS, INT64), load(words, BLOCK, INT64), load(words, QUERY_STARTS, INT64)
    keys, width = load(words, KEY_DIM, INT64), load(words, VALUE_DIM, INT64)
    trial = load(words, ROOM, INT64) + fetch_add(words + THREAD_COUNTER, 1) * (keys * width + 3 * keys + 2 * width) * 4
    room = trial + keys * width * 4
    work = load(words, ROWS, INT64) * heads
    item = fetch_add(words, 1)
    while item < work:
        row, head = item // heads, item % heads
        at = head * keys * width * 4
        position = first_position(words, row)
        state = state_of(words, row, position - 1) + at if position > 0 else 0
        start, on_trial = load(starts, row, INT32), is_on_trial(words, row)
        for token in range(start, load(starts, row + 1, INT32)):
            if token == start or (position % block == 0 and not on_trial):
                own = trial if on_trial else state_of(words, row, position) + at
                carry(state, own, keys * width)
                state = own
            _rule_token(words, token, head, state, room, kind)
            position += 1
        item = fetch_add(words, 1)


RULE = for_floats(_rule)


def gated_delta(
    launcher: KernelLauncher, mixed: Tensor, gates: Tensor, weights: DeltaWeights, cache: CpuCache, batch: RaggedBatch,
    shape: DeltaShape, bits: tuple[int, int, int],
) -> Tensor:
    """`StateKernels.gated_delta`; `bits` are those of eps, of beta's scale, and of PLAIN_BITS, as float32."""
    mixed, gates, tokens = mixed.contiguous(), gates.contiguous(), len(mixed)
    convolved = convolve(launcher, mixed, ConvolutionWeights(weights.convolution), cache, batch, shape, torch.float32)
    out = launcher.empty((tokens, shape.values), mixed.dtype)
    keys, width, (eps, scale, plain) = shape.key_dim, shape.value_dim, bits
    launcher.give(
        *of_states(launcher, cache, batch, keys * width + 3 * keys + 2 * width), mixed.data_ptr(), shape.channels,
        shape.values, convolved.data_ptr(), gates.data_ptr(), out.data_ptr(), weights.rate.data_ptr(),
        weights.step_bias.data_ptr(), weights.norm.data_ptr(), eps, shape.num_key_heads, shape.num_value_heads,
        keys, width, shape.num_decays // shape.num_value_heads, scale, plain)
    launcher.together(RULE[mixed.dtype])
    return out
