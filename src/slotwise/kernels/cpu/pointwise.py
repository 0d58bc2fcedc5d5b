"""What happens to each token by itself: norms, activation, rotary embedding with the cache write, greedy choice.

Each kernel fuses what would otherwise pass through memory several times.  Arithmetic is float32, rounded once where a
result is stored.  Threads take tokens a few at a time.
"""

from __future__ import annotations

import numpy as np
import torch
from numba import njit

from slotwise.kernels.cpu.compiled import Compiled
from slotwise.kernels.cpu.openmp import HEADER, MAX_ARGUMENTS
from slotwise.kernels.cpu.simd import (
    BFLOAT16,
    FASTMATH,
    FLOAT32,
    INT64,
    array,
    bits_to_float,
    bytes_of,
    exp2,
    fetch_add,
    narrow,
    widen,
)

TAKE = 4  # tokens a thread takes at a time
LOG2_E = np.float32(1.4426950408889634)

# Arguments in words after the header: those of norms and activation, then those of the rotary embedding.
X, RESIDUAL, WEIGHT, OUT, TOKENS, SIZE, EPS_BITS = range(HEADER, HEADER + 7)
(
    QKV, QUERY, CACHE, ROTARY, POSITIONS, SLOTS, NUM_TOKENS, HEADS, KV_HEADS, DIM, DIM_PADDED, BLOCK, BLOCK_PADDED,
    QUERY_NORM, KEY_NORM, NORM_EPS_BITS,
) = range(HEADER, HEADER + 16)


@njit(fastmath=FASTMATH)
def _inverse_rms(x, size, eps):
    squares = np.float32(0)
    for i in range(size):
        value = widen(x[i])
        squares += value * value
    return np.float32(1) / np.sqrt(squares / np.float32(size) + eps)


@njit(fastmath=FASTMATH)
def _norm_token(words, token, kind):
    size = words[SIZE]
    bytes_of_row = size * bytes_of(kind)
    x = array(words[X] + token * bytes_of_row, size, kind)
    out = array(words[OUT] + token * bytes_of_row, size, kind)
    weight = array(words[WEIGHT], size, kind)
    if words[RESIDUAL] != 0:
        residual = array(words[RESIDUAL] + token * bytes_of_row, size, kind)
        for i in range(size):
            residual[i] = narrow(widen(residual[i]) + widen(x[i]), kind)
        x = residual
    factor = _inverse_rms(x, size, bits_to_float(np.uint32(words[EPS_BITS])))
    for i in range(size):
        out[i] = narrow(widen(x[i]) * factor * widen(weight[i]), kind)


@njit(fastmath=FASTMATH)
def _silu_mul_token(words, token, kind):
    size = words[SIZE]
    gate = array(words[X] + token * 2 * size * bytes_of(kind), size, kind)
    up = array(words[X] + (token * 2 + 1) * size * bytes_of(kind), size, kind)
    out = array(words[OUT] + token * size * bytes_of(kind), size, kind)
    for i in range(size):
        value = widen(gate[i])
        out[i] = narrow(value / (np.float32(1) + exp2(-value * LOG2_E)) * widen(up[i]), kind)


@njit(fastmath=FASTMATH)
def _rotate(words, token, head, norm_at, target, stride, kind):
    """One head of `qkv`, normed if `norm_at` is an address and rotated, to every `stride`-th element of `target`."""
    dim = words[DIM]
    half = dim // 2
    row = (words[HEADS] + 2 * words[KV_HEADS]) * dim
    x = array(words[QKV] + (token * row + head * dim) * bytes_of(kind), dim, kind)
    position = array(words[POSITIONS], words[NUM_TOKENS], INT64)[token]
    cosine = array(words[ROTARY] + position * dim * 4, half, FLOAT32)
    sine = array(words[ROTARY] + (position * dim + half) * 4, half, FLOAT32)
    if norm_at != 0:
        weight = array(norm_at, dim, kind)
        factor = _inverse_rms(x, dim, bits_to_float(np.uint32(words[NORM_EPS_BITS])))
        for i in range(half):
            low = widen(x[i]) * factor * widen(weight[i])
            high = widen(x[half + i]) * factor * widen(weight[half + i])
            target[i * stride] = narrow(low * cosine[i] - high * sine[i], kind)
            target[(half + i) * stride] = narrow(high * cosine[i] + low * sine[i], kind)
    else:
        for i in range(half):
            low, high = widen(x[i]), widen(x[half + i])
            target[i * stride] = narrow(low * cosine[i] - high * sine[i], kind)
            target[(half + i) * stride] = narrow(high * cosine[i] + low * sine[i], kind)


