"""What a step will take, learned from the steps there were.

A step's seconds are a sum of non-negative shares, linear in what it computes, times a factor of its size and a level:

    seconds ≈ level · factor(size) · (a + l·launched + b·tokens + c·rows + d·context + e·pairs)

`a` is reading the weights, `l` starting the kernels one by one, `b` the products, `c` the head and sampling, `d`
reading the cache, `e` the attention of prompts.  The coefficients minimise squared *relative* errors (a step's terms
are divided by what it took), so that a step of two milliseconds counts as much as one of two hundred, and one that
somebody else's work made ten times longer hardly counts.

Three kinds of steps differ by more than their terms say.  Steps of decoding rows alone are recorded on the device and
run again as one (see `runner/graphs.py`); the *first* of as many rows, behind a context of such a length, pays for the
recording; and those with prompts in them are never recorded.  Only the first kind knows no `launched`.

Memory is kept by kind and size: steps of 1, 2-3, 4-7 ... tokens each have sums of their own (of a least-squares
problem's normal equations), and only steps of the same size make older ones fade.  An hour of full batches therefore
forgets nothing about a row alone, unless predictions turn out to be far off and to one side: then everything older
counts for little.  A size whose steps take persistently more or less than the line says is corrected by a factor,
between two sizes by what lies between their factors: processors have kinks that lines have not.

The level follows the last dozens of steps, of any size: a machine that others share is faster or slower from one minute
to the next.  What something *typically* takes leaves it out.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import mul
from typing import NamedTuple

from slotwise.core.least_squares import non_negative

FADE = 0.98  # what a step's sums keep when the next of its size comes: half is forgotten after 34
REMEMBERED = 10.0  # steps of a size that what was learned in another run counts for at most
DOUBT = 0.5  # steps of a size that its factor must outweigh
REFIT = 32  # steps after which coefficients are found anew, unless they are few
FAMILIAR = 24.0  # steps of a size after which only one in SELDOM is learned from: it is done beside the engine
SELDOM = 8
ROUTINE = 4  # of steps of a familiar kind and size, one in so many is looked at, for the same reason
# Towards nothing, of each term.  A step's own share is the cheapest, for eight streams that never change tell nothing
# about one of them, and most of a step is reading weights.
RIDGE = (1e-6, 1e-4, 1e-3, 1e-2, 1e-3, 1e-3)
JUDGED = 256  # steps that the error is told of
DONE_BEFORE = 0.25  # of what was predicted: a step in flight that took less was computed in the time of the one before
ANOTHER = 0.25  # error, to one side, of half of REFIT steps after which this must be another machine, or a busier one
AFRESH = 2.0  # steps of a size that everything older counts for then
HASTE = 0.3  # of a step's error that the level takes on
HICCUP = 0.1  # of its logarithm: what is off by more tells of something else than the machine's speed
TRUSTED = 3.0  # steps of a size before its errors tell of the level
SHORT = 256  # positions: contexts up to here are alike for a recorded step, then up to twice as many, and so on

NUM_TERMS = 6
PAIRS = [(i, j) for i in range(NUM_TERMS) for j in range(i + 1)]  # of a symmetric matrix, the lower half
DECODE, FIRST, PROMPTS = "decode", "first", "prompts"
KINDS = (DECODE, FIRST, PROMPTS)
SIZES = {kind: [f"{kind}-{1 << bits >> 1}" for bits in range(64)] for kind in KINDS}  # by the tokens' bits


class Work(NamedTuple):
    """What a step computes, or would."""

    tokens: int  # padding included
    rows: int
    context: int  # positions that rows of one token attend to, summed
    pairs: float  # of a prompt's token and a position it attends to
    longest: int = 0  # of `context`, the most of one row in a step of such rows alone; 0: as much as there often was


def work_of(starts: Sequence[int], counts: Sequence[int], padding: Sequence[int] = ()) -> Work:
    """The work of rows that compute `counts` tokens from positions `starts` on, and `padding` behind them."""
    if not counts:
        return Work(0, 0, 0, 0.0)
    if max(counts) == 1 and not padding:
        return Work(len(counts), len(counts), sum(starts) + len(starts), 0.0, max(starts) + 1)
    lengths = [count + pad for count, pad in zip(counts, padding, strict=True)] if padding else counts
    context, pairs = 0, 0.0
    for start, length in zip(starts, lengths, strict=True):
        if length == 1:
            context += start + 1
        else:
            pairs += length * (start + (length + 1) / 2)
    return Work(sum(lengths), len(counts), context, pairs)


@dataclass(slots=True)
class Sums:
    """The normal equations of one size's steps: `weight` of them, X'X and X'1, in relative terms."""

    weight: float = 0.0
    products: list[float] = field(default_factory=lambda: [0.0] * len(PAIRS))
    totals: list[float] = field(default_factory=lambda: [0.0] * NUM_TERMS)

    def add(self, terms: Sequence[float], seconds: float) -> None:
        share = [term / seconds for term in terms]
        self.weight = self.weight * FADE + 1
        self.totals = [known * FADE + one for known, one in zip(self.totals, share, strict=True)]
        self.products = [known * FADE + share[i] * share[j] for known, (i, j) in zip(self.products, PAIRS, strict=True)]

    def faded(self, weight: float) -> Sums:
        """The same, counting for at most `weight` steps."""
        share = min(1.0, weight / self.weight) if self.weight else 1.0
        return Sums(self.weight * share, [one * share for one in self.products], [one * share for one in self.totals])

    def tokens(self) -> float:
        """Of these steps, about the mean."""
        return self.totals[2] / self.totals[0]

    def factor(self, shares: Sequence[float]) -> float:
        """What a line of these shares must be multiplied by so that its part of a step is one on the mean.

        The least relative error would be further below what a step takes on the mean, by the variance of whatever
        disturbed them; here too one that was interrupted for ten times as long hardly counts.
        """
        told: float = sum(map(mul, shares, self.totals))
        return (self.weight + DOUBT) / (told + DOUBT)


