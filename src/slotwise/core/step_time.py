"""Step times: a model that predicts and learns the seconds of a step, its fit, and the roofline, a lower bound.

**Model.**  A step's seconds are a non-negative linear function of its work, times a factor of its size and a level:

    seconds ≈ level · factor(size) · (a + l·launched + b·tokens + c·rows + d·context + e·pairs)

`a` is reading the weights, `l` launching the kernels one by one, `b` the matrix products, `c` the head and sampling,
`d` reading the KV cache, `e` prefill attention.  There are three kinds of steps: DECODE steps, of decoding rows alone,
replay a captured graph; a FIRST step, with a row count and context length not seen before, pays for the capture;
DRAFTS steps, of decoding rows that verify drafts, replay a graph, too, and the model does not learn from the first of a
number of rows and tokens; PROMPTS steps, with prefill chunks, are never captured.  `launched` is 1 for FIRST and
PROMPTS, else 0.  A draft is a token and a row: its logits are computed.

**Fit.**  Steps are remembered by kind and size: steps of 1, 2-3, 4-7 ... tokens each have their own sums, the normal
equations of a least-squares problem.  Old measurements are down-weighted per size, so full batches do not overwrite the
single-row estimate; after a large one-sided error all old sums are down-weighted.  Errors are *relative* (a step's
terms are divided by its seconds): a step of two milliseconds counts as much as one of two hundred, and a step that
other processes made ten times longer hardly counts.  A factor corrects a size whose steps persistently take more or
less than the linear function, interpolated between two sizes.  The level follows the last dozens of steps, of any size,
because a shared machine changes its speed; the *typical* time omits it.

**Roofline** (Williams, Waterman and Patterson, 2009).  A step cannot be faster than its bytes at the machine's
bandwidth, nor than its operations at the machine's rate.  Both come from the step's plan, so the bound accounts for
every row, chunk and context.

    a step    bytes       all weights once, and the keys and values of every row's context
              operations  two for each weight and token, the head's only for rows that sample; four for each pair of a
                          query and a key, head and dimension
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

FADE = 0.98  # decay of a size's sums at its next step: half is forgotten after 34
REMEMBERED = 10.0  # steps of a size that sums learned in another run count for at most
DOUBT = 0.5  # prior weight of a factor of 1, in steps of its size
REFIT = 32  # steps between two fits; fewer in the first steps
FAMILIAR = 24.0  # steps of a size after which only one in ROUTINE is compared, and one in SELDOM of these is added to
ROUTINE = 4  # the sums: comparing takes the engine's time, and a disturbance of seconds should not fade the others
SELDOM = 8
# Regularization of each term towards 0.  A step's constant is regularized least: eight unchanging streams say nothing
# about a single one, and most of a step is reading weights.
RIDGE = (1e-6, 1e-4, 1e-3, 1e-2, 1e-3, 1e-3)
JUDGED = 256  # steps that `error` is computed over
DONE_BEFORE = 0.25  # of the prediction: an overlapped step that took less was computed during the step before
ANOTHER = 0.25  # median relative error of REFIT steps above which this must be another machine, or a busier one
AFRESH = 2.0  # steps of a size that all older ones then count for
HASTE = 0.3  # share of a step's error that moves the level
HICCUP = 0.1  # maximum logarithmic error used: larger ones have other causes than the machine's speed
TRUSTED = 3.0  # steps of a size before its errors move the level
MAX_COEFFICIENT = 1e12  # seconds; learned sums that give more cannot come from measurements
SHORT = 256  # positions: graphs are captured for contexts up to this, up to twice as many, and so on

NUM_TERMS = 6
PAIRS = [(i, j) for i in range(NUM_TERMS) for j in range(i + 1)]  # lower triangle of a symmetric matrix
DECODE, FIRST, PROMPTS, DRAFTS = "decode", "first", "prompts", "drafts"
KINDS = (DECODE, FIRST, PROMPTS, DRAFTS)
SIZES = {kind: [f"{kind}-{1 << bits >> 1}" for bits in range(64)] for kind in KINDS}  # by bit length of the tokens

Point = tuple[float, float]  # log2 of a size's tokens, its factor


class Work(NamedTuple):
    """The work of a step."""

    tokens: int  # padding included
    rows: int  # rows with logits; a draft is one, too
    context: int  # positions attended to by decoding rows, and by each of their drafts, summed
    pairs: float  # (token, attended position) pairs of prefill chunks
    longest: int = 0  # largest context of a row, in a step of decoding rows alone; 0: one seen before
    drafts: int = 0

    def with_drafts(self, num_drafts: int, context: int) -> Work:
        """Returns the work with drafts, which attend to `context` positions in all."""
        return Work(self.tokens + num_drafts, self.rows + num_drafts, self.context + context, self.pairs,
                    drafts=self.drafts + num_drafts) if num_drafts else self

    def repeated(self) -> Work:
        """Returns the work of a step of its row count and context length that is not the first."""
        return self._replace(longest=0)


NO_WORK = Work(0, 0, 0, 0.0)


def work_of(
    starts: Sequence[int], counts: Sequence[int], padding: Sequence[int] = (), drafts: Sequence[Sequence[int]] = (),
) -> Work:
    """Returns the work of rows that compute `counts` tokens from positions `starts`, and `padding` after them.

    Args:
        drafts: those among each row's tokens; () for none.
    """
    if drafts:
        numbers = list(map(len, drafts))
        context = sum([number * (start + 1) + number * (number + 1) // 2
                       for start, number in zip(starts, numbers, strict=True)])
        plain = [count - number for count, number in zip(counts, numbers, strict=True)]
        return work_of(starts, plain, padding).with_drafts(sum(numbers), context)
    if not counts:
        return NO_WORK
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


# -- fit -----------------------------------------------------------------------------------------------------------


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

    def point(self, coefficients: Sequence[float]) -> Point:
        """Returns the mean size of these steps, and the factor that makes predicted / measured 1 on their mean.

        The factor of least squared relative error would predict less than the mean, by the variance of disturbances.
        Here, too, a step that was interrupted for ten times its length hardly counts.
        """
        predicted: float = sum(map(mul, coefficients, self.totals))
        return math.log2(self.totals[2] / self.totals[0]), (self.weight + DOUBT) / (predicted + DOUBT)


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


def _interpolated(points: Sequence[Point], tokens: int) -> float:
    """Returns the factor for `tokens`: constant outside the known sizes, 1 if none is known."""
    if not points:
        return 1.0
    at = math.log2(tokens)
    after = bisect_right(points, (at, math.inf))
    if after in (0, len(points)):
        return points[max(0, after - 1)][1]
    (low, below), (high, above) = points[after - 1 : after + 1]
    share = (at - low) / (high - low)
    return below * (1 - share) + above * share


# -- model ---------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Prediction:
    """The parameters of `StepTimeModel.typical`, to predict in another process."""

    shares: list[float]  # coefficients: seconds per step, launch, token, row, context position and attention pair
    factors: dict[str, dict[str, Point]]  # by kind and size
    met: list[tuple[int, int]]


class StepTimeModel:
    """An on-line model of step times.  Raises ValueError for learned sums that give no finite times."""

    learns = True  # False: `step` changes nothing, and need not be called

    def __init__(self, learned: Learned | None = None) -> None:
        self._sizes = {size: sums.faded(REMEMBERED) for size, sums in learned.sizes.items()} if learned else {}
        self._coefficients = [0.0] * NUM_TERMS
        self._factors: dict[str, dict[str, Point]] = {kind: {} for kind in KINDS}
        self._level = 0.0  # natural logarithm of the level
        self._met: set[tuple[int, int]] = set()  # DECODE steps seen: rows, bits of the longest context
        self._errors: deque[float] = deque(maxlen=JUDGED)
        self._recent: deque[float] = deque(maxlen=REFIT)  # signed errors of `typical`
        self._last_end = 0.0  # seconds; end of the previous step
        self._unfitted = 0
        self._passed = dict.fromkeys(KINDS, 0)  # routine steps since the last one learned from
        self.num_steps = 0  # steps learned from
        if self._sizes:
            self._fit()
            if not self._is_finite():
                raise ValueError("sums of no step times")

    @property
    def is_trained(self) -> bool:
        """True once the model has learned from a step."""
        return bool(self._sizes)

    def seconds(self, work: Work) -> float:
        """Returns the predicted seconds of a step at the current level; 0 while untrained, and for no work."""
        return self.typical(work) * math.exp(self._level)

    def typical(self, work: Work) -> float:
        """Returns the predicted seconds at level 1, an average speed of the machine."""
        if not work.rows:
            return 0.0
        kind = self._kind(work)
        plain: float = sum(map(mul, self._coefficients, _terms(work, kind)))
        return plain * _interpolated(sorted(self._factors[kind].values()), work.tokens)

    def measured(self, work: Work) -> float:
        """Returns how many steps of this kind and size the model has learned from, older ones counting less."""
        sums = self._sizes.get(_size(work, self._kind(work)))
        return sums.weight if sums is not None else 0.0

    @property
    def error(self) -> float:
        """Median of |predicted - measured| / measured over the last steps, each predicted before learning from it."""
        return statistics.median(self._errors) if self._errors else 0.0

    def learned(self) -> Learned:
        return Learned({size: sums.faded(sums.weight) for size, sums in self._sizes.items()})

    def prediction(self) -> Prediction:
        """Returns the current parameters of `typical`."""
        factors = {kind: dict(known) for kind, known in self._factors.items()}
        return Prediction(list(self._coefficients), factors, sorted(self._met))

    @classmethod
    def predicting(cls, known: Prediction) -> StepTimeModel:
        """Returns a model with these parameters of `typical`."""
        times = cls()
        times._coefficients, times._met = list(known.shares), set(known.met)
        times._factors |= {kind: dict(factors) for kind, factors in known.factors.items()}
        return times

    def _is_finite(self) -> bool:
        """Whether predictions are finite for any work."""
        points = [number for factors in self._factors.values() for point in factors.values() for number in point]
        return all(one < MAX_COEFFICIENT for one in self._coefficients) and all(map(math.isfinite, points))

    def _kind(self, work: Work) -> str:
        if work.pairs:
            return PROMPTS
        if work.drafts:
            return DRAFTS
        return FIRST if work.longest and _graph_of(work) not in self._met else DECODE

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

    def skips(self, starts: Sequence[int], counts: Sequence[int], started: float, ended: float) -> bool:
        """Whether `step` would skip these rows as a routine step of decoding rows; if so, it need not be called.

        Most steps are routine, and this check is cheaper than summing up their work for `step`.
        """
        rows, passed = len(counts), self._passed[DECODE] + 1
        sums = self._sizes.get(SIZES[DECODE][rows.bit_length()])
        if (passed == ROUTINE or sums is None or sums.weight < FAMILIAR or ended <= started or ended <= self._last_end
                or counts.count(1) < rows or (rows, _context_bits(max(starts) + 1)) not in self._met):
            return False
        self._passed[DECODE], self._last_end = passed, ended
        return True

    def _is_routine(self, work: Work) -> bool:
        """Whether to skip a step of a familiar kind and size; one in ROUTINE is not skipped."""
        kind = self._kind(work)
        sums = self._sizes.get(_size(work, kind))
        if kind == FIRST or sums is None or sums.weight < FAMILIAR:
            return False
        self._passed[kind] = passed = (self._passed[kind] + 1) % ROUTINE
        return passed != 0

    def learn(self, work: Work, seconds: float) -> None:
        """Learn from a step that took `seconds`: compare it with its prediction, and add it to the sums."""
        kind, predicted = self._kind(work), self.typical(work)
        size = _size(work, kind)
        if kind == DRAFTS and (graph := (work.rows - work.drafts, -work.tokens)) not in self._met:
            self._met.add(graph)
            return
        if kind == FIRST:
            self._met.add(_graph_of(work))
        sums = self._sizes.setdefault(size, Sums())
        self.num_steps += 1
        if predicted > 0:
            self._judge(predicted / seconds, sums.weight >= TRUSTED)
        if sums.weight >= FAMILIAR and self.num_steps % SELDOM:
            return
        sums.add(_terms(work, kind), seconds)
        self._unfitted += 1
        if self._unfitted >= min(REFIT, self.num_steps // 2):
            self._fit()
        else:
            self._factors[kind][size] = sums.point(self._coefficients)

    def _judge(self, ratio: float, is_trusted: bool) -> None:
        """Record the error of a prediction, typical / measured, and move the level."""
        self._errors.append(abs(ratio * math.exp(self._level) - 1))
        self._recent.append(ratio - 1)
        if is_trusted:
            off = -math.log(ratio) - self._level
            self._level += HASTE * max(-HICCUP, min(HICCUP, off))

    def _fit(self) -> None:
        self._unfitted = 0
        if len(self._recent) == REFIT:
            if abs(statistics.median(self._recent)) > ANOTHER:
                self._sizes = {size: sums.faded(AFRESH) for size, sums in self._sizes.items()}
            self._recent.clear()
        products = map(sum, zip(*(sums.products for sums in self._sizes.values()), strict=True))
        totals = list(map(sum, zip(*(sums.totals for sums in self._sizes.values()), strict=True)))
        matrix = [[0.0] * NUM_TERMS for _ in range(NUM_TERMS)]
        for (i, j), value in zip(PAIRS, products, strict=True):
            matrix[i][j] = matrix[j][i] = value
        self._coefficients = non_negative(matrix, totals, RIDGE)
        for size, sums in self._sizes.items():
            self._factors[size.partition("-")[0]][size] = sums.point(self._coefficients)


def _terms(work: Work, kind: str) -> tuple[float, ...]:
    return 1.0, float(kind in (FIRST, PROMPTS)), work.tokens, work.rows, work.context, work.pairs


def _size(work: Work, kind: str) -> str:
    return SIZES[kind][work.tokens.bit_length()]


def _graph_of(work: Work) -> tuple[int, int]:
    """Returns the key of a captured graph: number of rows, and the context up to a power of two."""
    return work.rows, _context_bits(work.longest)


def _context_bits(longest: int) -> int:
    return max(SHORT - 1, longest - 1).bit_length()


Matrix = list[list[float]]


def non_negative(matrix: Matrix, target: Sequence[float], ridge: Sequence[float]) -> list[float]:
    """Returns the least-squares solution x >= 0 of `matrix` x = `target`.

    Drops the column with the most negative coefficient until none is negative.  This is nearly always the solution of
    non-negative least squares (Lawson and Hanson, 1974), in at most as many solves as there are columns.

    Args:
        matrix, target: the normal equations; `matrix` is symmetric and positive semi-definite.
        ridge: regularization towards 0, by column, relative to its weight: decides between collinear columns.
    """
    kept = [at for at, row in enumerate(matrix) if row[at] > 0]
    solution = [0.0] * len(matrix)
    while kept:
        scale = [matrix[at][at] ** -0.5 for at in kept]  # columns of unit length: their magnitudes differ widely
        found = _solved([
            [matrix[i][j] * scale[row] * scale[column] + ridge[i] * (i == j) for column, j in enumerate(kept)]
            + [target[i] * scale[row]] for row, i in enumerate(kept)])
        least = min(range(len(kept)), key=found.__getitem__)
        if found[least] >= 0:
            for at, value, factor in zip(kept, found, scale, strict=True):
                solution[at] = value * factor
            break
        del kept[least]
    return solution


def _solved(system: Matrix) -> list[float]:
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


class Cost(NamedTuple):
    """The least that a step must read and compute."""

    bytes: int
    operations: int


@dataclass(frozen=True, slots=True)
class Machine:
    """Measured peak rates."""

    bytes_per_second: float  # of memory reads
    operations_per_second: float  # of large matrix products


@dataclass(frozen=True, slots=True)
class Roofline:
    """A model on a machine."""

    machine: Machine
    weight_bytes: int  # of all weights that a step reads, quantized or not
    position_bytes: int  # keys and values of one position, in all layers
    token_weights: int  # weights that each token is multiplied by
    head_weights: int  # weights that each sampling row is multiplied by in addition
    pair_operations: int  # operations of a query and a key, in all layers
    row_bytes: int = 0  # of a row's recurrent states, read and written

    def cost(self, starts: Sequence[int], counts: Sequence[int], num_sampled: int) -> Cost:
        """Returns the cost of rows that compute `counts` tokens from positions `starts`; padding is not counted."""
        computed, contexts = sum(counts), sum(starts) + sum(counts)
        pairs = contexts
        if computed > len(counts):
            pairs = sum([count * start + count * (count + 1) // 2 for start, count in zip(starts, counts, strict=True)])
        return Cost(
            self.weight_bytes + contexts * self.position_bytes + len(counts) * self.row_bytes,
            2 * (computed * self.token_weights + num_sampled * self.head_weights) + pairs * self.pair_operations)

    def seconds(self, cost: Cost) -> float:
        """Returns the larger of the memory and the compute bound, in seconds."""
        machine = self.machine
        return max(cost.bytes / machine.bytes_per_second, cost.operations / machine.operations_per_second)
