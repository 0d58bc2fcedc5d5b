"""Operations on each token by itself: norms, activation, rotary embedding with the cache write.

Each kernel fuses what would otherwise pass through memory several times.  Arithmetic is float32, rounded once where a
result is stored.  A thread takes one token at a time.
"""

from __future__ import annotations

import torch

from slotwise.kernels.cpu.jit.compiler import kernel, specialised
from slotwise.kernels.cpu.launcher import HEADER, THREAD_COUNTER
from slotwise.kernels.cpu.processor import LANES, PAIR
from slotwise.kernels.cpu.simd import (
    BFLOAT16,
    FLOAT32,
    INT8,
    INT32,
    INT64,
    ONE,
    ZERO,
    Real,
    bits_of,
    bytes_of,
    fetch_add,
    float32,
    float_of,
    larger,
    load,
    sigmoid,
    sqrt,
    store,
    tanh,
)

SIZE_BITS, INFINITY_BITS = 0x7FFFFFFF, 0x7F800000  # of a float32: all but its sign; NaN lies above infinity
GELU_FIRST, GELU_THIRD = float32(1.5957691216057308), float32(0.07135481282952456)
STEPS = float32(127)  # int8 steps on either side of zero
TINY = float32(1e-30)

# Arguments in words after the header: of the embedding, of norms and activation, of the rotary embedding.
TABLE, TOKEN_IDS, EMBEDDING, EMBEDDED, ROW_BYTES, LAST_ID = range(HEADER, HEADER + 6)
X, RESIDUAL, WEIGHT, OUT, TOKENS, SIZE, EPS_BITS, OFFSET_BITS = range(HEADER, HEADER + 8)
CAP_BITS = EPS_BITS
ALPHA_BITS, LIMIT_BITS = EPS_BITS, OFFSET_BITS
(
    QKV, QUERY, CACHE, ROTARY, POSITIONS, SLOTS, NUM_TOKENS, GROUP, KV_HEADS, DIM, DIM_PADDED, BLOCK, BLOCK_PADDED,
    HEAD_BLOCK, QUERY_NORM, KEY_NORM, NORM_EPS_BITS, NORM_OFFSET_BITS, QUERY_NORM_HEADS, KEY_NORM_HEADS, ROOM,
) = range(HEADER, HEADER + 21)


