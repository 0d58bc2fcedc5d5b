"""Operations on each token by itself: the embedding, norms and activations.

Each kernel fuses what would otherwise pass through memory several times.  Arithmetic is float32, rounded once where a
result is stored.  A thread takes one token at a time; norms and additions give it the same tokens in every layer, since
it would have to fetch the residual stream of others from another core's cache.
"""

from __future__ import annotations

import math

import torch

from slotwise.compute.kernels.cpu.jit.compiler import kernel, specialized
from slotwise.compute.kernels.cpu.launcher import HEADER, THREAD_COUNTER
from slotwise.compute.kernels.cpu.simd import (
    FLOAT32,
    FLOATS,
    INT64,
    LOG2_E,
    ONE,
    ZERO,
    Real,
    bits_of,
    bytes_of,
    exp2,
    fetch_add,
    fill,
    float32,
    float_of,
    for_floats,
    larger,
    load,
    sigmoid,
    sqrt,
    store,
    tanh,
)
from slotwise.compute.kernels.cpu.threads import NOTHING, pop, rows_of_an_item

# Bits of a float32: all except the sign, and infinity; NaN is larger.
SIZE_BITS, INFINITY_BITS = 0x7FFFFFFF, 0x7F800000
GELU_FIRST, GELU_THIRD = float32(1.5957691216057308), float32(0.07135481282952456)
QUICK, HALF, HALF_ROOT, ERF_P = float32(1.702), float32(0.5), float32(math.sqrt(0.5)), float32(0.3275911)
ERF_1, ERF_2, ERF_3, ERF_4, ERF_5 = map(float32, (
    0.254829592, -0.284496736, 1.421413741, -1.453152027, 1.061405429))

# Arguments in words after the header: of the embedding, of norms and activations.
TABLE, TOKEN_IDS, EMBEDDING, EMBEDDED, ROW_BYTES, LAST_ID, FIRST_ID, IS_PART = range(HEADER, HEADER + 8)
X, RESIDUAL, WEIGHT, OUT, TOKENS, SIZE, EPS_BITS, OFFSET_BITS = range(HEADER, HEADER + 8)
BIAS, THREADS = OFFSET_BITS + 1, OFFSET_BITS + 2
CAP_BITS = EPS_BITS
ACTIVATION, IS_GATED = EPS_BITS, OFFSET_BITS
# Instead of the number of an activation; and numbers that `activate_columns` changes.
NO_ACTIVATION, COLUMNS = -1, 32
ALPHA_BITS, LIMIT_BITS = EPS_BITS, OFFSET_BITS


