"""The rotary embedding: everything between a layer's first product and its attention, token by token.

That is the norms of heads, the rotation of queries and keys, and the write of keys and values to the cache.  Arithmetic
is float32, rounded once where a result is stored.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from llvmlite import ir

from slotwise.compute.kernels.cpu.jit.compiler import INT, intrinsic, kernel, specialized
from slotwise.compute.kernels.cpu.jit.llvm import SHORT, read, write
from slotwise.compute.kernels.cpu.launcher import HEADER, THREAD_COUNTER
from slotwise.compute.kernels.cpu.pointwise import INFINITY_BITS, SIZE_BITS, inverse_rms, sum_of_squares
from slotwise.compute.kernels.cpu.processor import LANES, PAIR
from slotwise.compute.kernels.cpu.simd import (
    BFLOAT16,
    FLOAT32,
    INT8,
    INT32,
    INT64,
    ONE,
    Real,
    bytes_of,
    fetch_add,
    float32,
    float_of,
    for_floats,
    larger,
    load,
    prefetch_all,
    sqrt,
    store,
)
from slotwise.compute.kernels.cpu.threads import NOTHING, pop, rows_of_an_item

# The int8 steps on either side of zero.
STEPS = float32(127)
TINY = float32(1e-30)

# Arguments in words after the header.
(
    QKV, QUERY, CACHE, ROTARY, POSITIONS, SLOTS, NUM_TOKENS, GROUP, KV_HEADS, DIM, DIM_PADDED, BLOCK, BLOCK_PADDED,
    HEAD_BLOCK, QUERY_NORM, KEY_NORM, NORM_EPS_BITS, NORM_OFFSET_BITS, QUERY_NORM_HEADS, KEY_NORM_HEADS, ROOM,
    SQUARES, QUERY_NUMBERS, KEY_NUMBERS, THREADS,
) = range(HEADER, HEADER + 25)


@kernel
def _head_of(words: int, token: int, head: int, kind: Real) -> int:
    """Address in `qkv` of a token's head."""
    dim = load(words, DIM, INT64)
    row = (load(words, GROUP, INT64) + 2) * load(words, KV_HEADS, INT64) * dim
    return load(words, QKV, INT64) + (token * row + head * dim) * bytes_of(kind)


@kernel
def _norm_factor(words: int, token: int, head: int, heads: int, place: int, kind: Real) -> float:
    """One over the root mean square of `heads` heads of `qkv` from `head` on, or of the heads of all ranks.

    `place` selects the sum of squares and the number of its numbers: 0 of queries, 1 of keys.
    """
    eps, squares = float_of(load(words, NORM_EPS_BITS, INT64)), load(words, SQUARES, INT64)
    if squares != 0:
        numbers = float32(load(words, QUERY_NUMBERS + place, INT64))
        return ONE / sqrt(load(squares, 2 * token + place, FLOAT32) / numbers + eps)
    return inverse_rms(_head_of(words, token, head, kind), heads * load(words, DIM, INT64), eps, kind)


@kernel
def _squares(words: int, kind: Real) -> None:
    """The sums of the squares of each token's queries and keys to `SQUARES [tokens, 2]`."""
    tokens, dim, kv_heads = load(words, NUM_TOKENS, INT64), load(words, DIM, INT64), load(words, KV_HEADS, INT64)
    queries = load(words, GROUP, INT64) * kv_heads
    token = fetch_add(words, 1)
    while token < tokens:
        for place in range(2):
            at, heads = (_head_of(words, token, 0, kind), queries) if place == 0 else (
                _head_of(words, token, queries, kind), kv_heads)
            store(load(words, SQUARES, INT64), 2 * token + place, sum_of_squares(at, heads * dim, kind), FLOAT32)
        token = fetch_add(words, 1)


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
    """The place of `column` among `columns`, the inverse of `cache.stored_order`."""
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


def _copy_short(builder: ir.IRBuilder, source: ir.Value, target: ir.Value) -> None:
    write(builder, read(builder, source, SHORT, 2), target, align=2)


copy_short: Callable[[int, int], None] = intrinsic(_copy_short, INT, INT)
"""`copy_short(source, target)`: copy two bytes."""


@kernel
def _keep_as_is(
    words: int, token: int, head: int, norm: int, factor: float, block: int, offset: int, room: int, kind: Real,
) -> None:
    """Store a token's key and value of one head at place `offset` of the `block` of that head.

    `room` is scratch for a head: a key is rotated there by vectors, which cannot write to columns.
    """
    dim, width, columns = load(words, DIM, INT64), load(words, DIM_PADDED, INT64), load(words, BLOCK_PADDED, INT64)
    key = block + stored_at(offset, columns, kind) * bytes_of(kind)
    value = block + (dim * columns + offset * width) * bytes_of(kind)
    source = _values(words, token, head, kind)
    _rotate(words, token, _key_head(words, head), norm, factor, room, 1, kind, kind)
    if bytes_of(kind) == 2:  # a constant at compile time
        for i in range(dim):
            copy_short(room + 2 * i, key + 2 * i * columns)
        whole = dim // PAIR * PAIR
        for start in range(0, whole, PAIR):
            for i in range(LANES):
                copy_short(source + 2 * (start + i), value + 2 * (start + 2 * i))
                copy_short(source + 2 * (start + LANES + i), value + 2 * (start + 2 * i + 1))
        for i in range(whole, dim):
            copy_short(source + 2 * i, value + 2 * stored_at(i, width, kind))
    else:
        for i in range(dim):
            store(key, i * columns, load(room, i, kind), kind)
        for i in range(dim):
            store(value, i, load(source, i, kind), kind)