@dataclass(slots=True)
class Learned:
    """All that a model knows, to be kept and taken up again.  Raises ValueError for another model's."""

    sizes: dict[str, Sums]

    def __post_init__(self) -> None:
        known = {size for names in SIZES.values() for size in names}
        for size, sums in self.sizes.items():
            if size not in known or len(sums.products) != len(PAIRS) or len(sums.totals) != NUM_TERMS:
                raise ValueError(f"not sums over {NUM_TERMS} terms")
            if not sums.totals[0] > 0:
                raise ValueError("sums of no steps")


@dataclass(slots=True)
class Prediction:
    """What is typical of work, to be asked elsewhere (see `StepTimeModel.typical`)."""

    shares: list[float]
    factors: dict[str, dict[str, tuple[float, float]]]  # of each kind, by size: logarithm of its tokens, factor
    met: list[tuple[int, int]]


class Factors:
    """The factors of one kind's sizes, and what lies between them."""

    def __init__(self) -> None:
        self.known: dict[str, tuple[float, float]] = {}  # size -> logarithm of its tokens, factor
        self._at: list[float] = []
        self._factors: list[float] = []

    def restore(self, known: dict[str, tuple[float, float]]) -> None:
        """Take up what was `known`."""
        self.known = dict(known)
        self._arrange()

    def put(self, size: str, tokens: float, factor: float) -> None:
        self.known[size] = (math.log2(tokens), factor)
        self._arrange()

    def _arrange(self) -> None:
        curve = sorted(self.known.values())
        self._at, self._factors = [at for at, _ in curve], [factor for _, factor in curve]

    def of(self, tokens: int) -> float:
        """Before the first and behind the last that is known, theirs; 1 where nothing is."""
        if not self._at:
            return 1.0
        at = math.log2(tokens)
        after = bisect_right(self._at, at)
        if after in (0, len(self._at)):
            return self._factors[max(0, after - 1)]
        low, high = self._at[after - 1], self._at[after]
        share = (at - low) / (high - low)
        return self._factors[after - 1] * (1 - share) + self._factors[after] * share


