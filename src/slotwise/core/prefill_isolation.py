"""Courtesy towards those of other tenants: short steps before they come, steps of their own when they begin.

A prompt that is computed beside sixty decoding rows waits for all of them.  Where the policy says that those who run
are far ahead of one who begins, its step is left to it:

    far ahead   ■ ■ ■ ■ . . ■ ■      . rests: FIRST_TOKEN
    far ahead   ■ ■ ■ ■ . . ■ ■
    begins              ▓ ▓ ■ ■      ▓ a piece of its prompt

Who rests is a policy's to say; for how long is not: after MAX_RESTS such steps in a row comes one in which nobody
rests, and a step that holds up those who decode for as long as several might counts as so many.  And nobody rests for
nothing: where no one of those who were to begin was given a token, everyone runs.

Where nobody is far ahead, a prompt under way still goes on behind one who waits and goes before it, with what that one
leaves: else a few tokens of one tenant would wait for thousands of another.

Whoever comes waits for the step under way first.  So a step in which nobody rests takes in a part of the prompts it
could: all of a step is for those who begin where others are far ahead, or go behind them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from slotwise.core.interfaces import Key, Policy
from slotwise.core.plan_builder import PlanBuilder
from slotwise.core.reasons import FIRST_TOKEN, SHORT_STEP
from slotwise.core.request import Request
from slotwise.core.request_table import RequestTable
from slotwise.core.step import Decision

MAX_ISOLATED_STEPS = 4  # in a row in which somebody rests: steps, or stalls within one
SHORT = 4  # such a part of its tokens has a step, beside its decoding rows, in which nobody is waited for


def starts_prefill(request: Request) -> bool:
    """Some of its prompt is to be computed before its first token."""
    return request.num_scheduled < request.num_prompt and not request.num_output


def goes_before(policy: Policy, request: Request, other: Request, now: float) -> bool:
    """Among those who run, both of them taken to do so."""
    mine, its = ((policy.running_key(one, now), one.arrival) for one in (request, other))
    return mine < its


class PrefillIsolation:
    """Of one step after another: who begins in it, and who rests for that."""

    def __init__(self, table: RequestTable) -> None:
        self._table = table
        self._num_isolated = 0  # in a row, as many for a step as it has stalls

    def start(self, builder: PlanBuilder, next_in_line: Request | None) -> None:
        """Note in the draft whom its step may begin to compute, and who is to rest if it does."""
        running = [request for request in self._table.running.values() if self._goes_on(request)]
        if self._num_isolated < MAX_ISOLATED_STEPS:
            starting = [one for one in running if starts_prefill(one)]
            if next_in_line is not None and starts_prefill(next_in_line):
                starting.append(next_in_line)
            self._pause(builder, running, starting)
            if not builder.paused:
                self._shorten(builder, running, starting)
        self._defer(builder, running, next_in_line)

    def _pause(self, builder: PlanBuilder, running: list[Request], starting: list[Request]) -> None:
        """Who rests keeps its word, whatever the places of newcomers change: nobody of its lane joins either."""
        policy = self._table.policy
        builder.paused = policy.paused(running, starting, builder.now) if starting else frozenset()
        if not builder.paused:
            return
        builder.starting = [one for one in starting if one.request_id not in builder.paused
                            and policy.paused(running, (one,), builder.now)]
        builder.lanes = frozenset([policy.lane(one) for one in running if one.request_id in builder.paused])
        if all(one.unscheduled > 1 or one.request_id in builder.paused for one in running):
            builder.isolated_steps = MAX_ISOLATED_STEPS - self._num_isolated

    def _defer(self, builder: PlanBuilder, running: list[Request], next_in_line: Request | None) -> None:
        """Prompts under way that go behind who waits; where others rest, also those for which they do not."""
        policy, now = self._table.policy, builder.now

        def is_behind(one: Request) -> bool:
            if builder.paused and one not in builder.starting:
                return True
            return next_in_line is not None and goes_before(policy, next_in_line, one, now)

        behind = [one for one in running if one.request_id not in builder.paused and one.unscheduled > 1
                  and is_behind(one)]
        builder.deferred = sorted(behind, key=lambda one: (policy.running_key(one, now), one.arrival))

    def _shorten(self, builder: PlanBuilder, running: list[Request], starting: list[Request]) -> None:
        """Leave out some of what prompts could have, but nothing of those for whom others would be waited for."""
        last: dict[str, tuple[Key, int]] = {}  # of each lane, who goes behind all others of it
        for lane, place in self._places(running, builder.now):
            last[lane] = max(place, last.get(lane, place))
        owed = sum(
            one.unscheduled for one, (lane, place) in zip(starting, self._places(starting, builder.now), strict=True)
            if any(lane != other and place < its for other, its in last.items()))
        # somebody gets on, whatever is asked for
        budget = max(1, len(running) + max(owed, builder.budget // SHORT))
        if budget < builder.budget:
            builder.budget, builder.shortage = budget, SHORT_STEP

    def _places(self, requests: Iterable[Request], now: float) -> Iterator[tuple[str, tuple[Key, int]]]:
        """The lane of each, and where it stands among those who run."""
        policy = self._table.policy
        return ((policy.lane(one), (policy.running_key(one, now), one.arrival)) for one in requests)

    @staticmethod
    def _goes_on(request: Request) -> bool:
        return not request.reason and request.num_known < request.end

    def settle(self, builder: PlanBuilder) -> Sequence[Request]:
        """Now that the others have their tokens: those who need not rest, where nobody that they rest for begins."""
        if not builder.paused:
            return ()
        idle = [request for request in self._table.running.values() if request.request_id in builder.paused]
        if not self._is_isolated(builder):
            return idle
        builder.refused[:0] = [Decision(one.request_id, FIRST_TOKEN) for one in idle]
        return ()

    def count(self, builder: PlanBuilder) -> None:
        """The draft is complete."""
        stalls = builder.time.stalls if builder.time is not None else 1
        self._num_isolated = self._num_isolated + stalls if self._is_isolated(builder) else 0

    @staticmethod
    def _is_isolated(builder: PlanBuilder) -> bool:
        return any(builder.has(request) for request in builder.starting)
