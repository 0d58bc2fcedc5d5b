"""Sampling: the largest logits, draws, masks and log-probabilities of rows, each row computed by one thread.

Every row is computed in float32 and in one fixed order of operations, so a request's tokens cannot depend on its
batch-mates.  Its random numbers are a pure function of (seed, output index): Philox4x32-10, the counter-based generator
of Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3" (SC 2011), which cuRAND and Triton use as well.

A row becomes *candidates*: token ids with weights exp((logit - max) / temperature), the largest about 1.  A filter is
one cut-off weight, and candidates at or above it stay, so those that tie stand or fall together:

    min-p   the cut is min_p of the largest weight
    top-k   the largest cut that at least k candidates reach
    top-p   the largest cut such that those that reach it hold at least top_p of the mass

Nothing is sorted.  The bits of positive floats order like integers, so a cut is found by bisection over them: at most
31 vectorized passes, most of them over the few candidates left after the first eight.  The token is then drawn by
inverting the cumulative weights, in order of token id.
"""

from __future__ import annotations

import numpy as np

from slotwise.compute.kernels.cpu.jit.compiler import CompiledKernel, kernel
from slotwise.compute.kernels.cpu.launcher import HEADER, THREAD_COUNTER
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
    float64,
    float_of,
    for_floats,
    int32,
    int64,
    load,
    log,
    signed_bits_of,
    store,
    uint64,
)
from slotwise.compute.kernels.cpu.threads import NOTHING, pop
from slotwise.compute.kernels.reference import FAILED

# Arguments in words after the header: addresses, except for VOCAB, NUM_ROWS and NUM_TOP, which are numbers.  The first
# are common to all kernels; rows and tokens are int64.
LOGITS, VOCAB, ROWS, NUM_ROWS, TOKENS = range(HEADER, HEADER + 5)
# Of the largest logits with masks: `[rows, words]` int32, bit i of word i // 32 allows token i.
MASKS = HEADER + 5
# Of the largest logits without: the parts of each row, and memory for two int64 of each part; the counter of the parts
# that are done, in bytes behind the start of the words.
PARTS, FOUND = HEADER + 5, HEADER + 6
DONE = THREAD_COUNTER + 8
# Of draws and log-probabilities, in the place of the masks: scratch memory.
SCRATCH = HEADER + 5
# Of widening, in the place of the tokens: `[rows, vocab]` float32.
TARGET = HEADER + 4
# Of draws: `[rows, 4]` float32, then `[rows]` and `[rows]` 64 bits.  Temperature 0 is greedy, top_k 0 keeps all tokens.
CONTROLS, SEEDS, INDICES = range(HEADER + 6, HEADER + 9)
TEMPERATURE, TOP_K, TOP_P, MIN_P = range(4)
# Of log-probabilities: float32, int64, then `[rows, k]` int32 and float32.
CHOSEN, RANKS, TOP_IDS, TOP, NUM_TOP = range(HEADER + 6, HEADER + 11)
# Per vocabulary entry and thread: ids int32, weights float32, sums of blocks float64.
SCRATCH_BYTES = 16

# The largest logit of each row, among all tokens or among those that a mask allows.  Where a mask forbids 32 tokens in
# a row, their logits are not read.

_ARGMAX_BLOCK = 512
_WORD_BITS = 32
_MINUS_INFINITY = float32(-np.inf)
# The bits of this float, and an order above it.
_INFINITY, _UNSOUND = 0x7F800000, 0x7FFFFFFF