class StepTimeModel:
    """An on-line model of step times."""

    def __init__(self, learned: Learned | None = None) -> None:
        self._sizes = {size: sums.faded(REMEMBERED) for size, sums in learned.sizes.items()} if learned else {}
        self._shares = [0.0] * NUM_TERMS
        self._factors = {kind: Factors() for kind in KINDS}
        self._level = 0.0  # its logarithm
        self._met: set[tuple[int, int]] = set()  # rows and bits of the longest context, of steps of decoding rows alone
        self._errors: deque[float] = deque(maxlen=JUDGED)
        self._recent: deque[float] = deque(maxlen=REFIT)  # of what is typical, with their sign
        self._last_end = 0.0  # seconds; of the step before
        self._unfitted = 0
        self._passed = dict.fromkeys(KINDS, 0)  # routine steps since the last that was looked at
        self.num_steps = 0  # learned from
        if self._sizes:
            self._fit()

    # -- asking --------------------------------------------------------------------------------------------------

    @property
    def knows(self) -> bool:
        """It has something to say."""
        return bool(self._sizes)

    def seconds(self, work: Work) -> float:
        """What a step of this work should take now; 0 while nothing is known, and for no work at all."""
        return self.typical(work) * math.exp(self._level)

    def typical(self, work: Work) -> float:
        """The same at a speed between those that the machine was seen at."""
        return self._typical(work, self._kind(work)) if work.rows else 0.0

    @property
    def error(self) -> float:
        """Median of |predicted - taken| / taken over the last steps, each predicted before it was learned from."""
        return statistics.median(self._errors) if self._errors else 0.0

    @property
    def coefficients(self) -> dict[str, float]:
        """Seconds of a step, of starting its kernels, of a token, of a row, of a position of context and of a pair."""
        return dict(zip(("step", "launch", "token", "row", "context", "pair"), self._shares, strict=True))

    def learned(self) -> Learned:
        return Learned({size: sums.faded(sums.weight) for size, sums in self._sizes.items()})

    def prediction(self) -> Prediction:
        """What it predicts by at present."""
        factors = {kind: dict(known.known) for kind, known in self._factors.items()}
        return Prediction(list(self._shares), factors, sorted(self._met))

    @classmethod
    def predicting(cls, known: Prediction) -> StepTimeModel:
        """A model to which the same is typical."""
        times = cls()
        times._shares, times._met = list(known.shares), set(known.met)
        for kind, factors in known.factors.items():
            times._factors[kind].restore(factors)
        return times

    def _kind(self, work: Work) -> str:
        if work.pairs:
            return PROMPTS
        return FIRST if work.longest and _met_as(work) not in self._met else DECODE

    def _typical(self, work: Work, kind: str) -> float:
        step, launch, token, row, position, pair = self._shares
        tokens, rows, context, pairs, _ = work
        plain = step + token * tokens + row * rows + position * context + pair * pairs
        return (plain if kind == DECODE else plain + launch) * self._factors[kind].of(tokens)

    # -- learning ------------------------------------------------------------------------------------------------

    def step(self, work: Work, started: float, ended: float) -> None:
        """Learn from a step, in seconds of one clock; steps are told in order, and one that was planned ahead is taken
        to have begun when the one before had ended.
        """
        overlapped = started < self._last_end
        began, self._last_end = max(started, self._last_end), ended
        if not work.rows or ended <= began or self._is_routine(work):
            return
        if overlapped and ended - began < self.seconds(work) * DONE_BEFORE:
            return
        self.learn(work, ended - began)

    def _is_routine(self, work: Work) -> bool:
        """Nothing about such a step is new, and it is not this one's turn to be looked at all the same."""
        kind = self._kind(work)
        sums = self._sizes.get(_size(work, kind))
        if kind == FIRST or sums is None or sums.weight < FAMILIAR:
            return False
        self._passed[kind] = passed = (self._passed[kind] + 1) % ROUTINE
        return passed != 0

    def learn(self, work: Work, seconds: float) -> None:
        """Learn from a step that took so long."""
        kind = self._kind(work)
        sums = self._compare(work, kind, seconds)
        if sums.weight < FAMILIAR or self.num_steps % SELDOM == 0:
            self._take_in(work, kind, seconds)

    def _compare(self, work: Work, kind: str, seconds: float) -> Sums:
        """Hold a step against what was said of it: what is known of its size."""
        size = _size(work, kind)
        if kind == FIRST:
            self._met.add(_met_as(work))
        sums = self._sizes.get(size)
        if sums is None:
            sums = self._sizes[size] = Sums()
        self.num_steps += 1
        predicted = self._typical(work, kind)
        if predicted > 0:
            self._judge(predicted / seconds, sums.weight >= TRUSTED)
        return sums

    def _judge(self, ratio: float, is_trusted: bool) -> None:
        """Take note of how what is typical compares with what a step took."""
        self._errors.append(abs(ratio * math.exp(self._level) - 1))
        self._recent.append(ratio - 1)
        if is_trusted:
            off = -math.log(ratio) - self._level
            self._level += HASTE * max(-HICCUP, min(HICCUP, off))

    def _take_in(self, work: Work, kind: str, seconds: float) -> None:
        size = _size(work, kind)
        self._sizes[size].add(_terms(work, kind), seconds)
        self._unfitted += 1
        if self._unfitted >= min(REFIT, self.num_steps // 2):
            self._fit()
        self._put(size, self._sizes[size])

    def _fit(self) -> None:
        self._unfitted = 0
        if len(self._recent) == REFIT:
            if abs(statistics.median(self._recent)) > ANOTHER:
                self._sizes = {size: sums.faded(AFRESH) for size, sums in self._sizes.items()}
            self._recent.clear()
        sizes = self._sizes.values()
        products = [sum(column) for column in zip(*(sums.products for sums in sizes), strict=True)]
        totals = [sum(column) for column in zip(*(sums.totals for sums in sizes), strict=True)]
        matrix = [[0.0] * NUM_TERMS for _ in range(NUM_TERMS)]
        for (i, j), value in zip(PAIRS, products, strict=True):
            matrix[i][j] = matrix[j][i] = value
        self._shares = non_negative(matrix, totals, RIDGE)
        for size, sums in self._sizes.items():
            self._put(size, sums)

    def _put(self, size: str, sums: Sums) -> None:
        self._factors[size.partition("-")[0]].put(size, sums.tokens(), sums.factor(self._shares))


def _terms(work: Work, kind: str) -> tuple[float, ...]:
    return 1.0, float(kind != DECODE), work.tokens, work.rows, work.context, work.pairs


def _size(work: Work, kind: str) -> str:
    return SIZES[kind][work.tokens.bit_length()]


def _met_as(work: Work) -> tuple[int, int]:
    """Steps of decoding rows that share a recording: as many rows, and contexts up to the same power of two."""
    return work.rows, max(SHORT - 1, work.longest - 1).bit_length()
