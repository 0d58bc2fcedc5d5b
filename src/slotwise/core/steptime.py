"""What a step will take, learned from the steps there were.

A step's seconds are a sum of non-negative shares, linear in what it computes:

    seconds ≈ a + b·tokens + c·rows + d·context + e·pairs

`a` is reading the weights, `b` the products, `c` the head and sampling, `d` reading the cache, `e` the attention of
prompts.  The coefficients minimise squared *relative* errors (a step's terms are divided by what it took), so that a
step of two milliseconds counts as much as one of two hundred, and one that somebody else's work made ten times longer
hardly counts.

Memory is kept by size: steps of 1, 2-3, 4-7 ... tokens each have sums of their own (of a least-squares problem's normal
equations), and only steps of the same size make older ones fade.  An hour of full batches therefore forgets nothing
about a row alone, unless predictions turn out to be far off and to one side: then everything older counts for little.
A size whose steps take persistently more or less than the line says is corrected by a factor: processors have kinks
that lines have not.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

FADE = 0.98  # what a step's sums keep when the next of its size comes: half is forgotten after 34
REMEMBERED = 10.0  # steps of a size that what was learned in another run counts for at most
DOUBT = 2.0  # steps of a size that its correction must outweigh
REFIT = 32  # steps after which coefficients are found anew, unless they are few
FAMILIAR = 24.0  # steps of a size after which only one in SELDOM is learned from: it is done beside the engine
SELDOM = 2
# Of each term's own weight, towards nothing: decides between terms that were always alike.  A step's own share is the
# cheapest, for eight streams that never change tell nothing about one of them, and most of a step is reading weights.
RIDGE = (1e-6, 1e-3, 1e-2, 1e-3, 1e-3)
JUDGED = 256  # steps that the error is told of
DONE_BEFORE = 0.25  # of what was predicted: a step in flight that took less was computed in the time of the one before
ANOTHER = 0.25  # error, to one side, of half of REFIT steps after which this must be another machine, or a busier one
NUM_TERMS = 5
PAIRS = [(i, j) for i in range(NUM_TERMS) for j in range(i + 1)]  # of a symmetric matrix, the lower half


class Work(NamedTuple):
    """What a step computes, or would."""

    tokens: int  # padding included
    rows: int
    context: int  # positions that rows of one token attend to, summed
    pairs: float  # of a prompt's token and a position it attends to

    @property
    def terms(self) -> tuple[float, ...]:
        return (1.0, self.tokens, self.rows, self.context, self.pairs)

    @property
    def size(self) -> str:
        """Steps of one size are remembered together: their tokens to a power of two, with or without a prompt's."""
        return f"{'prompts' if self.pairs else 'decode'}-{1 << self.tokens.bit_length() >> 1}"


def work_of(starts: Sequence[int], counts: Sequence[int], padding: Sequence[int] = ()) -> Work:
    """The work of rows that compute `counts` tokens from positions `starts` on, and `padding` behind them."""
    if not counts:
        return Work(0, 0, 0, 0.0)
    if max(counts) == 1 and not padding:
        return Work(len(counts), len(counts), sum(starts) + len(starts), 0.0)
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


@dataclass(slots=True)
class Learned:
    """All that a model knows, to be kept and taken up again.  Raises ValueError for another model's."""

    sizes: dict[str, Sums]

    def __post_init__(self) -> None:
        for sums in self.sizes.values():
            if len(sums.products) != len(PAIRS) or len(sums.totals) != NUM_TERMS:
                raise ValueError(f"not sums over {NUM_TERMS} terms")