@kernel
def _greedy(words: int, kind: Real) -> None:
    """`tokens[i]` = the first of the largest logits of row `rows[i]`, or FAILED.

    Each of PARTS of a row is an item.  The thread that is done last compares what was found in the parts.
    """
    rows, parts, vocab = load(words, NUM_ROWS, INT64), load(words, PARTS, INT64), load(words, VOCAB, INT64)
    found, tokens = load(words, FOUND, INT64), load(words, TOKENS, INT64)
    thread, items = fetch_add(words + THREAD_COUNTER, 1), rows * parts
    item = pop(words, thread, parts, items)
    while item != NOTHING:
        row, part = load(load(words, ROWS, INT64), item // parts, INT64), item % parts
        order, place = _largest(load(words, LOGITS, INT64) + row * vocab * bytes_of(kind), vocab * part // parts,
                                vocab * (part + 1) // parts, kind)
        store(found, 2 * item, order, INT64)
        store(found, 2 * item + 1, place, INT64)
        if fetch_add(words + DONE, 1) + 1 == items:
            for i in range(rows):
                best = i * parts
                for other in range(best + 1, best + parts):
                    best = other if load(found, 2 * other, INT64) > load(found, 2 * best, INT64) else best
                store(tokens, i, load(found, 2 * best + 1, INT64), INT64)
        item = pop(words, thread, parts, items)


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
    """The first of the largest, or FAILED."""
    _, place = _largest(logits, 0, size, kind)
    return place


@kernel
def _largest(logits: int, first: int, end: int, kind: Real) -> tuple[int, int]:
    """The order of the largest of the logits `first ... end - 1`, and the first place that has it.

    The place is FAILED where all are -inf, and where one is NaN or +inf: its order is then above all others.  Works on
    integers that order like the floats (sign and magnitude made two's complement): they vectorize, unlike comparisons
    of floats that respect NaN.
    """
    best, place = int32(-_INFINITY), int64(FAILED)
    for start in range(first, end, _ARGMAX_BLOCK):
        top, widest = int32(-_INFINITY), int32(0)
        for i in range(start, min(start + _ARGMAX_BLOCK, end)):
            order = _order(load(logits, i, kind))
            top = max(top, order)
            widest = max(widest, int32(abs(order)))
        if widest > _INFINITY or top == _INFINITY:
            return int64(_UNSOUND), int64(FAILED)
        if top > best:
            best, place = top, int64(start)
    if place != FAILED:
        while _order(load(logits, place, kind)) != best:
            place += 1
    return int64(best), place


@kernel
def _masked_argmax(logits: int, mask: int, size: int, kind: Real) -> int:
    """`argmax` of the tokens that `mask` allows; where it forbids 32 in a row, these are not even compared."""
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


GREEDY = for_floats(_greedy)
MASKED_GREEDY = for_floats(_masked_greedy)
MASK = CompiledKernel(_mask)


# Draws and log-probabilities.

_BLOCK = 512
_SMALL_BLOCK = 64
# The bits of this float.
_TWO = 0x40000000
# Steps of a bisection that find the exponent.
_COARSE_STEPS = 8
_BY_COUNT, _BY_MASS = int64(0), int64(1)
_LOW_WORD, _WORD = uint64(0xFFFFFFFF), uint64(32)


@kernel
def _widen(words: int, kind: Real) -> None:
    """Row i of the float32 target = row `rows[i]` of the logits."""
    vocab = load(words, VOCAB, INT64)
    i = fetch_add(words, 1)
    while i < load(words, NUM_ROWS, INT64):
        row = load(load(words, ROWS, INT64), i, INT64)
        source, target = load(words, LOGITS, INT64) + row * vocab * bytes_of(kind), load(words, TARGET, INT64)
        for j in range(vocab):
            store(target + i * vocab * 4, j, load(source, j, kind), FLOAT32)
        i = fetch_add(words, 1)


def _draw(words: int) -> None:
    """`tokens[i]` = a token drawn from row i of the float32 logits under its controls, or FAILED."""
    vocab = load(words, VOCAB, INT64)
    ids = load(words, SCRATCH, INT64) + fetch_add(words + THREAD_COUNTER, 1) * vocab * SCRATCH_BYTES
    i = fetch_add(words, 1)
    while i < load(words, NUM_ROWS, INT64):
        logits, control = load(words, LOGITS, INT64) + i * vocab * 4, load(words, CONTROLS, INT64) + i * 16
        token = argmax(logits, vocab, FLOAT32)
        temperature = load(control, TEMPERATURE, FLOAT32)
        if token != FAILED and temperature > 0:
            _weigh(logits, load(logits, token, FLOAT32), temperature, ids, vocab)
            n = _filter(control, ids, vocab)
            seed, index = load(load(words, SEEDS, INT64), i, INT64), load(load(words, INDICES, INT64), i, INT64)
            place = _invert(ids + vocab * 4, n, ids + vocab * 8, _uniform(uint64(seed), uint64(index)))
            token = load(ids, place, INT32)
        store(load(words, TOKENS, INT64), i, token, INT64)
        i = fetch_add(words, 1)


def _log_probabilities(words: int) -> None:
    """Log-probability and rank of `tokens[i]` in row `rows[i]`, and of the most probable, best first, ties by id."""
    vocab, k = load(words, VOCAB, INT64), load(words, NUM_TOP, INT64)
    ids = load(words, SCRATCH, INT64) + fetch_add(words + THREAD_COUNTER, 1) * vocab * SCRATCH_BYTES
    i = fetch_add(words, 1)
    while i < load(words, NUM_ROWS, INT64):
        logits = load(words, LOGITS, INT64) + load(load(words, ROWS, INT64), i, INT64) * vocab * 4
        largest = load(logits, argmax(logits, vocab, FLOAT32), FLOAT32)
        _weigh(logits, largest, ONE, ids, vocab)
        log_sum = float32(log(_sum_blocks(ids + vocab * 4, vocab, ids + vocab * 8)))
        logit = load(logits, load(load(words, TOKENS, INT64), i, INT64), FLOAT32)
        store(load(words, CHOSEN, INT64), i, (logit - largest) - log_sum, FLOAT32)
        above = np.nextafter(logit, float32(np.inf))
        store(load(words, RANKS, INT64), i, 1 + int64(_measure(logits, vocab, above, _BY_COUNT)), INT64)
        top_ids, top = load(words, TOP_IDS, INT64) + i * k * 4, load(words, TOP, INT64) + i * k * 4
        _find_largest(logits, vocab, top_ids, k)
        for j in range(k):
            store(top, j, (load(logits, load(top_ids, j, INT32), FLOAT32) - largest) - log_sum, FLOAT32)
        i = fetch_add(words, 1)


@kernel
def _weigh(logits: int, largest: float, temperature: float, ids: int, size: int) -> None:
    """Make all tokens candidates: `ids` 0 to `size`, and behind them their weights."""
    weights, scale = ids + size * 4, LOG2_E / temperature
    for i in range(size):
        store(ids, i, i, INT32)
        store(weights, i, exp2((load(logits, i, FLOAT32) - largest) * scale), FLOAT32)


@kernel
def _filter(control: int, ids: int, vocab: int) -> int:
    """Move the candidates that pass min-p, top-k and top-p, in this order, to the front; returns their number."""
    weights, n = ids + vocab * 4, vocab
    top_k, top_p, min_p = load(control, TOP_K, FLOAT32), load(control, TOP_P, FLOAT32), load(control, MIN_P, FLOAT32)
    if min_p > 0:
        n = _keep(ids, weights, n, min_p)
    if 0 < top_k < n:
        n = _keep_top(ids, weights, n, top_k, _BY_COUNT)
    if top_p < 1:
        n = _keep_top(ids, weights, n, top_p * _measure(weights, n, ZERO, _BY_MASS), _BY_MASS)
    return n


@kernel
def _keep_top(ids: int, weights: int, n: int, target: float, by: int) -> int:
    """Keep the fewest candidates, heaviest first and ties together, that measure at least `target`."""
    low, high = int64(0), int64(_TWO)  # bits of weights: a cut at `low` keeps enough, a cut at `high` does not
    step = 0
    while high - low > 1:
        middle = (low + high) // 2
        if _measure(weights, n, float_of(middle), by) < target:
            high = middle
        else:
            low = middle
        step += 1
        if step == _COARSE_STEPS:
            n = _keep(ids, weights, n, float_of(low))
    return _keep(ids, weights, n, float_of(low))


@kernel
def _keep(ids: int, weights: int, n: int, cut: float) -> int:
    """Move the candidates of weight `cut` and above to the front, in order; returns their number."""
    kept = 0
    for start in range(0, n, _SMALL_BLOCK):
        stop = min(start + _SMALL_BLOCK, n)
        if _measure(weights + start * 4, stop - start, cut, _BY_COUNT) > 0:
            for i in range(start, stop):
                weight = load(weights, i, FLOAT32)
                store(ids, kept, load(ids, i, INT32), INT32)
                store(weights, kept, weight, FLOAT32)
                kept += weight >= cut
    return kept


@kernel
def _measure(values: int, size: int, cut: float, by: int) -> float:
    """The sum or the number (exact up to 2**24) of the values at or above `cut`."""
    total = ZERO
    for i in range(size):
        value = load(values, i, FLOAT32)
        total += (value if by == _BY_MASS else ONE) if value >= cut else ZERO
    return total


@kernel
def _sum_blocks(weights: int, size: int, sums: int) -> float:
    """The sum of all weights; the sum of each block is stored in `sums`."""
    total = 0.0
    for block in range((size + _BLOCK - 1) // _BLOCK):
        start = block * _BLOCK
        part = _measure(weights + start * 4, min(size - start, _BLOCK), ZERO, _BY_MASS)
        store(sums, block, part, FLOAT32)
        total += part
    return total


@kernel
def _invert(weights: int, size: int, sums: int, share: float) -> int:
    """The first place where the cumulative weight exceeds `share` (in [0, 1)) of the whole."""
    threshold = share * _sum_blocks(weights, size, sums)
    start, below = 0, 0.0
    while start + _BLOCK < size and below + load(sums, start // _BLOCK, FLOAT32) <= threshold:
        below += load(sums, start // _BLOCK, FLOAT32)
        start += _BLOCK
    place = start
    for i in range(start, min(start + _BLOCK, size)):
        weight = load(weights, i, FLOAT32)
        if weight > 0:
            place = i  # the last one is returned if the block's sum was rounded up
            below += weight
            if below > threshold:
                break
    return place


@kernel
def _find_largest(values: int, size: int, ids: int, k: int) -> None:
    """Set `ids [k]` to the places of the k largest values, largest first, ties by place.  Needs `k <= size`."""
    found = 0
    for start in range(0, size, _SMALL_BLOCK):
        stop = min(start + _SMALL_BLOCK, size)
        if found == k:
            if k == 0:
                return
            least = load(values, load(ids, k - 1, INT32), FLOAT32)
            if _measure(values + start * 4, stop - start, least, _BY_COUNT) == 0:
                continue
        for i in range(start, stop):
            found = _insert(values, i, ids, found, k)


@kernel
def _insert(values: int, i: int, ids: int, found: int, k: int) -> int:
    """Insert `i` among the `found` largest so far; returns their new number."""
    value = load(values, i, FLOAT32)
    if found < k:
        found += 1
    elif value <= load(values, load(ids, k - 1, INT32), FLOAT32):
        return found
    at = found - 1
    while at > 0 and load(values, load(ids, at - 1, INT32), FLOAT32) < value:
        store(ids, at, load(ids, at - 1, INT32), INT32)
        at -= 1
    store(ids, at, i, INT32)
    return found


@kernel
def _uniform(seed: int, index: int) -> float:
    """A float64 in [0, 1): 53 of the 128 bits of Philox4x32-10 under key `seed` and counter `index`, both uint64."""
    key_low, key_high = seed & _LOW_WORD, seed >> _WORD
    a, b, c, d = index & _LOW_WORD, index >> _WORD, uint64(0), uint64(0)
    for _ in range(10):
        left, right = uint64(0xD2511F53) * a, uint64(0xCD9E8D57) * c
        a, b = (right >> _WORD) ^ b ^ key_low, right & _LOW_WORD
        c, d = (left >> _WORD) ^ d ^ key_high, left & _LOW_WORD
        key_low = (key_low + uint64(0x9E3779B9)) & _LOW_WORD
        key_high = (key_high + uint64(0xBB67AE85)) & _LOW_WORD
    return float64(((b << _WORD) | a) >> uint64(11)) * 2.0**-53


WIDEN = for_floats(_widen)
DRAW = CompiledKernel(_draw)
LOG_PROBABILITIES = CompiledKernel(_log_probabilities)