@njit(fastmath=FASTMATH)
def _rotary_store_token(words, token, kind):
    heads, kv_heads, dim, size = words[HEADS], words[KV_HEADS], words[DIM], bytes_of(kind)
    block_padded, width = words[BLOCK_PADDED], words[DIM_PADDED]
    for head in range(heads):
        target = array(words[QUERY] + (token * heads + head) * dim * size, dim, kind)
        _rotate(words, token, head, words[QUERY_NORM], target, 1, kind)
    slot = array(words[SLOTS], words[NUM_TOKENS], INT64)[token]
    block, offset = slot // words[BLOCK], slot % words[BLOCK]
    head_block = dim * block_padded + words[BLOCK] * width
    for head in range(kv_heads):
        start = words[CACHE] + (block * kv_heads + head) * head_block * size
        keys = array(start + offset * size, dim * block_padded, kind)
        _rotate(words, token, heads + head, words[KEY_NORM], keys, block_padded, kind)
        values = array(start + (dim * block_padded + offset * width) * size, dim, kind)
        row = token * (heads + 2 * kv_heads) + heads + kv_heads + head
        new = array(words[QKV] + row * dim * size, dim, kind)
        for i in range(dim):
            values[i] = new[i]


@njit(fastmath=FASTMATH)
def _greedy_token(words, token, kind):
    """The first of the largest logits."""
    size = words[SIZE]
    logits = array(words[X] + token * size * bytes_of(kind), size, kind)
    chosen = array(words[OUT], words[TOKENS], INT64)
    top = widen(logits[0])
    for i in range(size):
        top = max(top, widen(logits[i]))
    chosen[token] = 0
    for i in range(size):
        if widen(logits[i]) == top:
            chosen[token] = i
            break


@njit
def _each(words_at, count_word, take, do, kind):
    """`do(words, token, kind)` for every token, `take` tokens at a time."""
    words = array(words_at, HEADER + MAX_ARGUMENTS, INT64)
    first = fetch_add(words_at, take)
    while first < words[count_word]:
        for token in range(first, min(first + take, words[count_word])):
            do(words, token, kind)
        first = fetch_add(words_at, take)


def _norm_bfloat16(words_at):
    _each(words_at, TOKENS, TAKE, _norm_token, BFLOAT16)


def _norm_float32(words_at):
    _each(words_at, TOKENS, TAKE, _norm_token, FLOAT32)


def _silu_mul_bfloat16(words_at):
    _each(words_at, TOKENS, TAKE, _silu_mul_token, BFLOAT16)


def _silu_mul_float32(words_at):
    _each(words_at, TOKENS, TAKE, _silu_mul_token, FLOAT32)


def _rotary_store_bfloat16(words_at):
    _each(words_at, NUM_TOKENS, TAKE, _rotary_store_token, BFLOAT16)


def _rotary_store_float32(words_at):
    _each(words_at, NUM_TOKENS, TAKE, _rotary_store_token, FLOAT32)


def _greedy_bfloat16(words_at):
    _each(words_at, TOKENS, 1, _greedy_token, BFLOAT16)


def _greedy_float32(words_at):
    _each(words_at, TOKENS, 1, _greedy_token, FLOAT32)


NORM = {
    torch.bfloat16: Compiled(_norm_bfloat16, "void(int64)"),
    torch.float32: Compiled(_norm_float32, "void(int64)"),
}
SILU_MUL = {
    torch.bfloat16: Compiled(_silu_mul_bfloat16, "void(int64)"),
    torch.float32: Compiled(_silu_mul_float32, "void(int64)"),
}
ROTARY_STORE = {
    torch.bfloat16: Compiled(_rotary_store_bfloat16, "void(int64)"),
    torch.float32: Compiled(_rotary_store_float32, "void(int64)"),
}
GREEDY = {
    torch.bfloat16: Compiled(_greedy_bfloat16, "void(int64)"),
    torch.float32: Compiled(_greedy_float32, "void(int64)"),
}
