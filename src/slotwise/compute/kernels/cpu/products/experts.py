"""Mixtures of experts: each token is multiplied by the weights of the few experts that its router chose.

    route      alone      chosen experts and their shares; tokens sorted by expert: a counting sort
    scale      together   rows times their shares, where shares scale inputs        [tokens * top_k, ...]
    divide     alone      blocks of rows of each expert that has rows, with the addresses of its weights
    products   together   all blocks: the product that the weights are packed for   [tokens * top_k, ...]
    combine    together   a token's results times its shares, added                 [tokens, hidden]

    tokens       a: 2 0     b: 1 2         (experts, the best first)
    sorted       0: a       1: b      2: a b
    starts       0          1         2          4

All experts of a layer have one shape and one format, so one kernel multiplies the rows of all experts: it finds the
weights of each block in a table, which another kernel writes, and the rows of x by the order of tokens.  Threads take
panels of all experts from one queue, wait for each other at its end, and prefetch the weights of the next expert while
they read the current one's.  Weights of experts without tokens are not read.  Nothing depends on tokens in Python, so a
graph can record all of it.  A token's result depends only on its own row: products do not depend on other rows, and its
shares are added in the order of its experts.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from slotwise.compute.kernels.cpu.jit.compiler import kernel, specialized
from slotwise.compute.kernels.cpu.launcher import HEADER, THREAD_COUNTER, KernelLauncher
from slotwise.compute.kernels.cpu.products.linear import BLOCK_WORDS, OF_WEIGHTS, PackedPart, Tables
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
    fill,
    float32,
    float_of,
    for_floats,
    int64,
    larger,
    load,
    sigmoid,
    signed_bits_of,
    store,
)
from slotwise.compute.kernels.interface import ExpertGroups, Linear, Routing

# Arguments in words after the header: of the route, of the sums, of the division into blocks.
(LOGITS, ROWS, EXPERTS, TOP_K, NORMALIZED, STARTS, SOURCES, PLACES, SHARES, ENDS, SCORING, BY_SCORE, CORRECTION,
 GROUPS, KEPT, NUM_BEST, SCALE_BITS, LEAST_BITS, JITTER_BITS, VALUES) = range(HEADER, HEADER + 20)
FROM, TO, OF_ROW, NUM_ROWS, SIZE, EACH, SHARE, SUMS, FIRST_ROW, END_ROW = range(HEADER, HEADER + 10)
FIRSTS, COUNT, WEIGHTS, MOST, TABLE = range(HEADER, HEADER + 5)

# Bits of an expert's number in a key.
INDEX_BITS = 16
MAX_EXPERTS = 1 << INDEX_BITS
_LAST, _SIZE_BITS = MAX_EXPERTS - 1, 0x7FFFFFFF
# Above every key.
_TOP_KEY = int64(1) << 62
_LEAST = float32(-math.inf)
SOFTMAX, SIGMOID, SPARSE_MIXER = range(3)
_SCORINGS = {"softmax": SOFTMAX, "sigmoid": SIGMOID, "sparse_mixer": SPARSE_MIXER}


@kernel
def _key(values: int, expert: int) -> int:
    """An integer that orders experts by their values and then by their numbers, the first one highest.

    A float's bits order like the float once the bits below the sign of a negative are inverted; NaN is highest.
    """
    bits = int64(signed_bits_of(load(values, expert, FLOAT32)))
    return ((bits ^ (bits >> 31 & _SIZE_BITS)) << INDEX_BITS) + _LAST - expert


@kernel
def _best_below(values: int, first: int, end: int, before: int) -> int:
    """The largest key of the experts `first ... end - 1` that is less than `before`."""
    best = -_TOP_KEY
    for expert in range(first, end):
        key = _key(values, expert)
        if key < before and key > best:
            best = key
    return best


@kernel
def _leave_groups(words: int, values: int, sums: int) -> None:
    """Set the values of experts to -inf that are not in the groups kept; `sums` is memory for one float of each."""
    experts, groups = load(words, EXPERTS, INT64), load(words, GROUPS, INT64)
    size = experts // groups
    for group in range(groups):
        total, before = ZERO, _TOP_KEY
        for _ in range(load(words, NUM_BEST, INT64)):
            before = _best_below(values, group * size, (group + 1) * size, before)
            total += load(values, _LAST - (before & _LAST), FLOAT32)
        store(sums, group, total, FLOAT32)
    for group in range(groups):
        own, ahead = _key(sums, group), int64(0)
        for other in range(groups):
            ahead += int64(_key(sums, other) > own)
        if ahead >= load(words, KEPT, INT64):
            for expert in range(group * size, (group + 1) * size):
                store(values, expert, _LEAST, FLOAT32)


@kernel
def _mixed_share(logits: int, experts: int, key: int, jitter: float) -> float:
    """The softmax of the expert with this key over experts whose keys are not higher, and that are not much less."""
    best, total = load(logits, _LAST - (key & _LAST), FLOAT32), ZERO
    for expert in range(experts):
        logit = load(logits, expert, FLOAT32)
        bound = float32(2) * jitter * larger(larger(logit, -logit), best)
        if _key(logits, expert) <= key and not best - logit > bound:
            total += exp2((logit - best) * LOG2_E)
    return ONE / total


@kernel
def _choose(words: int, token: int, kind: Real) -> None:
    """A token's experts to `PLACES`, the best first, and their shares to `SHARES`."""
    experts, top_k = load(words, EXPERTS, INT64), load(words, TOP_K, INT64)
    logits = load(words, LOGITS, INT64) + token * experts * bytes_of(kind)
    chosen, shares = load(words, PLACES, INT64) + token * top_k * 4, load(words, SHARES, INT64) + token * top_k * 4
    values, correction = load(words, VALUES, INT64), load(words, CORRECTION, INT64)
    scoring, by_score = load(words, SCORING, INT64), load(words, BY_SCORE, INT64)
    is_normalized, least = load(words, NORMALIZED, INT64), float_of(load(words, LEAST_BITS, INT64))
    top, all_scores = _LEAST, ONE
    for expert in range(experts):
        top = larger(top, load(logits, expert, kind))
    if scoring == SOFTMAX and (by_score or is_normalized == 0 or least > ZERO):
        all_scores = ZERO
        for expert in range(experts):
            all_scores += exp2((load(logits, expert, kind) - top) * LOG2_E)
    for expert in range(experts):
        value = load(logits, expert, kind)
        if by_score:
            value = sigmoid(value) if scoring == SIGMOID else exp2((value - top) * LOG2_E) / all_scores
        if correction:
            value += load(correction, expert, FLOAT32)
        store(values, expert, value, FLOAT32)
    if load(words, GROUPS, INT64):
        _leave_groups(words, values, values + experts * 4)
    before, total = _TOP_KEY, ZERO
    for i in range(top_k):
        before = _best_below(values, 0, experts, before)
        best = _LAST - (before & _LAST)
        store(chosen, i, best, INT32)
        if scoring == SPARSE_MIXER:
            share = _mixed_share(values, experts, before, float_of(load(words, JITTER_BITS, INT64)))
        elif scoring == SIGMOID:
            share = sigmoid(load(logits, best, kind))
        else:
            share = exp2((load(logits, best, kind) - top) * LOG2_E) / all_scores
        store(shares, i, share, FLOAT32)
        total += share
    scale = float_of(load(words, SCALE_BITS, INT64))
    divisor = larger(total, least) if is_normalized else ONE
    for i in range(top_k):
        store(shares, i, load(shares, i, FLOAT32) / divisor * scale, FLOAT32)


