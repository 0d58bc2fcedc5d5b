"""How many drafts a step verifies: the number with the most expected tokens per second.

    tokens per second
          ▲      ___                    drafts, the most probable first
          │   __/   \\___                one stream: a draft costs little, for the step reads all weights in any case
          │__/          \\___
          │────\\____                   full batch: a draft costs what it saves, or more
          └──────────────────► drafts

The expected tokens are one for each decoding row, and each draft with the probability that it and those before it are
right.  The seconds are those of the step-time model.  Beside prompts a step takes long in any case; there, a draft is
worth the time that the decoding rows alone would take for a token.

The choice compares with the step without drafts, and while every step has drafts, a wrong prediction of that one would
stay so.  So until FAMILIAR steps without drafts of a size were measured, the first few steps of that size have none,
and later one in MEASURED_EVERY.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from slotwise.core.step_time import FAMILIAR, TRUSTED, StepTimeModel, Work

# Numbers of drafts that are compared: few, because each number of rows and tokens has a captured graph of its own.
GRID = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
LEAST_GAIN = 1.08  # of the tokens per second: predictions err, and drafts take time to be found
LEAST_COST = 0.04  # of a draft, in steps of its row alone: no prediction makes drafts free
RENEWED = 64  # steps that a cost curve is used for
FIRST_MEASURED = 4  # first steps of a size without drafts: one of them captures a graph, so three are measured
MEASURED_EVERY = 32


class DraftCount(NamedTuple):
    """A number of drafts, and whether more would have been taken had there been any."""

    num_drafts: int
    wants_more: bool


class Costs:
    """Predicted seconds of steps with drafts, relative to the step without, kept for steps of nearly the same work."""

    def __init__(self, times: StepTimeModel) -> None:
        self._times = times
        self._kept: dict[tuple[int, int], tuple[int, list[float]]] = {}  # by rows and context: uses left, costs on GRID
        self._asked: Counter[int] = Counter()  # by size: steps that `measures` was asked about

    def measures(self, work: Work) -> bool:
        """Whether this step is to have no drafts, because too few of its size without drafts were measured."""
        number = self._times.measured(work.repeated())
        if work.pairs or number >= FAMILIAR:
            return False
        self._asked[size := work.tokens.bit_length()] += 1
        asked = self._asked[size]
        return asked % MEASURED_EVERY == 0 or (asked <= FIRST_MEASURED and number < TRUSTED)

    def curve(self, work: Work, num_rows: int, context: int) -> list[float]:
        """Returns the relative seconds for each number of GRID.

        Args:
            work: of the step without drafts.
            num_rows: decoding rows among its rows.
            context: positions that these attend to.
        """
        if work.pairs:
            return self._computed(work, num_rows, context)
        key = num_rows, context.bit_length()
        left, costs = self._kept.get(key, (0, []))
        if not left:
            if len(self._kept) > 1024:
                self._kept.clear()
            left, costs = RENEWED, self._computed(work, num_rows, context)
        self._kept[key] = left - 1, costs
        return costs

    def _computed(self, work: Work, num_rows: int, context: int) -> list[float]:
        seconds = self._times.typical
        plain = seconds(work.repeated())  # the first step without drafts, which captures a graph, is slow but once
        alone = seconds(Work(num_rows, num_rows, context, 0.0)) if work.pairs else plain
        each = context // num_rows + 1
        if alone <= 0:
            return [1.0] * len(GRID)
        more = [(seconds(work.with_drafts(number, number * each)) - plain) / alone for number in GRID]
        return [1.0 + max(cost, LEAST_COST * number / num_rows) for number, cost in zip(GRID, more, strict=True)]


def best(costs: Sequence[float], num_rows: int, probabilities: Sequence[float]) -> DraftCount:
    """Returns how many drafts to verify in a step of `num_rows` decoding rows.

    Args:
        costs: relative seconds for each number of GRID.
        probabilities: that a draft and those before it in its row are right, in falling order.
    """
    expected = [0.0, *accumulate(probabilities)]
    most = len(probabilities)
    chosen, best_rate = 0, LEAST_GAIN * num_rows
    for place, number in enumerate(GRID):
        if number > most:
            return DraftCount(chosen, chosen == GRID[place - 1])
        rate = (num_rows + expected[number]) / costs[place]
        if number and rate > best_rate:
            chosen, best_rate = number, rate
    return DraftCount(chosen, chosen == GRID[-1])


def may_gain(costs: Sequence[float], num_rows: int, most: int) -> bool:
    """Whether drafts would be worth their time if all of them were right, `most` a row."""
    return any(number <= num_rows * most and (num_rows + number) / cost > LEAST_GAIN * num_rows
               for number, cost in zip(GRID[1:], costs[1:], strict=True))


GROUPS = 8
PRIOR_WEIGHT = 4.0  # comparisons that a prior counts for
UNLIKELY = 0.05
REMEMBERED = 32.0  # comparisons of a request, and of all requests, after which older ones count half
REMEMBERED_BY_ALL = 512.0


class Acceptance:
    """Shares of right drafts by group of positions.

    Args:
        prior: where the shares come from until there are comparisons: of all requests, or a number for each group.
    """

    def __init__(self, prior: Acceptance | tuple[float, ...]) -> None:
        self._prior = prior
        self._remembered = REMEMBERED if isinstance(prior, Acceptance) else REMEMBERED_BY_ALL
        self._right = [0.0] * GROUPS
        self._compared = [0.0] * GROUPS

    def share(self, group: int) -> float:
        prior = self._prior.share(group) if isinstance(self._prior, Acceptance) else self._prior[group]
        return (self._right[group] + PRIOR_WEIGHT * prior) / (self._compared[group] + PRIOR_WEIGHT)

    def survival(self, match: int, number: int) -> list[float]:
        """Returns for each of `number` drafts after a match the probability that it and all before it are right.

        Ends with the first that is below UNLIKELY: no step has a use for more.
        """
        shares: dict[int, float] = {}
        survival, alive = [], 1.0
        for position in range(match, match + number):
            group = min(GROUPS - 1, position.bit_length())
            if group not in shares:
                shares[group] = self.share(group)
            alive *= shares[group]
            survival.append(alive)
            if alive < UNLIKELY:
                break
        return survival

    def observe(self, match: int, num_right: int, *, diverged: bool) -> None:
        """Count `num_right` drafts after a match that were right, and the next one, which was wrong, if `diverged`."""
        for position in range(match, match + num_right):
            self._count(position, 1.0)
        if diverged:
            self._count(match + num_right, 0.0)

    def _count(self, position: int, right: float) -> None:
        group = min(GROUPS - 1, position.bit_length())
        if self._compared[group] >= self._remembered:
            self._compared[group] /= 2
            self._right[group] /= 2
        self._compared[group] += 1
        self._right[group] += right
        if isinstance(self._prior, Acceptance):
            self._prior._count(position, right)
