"""Sampling: from logits to tokens, and grammars' masks, without leaving the device.

The algorithm and its random numbers are those of `cpu/sampling_filters.py`: candidates weigh exp((logit - max) /
temperature); min-p, top-k and top-p each become one cut-off weight, found by bisection over the bits of positive
floats instead of a sort; and the token inverts the cumulative weights in order of token id, with a number that is a
pure function of (seed, output index): Philox4x32-10 (Salmon et al., SC 2011).  So a seed gives the same token on both
devices, except where the two differ in the last bits of a logit or of a sum of weights.

A row is read by many programs, then drawn by one:

    _largest    a chunk of a row    its largest logit and its place, and whether it holds NaN or +inf
    _survey     a chunk of a row    how many weights reach 1, 1/4, 1/16 ... and the min-p cut, and their sums
    _gather     a chunk of a row    the candidates above a cut: a power of four, below the cuts of top-k and top-p
    _draw       a row               among these candidates, usually few, the exact cuts; then the draw

Nothing depends on a row's batch-mates.  Nothing waits for the device, so all of it can be part of a CUDA graph.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from slotwise.compute.kernels.cuda.jit import jit, jit_varying
from slotwise.compute.kernels.reference import FAILED

# Words of a mask that a program reads.
_WORDS = tl.constexpr(64)


def mask_rows(logits: Tensor, rows: Tensor, bits: Tensor) -> Tensor:
    """Set tokens that masks do not allow to minus infinity, in place; returns `logits`.

    Args:
        logits: `[all rows, vocab]`, rows contiguous.
        rows: `[rows]` int64, the rows that have a mask.
        bits: `[rows, words]` int32: bit i of word i // 32 allows token i.
    """
    if len(rows):
        words = bits.shape[1]
        _mask_rows[(len(rows), triton.cdiv(words, _WORDS.value))](
            logits, rows, bits, STRIDE=logits.stride(0), VOCAB=logits.shape[1], WORDS=words, num_warps=4)
    return logits


@jit_varying(alignments=("rows", "bits"))
def _mask_rows(
    logits: tl.tensor, rows: tl.tensor, bits: tl.tensor, STRIDE: tl.constexpr, VOCAB: tl.constexpr,
    WORDS: tl.constexpr,
) -> None:
    mask, word = tl.program_id(0), tl.program_id(1) * _WORDS + tl.arange(0, _WORDS)
    allowed = tl.load(bits + mask.to(tl.int64) * WORDS + word, word < WORDS, -1)
    place = tl.arange(0, 32)
    token = word[:, None] * 32 + place[None, :]
    forbidden = ((allowed[:, None] >> place[None, :]) & 1) == 0
    row = tl.load(rows + mask).to(tl.int64)
    nothing = tl.full([_WORDS, 32], float("-inf"), tl.float32).to(logits.dtype.element_ty)
    tl.store(logits + row * STRIDE + token, nothing, forbidden & (token < VOCAB))


# Logits per program.
CHUNK = 4096
# Cuts that a survey measures; the last is the min-p cut itself.
LEVELS = 16

# Weights that are compared with all levels at a time, and candidates that are loaded together.
_SLICE = tl.constexpr(256)
_BLOCK = tl.constexpr(4096)
_LOG2_E = tl.constexpr(math.log2(math.e))
# The bits of 2.0f: every weight is smaller.
_ABOVE_ALL = tl.constexpr(0x40000000)
_NOWHERE = tl.constexpr(0x7FFFFFFF)
_FAILED = tl.constexpr(FAILED)
# Arguments whose alignment varies: it must not compile kernels again.
_PARAMETERS = ("controls", "seeds", "indices")


def sample(logits: Tensor, controls: Tensor, seeds: Tensor, indices: Tensor) -> Tensor:
    """A token for every row, `[rows]` int64 on the logits' device; FAILED in rows without a valid distribution.

    Args:
        logits: `[rows, vocab]` bfloat16, float16 or float32, rows contiguous; left as they are.
        controls: `[rows, 4]` float32: temperature (0: the first of the largest logits), top_k (0: all), top_p, min_p.
        seeds: `[rows]` int64, the bits of an unsigned seed.
        indices: `[rows]` int64, the number of outputs the request already has.
    """
    rows, vocab = logits.shape
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if not rows:
        return tokens
    chunks = triton.cdiv(vocab, CHUNK)
    maxima, masses = (logits.new_empty(*size, dtype=torch.float32) for size in ((rows, chunks), (rows, chunks, LEVELS)))
    places, counts = (torch.empty_like(like, dtype=torch.int32) for like in (maxima, masses))
    weights = logits.new_empty(rows, vocab, dtype=torch.float32)
    ids = torch.empty_like(weights, dtype=torch.int32)
    controls = controls.contiguous()
    row = {"STRIDE": logits.stride(0), "VOCAB": vocab, "CHUNK": CHUNK}
    shape = {"CHUNKS": chunks, "BLOCK_CHUNKS": triton.next_power_of_2(chunks), "LEVELS": LEVELS}
    _largest[(rows, chunks)](maxima, places, logits, **row, num_warps=4)
    _survey[(rows, chunks)](counts, masses, logits, maxima, controls, **row, **shape, num_warps=4)
    _gather[(rows, chunks)](weights, ids, logits, maxima, counts, masses, controls, **row, **shape, num_warps=8)
    _draw[(rows,)](
        tokens, weights, ids, maxima, places, counts, masses, controls, seeds, indices, VOCAB=vocab, **shape,
        num_warps=8)
    return tokens


@jit
def _largest(
    maxima: tl.tensor, places: tl.tensor, logits: tl.tensor, STRIDE: tl.constexpr, VOCAB: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:
    """Largest logit of a chunk and its first place; the place is FAILED where the chunk holds NaN or +inf."""
    row, chunk = tl.program_id(0), tl.program_id(1)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    values = tl.load(logits + row.to(tl.int64) * STRIDE + token, token < VOCAB, float("-inf")).to(tl.float32)
    unsound = tl.max(((values != values) | (values == float("inf"))).to(tl.int32), 0)
    largest = tl.max(tl.where(values != values, float("-inf"), values), 0)
    place = tl.min(tl.where(values == largest, token, _NOWHERE), 0)
    at = row * tl.num_programs(1) + chunk
    tl.store(maxima + at, largest)
    tl.store(places + at, tl.where(unsound > 0, _FAILED, place))


@jit_varying(alignments=_PARAMETERS)
def _survey(
    counts: tl.tensor, masses: tl.tensor, logits: tl.tensor, maxima: tl.tensor, controls: tl.tensor,
    STRIDE: tl.constexpr, VOCAB: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, BLOCK_CHUNKS: tl.constexpr,
    LEVELS: tl.constexpr,
) -> None:
    """How many weights of a chunk reach each level, and their sum: `[rows, chunks, LEVELS]` int32 and float32."""
    row, chunk = tl.program_id(0), tl.program_id(1)
    temperature = tl.load(controls + row * 4)
    largest = _row_largest(maxima, row, CHUNKS, BLOCK_CHUNKS)
    if (temperature <= 0) | (largest == float("-inf")):
        return
    level = tl.arange(0, LEVELS)
    cut = _cut_of(level, tl.load(controls + row * 4 + 3), LEVELS)[None, :]
    count, mass = tl.full([_SLICE, LEVELS], 0, tl.int32), tl.full([_SLICE, LEVELS], 0.0, tl.float32)
    for begin in range(0, CHUNK, _SLICE):
        token = chunk * CHUNK + begin + tl.arange(0, _SLICE)
        weight = _weigh(logits + row.to(tl.int64) * STRIDE, token, largest, temperature, VOCAB)[:, None]
        reaches = weight >= cut
        count += reaches.to(tl.int32)
        mass += tl.where(reaches, weight, 0.0)
    at = (row * CHUNKS + chunk) * LEVELS + level
    tl.store(counts + at, tl.sum(count, 0))
    tl.store(masses + at, tl.sum(mass, 0))


@jit_varying(alignments=_PARAMETERS)
def _gather(
    weights: tl.tensor, ids: tl.tensor, logits: tl.tensor, maxima: tl.tensor, counts: tl.tensor, masses: tl.tensor,
    controls: tl.tensor, STRIDE: tl.constexpr, VOCAB: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
    BLOCK_CHUNKS: tl.constexpr, LEVELS: tl.constexpr,
) -> None:
    """Write the candidates of a chunk, in order of token id, behind those of the chunks before it."""
    row, chunk = tl.program_id(0), tl.program_id(1)
    temperature = tl.load(controls + row * 4)
    largest = _row_largest(maxima, row, CHUNKS, BLOCK_CHUNKS)
    if (temperature <= 0) | (largest == float("-inf")):
        return
    cut, number, _, _, _ = _choose_level(counts, masses, controls, row, CHUNKS, BLOCK_CHUNKS, LEVELS)
    before = tl.sum(tl.where(tl.arange(0, BLOCK_CHUNKS) < chunk, number, 0), 0)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    weight = _weigh(logits + row.to(tl.int64) * STRIDE, token, largest, temperature, VOCAB)
    kept = weight >= cut
    at = row.to(tl.int64) * VOCAB + before + tl.cumsum(kept.to(tl.int32), 0) - 1
    tl.store(ids + at, token, kept)
    tl.store(weights + at, weight, kept)


@jit_varying(alignments=_PARAMETERS)
def _draw(
    tokens: tl.tensor, weights: tl.tensor, ids: tl.tensor, maxima: tl.tensor, places: tl.tensor, counts: tl.tensor,
    masses: tl.tensor, controls: tl.tensor, seeds: tl.tensor, indices: tl.tensor, VOCAB: tl.constexpr,
    CHUNKS: tl.constexpr, BLOCK_CHUNKS: tl.constexpr, LEVELS: tl.constexpr,
) -> None:
    """A row's token."""
    row, chunk = tl.program_id(0), tl.arange(0, BLOCK_CHUNKS)
    largest = _row_largest(maxima, row, CHUNKS, BLOCK_CHUNKS)
    maximum = tl.load(maxima + row * CHUNKS + chunk, chunk < CHUNKS, float("-inf"))
    place = tl.load(places + row * CHUNKS + chunk, chunk < CHUNKS, _NOWHERE)
    token = tl.min(tl.where((maximum == largest) | (place == _FAILED), place, _NOWHERE), 0)
    token = tl.where(largest == float("-inf"), _FAILED, token)
    if (token != _FAILED) & (tl.load(controls + row * 4) > 0):
        cut, number, mass, by_count, by_mass = _choose_level(
            counts, masses, controls, row, CHUNKS, BLOCK_CHUNKS, LEVELS)
        size = tl.sum(number, 0)
        weights += row.to(tl.int64) * VOCAB
        if by_count:
            cut = _search(weights, size, cut, tl.load(controls + row * 4 + 1), False)
            mass = _measure(weights, size, cut, True)
        if by_mass:
            cut = _search(weights, size, cut, tl.load(controls + row * 4 + 2) * mass, True)
        share = _uniform(tl.load(seeds + row), tl.load(indices + row))
        token = tl.load(ids + row.to(tl.int64) * VOCAB + _invert(weights, size, cut, share))
    tl.store(tokens + row, token.to(tl.int64))