@kernel
def _embed(words: int) -> None:
    """Rows of the table, copied by 32 bits.  An id outside the table is clamped: no other memory is read."""
    tokens, row, last = load(words, EMBEDDED, INT64), load(words, ROW_BYTES, INT64), load(words, LAST_ID, INT64)
    token = fetch_add(words, 1)
    while token < tokens:
        token_id = min(max(load(load(words, TOKEN_IDS, INT64), token, INT64), 0), last)
        source = load(words, TABLE, INT64) + token_id * row
        target = load(words, EMBEDDING, INT64) + token * row
        for i in range(row // 4):
            store(target, i, load(source, i, FLOAT32), FLOAT32)
        token = fetch_add(words, 1)


@kernel
def _inverse_rms(x: int, size: int, eps: float, kind: Real) -> float:
    squares = ZERO
    for i in range(size):
        value = load(x, i, kind)
        squares += value * value
    return ONE / sqrt(squares / float32(size) + eps)


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
        factor = _inverse_rms(x, size, eps, kind)
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
    """`cap * tanh(x / cap)`; numbers that are not finite, recognised by their bits, are unchanged."""
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


@kernel
def _head_of(words: int, token: int, head: int, kind: Real) -> int:
    """Address in `qkv` of a token's head."""
    dim = load(words, DIM, INT64)
    row = (load(words, GROUP, INT64) + 2) * load(words, KV_HEADS, INT64) * dim
    return load(words, QKV, INT64) + (token * row + head * dim) * bytes_of(kind)


@kernel
def _norm_factor(words: int, token: int, head: int, heads: int, kind: Real) -> float:
    """One over the root mean square of `heads` heads of `qkv` from `head` on."""
    eps = float_of(load(words, NORM_EPS_BITS, INT64))
    return _inverse_rms(_head_of(words, token, head, kind), heads * load(words, DIM, INT64), eps, kind)


@kernel
def _rotate(
    words: int, token: int, head: int, norm: int, factor: float, target: int, stride: int, kind: Real, stored: Real,
) -> None:
    """One head of `qkv`, normed if `norm` is an address and rotated, to every `stride`-th element of `target`.

    The norm's weights for this head lie at `norm`.  `stored` is the kind of the elements of `target`.
    """
    dim = load(words, DIM, INT64)
    half = dim // 2
    x = _head_of(words, token, head, kind)
    cosine = load(words, ROTARY, INT64) + load(load(words, POSITIONS, INT64), token, INT64) * dim * 4
    sine = cosine + half * 4
    offset = float_of(load(words, NORM_OFFSET_BITS, INT64))
    for i in range(half):
        low, high = load(x, i, kind), load(x, half + i, kind)
        if norm != 0:
            low *= factor * (load(norm, i, kind) + offset)
            high *= factor * (load(norm, half + i, kind) + offset)
        c, s = load(cosine, i, FLOAT32), load(sine, i, FLOAT32)
        store(target, i * stride, low * c - high * s, stored)
        store(target, (half + i) * stride, high * c + low * s, stored)


@kernel
def stored_at(column: int, columns: int, kind: Real) -> int:
    """The place of `column` among `columns`, as in `cache.stored_order`."""
    if bytes_of(kind) != 2 or column >= columns // PAIR * PAIR:
        return column
    return column // PAIR * PAIR + column % LANES * 2 + column // LANES % 2


@kernel
def _key_head(words: int, head: int) -> int:
    """Index in `qkv` of the key of key-value head `head`."""
    return load(words, GROUP, INT64) * load(words, KV_HEADS, INT64) + head


@kernel
def _values(words: int, token: int, head: int, kind: Real) -> int:
    """Address in `qkv` of a token's value of one head."""
    group, kv_heads, dim = load(words, GROUP, INT64), load(words, KV_HEADS, INT64), load(words, DIM, INT64)
    place = (token * (group + 2) + group + 1) * kv_heads + head
    return load(words, QKV, INT64) + place * dim * bytes_of(kind)


@kernel
def _keep_as_is(
    words: int, token: int, head: int, norm: int, factor: float, block: int, offset: int, kind: Real,
) -> None:
    """Store a token's key and value of one head at place `offset` of the `block` of that head."""
    dim, width, columns = load(words, DIM, INT64), load(words, DIM_PADDED, INT64), load(words, BLOCK_PADDED, INT64)
    key = block + stored_at(offset, columns, kind) * bytes_of(kind)
    value = block + (dim * columns + offset * width) * bytes_of(kind)
    _rotate(words, token, _key_head(words, head), norm, factor, key, columns, kind, kind)
    source = _values(words, token, head, kind)
    for i in range(dim):
        store(value, stored_at(i, width, kind), load(source, i, kind), kind)


@kernel
def _quantise(numbers: int, count: int, target: int, stride: int, scale: int) -> None:
    """Quantise float32 `numbers` to every `stride`-th byte of `target`, and store their scale at `scale`.

    Magnitudes are compared by their bits, which order like the numbers, with NaN at the top.  So the scale of numbers
    with a NaN is NaN, and with an infinity infinite: neither is lost.
    """
    largest = 0
    for i in range(count):
        largest = max(largest, load(numbers, i, INT32) & SIZE_BITS)
    factor = STEPS / larger(float_of(largest), TINY)
    for i in range(count):
        store(target, i * stride, load(numbers, i, FLOAT32) * factor, INT8)
    if largest < INFINITY_BITS:
        store(scale, 0, float_of(largest) / STEPS, FLOAT32)
    else:
        store(scale, 0, largest, INT32)


@kernel
def _keep_int8(
    words: int, token: int, head: int, norm: int, factor: float, block: int, offset: int, room: int, kind: Real,
) -> None:
    """The same quantised to int8, with `room` as scratch for a head in float32."""
    dim, width, columns = load(words, DIM, INT64), load(words, DIM_PADDED, INT64), load(words, BLOCK_PADDED, INT64)
    values = block + dim * columns
    scales = values + load(words, BLOCK, INT64) * width + offset * 4
    _rotate(words, token, _key_head(words, head), norm, factor, room, 1, kind, FLOAT32)
    _quantise(room, dim, block + offset, columns, scales)
    source = _values(words, token, head, kind)
    for i in range(dim):
        store(room, i, load(source, i, kind), FLOAT32)
    _quantise(room, dim, values + offset * width, 1, scales + columns * 4)


@kernel
def _rotary_store_token(words: int, token: int, room: int, kind: Real, stored: Real) -> None:
    kv_heads, dim = load(words, KV_HEADS, INT64), load(words, DIM, INT64)
    heads = load(words, GROUP, INT64) * kv_heads
    norm, together, factor = load(words, QUERY_NORM, INT64), load(words, QUERY_NORM_HEADS, INT64), ONE
    for head in range(heads):
        target = load(words, QUERY, INT64) + (token * heads + head) * dim * bytes_of(kind)
        if norm != 0 and head % together == 0:
            factor = _norm_factor(words, token, head, together, kind)
        weight = norm + head % together * dim * bytes_of(kind)
        _rotate(words, token, head, weight, factor, target, 1, kind, kind)
    slot, block, head_block = (
        load(load(words, SLOTS, INT64), token, INT64), load(words, BLOCK, INT64), load(words, HEAD_BLOCK, INT64))
    start = load(words, CACHE, INT64) + slot // block * kv_heads * head_block
    norm, together = load(words, KEY_NORM, INT64), load(words, KEY_NORM_HEADS, INT64)
    for head in range(kv_heads):
        if norm != 0 and head % together == 0:
            factor = _norm_factor(words, token, _key_head(words, head), together, kind)
        weight = norm + head % together * dim * bytes_of(kind)
        if bytes_of(stored) == 1:  # a constant at compile time
            _keep_int8(words, token, head, weight, factor, start, slot % block, room, kind)
        else:
            _keep_as_is(words, token, head, weight, factor, start, slot % block, kind)
        start += head_block


@kernel
def _rotary_store(words: int, kind: Real, stored: Real) -> None:
    """Queries normed and rotated; keys and values to the cache, as `stored`, which may be another kind.

    Neighbours in a prompt are neighbours in a block, where keys of 32 tokens share every cache line: threads that
    alternated between them would move the lines from core to core at every token.
    """
    tokens = load(words, NUM_TOKENS, INT64)
    room = load(words, ROOM, INT64) + fetch_add(words + THREAD_COUNTER, 1) * load(words, DIM_PADDED, INT64) * 4
    grain = min(32, max(1, tokens // 8))
    first = fetch_add(words, grain)
    while first < tokens:
        for token in range(first, min(first + grain, tokens)):
            _rotary_store_token(words, token, room, kind, stored)
        first = fetch_add(words, grain)


EMBED = specialised(_embed)
NORM = {
    torch.bfloat16: specialised(_norm, BFLOAT16),
    torch.float32: specialised(_norm, FLOAT32),
}
ADD = {
    torch.bfloat16: specialised(_add, BFLOAT16),
    torch.float32: specialised(_add, FLOAT32),
}
SILU_MUL = {
    torch.bfloat16: specialised(_silu_mul, BFLOAT16),
    torch.float32: specialised(_silu_mul, FLOAT32),
}
GELU_MUL = {
    torch.bfloat16: specialised(_gelu_mul, BFLOAT16),
    torch.float32: specialised(_gelu_mul, FLOAT32),
}
CLAMPED_SWIGLU = {
    torch.bfloat16: specialised(_clamped_swiglu, BFLOAT16),
    torch.float32: specialised(_clamped_swiglu, FLOAT32),
}
SOFT_CAP = {
    torch.bfloat16: specialised(_soft_cap, BFLOAT16),
    torch.float32: specialised(_soft_cap, FLOAT32),
}
ROTARY_STORE = {  # by the type of the input and of the cache
    (torch.bfloat16, torch.bfloat16): specialised(_rotary_store, BFLOAT16, BFLOAT16),
    (torch.float32, torch.float32): specialised(_rotary_store, FLOAT32, FLOAT32),
    (torch.bfloat16, torch.int8): specialised(_rotary_store, BFLOAT16, INT8),
    (torch.float32, torch.int8): specialised(_rotary_store, FLOAT32, INT8),
}