class StepTimes:
    """An on-line model of step times."""

    def __init__(self, learned: Learned | None = None) -> None:
        self._sizes = {size: sums.faded(REMEMBERED) for size, sums in learned.sizes.items()} if learned else {}
        self._coefficients: list[float] = [0.0] * NUM_TERMS
        self._corrections: dict[str, float] = {}
        self._errors: deque[float] = deque(maxlen=JUDGED)
        self._recent: list[float] = []  # errors with their sign, since the last look at them
        self._last_end = 0.0  # seconds; of the step before
        self._unfitted = 0
        self._seen = 0
        self.num_steps = 0  # learned from
        if self._sizes:
            self._fit()

    # -- asking --------------------------------------------------------------------------------------------------

    @property
    def knows(self) -> bool:
        """It has something to say."""
        return bool(self._sizes)

    def seconds(self, work: Work) -> float:
        """What a step of this work should take; 0 while nothing is known, and for no work at all."""
        if not work.rows:
            return 0.0
        plain = sum(one * term for one, term in zip(self._coefficients, work.terms, strict=True))
        return plain * self._corrections.get(work.size, 1.0)

    @property
    def error(self) -> float:
        """Median of |predicted - taken| / taken over the last steps, each predicted before it was learned from."""
        return statistics.median(self._errors) if self._errors else 0.0

    @property
    def coefficients(self) -> dict[str, float]:
        """Seconds of a step, of a token, of a row, of a position of context and of a pair."""
        return dict(zip(("step", "token", "row", "context", "pair"), self._coefficients, strict=True))

    def learned(self) -> Learned:
        return Learned(dict(self._sizes))

    # -- learning ------------------------------------------------------------------------------------------------

    def step(self, work: Work, started: float, ended: float) -> None:
        """Learn from a step, in seconds of one clock; steps are told in order, and one that was planned ahead is taken
        to have begun when the one before had ended.
        """
        overlapped = started < self._last_end
        began, self._last_end = max(started, self._last_end), ended
        if not work.rows or ended <= began:
            return
        if overlapped and ended - began < self.seconds(work) * DONE_BEFORE:
            return
        self._seen += 1
        known = self._sizes.get(work.size)
        if known is None or known.weight < FAMILIAR or self._seen % SELDOM == 0:
            self.learn(work, ended - began)

    def learn(self, work: Work, seconds: float) -> None:
        if any(self._coefficients):
            error = self.seconds(work) / seconds - 1
            self._errors.append(abs(error))
            self._recent.append(error)
        sums = self._sizes.get(work.size)
        if sums is None:
            sums = self._sizes[work.size] = Sums()
        sums.add(work.terms, seconds)
        self.num_steps += 1
        self._unfitted += 1
        if self._unfitted >= min(REFIT, self.num_steps // 2):
            self._fit()
        else:
            self._correct(work.size)

    def _fit(self) -> None:
        self._unfitted = 0
        if len(self._recent) >= REFIT:
            if abs(statistics.median(self._recent)) > ANOTHER:
                self._sizes = {size: sums.faded(DOUBT) for size, sums in self._sizes.items()}
            self._recent.clear()
        sizes = self._sizes.values()
        products = [sum(column) for column in zip(*(sums.products for sums in sizes), strict=True)]
        totals = [sum(column) for column in zip(*(sums.totals for sums in sizes), strict=True)]
        matrix = [[0.0] * NUM_TERMS for _ in range(NUM_TERMS)]
        for (i, j), value in zip(PAIRS, products, strict=True):
            matrix[i][j] = matrix[j][i] = value
        self._coefficients = non_negative(matrix, totals)
        for size in self._sizes:
            self._correct(size)

    def _correct(self, size: str) -> None:
        """By the factor that makes the least of its steps' relative errors."""
        sums, shares = self._sizes[size], self._coefficients
        told = sum(share * total for share, total in zip(shares, sums.totals, strict=True))
        squares = sum(
            shares[i] * shares[j] * product * (1 if i == j else 2)
            for product, (i, j) in zip(sums.products, PAIRS, strict=True))
        self._corrections[size] = (told + DOUBT) / (squares + DOUBT)


def non_negative(matrix: list[list[float]], target: list[float]) -> list[float]:
    """x of `matrix` x = `target` in the least-squares sense, with no x below zero.

    Normal equations in, symmetric and positive semi-definite.  Whoever would be most negative is left out, until nobody
    would: nearly always what non-negative least squares (Lawson and Hanson, 1974) find, in at most as many solutions as
    there are columns.
    """
    kept = [at for at, row in enumerate(matrix) if row[at] > 0]
    while kept:
        scale = [matrix[at][at] ** -0.5 for at in kept]  # columns of unit length: counts and pairs are worlds apart
        system = [
            [matrix[i][j] * scale[row] * scale[column] + RIDGE[i] * (i == j) for column, j in enumerate(kept)]
            + [target[i] * scale[row]] for row, i in enumerate(kept)]
        found = _solved(system)
        least = min(range(len(kept)), key=found.__getitem__)
        if found[least] >= 0:
            solution = [0.0] * len(matrix)
            for at, value, factor in zip(kept, found, scale, strict=True):
                solution[at] = value * factor
            return solution
        del kept[least]
    return [0.0] * len(matrix)


def _solved(system: list[list[float]]) -> list[float]:
    """Gaussian elimination of a positive definite system, the right side as its last column; destroys `system`."""
    size = len(system)
    for pivot in range(size):
        for row in range(pivot + 1, size):
            factor = system[row][pivot] / system[pivot][pivot]
            for column in range(pivot, size + 1):
                system[row][column] -= factor * system[pivot][column]
    values = [0.0] * size
    for row in reversed(range(size)):
        known = sum(system[row][column] * values[column] for column in range(row + 1, size))
        values[row] = (system[row][size] - known) / system[row][row]
    return values
