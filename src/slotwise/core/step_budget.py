"""A step budgeted in time: what it may still compute, by the model of step times.

    |■ decode rows ■|■■ a piece of a prompt ■■|              |      predicted seconds
    0                                          ...            `seconds`

A budget in tokens cannot keep streams flowing: 256 tokens behind a context of 8,000 take several times as long as 256
at the beginning, and sixty-four decoding rows take longer than four.  After Sarathi-Serve's observation (Agrawal et
al., OSDI 2024) that a step's time, not its tokens, is what decoding requests wait for.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import NamedTuple

from slotwise.core.step_time import StepTimeModel, Work

FLOOR = 16  # tokens that one prompt gets at every step, whatever they cost: a long prompt must get on
MOST = 4.0  # times the bound, however many more begin
WHOLE = 2.5  # times the bound, for a prompt that is over with it
SHARE = 2.0  # times what the decoding rows take alone, that they may always be held up: prompts get half of a full step


class StallLimit(NamedTuple):
    """How long a step with prompts may hold up those who decode, in seconds."""

    seconds: float
    whole: float  # if it computes all of a prompt: to cut a short one holds them up longer in all, and it, too


def stall_limit(times: StepTimeModel, bound: float, contexts: Sequence[int], num_newcomers: int) -> StallLimit:
    """What a step with prompts may take so that nobody who decodes is held up for long.

    A step of `bound` delays each of the decoding rows by as much as it brings the newcomers on.  Where more of them
    come on than are delayed, it is longer, by as much as they are more: so a burst is taken in at nearly full speed,
    and a few long prompts are cut finely.

    Args:
        times: of steps.
        bound: seconds, where newcomers are at most as many as those who decode, and these leave time for prompts.
        contexts: tokens that are computed of each request that decodes, at least one.
        num_newcomers: who run and have no token yet, and who wait and find a slot.
    """
    decode = Work(len(contexts), len(contexts), sum(contexts) + len(contexts), 0.0)
    plain = max(bound, SHARE * times.seconds(decode))
    seconds = plain * min(MOST, max(1.0, num_newcomers / len(contexts)))
    return StallLimit(seconds, max(seconds, WHOLE * plain))


class StepBudget:
    """What a step computes so far, and how much of a prompt it may take in.

    Args:
        times: nothing is held back while it knows nothing.
        asked: seconds that the step was asked to take at most; infinite: nobody asked.
        held_up: what those who decode in it may be held up; None: nobody is.
    """

    def __init__(self, times: StepTimeModel, asked: float, held_up: StallLimit | None = None) -> None:
        self._times = times
        self._asked = asked
        self._stall = held_up or StallLimit(asked, asked)
        self._work = Work(0, 0, 0, 0.0)

    @property
    def stalls(self) -> int:
        """As many are in this step, as far as it is filled; at least one."""
        return max(1, ceil(self._times.seconds(self._work) / self._stall.seconds))

    def lets_begin(self, start: int, count: int) -> bool:
        """Whether one who waits may begin with `count` tokens: only what was asked for makes it wait while others
        run.
        """
        return self._takes(start, count, self._asked)

    def takes_whole(self, start: int, count: int) -> bool:
        """Whether all `count` tokens of a prompt may be computed that nobody has begun."""
        return self._takes(start, count, min(self._asked, self._stall.whole))

    def add(self, start: int, count: int) -> None:
        """A row computes `count` tokens from position `start` on."""
        self._work = self._with(start, count)

    def add_decodes(self, starts: Sequence[int]) -> None:
        """Rows compute a token each, at `starts`."""
        tokens, rows, context, pairs, _ = self._work
        self._work = Work(tokens + len(starts), rows + len(starts), context + sum(starts) + len(starts), pairs)

    def fitting(self, start: int, wanted: int, stalls: int = 1) -> int:
        """Of `wanted` tokens from position `start` on, as many as the time that is left allows; 0: none.

        Args:
            stalls: that the step may take in one: more only where all who decode rest for so many.
        """
        seconds = min(self._asked, self._stall.seconds * stalls)
        if self._takes(start, wanted, seconds):
            return wanted
        fits, too_many = 0, wanted
        while too_many - fits > 1:
            count = (fits + too_many) // 2
            if self._takes(start, count, seconds):
                fits = count
            else:
                too_many = count
        return fits

    def _takes(self, start: int, count: int, seconds: float) -> bool:
        """With these, at most so long; so it is believed while nothing is known."""
        return not self._times.knows or self._times.seconds(self._with(start, count)) <= seconds

    def _with(self, start: int, count: int) -> Work:
        tokens, rows, context, pairs, _ = self._work
        if count == 1:
            context += start + 1
        else:
            pairs += count * (start + (count + 1) / 2)
        return Work(tokens + count, rows + 1, context, pairs)