@jit
def _row_largest(maxima: tl.tensor, row: tl.tensor, CHUNKS: tl.constexpr, BLOCK_CHUNKS: tl.constexpr) -> tl.tensor:
    chunk = tl.arange(0, BLOCK_CHUNKS)
    return tl.max(tl.load(maxima + row * CHUNKS + chunk, chunk < CHUNKS, float("-inf")), 0)


@jit
def _weigh(
    logits: tl.tensor, token: tl.tensor, largest: tl.tensor, temperature: tl.tensor, VOCAB: tl.constexpr
) -> tl.tensor:
    """Weights of tokens, -1 outside of the vocabulary; `logits` points at the row."""
    values = tl.load(logits + token, token < VOCAB, float("-inf")).to(tl.float32)
    return tl.where(token < VOCAB, tl.exp2((values - largest) * (_LOG2_E / temperature)), -1.0)


@jit
def _cut_of(level: tl.tensor, min_p: tl.tensor, LEVELS: tl.constexpr) -> tl.tensor:
    """The cut of a level: 4 ** -level and not less than `min_p`; of the last level, `min_p`."""
    return tl.where(level == LEVELS - 1, min_p, tl.maximum(tl.exp2(-2.0 * level.to(tl.float32)), min_p))


@jit
def _choose_level(
    counts: tl.tensor, masses: tl.tensor, controls: tl.tensor, row: tl.tensor, CHUNKS: tl.constexpr,
    BLOCK_CHUNKS: tl.constexpr, LEVELS: tl.constexpr,
) -> tuple[tl.tensor, ...]:
    """The level at which the search for the exact cuts begins.

    Returns the highest level's cut that leaves enough for the first of top-k and top-p, and how many of each chunk
    reach it; the sum of what passes min-p; whether top-k and whether top-p cuts at all.
    """
    chunk, level = tl.arange(0, BLOCK_CHUNKS), tl.arange(0, LEVELS)
    at, in_row = (row * CHUNKS + chunk)[:, None] * LEVELS + level[None, :], (chunk < CHUNKS)[:, None]
    by_chunk = tl.load(counts + at, in_row, 0)
    count, mass = tl.sum(by_chunk, 0), tl.sum(tl.load(masses + at, in_row, 0.0), 0)
    is_last = level == LEVELS - 1
    survivors, all_mass = tl.sum(tl.where(is_last, count, 0), 0), tl.sum(tl.where(is_last, mass, 0.0), 0)
    top_k, top_p = tl.load(controls + row * 4 + 1), tl.load(controls + row * 4 + 2)
    by_count, by_mass = (top_k > 0) & (top_k < survivors), top_p < 1
    enough = tl.where(by_count, count.to(tl.float32) >= top_k, mass >= top_p * all_mass)
    highest = tl.min(tl.where(enough, level, LEVELS - 1), 0)
    chosen = tl.where(by_count | by_mass, highest, LEVELS - 1)
    cut = _cut_of(chosen, tl.load(controls + row * 4 + 3), LEVELS)
    number = tl.sum(tl.where(level[None, :] == chosen, by_chunk, 0), 1)
    return cut, number, all_mass, by_count, by_mass