@kernel
def _quantize(numbers: int, count: int, target: int, stride: int, scale: int) -> None:
    """Quantize float32 `numbers` to every `stride`-th byte of `target`, and store their scale at `scale`.

    Magnitudes are compared by their bits, which order like the numbers, with NaN at the top.  So the scale of numbers
    with a NaN is NaN, and with an infinity infinite: both stay visible.
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
    """Store a token's key and value quantized to int8, with `room` as scratch for a head in float32."""
    dim, width, columns = load(words, DIM, INT64), load(words, DIM_PADDED, INT64), load(words, BLOCK_PADDED, INT64)
    values = block + dim * columns
    scales = values + load(words, BLOCK, INT64) * width + offset * 4
    _rotate(words, token, _key_head(words, head), norm, factor, room, 1, kind, FLOAT32)
    _quantize(room, dim, block + offset, columns, scales)
    source = _values(words, token, head, kind)
    for i in range(dim):
        store(room, i, load(source, i, kind), FLOAT32)
    _quantize(room, dim, values + offset * width, 1, scales + columns * 4)


@kernel
def _rotary_store_token(words: int, token: int, room: int, kind: Real, stored: Real) -> None:
    kv_heads, dim = load(words, KV_HEADS, INT64), load(words, DIM, INT64)
    heads = load(words, GROUP, INT64) * kv_heads
    norm, together, factor = load(words, QUERY_NORM, INT64), load(words, QUERY_NORM_HEADS, INT64), ONE
    for head in range(heads):
        target = load(words, QUERY, INT64) + (token * heads + head) * dim * bytes_of(kind)
        if norm != 0 and head % together == 0:
            factor = _norm_factor(words, token, head, together, 0, kind)
        weight = norm + head % together * dim * bytes_of(kind)
        _rotate(words, token, head, weight, factor, target, 1, kind, kind)
    slot, block, head_block = _slot(words, token), load(words, BLOCK, INT64), load(words, HEAD_BLOCK, INT64)
    start = load(words, CACHE, INT64) + slot // block * kv_heads * head_block
    norm, together = load(words, KEY_NORM, INT64), load(words, KEY_NORM_HEADS, INT64)
    for head in range(kv_heads):
        if norm != 0 and head % together == 0:
            factor = _norm_factor(words, token, _key_head(words, head), together, 1, kind)
        weight = norm + head % together * dim * bytes_of(kind)
        if bytes_of(stored) == 1:  # a constant at compile time
            _keep_int8(words, token, head, weight, factor, start, slot % block, room, kind)
        else:
            _keep_as_is(words, token, head, weight, factor, start, slot % block, room, kind)
        start += head_block


@kernel
def _slot(words: int, token: int) -> int:
    """The place of a token in the cache."""
    return load(load(words, SLOTS, INT64), token, INT64)


@kernel
def _prefetch_place(words: int, token: int, stored: Real) -> None:
    """Prefetch what a token's keys are written to: each number lies in a cache line of its own."""
    dim, columns, kv_heads = load(words, DIM, INT64), load(words, BLOCK_PADDED, INT64), load(words, KV_HEADS, INT64)
    slot, block, head_block = _slot(words, token), load(words, BLOCK, INT64), load(words, HEAD_BLOCK, INT64)
    place = load(words, CACHE, INT64) + slot // block * kv_heads * head_block
    place += stored_at(slot % block, columns, stored) * bytes_of(stored)
    for _ in range(kv_heads):
        for i in range(dim):
            prefetch_all(place + i * columns * bytes_of(stored), 1)
        place += head_block


@kernel
def _rotary_store(words: int, kind: Real, stored: Real) -> None:
    """Queries normed and rotated; keys and values to the cache, as `stored`, which may be another kind.

    Neighbors in a prompt are neighbors in a block, where keys of 32 tokens share every cache line: threads that
    alternated between them would move the lines from core to core at every token.  Attention, too, takes rows in order,
    so that most keys are in the cache of the core that reads them.
    """
    tokens, threads = load(words, NUM_TOKENS, INT64), load(words, THREADS, INT64)
    thread = fetch_add(words + THREAD_COUNTER, 1)
    room = load(words, ROOM, INT64) + thread * load(words, DIM_PADDED, INT64) * 4
    together = rows_of_an_item(tokens, threads)
    items = (tokens + together - 1) // together
    item = pop(words, thread, threads, items)
    while item != NOTHING:
        end = min((item + 1) * together, tokens)
        _prefetch_place(words, item * together, stored)
        for token in range(item * together, end):
            if token + 1 < end and _slot(words, token + 1) != _slot(words, token) + 1:  # of another row
                _prefetch_place(words, token + 1, stored)
            _rotary_store_token(words, token, room, kind, stored)
        item = pop(words, thread, threads, items)


SQUARES_OF = for_floats(_squares)
ROTARY_STORE = {
    (torch.bfloat16, torch.bfloat16): specialized(_rotary_store, BFLOAT16, BFLOAT16),
    (torch.float32, torch.float32): specialized(_rotary_store, FLOAT32, FLOAT32),
    (torch.bfloat16, torch.int8): specialized(_rotary_store, BFLOAT16, INT8),
    (torch.float32, torch.int8): specialized(_rotary_store, FLOAT32, INT8),
}
"""The kernels, by the types of the input and of the cache."""