@kernel
def _route(words: int, kind: Real) -> None:
    """Choose experts, then sort: `STARTS` of each expert's rows, the token of each row, and the row of each choice.

    The end of each expert's rows is added to `ENDS`, int64.
    """
    tokens, experts, top_k = load(words, ROWS, INT64), load(words, EXPERTS, INT64), load(words, TOP_K, INT64)
    starts, sources, places = (load(words, STARTS, INT64), load(words, SOURCES, INT64), load(words, PLACES, INT64))
    ends = load(words, ENDS, INT64)
    for expert in range(experts + 1):
        store(starts, expert, 0, INT32)
    for token in range(tokens):
        _choose(words, token, kind)
    for choice in range(tokens * top_k):
        after = load(places, choice, INT32) + 1
        store(starts, after, load(starts, after, INT32) + 1, INT32)
    for expert in range(experts):
        end = load(starts, expert, INT32) + load(starts, expert + 1, INT32)
        store(starts, expert + 1, end, INT32)
        store(ends, expert, load(ends, expert, INT64) + end, INT64)
    # Each start moves on to the next expert's, and is moved back below.
    for choice in range(tokens * top_k):
        expert = load(places, choice, INT32)
        row = load(starts, expert, INT32)
        store(starts, expert, row + 1, INT32)
        store(sources, row, choice // top_k, INT32)
        store(places, choice, row, INT32)
    for expert in range(experts, 0, -1):
        store(starts, expert, load(starts, expert - 1, INT32), INT32)
    store(starts, 0, 0, INT32)


@kernel
def _combine(words: int, kind: Real) -> None:
    """Token i of `TO` is the sum of `EACH` rows of `FROM` times their shares, rounded once.

    Rows of experts that this rank does not hold are left out.
    """
    first, end = load(load(words, FIRST_ROW, INT64), 0, INT32), load(load(words, END_ROW, INT64), 0, INT32)
    size, tokens, each = load(words, SIZE, INT64), load(words, NUM_ROWS, INT64), load(words, EACH, INT64)
    sums = load(words, SUMS, INT64) + fetch_add(words + THREAD_COUNTER, 1) * size * 4
    token = fetch_add(words, 1)
    while token < tokens:
        fill(sums, size, ZERO)
        for choice in range(token * each, (token + 1) * each):
            row = load(load(words, OF_ROW, INT64), choice, INT32)
            if first <= row < end:
                source = load(words, FROM, INT64) + row * size * bytes_of(kind)
                share = load(load(words, SHARE, INT64), choice, FLOAT32)
                for i in range(size):
                    store(sums, i, load(sums, i, FLOAT32) + share * load(source, i, kind), FLOAT32)
        target = load(words, TO, INT64) + token * size * bytes_of(kind)
        for i in range(size):
            store(target, i, load(sums, i, FLOAT32), kind)
        token = fetch_add(words, 1)


@kernel
def _scale(words: int, kind: Real) -> None:
    """Each choice's row of `TO` is its token of `FROM` times its share, which is 1 from then on."""
    size, choices, each = load(words, SIZE, INT64), load(words, NUM_ROWS, INT64), load(words, EACH, INT64)
    choice = fetch_add(words, 1)
    while choice < choices:
        source = load(words, FROM, INT64) + choice // each * size * bytes_of(kind)
        target = load(words, TO, INT64) + load(load(words, OF_ROW, INT64), choice, INT32) * size * bytes_of(kind)
        share = load(load(words, SHARE, INT64), choice, FLOAT32)
        for i in range(size):
            store(target, i, share * load(source, i, kind), kind)
        store(load(words, SHARE, INT64), choice, ONE, FLOAT32)
        choice = fetch_add(words, 1)


@kernel
def _divide(words: int) -> None:
    """The table of blocks of all experts' rows, for `linear.py`; an expert's blocks have nearly equal heights."""
    starts, most, table = load(words, FIRSTS, INT64), load(words, MOST, INT64), load(words, TABLE, INT64)
    of_weights, count = BLOCK_WORDS - 2, 0
    for expert in range(load(words, COUNT, INT64)):
        first, end = load(starts, expert, INT32), load(starts, expert + 1, INT32)
        blocks = (end - first + most - 1) // most
        for block in range(blocks, 0, -1):
            rows, at = (end - first + block - 1) // block, 1 + count * BLOCK_WORDS
            store(table, at, first, INT64)
            store(table, at + 1, rows, INT64)
            for i in range(of_weights):
                store(table, at + 2 + i, load(load(words, WEIGHTS, INT64), expert * of_weights + i, INT64), INT64)
            first, count = first + rows, count + 1
    store(table, 0, count, INT64)


ROUTE = for_floats(_route)
COMBINE = for_floats(_combine)
SCALE = for_floats(_scale)
DIVIDE = specialized(_divide)


class _ExpertColumns:
    """The products of rows sorted by expert with a part of each expert's weights, to columns of the results.

    Args:
        at: the first of the columns, of `width`.
    """

    def __init__(self, parts: Sequence[PackedPart], at: int, width: int, launcher: KernelLauncher) -> None:
        self._parts, self._at, self._width, self._launcher = parts, at, width, launcher

    @functools.cached_property
    def _weights(self) -> Tensor:
        """`[experts, 3]`, words of each expert's `RowBlock`; made at the first product, because it compiles kernels."""
        return torch.tensor([part.arguments(self._launcher, 0, 0, 1)[OF_WEIGHTS] for part in self._parts])

    def multiply(self, x: Tensor, out: Tensor, starts: Tensor, sources: int) -> None:
        """`x [..., depth]` to `out [rows, width]`; `sources` is the address of the rows' places in x, or 0."""
        launcher, part = self._launcher, self._parts[0]
        table = launcher.empty((1 + BLOCK_WORDS * len(out),), torch.int64)
        launcher.give(starts.data_ptr(), len(self._parts), self._weights.data_ptr(), part.block_rows(1),
                      table.data_ptr())
        launcher.alone(DIVIDE)
        launcher.give(*part.arguments(launcher, x.data_ptr(), out.data_ptr() + self._at * out.itemsize, 1, self._width,
                                      Tables(table.data_ptr(), sources)))
        launcher.together(part.kernel(x.dtype))


class _ExpertProducts:
    """The products of rows sorted by expert with each expert's weights, in parts along the outputs."""

    def __init__(self, experts: Sequence[Sequence[PackedPart]], launcher: KernelLauncher) -> None:
        self._launcher, at = launcher, 0
        self._width = sum(part.stored for part in experts[0])
        self._columns: list[_ExpertColumns] = []
        for parts in zip(*experts, strict=True):
            self._columns.append(_ExpertColumns(parts, at, self._width, launcher))
            at += parts[0].stored

    def __call__(self, x: Tensor, starts: Tensor, sources: Tensor | None = None) -> Tensor:
        """`x [tokens, depth]` and the token of each row, or `x [rows, depth]`: `[rows, width]`."""
        rows, sources_at = (len(x), 0) if sources is None else (len(sources), sources.data_ptr())
        out = self._launcher.empty((rows, self._width), x.dtype)
        for columns in self._columns:
            columns.multiply(x, out, starts, sources_at)
        return out


class CpuMixture:
    """`x [tokens, hidden], logits [tokens, experts] -> [tokens, hidden]`.

    Args:
        gates: the gates and up projection of each expert that this rank holds; activated by the product or `activate`.
        ends: `[experts]` int64, to which the end of each expert's rows is added.
    """

    def __init__(
        self, gates: Sequence[Sequence[PackedPart]], downs: Sequence[Sequence[PackedPart]], activate: Linear | None,
        routing: Routing, ends: Tensor, launcher: KernelLauncher,
    ) -> None:
        self._gates, self._downs = _ExpertProducts(gates, launcher), _ExpertProducts(downs, launcher)
        self._activate, self._routing, self._ends, self._launcher = activate, routing, ends, launcher
        groups, floats = routing.groups or ExpertGroups(0, 0, 0), (routing.scale, routing.least_sum, routing.jitter)
        self._options = (
            _SCORINGS[routing.scoring], int(routing.chooses_by_scores),
            0 if routing.correction is None else routing.correction.data_ptr(), *groups,
            *torch.tensor(floats, dtype=torch.float32).view(torch.int32).tolist())

    def __call__(self, x: Tensor, logits: Tensor) -> Tensor:
        launcher, routing, (tokens, hidden) = self._launcher, self._routing, x.shape
        top_k = routing.top_k
        if not tokens:
            return torch.empty_like(x)
        starts, sources, places, shares = self._route(logits.contiguous())
        held = starts[routing.experts.start : routing.experts.stop + 1]
        if routing.scales_inputs:
            rows = launcher.empty((tokens * top_k, hidden), x.dtype)
            launcher.give(x.contiguous().data_ptr(), rows.data_ptr(), places.data_ptr(), tokens * top_k, hidden, top_k,
                          shares.data_ptr())
            launcher.together(SCALE[x.dtype])
            inner = self._gates(rows, held)
        else:
            inner = self._gates(x.contiguous(), held, sources)
        if self._activate is not None:
            inner = self._activate(inner)
        results = self._downs(inner, held)
        out = launcher.empty((tokens, hidden), x.dtype)
        launcher.give(results.data_ptr(), out.data_ptr(), places.data_ptr(), tokens, hidden, top_k, shares.data_ptr(),
                      launcher.scratch(launcher.threads * hidden), held.data_ptr(), held[-1:].data_ptr())
        launcher.together(COMBINE[x.dtype])
        return out

    def _route(self, logits: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The start of each expert's rows, the token of each row, and the row and share of each choice."""
        (tokens, experts), routing, launcher = logits.shape, self._routing, self._launcher
        starts = launcher.empty((experts + 1,), torch.int32)
        sources, places = (launcher.empty((tokens * routing.top_k,), torch.int32) for _ in range(2))
        shares = launcher.empty((tokens * routing.top_k,), torch.float32)
        launcher.give(logits.data_ptr(), tokens, experts, routing.top_k, int(routing.is_normalized), starts.data_ptr(),
                      sources.data_ptr(), places.data_ptr(), shares.data_ptr(), self._ends.data_ptr(), *self._options,
                      launcher.scratch(2 * experts))
        launcher.alone(ROUTE[logits.dtype])
        return starts, sources, places, shares