@jit
def _measure(weights: tl.tensor, size: tl.tensor, cut: tl.tensor, BY_MASS: tl.constexpr) -> tl.tensor:
    """The sum or the number (exact up to 2**24) of the weights that reach `cut`."""
    total = tl.full([_BLOCK], 0.0, tl.float32)
    for begin in range(0, size, _BLOCK):
        weight = _candidates(weights, begin, size, cut)
        total += tl.where(weight < 0, 0.0, weight if BY_MASS else 1.0)
    return tl.sum(total, 0)


@jit
def _candidates(weights: tl.tensor, begin: tl.tensor, size: tl.tensor, cut: tl.tensor) -> tl.tensor:
    """The weights of one block, -1 where they do not reach `cut`."""
    place = begin + tl.arange(0, _BLOCK)
    weight = tl.load(weights + place, place < size, -1.0)
    return tl.where(weight >= cut, weight, -1.0)


@jit
def _search(weights: tl.tensor, size: tl.tensor, cut: tl.tensor, target: tl.tensor, BY_MASS: tl.constexpr) -> tl.tensor:
    """The largest cut reached by weights that measure at least `target`; `cut` is known to be low enough."""
    low, high = cut.to(tl.int32, bitcast=True), _ABOVE_ALL
    while high - low > 1:
        middle = low + (high - low) // 2
        enough = _measure(weights, size, middle.to(tl.float32, bitcast=True), BY_MASS) >= target
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)
    return low.to(tl.float32, bitcast=True)


