"""Step-time model: predicts a step's seconds, and learns on-line from committed steps.

A step's seconds are a non-negative linear function of its work, times a factor of its size and a level:

    seconds ≈ level · factor(size) · (a + l·launched + b·tokens + c·rows + d·context + e·pairs)

`a` is reading the weights, `l` launching the kernels one by one, `b` the matrix products, `c` the head and sampling,
`d` reading the KV cache, `e` prefill attention.  The coefficients minimise squared *relative* errors (a step's terms
are divided by its seconds), so that a step of two milliseconds counts as much as one of two hundred, and a step that
other processes made ten times longer hardly counts.

Three kinds of steps differ by more than their terms.  DECODE steps, of decoding rows alone, replay a captured graph
(see `runner/graphs.py`); a FIRST step, with a row count and context length not seen before, pays for the capture;
PROMPTS steps, with prefill chunks, are never captured.  `launched` is 0 for DECODE, else 1.

Steps are remembered by kind and size: steps of 1, 2-3, 4-7 ... tokens each have their own sums (the normal equations of
a least-squares problem), and only steps of the same size fade older ones.  So an hour of full batches forgets nothing
about a single row, unless predictions turn out to be far off and to one side: then everything older counts for little.
A factor corrects a size whose steps persistently take more or less than the linear function, interpolated between two
sizes: processors have non-linearities.

The level follows the last dozens of steps, of any size: a shared machine is faster or slower from one minute to the
next.  The *typical* time leaves it out.
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

FADE = 0.98  # decay of a size's sums at its next step: half is forgotten after 34
REMEMBERED = 10.0  # steps of a size that sums learned in another run count for at most
DOUBT = 0.5  # prior weight of a factor of 1, in steps of its size
REFIT = 32  # steps between two fits; fewer in the first steps
FAMILIAR = 24.0  # steps of a size after which only one in SELDOM is learned from: learning takes time beside the engine
SELDOM = 8
ROUTINE = 4  # of steps of a familiar kind and size, one in this many is compared, for the same reason
# Regularisation of each term towards 0.  A step's constant is regularised least: eight unchanging streams say nothing
# about a single one, and most of a step is reading weights.
RIDGE = (1e-6, 1e-4, 1e-3, 1e-2, 1e-3, 1e-3)
JUDGED = 256  # steps that `error` is computed over
DONE_BEFORE = 0.25  # of the prediction: an overlapped step that took less was computed during the step before
ANOTHER = 0.25  # median relative error of REFIT steps above which this must be another machine, or a busier one
AFRESH = 2.0  # steps of a size that all older ones then count for
HASTE = 0.3  # share of a step's error that moves the level
HICCUP = 0.1  # maximum logarithmic error used: larger ones have other causes than the machine's speed
TRUSTED = 3.0  # steps of a size before its errors move the level
SHORT = 256  # positions: graphs are captured for contexts up to this, up to twice as many, and so on

NUM_TERMS = 6
PAIRS = [(i, j) for i in range(NUM_TERMS) for j in range(i + 1)]  # lower triangle of a symmetric matrix
DECODE, FIRST, PROMPTS = "decode", "first", "prompts"
KINDS = (DECODE, FIRST, PROMPTS)
SIZES = {kind: [f"{kind}-{1 << bits >> 1}" for bits in range(64)] for kind in KINDS}  # by bit length of the tokens


class Work(NamedTuple):
    """The work of a step."""

    tokens: int  # padding included
    rows: int
    context: int  # positions attended to by rows of one token, summed
    pairs: float  # (prompt token, attended position) pairs of prefill chunks
    longest: int = 0  # largest context of a row, in a step of decoding rows alone; 0: one seen before


def work_of(starts: Sequence[int], counts: Sequence[int], padding: Sequence[int] = ()) -> Work:
    """Returns the work of rows that compute `counts` tokens from positions `starts`, and `padding` after them."""
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
        """Returns a copy that counts for at most `weight` steps."""
        share = min(1.0, weight / self.weight) if self.weight else 1.0
        return Sums(self.weight * share, [one * share for one in self.products], [one * share for one in self.totals])

    def tokens(self) -> float:
        """Returns about the mean number of tokens of these steps."""
        return self.totals[2] / self.totals[0]

    def factor(self, shares: Sequence[float]) -> float:
        """Returns the factor for `shares` that makes predicted / measured 1 on the mean over these steps.

        The factor of least squared relative error would predict less than the mean, by the variance of disturbances.
        Here, too, a step that was interrupted for ten times its length hardly counts.
        """
        told: float = sum(map(mul, shares, self.totals))
        return (self.weight + DOUBT) / (told + DOUBT)


@dataclass(slots=True)
class Learned:
    """The learned state of a model, to be saved and restored.  Raises ValueError for sums of another shape."""

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
    """The parameters of `StepTimeModel.typical`, to predict in another process."""

    shares: list[float]
    factors: dict[str, dict[str, tuple[float, float]]]  # by kind and size: log2 of the tokens, factor
    met: list[tuple[int, int]]


class Factors:
    """The factors of one kind's sizes, interpolated between sizes."""

    def __init__(self) -> None:
        self.known: dict[str, tuple[float, float]] = {}  # by size: log2 of the tokens, factor
        self._at: list[float] = []
        self._factors: list[float] = []

    def restore(self, known: dict[str, tuple[float, float]]) -> None:
        """Restore the factors `known`."""
        self.known = dict(known)
        self._arrange()

    def put(self, size: str, tokens: float, factor: float) -> None:
        self.known[size] = (math.log2(tokens), factor)
        self._arrange()

    def _arrange(self) -> None:
        curve = sorted(self.known.values())
        self._at, self._factors = [at for at, _ in curve], [factor for _, factor in curve]

    def of(self, tokens: int) -> float:
        """Returns the factor for `tokens`: constant outside the known sizes, 1 if none is known."""
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
        self._level = 0.0  # natural logarithm of the level
        self._met: set[tuple[int, int]] = set()  # DECODE steps seen: rows, bits of the longest context
        self._errors: deque[float] = deque(maxlen=JUDGED)
        self._recent: deque[float] = deque(maxlen=REFIT)  # signed errors of `typical`
        self._last_end = 0.0  # seconds; end of the previous step
        self._unfitted = 0
        self._passed = dict.fromkeys(KINDS, 0)  # routine steps since the last one compared
        self.num_steps = 0  # steps learned from
        if self._sizes:
            self._fit()

    # -- predicting ----------------------------------------------------------------------------------------------

    @property
    def knows(self) -> bool:
        """True once the model has learned from a step."""
        return bool(self._sizes)

    def seconds(self, work: Work) -> float:
        """Returns the predicted seconds of a step at the current level; 0 while untrained, and for no work."""
        return self.typical(work) * math.exp(self._level)

    def typical(self, work: Work) -> float:
        """Returns the predicted seconds at level 1, an average speed of the machine."""
        return self._typical(work, self._kind(work)) if work.rows else 0.0

    @property
    def error(self) -> float:
        """Median of |predicted - measured| / measured over the last steps, each predicted before learning from it."""
        return statistics.median(self._errors) if self._errors else 0.0

    @property
    def coefficients(self) -> dict[str, float]:
        """Seconds per step, kernel launch, token, row, context position and attention pair."""
        return dict(zip(("step", "launch", "token", "row", "context", "pair"), self._shares, strict=True))

    def learned(self) -> Learned:
        return Learned({size: sums.faded(sums.weight) for size, sums in self._sizes.items()})

    def prediction(self) -> Prediction:
        """Returns the current parameters of `typical`."""
        factors = {kind: dict(known.known) for kind, known in self._factors.items()}
        return Prediction(list(self._shares), factors, sorted(self._met))

    @classmethod
    def predicting(cls, known: Prediction) -> StepTimeModel:
        """Returns a model with these parameters of `typical`."""
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
        """Learn from a step that ran from `started` to `ended`, in seconds of one clock.

        Steps arrive in order; a step planned ahead counts from the end of the previous one.
        """
        overlapped = started < self._last_end
        began, self._last_end = max(started, self._last_end), ended
        if not work.rows or ended <= began or self._is_routine(work):
            return
        if overlapped and ended - began < self.seconds(work) * DONE_BEFORE:
            return
        self.learn(work, ended - began)

    def _is_routine(self, work: Work) -> bool:
        """Whether to skip a step of a familiar kind and size; one in ROUTINE is not skipped."""
        kind = self._kind(work)
        sums = self._sizes.get(_size(work, kind))
        if kind == FIRST or sums is None or sums.weight < FAMILIAR:
            return False
        self._passed[kind] = passed = (self._passed[kind] + 1) % ROUTINE
        return passed != 0

    def learn(self, work: Work, seconds: float) -> None:
        """Learn from a step of this work that took `seconds`."""
        kind = self._kind(work)
        sums = self._compare(work, kind, seconds)
        if sums.weight < FAMILIAR or self.num_steps % SELDOM == 0:
            self._take_in(work, kind, seconds)

    def _compare(self, work: Work, kind: str, seconds: float) -> Sums:
        """Compare a step with its prediction.  Returns the sums of its size."""
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
        """Record the error of a prediction, typical / measured, and move the level."""
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
    """Returns the key of a captured graph: number of rows, and the context up to a power of two."""
    return work.rows, max(SHORT - 1, work.longest - 1).bit_length()
