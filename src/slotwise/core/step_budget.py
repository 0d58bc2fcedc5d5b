"""The time budget of a step: how many prompt tokens it may still compute.

    |■ decode rows ■|■■■■ prefill chunk ■■■■■■|              |      predicted seconds
    0                                          ...            limit

A token budget does not bound inter-token latency: decoding requests wait for a step's time, not for its tokens, as
Sarathi-Serve observes (Agrawal et al., OSDI 2024).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from slotwise.core.step_time import NO_WORK, StepTimeModel, Work

MOST = 4.0  # stall limits that a step may last for at most, however many prompts start
WHOLE = 2.5  # stall limits that it may last for if a prompt completes in it
SHARE = 2.0  # times the decoding rows' own time, always allowed: prompts get half of a full step
FEW = 0.5  # newcomers per decoding row up to which steps are not lengthened
EVEN = 64.0  # stall limits: a gap of this length costs as much as a first token delayed by the same time


class StallLimit(NamedTuple):
    """How long a step with prefill chunks may take if it has decoding rows, in seconds."""

    free: float  # while few requests wait for a first token
    seconds: float
    whole: float  # if it computes a whole prompt: chunking a short one delays the rows, and the prompt, longer in total


def stall_limit(times: StepTimeModel, bound: float, contexts: Sequence[int], num_newcomers: int) -> StallLimit:
    """Returns the stall limit of a step with `num_newcomers` prompts and decoding rows.

    As long as the newcomers are at most half as many as the k decoding rows, the limit is `bound`.  Let w be the number
    of newcomers beyond k/2.  Of a step of T seconds the decoding rows take d, which leaves T - d for prompts, so a
    second of prompt work needs 1 / (T - d) steps.  Their decoding time d delays half of the w newcomers on average.  A
    gap of T seconds costs each decoding row T² / g: a reader notices one long gap more than several short ones:

        cost(T) = (w/2 · d + k · T² / g) / (T - d)      least at      T = d + √(d² + g · d · w / 2k)

    So a burst is computed at nearly full speed, and a few prompts are computed in steps of `bound` seconds.

    Args:
        bound: seconds; the limit if few newcomers wait, and the decoding rows leave time for prompts.
        contexts: computed tokens of each decoding request; at least one request.
        num_newcomers: running requests without a token, and waiting ones that get a slot.
    """
    rows = len(contexts)
    decode = times.seconds(Work(rows, rows, sum(contexts) + rows, 0.0))
    free = max(bound, SHARE * decode)
    many = max(0.0, num_newcomers - FEW * rows)
    best = decode + math.sqrt(decode**2 + EVEN * bound * decode * many / (2 * rows))
    seconds = max(free, min(MOST * bound, best))
    return StallLimit(free, seconds, max(seconds, WHOLE * free))


class StepBudget:
    """The work planned into a step so far, and the prompt tokens that still fit its time.

    Args:
        times: step-time model; while it is untrained, nothing is limited.
        limit: seconds that the step may take (`max_step_ms` or a TPOT objective); infinite: any.
        stall: stall limit for the decoding rows; None: no row decodes.
        start_limit: seconds beyond which no waiting request starts.
    """

    def __init__(
        self, times: StepTimeModel, limit: float, stall: StallLimit | None = None, start_limit: float = math.inf,
    ) -> None:
        self._times = times
        self._limit = limit
        self._start_limit = start_limit
        self._stall = stall or StallLimit(limit, limit, limit)
        self._work = NO_WORK

    @property
    def seconds(self) -> float:
        """Seconds that the step may take."""
        return min(self._limit, self._stall.seconds)

    @property
    def stalls(self) -> int:
        """Number of stall limits that the step planned so far lasts for; at least 1."""
        return max(1, math.ceil(self._times.seconds(self._work) / self._stall.free))

    def lets_begin(self, start: int, count: int) -> bool:
        """Whether a waiting request may start with `count` tokens."""
        return self._takes(start, count, self._start_limit)

    def takes_whole(self, start: int, count: int) -> bool:
        """Whether all `count` tokens of a new prompt may be computed in this step."""
        return self._takes(start, count, min(self._limit, self._stall.whole))

    def add(self, start: int, count: int) -> None:
        """Add a row that computes `count` tokens from position `start`."""
        self._work = self._with(start, count)

    def add_decodes(self, starts: Sequence[int]) -> None:
        """Add decoding rows, which compute one token each, at positions `starts`."""
        tokens, rows, context, pairs, *_ = self._work
        self._work = Work(tokens + len(starts), rows + len(starts), context + sum(starts) + len(starts), pairs)

    def fitting(self, start: int, wanted: int, stalls: int = 1) -> int:
        """Returns how many of `wanted` tokens from position `start` fit the time left; 0: none.

        Args:
            stalls: stall limits that the step may last for; above 1 only if all decoding rows pause.
        """
        seconds = min(self._limit, self._stall.seconds if stalls == 1 else self._stall.free * stalls)
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
        """Whether the step with these tokens takes at most `seconds`; true while the model is untrained."""
        return not self._times.is_trained or self._times.seconds(self._with(start, count)) <= seconds

    def _with(self, start: int, count: int) -> Work:
        tokens, rows, context, pairs, *_ = self._work
        if count == 1:
            context += start + 1
        else:
            pairs += count * (start + (count + 1) / 2)
        return Work(tokens + count, rows + 1, context, pairs)