@jit
def _invert(weights: tl.tensor, size: tl.tensor, cut: tl.tensor, share: tl.tensor) -> tl.tensor:
    """The first place where the cumulative weight exceeds `share` (in [0, 1)) of the whole."""
    total = tl.full([], 0.0, tl.float64)
    for begin in range(0, size, _BLOCK):
        weight = tl.maximum(_candidates(weights, begin, size, cut), 0.0)
        total += tl.sum(weight, 0).to(tl.float64)
    threshold = share * total
    below = tl.full([], 0.0, tl.float64)
    found, last = -1, 0
    for begin in range(0, size, _BLOCK):
        weight = tl.maximum(_candidates(weights, begin, size, cut), 0.0)
        place = begin + tl.arange(0, _BLOCK)
        mass = tl.sum(weight, 0).to(tl.float64)
        last = tl.maximum(last, tl.max(tl.where(weight > 0, place, 0), 0))
        if (found < 0) & (below + mass > threshold):
            beyond = (below + tl.cumsum(weight.to(tl.float64), 0) > threshold) & (weight > 0)
            crossing = tl.min(tl.where(beyond, place, _NOWHERE), 0)
            found = tl.where(crossing < _NOWHERE, crossing, -1)
        below += mass
    return tl.where(found >= 0, found, last)  # the last one is returned if the sums were rounded up


@jit
def _uniform(seed: tl.tensor, index: tl.tensor) -> tl.tensor:
    """A float64 in [0, 1): 53 of the 128 bits of Philox4x32-10 under key `seed` and counter `index`."""
    low, high = (index & 0xFFFFFFFF).to(tl.uint32), (index >> 32).to(tl.uint32)
    first, second, _, _ = tl.philox(seed, low, high, low * 0, low * 0, 10)
    bits = (second.to(tl.uint64) << 32) | first.to(tl.uint64)
    return (bits >> 11).to(tl.float64) * 1.1102230246251565e-16  # 2 ** -53
