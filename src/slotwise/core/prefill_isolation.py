"""Prefill isolation between tenants: a tenant's prompt in a step of its own, and short steps before it arrives.

A prompt computed together with sixty decoding rows waits for all of them.  If the policy finds running rows far ahead
of a starting prompt, these rows pause while it is computed:

    far ahead   ■ ■ ■ ■ . . ■ ■      . paused: FIRST_TOKEN
    far ahead   ■ ■ ■ ■ . . ■ ■
    starts              ▓ ▓ ■ ■      ▓ prefill chunk

Three sets of requests, kept in the PlanBuilder, order such a step:

    starting   prompts without an output token, running or next in line, for which rows pause
    paused     running rows far ahead: planned last, and only if no starting prompt got a token; else FIRST_TOKEN
    deferred   running prefills that the next waiting request outranks, and, if rows pause, those not starting:
               planned after admissions, or before a waiting request that they outrank

    order      other running rows, admissions, deferred and starting, [paused], the other deferred

The policy chooses the paused rows, this module the duration.  After MAX_ISOLATED_STEPS such steps in a row, one step
runs all rows; a step that delays decode for as long as several stall limits counts as that many.  If no starting prompt
got a token, the paused rows run after all.

If no row is far ahead, a running prefill is still deferred behind a waiting request that outranks it: else a few tokens
of one tenant would wait for thousands of another.

A new request first waits for the step in flight.  So a step without paused rows computes only a part of the prefill it
could (SHORT), except for prompts that outrank rows of other tenants.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from slotwise.core.interfaces import Key, Policy
from slotwise.core.plan_builder import PlanBuilder
from slotwise.core.reasons import FIRST_TOKEN, SHORT_STEP
from slotwise.core.record import Decision
from slotwise.core.request import Request

MAX_ISOLATED_STEPS = 4  # in a row with paused rows: steps, or stall limits within one step
SHORT = 4  # a step without paused rows gets 1/SHORT of its token budget for prefill


def starts_prefill(request: Request) -> bool:
    """Whether part of its prompt is still to be computed before its first token."""
    return request.num_scheduled < request.num_prompt and not request.num_output


def goes_before(policy: Policy, request: Request, other: Request, now: float) -> bool:
    """Whether `request` precedes `other` in the order of running rows, as if both ran."""
    mine, its = ((policy.running_key(each, now), each.arrival) for each in (request, other))
    return mine < its


class PrefillIsolation:
    """Decides in each step which prompts start, which rows pause for them, and which prefills are deferred."""

    def __init__(self) -> None:
        self._num_isolated = 0  # isolated steps in a row; a step counts once per stall limit it lasts

    def start(
        self, builder: PlanBuilder, policy: Policy, running: Iterable[Request], next_in_line: Request | None,
    ) -> None:
        """Set in `builder` the starting prompts, the rows that pause for them, and the deferred prefills."""
        going_on = [request for request in running if not request.reason and request.num_known < request.max_len]
        if self._num_isolated < MAX_ISOLATED_STEPS:
            starting = [request for request in going_on if starts_prefill(request)]
            if next_in_line is not None and starts_prefill(next_in_line):
                starting.append(next_in_line)
            self._pause(builder, policy, going_on, starting)
            if not builder.paused:
                _shorten(builder, policy, going_on, starting)
        _defer(builder, policy, going_on, next_in_line)

    def _pause(
        self, builder: PlanBuilder, policy: Policy, running: list[Request], starting: list[Request],
    ) -> None:
        """Choose the rows to pause.  No request of their lanes is admitted in the same step."""
        builder.paused = policy.paused(running, starting, builder.now) if starting else frozenset()
        if not builder.paused:
            return
        builder.starting = [request for request in starting if request.request_id not in builder.paused
                            and policy.paused(running, (request,), builder.now)]
        builder.lanes = frozenset([policy.lane(request) for request in running if request.request_id in builder.paused])
        if all(request.unscheduled > 1 or request.request_id in builder.paused for request in running):
            builder.isolated_steps = MAX_ISOLATED_STEPS - self._num_isolated

    def settle(self, builder: PlanBuilder, running: Iterable[Request]) -> Sequence[Request]:
        """Returns the paused rows to plan after all, if no starting prompt got a token; else records their refusal."""
        if not builder.paused:
            return ()
        idle = [request for request in running if request.request_id in builder.paused]
        if not _is_isolated(builder):
            return idle
        builder.refused[:0] = [Decision(request.request_id, FIRST_TOKEN) for request in idle]
        return ()

    def count(self, builder: PlanBuilder) -> None:
        """Update the count of isolated steps; called when the plan is complete."""
        stalls = builder.time.stalls if builder.time is not None else 1
        self._num_isolated = self._num_isolated + stalls if _is_isolated(builder) else 0


def _defer(builder: PlanBuilder, policy: Policy, running: list[Request], next_in_line: Request | None) -> None:
    """Defer running prefills that `next_in_line` outranks, and, if rows pause, those they do not pause for."""
    now = builder.now

    def is_behind(request: Request) -> bool:
        if builder.paused and request not in builder.starting:
            return True
        return next_in_line is not None and goes_before(policy, next_in_line, request, now)

    prefills = [request for request in running if request.request_id not in builder.paused
                and request.unscheduled > 1 and is_behind(request)]
    builder.deferred = sorted(prefills, key=lambda request: (policy.running_key(request, now), request.arrival))


def _shorten(builder: PlanBuilder, policy: Policy, running: list[Request], starting: list[Request]) -> None:
    """Reduce the step's prefill budget, but not below the starting prompts that outrank another lane's rows."""

    def places(requests: Iterable[Request]) -> Iterator[tuple[str, tuple[Key, int]]]:
        """Yields the lane of each request, and its place in the order of running rows."""
        return ((policy.lane(request), (policy.running_key(request, builder.now), request.arrival))
                for request in requests)

    last: dict[str, tuple[Key, int]] = {}  # by lane: the place of its last running row
    for lane, place in places(running):
        last[lane] = max(place, last.get(lane, place))
    owed = sum(
        request.unscheduled for request, (lane, place) in zip(starting, places(starting), strict=True)
        if any(lane != other and place < its for other, its in last.items()))
    # at least one row makes progress
    budget = max(1, len(running) + max(owed, builder.budget // SHORT))
    if budget < builder.budget:
        builder.budget, builder.shortage = budget, SHORT_STEP


def _is_isolated(builder: PlanBuilder) -> bool:
    return any(builder.has(request) for request in builder.starting)
