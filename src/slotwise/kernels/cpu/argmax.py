"""The largest logit of each row, among all tokens or among those that a mask allows; each row by one thread.

A mask has one bit a token: bit i of word i // 32 allows token i.  Where 32 tokens in a row are not allowed, their
logits are not read.
"""

from __future__ import annotations

import numpy as np
import torch

from slotwise.kernels.cpu.jit.compiler import Compiled, kernel, specialised
from slotwise.kernels.cpu.launcher import HEADER
from slotwise.kernels.cpu.simd import (
    BFLOAT16,
    FLOAT32,
    INT32,
    INT64,
    Real,
    bytes_of,
    fetch_add,
    float32,
    int32,
    int64,
    load,
    signed_bits_of,
    store,
)
from slotwise.kernels.sampling import FAILED

# Arguments in words after the header: addresses, but for VOCAB and NUM_ROWS, which are sizes.
LOGITS, VOCAB, ROWS, NUM_ROWS, TOKENS, MASKS = range(HEADER, HEADER + 6)  # rows and tokens int64, masks [rows, words]

_BLOCK = 512
_WORD_BITS = 32
_MINUS_INFINITY = float32(-np.inf)
_INFINITY = 0x7F800000  # the bits of this float


@kernel
def _greedy(words: int, kind: Real) -> None:
    """`tokens[i]` = the first of the largest logits of row `rows[i]`, or FAILED."""
    bytes_of_row = load(words, VOCAB, INT64) * bytes_of(kind)
    i = fetch_add(words, 1)
    while i < load(words, NUM_ROWS, INT64):
        row = load(load(words, ROWS, INT64), i, INT64)
        token = argmax(load(words, LOGITS, INT64) + row * bytes_of_row, load(words, VOCAB, INT64), kind)
        store(load(words, TOKENS, INT64), i, token, INT64)
        i = fetch_add(words, 1)


@kernel
def _masked_greedy(words: int, kind: Real) -> None:
    """`tokens[i]` = the first of the largest logits of row `rows[i]` that mask i allows, or FAILED."""
    vocab = load(words, VOCAB, INT64)
    i = fetch_add(words, 1)
    while i < load(words, NUM_ROWS, INT64):
        row = load(load(words, ROWS, INT64), i, INT64)
        mask = load(words, MASKS, INT64) + i * ((vocab + 31) // 32) * 4
        token = _masked_argmax(load(words, LOGITS, INT64) + row * vocab * bytes_of(kind), mask, vocab, kind)
        store(load(words, TOKENS, INT64), i, token, INT64)
        i = fetch_add(words, 1)


def _mask(words: int) -> None:
    """Minus infinity for the tokens of row `rows[i]` of the float32 logits that mask i does not allow."""
    vocab = load(words, VOCAB, INT64)
    i = fetch_add(words, 1)
    while i < load(words, NUM_ROWS, INT64):
        row = load(load(words, ROWS, INT64), i, INT64)
        logits, mask = load(words, LOGITS, INT64) + row * vocab * 4, load(words, MASKS, INT64)
        mask += i * ((vocab + 31) // 32) * 4
        for start in range(0, vocab, _WORD_BITS):
            bits = load(mask, start // _WORD_BITS, INT32)
            for j in range(start, min(start + _WORD_BITS, vocab)):
                value = load(logits, j, FLOAT32)
                store(logits, j, value if int32(bits >> int32(j - start)) & int32(1) else _MINUS_INFINITY, FLOAT32)
        i = fetch_add(words, 1)


@kernel
def argmax(logits: int, size: int, kind: Real) -> int:
    """The first of the largest, or FAILED.

    Works on integers that order like the floats (sign and magnitude made two's complement): they vectorise, unlike
    comparisons of floats that respect NaN.
    """
    best, place = int32(-_INFINITY), int64(FAILED)
    for start in range(0, size, _BLOCK):
        top, widest = int32(-_INFINITY), int32(0)
        for i in range(start, min(start + _BLOCK, size)):
            order = _order(load(logits, i, kind))
            top = max(top, order)
            widest = max(widest, int32(abs(order)))
        if widest > _INFINITY or top == _INFINITY:
            return int64(FAILED)
        if top > best:
            best, place = top, int64(start)
    if place != FAILED:
        while _order(load(logits, place, kind)) != best:
            place += 1
    return place


@kernel
def _masked_argmax(logits: int, mask: int, size: int, kind: Real) -> int:
    """As `argmax`, of the tokens that `mask` allows; the others are not even compared where 32 in a row are not."""
    best, place = int32(-_INFINITY), int64(FAILED)
    for start in range(0, size, _WORD_BITS):
        bits = load(mask, start // _WORD_BITS, INT32)
        if bits != 0:
            top, widest = int32(-_INFINITY), int32(0)
            for i in range(start, min(start + _WORD_BITS, size)):
                order = _order(load(logits, i, kind))
                order = order if int32(bits >> int32(i - start)) & int32(1) else int32(-_INFINITY)
                top = max(top, order)
                widest = max(widest, int32(abs(order)))
            if widest > _INFINITY or top == _INFINITY:
                return int64(FAILED)
            if top > best:
                best, place = top, int64(start)
    if place != FAILED:
        start, bits = place, load(mask, place // _WORD_BITS, INT32)
        while _order(load(logits, place, kind)) != best or not int32(bits >> int32(place - start)) & int32(1):
            place += 1
    return place


@kernel
def _order(value: float) -> int:
    bits = signed_bits_of(value)
    sign = int32(bits >> int32(31))
    return int32((int32(bits & int32(0x7FFFFFFF)) ^ sign) - sign)


GREEDY = {
    torch.bfloat16: specialised(_greedy, BFLOAT16),
    torch.float32: specialised(_greedy, FLOAT32),
}
MASKED_GREEDY = {
    torch.bfloat16: specialised(_masked_greedy, BFLOAT16),
    torch.float32: specialised(_masked_greedy, FLOAT32),
}
MASK = Compiled(_mask)