@kernel
def _embed(words: int) -> None:
    """Rows of the table, copied by 32 bits.  An id outside is clamped, or gives zeros in a part of a table."""
    tokens, row, last = load(words, EMBEDDED, INT64), load(words, ROW_BYTES, INT64), load(words, LAST_ID, INT64)
    token = fetch_add(words, 1)
    while token < tokens:
        place = load(load(words, TOKEN_IDS, INT64), token, INT64) - load(words, FIRST_ID, INT64)
        token_id = min(max(place, 0), last)
        source = load(words, TABLE, INT64) + token_id * row
        target = load(words, EMBEDDING, INT64) + token * row
        for i in range(row // 4):
            store(target, i, load(source, i, FLOAT32), FLOAT32)
        if token_id != place and load(words, IS_PART, INT64) != 0:
            fill(target, row // 4, ZERO)
        token = fetch_add(words, 1)


@kernel
def sum_of_squares(x: int, size: int, kind: Real) -> float:
    """The sum of the squares of `size` numbers at `x`."""
    squares = ZERO
    for i in range(size):
        value = load(x, i, kind)
        squares += value * value
    return squares


@kernel
def inverse_rms(x: int, size: int, eps: float, kind: Real) -> float:
    """One over the root mean square of `size` numbers at `x`."""
    return ONE / sqrt(sum_of_squares(x, size, kind) / float32(size) + eps)


@kernel
def _add_to_stream(words: int, token: int, kind: Real, stream: Real) -> int:
    """The address of a token's `x`, or of its `residual += x` where `RESIDUAL` is an address."""
    size, residual = load(words, SIZE, INT64), load(words, RESIDUAL, INT64)
    if residual == 0:
        return load(words, X, INT64) + token * size * bytes_of(stream)
    x = load(words, X, INT64) + token * size * bytes_of(kind)
    residual += token * size * bytes_of(stream)
    for i in range(size):
        store(residual, i, load(residual, i, stream) + load(x, i, kind), stream)
    return residual


@kernel
def _convert(words: int, kind: Real, made: Real) -> None:
    """Convert numbers of type `kind` to type `made`."""
    size, tokens = load(words, SIZE, INT64), load(words, TOKENS, INT64)
    token = fetch_add(words, 1)
    while token < tokens:
        x = load(words, X, INT64) + token * size * bytes_of(kind)
        out = load(words, OUT, INT64) + token * size * bytes_of(made)
        for i in range(size):
            store(out, i, load(x, i, kind), made)
        token = fetch_add(words, 1)


@kernel
def _norm(words: int, kind: Real, stream: Real) -> None:
    """RMSNorm of `x`, or of `residual += x` where `RESIDUAL` is an address.

    The normed numbers have the type `stream`; weights and results have the type `kind`, and so has an added `x`.
    """
    size, weight = load(words, SIZE, INT64), load(words, WEIGHT, INT64)
    eps, tokens = float_of(load(words, EPS_BITS, INT64)), load(words, TOKENS, INT64)
    offset = float_of(load(words, OFFSET_BITS, INT64))
    thread, threads = fetch_add(words + THREAD_COUNTER, 1), load(words, THREADS, INT64)
    together = rows_of_an_item(tokens, threads)
    items = (tokens + together - 1) // together
    item = pop(words, thread, threads, items)
    while item != NOTHING:
        for token in range(item * together, min((item + 1) * together, tokens)):
            x = _add_to_stream(words, token, kind, stream)
            out = load(words, OUT, INT64) + token * size * bytes_of(kind)
            factor = inverse_rms(x, size, eps, stream)
            for i in range(size):
                store(out, i, load(x, i, stream) * factor * (load(weight, i, kind) + offset), kind)
        item = pop(words, thread, threads, items)


@kernel
def _layer_norm(words: int, kind: Real, stream: Real) -> None:
    """LayerNorm of `x`, or of `residual += x` where `RESIDUAL` is an address; of ones and zeros without addresses.

    Types are those of `_norm`.
    """
    size, weight, bias = load(words, SIZE, INT64), load(words, WEIGHT, INT64), load(words, BIAS, INT64)
    eps, tokens = float_of(load(words, EPS_BITS, INT64)), load(words, TOKENS, INT64)
    offset = float_of(load(words, OFFSET_BITS, INT64))
    thread, threads = fetch_add(words + THREAD_COUNTER, 1), load(words, THREADS, INT64)
    together = rows_of_an_item(tokens, threads)
    items = (tokens + together - 1) // together
    item = pop(words, thread, threads, items)
    while item != NOTHING:
        for token in range(item * together, min((item + 1) * together, tokens)):
            x = _add_to_stream(words, token, kind, stream)
            out = load(words, OUT, INT64) + token * size * bytes_of(kind)
            total, squares = ZERO, ZERO
            for i in range(size):
                total += load(x, i, stream)
            mean = total / float32(size)
            for i in range(size):
                off = load(x, i, stream) - mean
                squares += off * off
            factor = ONE / sqrt(squares / float32(size) + eps)
            if weight != 0 and bias != 0:
                for i in range(size):
                    normed = (load(x, i, stream) - mean) * factor
                    store(out, i, normed * (load(weight, i, kind) + offset) + load(bias, i, kind), kind)
            elif weight != 0:
                for i in range(size):
                    store(out, i, (load(x, i, stream) - mean) * factor * (load(weight, i, kind) + offset), kind)
            elif bias != 0:
                for i in range(size):
                    store(out, i, (load(x, i, stream) - mean) * factor + load(bias, i, kind), kind)
            else:
                for i in range(size):
                    store(out, i, (load(x, i, stream) - mean) * factor, kind)
        item = pop(words, thread, threads, items)


@kernel
def _add(words: int, kind: Real, stream: Real) -> None:
    """`residual += x`, or where `WEIGHT` is an address, `residual += sigmoid(weight) * x`, with a weight per token."""
    size, tokens, gates = load(words, SIZE, INT64), load(words, TOKENS, INT64), load(words, WEIGHT, INT64)
    thread, threads = fetch_add(words + THREAD_COUNTER, 1), load(words, THREADS, INT64)
    together = rows_of_an_item(tokens, threads)
    items = (tokens + together - 1) // together
    item = pop(words, thread, threads, items)
    while item != NOTHING:
        for token in range(item * together, min((item + 1) * together, tokens)):
            x = load(words, X, INT64) + token * size * bytes_of(kind)
            residual = load(words, RESIDUAL, INT64) + token * size * bytes_of(stream)
            factor = sigmoid(load(gates, token, kind)) if gates != 0 else ONE
            for i in range(size):
                store(residual, i, load(residual, i, stream) + factor * load(x, i, kind), stream)
        item = pop(words, thread, threads, items)


@kernel
def _silu_mul(words: int, kind: Real) -> None:
    size, tokens = load(words, SIZE, INT64), load(words, TOKENS, INT64)
    bytes_of_row = size * bytes_of(kind)
    token = fetch_add(words, 1)
    while token < tokens:
        gate = load(words, X, INT64) + 2 * token * bytes_of_row
        up, out = gate + bytes_of_row, load(words, OUT, INT64) + token * bytes_of_row
        for i in range(size):
            value = load(gate, i, kind)
            store(out, i, value * sigmoid(value) * load(up, i, kind), kind)
        token = fetch_add(words, 1)


@kernel
def _sigmoid_mul(words: int, kind: Real) -> None:
    """`sigmoid(weight) * x`, with a weight for each number."""
    size, tokens = load(words, SIZE, INT64), load(words, TOKENS, INT64)
    token = fetch_add(words, 1)
    while token < tokens:
        start = token * size * bytes_of(kind)
        x, gate = load(words, X, INT64) + start, load(words, WEIGHT, INT64) + start
        out = load(words, OUT, INT64) + start
        for i in range(size):
            store(out, i, sigmoid(load(gate, i, kind)) * load(x, i, kind), kind)
        token = fetch_add(words, 1)


@kernel
def _gelu_tanh(x: float) -> float:
    """GELU by tanh: x * (1 + tanh(y)) / 2 is x * sigmoid(2 * y), for y = sqrt(2 / pi) * (x + 0.044715 * x**3)."""
    return x * sigmoid(x * (GELU_FIRST + GELU_THIRD * x * x))


@kernel
def _gelu_mul(words: int, kind: Real) -> None:
    """`gelu_tanh(gate) * up`."""
    size, tokens = load(words, SIZE, INT64), load(words, TOKENS, INT64)
    bytes_of_row = size * bytes_of(kind)
    token = fetch_add(words, 1)
    while token < tokens:
        gate = load(words, X, INT64) + 2 * token * bytes_of_row
        up, out = gate + bytes_of_row, load(words, OUT, INT64) + token * bytes_of_row
        for i in range(size):
            store(out, i, _gelu_tanh(load(gate, i, kind)) * load(up, i, kind), kind)
        token = fetch_add(words, 1)


@kernel
def _gelu(x: float) -> float:
    """x * (1 + erf(x / sqrt(2))) / 2, with erf within 1.5e-7 (Abramowitz and Stegun, 1964, 7.1.26)."""
    y = abs(x) * HALF_ROOT
    t = ONE / (ONE + ERF_P * y)
    left = ((((ERF_5 * t + ERF_4) * t + ERF_3) * t + ERF_2) * t + ERF_1) * t * exp2(-y * y * LOG2_E)
    half = HALF * left  # the probability beyond |x|
    return x * (ONE - half) if x > ZERO else x * half


@kernel
def _relu2(x: float) -> float:
    value = larger(x, ZERO)
    return value * value


@kernel
def activate_columns(x: int, number: int, kind: Real) -> None:
    """The activation with this number in `interface.ACTIVATIONS` of COLUMNS numbers at `x`, in place.

    Loops of a constant length become whole vectors.
    """
    if number == 0:
        for i in range(COLUMNS):
            store(x, i, load(x, i, kind) * sigmoid(load(x, i, kind)), kind)
    elif number == 1:
        for i in range(COLUMNS):
            store(x, i, _gelu_tanh(load(x, i, kind)), kind)
    elif number == 2:
        for i in range(COLUMNS):
            store(x, i, _gelu(load(x, i, kind)), kind)
    elif number == 3:
        for i in range(COLUMNS):
            store(x, i, load(x, i, kind) * sigmoid(QUICK * load(x, i, kind)), kind)
    elif number == 4:
        for i in range(COLUMNS):
            store(x, i, larger(load(x, i, kind), ZERO), kind)
    else:
        for i in range(COLUMNS):
            store(x, i, _relu2(load(x, i, kind)), kind)


@kernel
def _up(up: int, i: int, kind: Real) -> float:
    """What the activation of a gate is multiplied by; 1 where `up` is 0."""
    return load(up, i, kind) if up != 0 else ONE


@kernel
def _activate(words: int, kind: Real) -> None:
    """The activation with this number in `interface.ACTIVATIONS`, of `x` or of gates."""
    size, tokens, number = load(words, SIZE, INT64), load(words, TOKENS, INT64), load(words, ACTIVATION, INT64)
    is_gated, bytes_of_row = load(words, IS_GATED, INT64), size * bytes_of(kind)
    token = fetch_add(words, 1)
    while token < tokens:
        x = load(words, X, INT64) + token * bytes_of_row * (1 + is_gated)
        up, out = (x + bytes_of_row) * is_gated, load(words, OUT, INT64) + token * bytes_of_row
        if number == 0:
            for i in range(size):
                value = load(x, i, kind)
                store(out, i, value * sigmoid(value) * _up(up, i, kind), kind)
        elif number == 1:
            for i in range(size):
                store(out, i, _gelu_tanh(load(x, i, kind)) * _up(up, i, kind), kind)
        elif number == 2:
            for i in range(size):
                store(out, i, _gelu(load(x, i, kind)) * _up(up, i, kind), kind)
        elif number == 3:
            for i in range(size):
                value = load(x, i, kind)
                store(out, i, value * sigmoid(QUICK * value) * _up(up, i, kind), kind)
        elif number == 4:
            for i in range(size):
                store(out, i, larger(load(x, i, kind), ZERO) * _up(up, i, kind), kind)
        else:
            for i in range(size):
                store(out, i, _relu2(load(x, i, kind)) * _up(up, i, kind), kind)
        token = fetch_add(words, 1)


@kernel
def _clamped_swiglu(words: int, kind: Real) -> None:
    """(clamp(up) + 1) * g * sigmoid(alpha * g), for g = min(gate, limit)."""
    size, tokens = load(words, SIZE, INT64), load(words, TOKENS, INT64)
    alpha, limit = float_of(load(words, ALPHA_BITS, INT64)), float_of(load(words, LIMIT_BITS, INT64))
    bytes_of_row = size * bytes_of(kind)
    token = fetch_add(words, 1)
    while token < tokens:
        gate = load(words, X, INT64) + 2 * token * bytes_of_row
        up, out = gate + bytes_of_row, load(words, OUT, INT64) + token * bytes_of_row
        for i in range(size):
            value, other = load(gate, i, kind), load(up, i, kind)
            value = limit if value > limit else value
            other = limit if other > limit else -limit if other < -limit else other
            store(out, i, (other + ONE) * value * sigmoid(alpha * value), kind)
        token = fetch_add(words, 1)


@kernel
def _soft_cap(words: int, kind: Real) -> None:
    """`cap * tanh(x / cap)`; numbers that are not finite, recognized by their bits, are unchanged."""
    size, cap = load(words, SIZE, INT64), float_of(load(words, CAP_BITS, INT64))
    factor, tokens = ONE / cap, load(words, TOKENS, INT64)
    token = fetch_add(words, 1)
    while token < tokens:
        start = token * size * bytes_of(kind)
        x, out = load(words, X, INT64) + start, load(words, OUT, INT64) + start
        for i in range(size):
            value = load(x, i, kind)
            capped = cap * tanh(value * factor)
            store(out, i, capped if bits_of(value) & SIZE_BITS < INFINITY_BITS else value, kind)
        token = fetch_add(words, 1)


EMBED = specialized(_embed)
CONVERT = {(kind, made): specialized(_convert, FLOATS[kind], FLOATS[made]) for kind in FLOATS for made in FLOATS
           if kind != made}
STREAMS = [(torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32), (torch.float32, torch.float32)]
"""The type of a model and the type of its residual stream, by which its kernels are chosen."""
NORM, LAYER_NORM, ADD = (
    {(kind, stream): specialized(part, FLOATS[kind], FLOATS[stream]) for kind, stream in STREAMS}
    for part in (_norm, _layer_norm, _add))
SILU_MUL, SIGMOID_MUL, GELU_MUL, ACTIVATE, CLAMPED_SWIGLU, SOFT_CAP = map(
    for_floats, (_silu_mul, _sigmoid_mul, _gelu_mul, _activate, _clamped_swiglu, _soft_cap))
