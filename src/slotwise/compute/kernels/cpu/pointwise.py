"""Operations on each token by itself: the embedding, norms and activations.

Each kernel fuses what would otherwise pass through memory several times.  Arithmetic is float32, rounded once where a
result is stored.  A thread takes one token at a time.
"""

from __future__ import annotations

import torch

from slotwise.compute.kernels.cpu.jit.compiler import kernel, specialized
from slotwise.compute.kernels.cpu.launcher import HEADER
from slotwise.compute.kernels.cpu.simd import (
    BFLOAT16,
    FLOAT32,
    INT64,
    ONE,
    ZERO,
    Real,
    bits_of,
    bytes_of,
    fetch_add,
    fill,
    float32,
    float_of,
    load,
    sigmoid,
    sqrt,
    store,
    tanh,
)

# Bits of a float32: all except the sign, and infinity; NaN is larger.
SIZE_BITS, INFINITY_BITS = 0x7FFFFFFF, 0x7F800000
GELU_FIRST, GELU_THIRD = float32(1.5957691216057308), float32(0.07135481282952456)

# Arguments in words after the header: of the embedding, of norms and activations.
TABLE, TOKEN_IDS, EMBEDDING, EMBEDDED, ROW_BYTES, LAST_ID, FIRST_ID, IS_PART = range(HEADER, HEADER + 8)
X, RESIDUAL, WEIGHT, OUT, TOKENS, SIZE, EPS_BITS, OFFSET_BITS = range(HEADER, HEADER + 8)
CAP_BITS = EPS_BITS
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
def _norm(words: int, kind: Real) -> None:
    """RMSNorm of `x`, or of `residual += x` where `RESIDUAL` is an address."""
    size, weight = load(words, SIZE, INT64), load(words, WEIGHT, INT64)
    eps, tokens = float_of(load(words, EPS_BITS, INT64)), load(words, TOKENS, INT64)
    offset = float_of(load(words, OFFSET_BITS, INT64))
    token = fetch_add(words, 1)
    while token < tokens:
        start = token * size * bytes_of(kind)
        x, residual, out = load(words, X, INT64) + start, load(words, RESIDUAL, INT64), load(words, OUT, INT64) + start
        if residual != 0:
            residual += start
            for i in range(size):
                store(residual, i, load(residual, i, kind) + load(x, i, kind), kind)
            x = residual
        factor = inverse_rms(x, size, eps, kind)
        for i in range(size):
            store(out, i, load(x, i, kind) * factor * (load(weight, i, kind) + offset), kind)
        token = fetch_add(words, 1)


@kernel
def _add(words: int, kind: Real) -> None:
    """`residual += x`, or where `WEIGHT` is an address, `residual += sigmoid(weight) * x`, with a weight per token."""
    size, tokens, gates = load(words, SIZE, INT64), load(words, TOKENS, INT64), load(words, WEIGHT, INT64)
    token = fetch_add(words, 1)
    while token < tokens:
        start = token * size * bytes_of(kind)
        x, residual = load(words, X, INT64) + start, load(words, RESIDUAL, INT64) + start
        factor = sigmoid(load(gates, token, kind)) if gates != 0 else ONE
        for i in range(size):
            store(residual, i, load(residual, i, kind) + factor * load(x, i, kind), kind)
        token = fetch_add(words, 1)


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
def _gelu_mul(words: int, kind: Real) -> None:
    """GELU by tanh: x * (1 + tanh(y)) / 2 is x * sigmoid(2 * y), for y = sqrt(2 / pi) * (x + 0.044715 * x**3)."""
    size, tokens = load(words, SIZE, INT64), load(words, TOKENS, INT64)
    bytes_of_row = size * bytes_of(kind)
    token = fetch_add(words, 1)
    while token < tokens:
        gate = load(words, X, INT64) + 2 * token * bytes_of_row
        up, out = gate + bytes_of_row, load(words, OUT, INT64) + token * bytes_of_row
        for i in range(size):
            value = load(gate, i, kind)
            power = value * (GELU_FIRST + GELU_THIRD * value * value)
            store(out, i, value * sigmoid(power) * load(up, i, kind), kind)
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
NORM = {
    torch.bfloat16: specialized(_norm, BFLOAT16),
    torch.float32: specialized(_norm, FLOAT32),
}
ADD = {
    torch.bfloat16: specialized(_add, BFLOAT16),
    torch.float32: specialized(_add, FLOAT32),
}
SILU_MUL = {
    torch.bfloat16: specialized(_silu_mul, BFLOAT16),
    torch.float32: specialized(_silu_mul, FLOAT32),
}
SIGMOID_MUL = {
    torch.bfloat16: specialized(_sigmoid_mul, BFLOAT16),
    torch.float32: specialized(_sigmoid_mul, FLOAT32),
}
GELU_MUL = {
    torch.bfloat16: specialized(_gelu_mul, BFLOAT16),
    torch.float32: specialized(_gelu_mul, FLOAT32),
}
CLAMPED_SWIGLU = {
    torch.bfloat16: specialized(_clamped_swiglu, BFLOAT16),
    torch.float32: specialized(_clamped_swiglu, FLOAT32),
}
SOFT_CAP = {
    torch.bfloat16: specialized(_soft_cap, BFLOAT16),
    torch.float32: specialized(_soft_cap, FLOAT32),
}
