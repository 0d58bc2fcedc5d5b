"""Chunked prefill: the tokens of a prompt that a step computes, as policy, discipline and both budgets allow.

The token budget is the discipline's.  The time budget (`core/step_budget.py`) exists while `max_step_ms`, a TPOT
objective of a running request or a stall limit bounds the step.  The first chunk of a step has at least FLOOR tokens
whatever it takes, so that every prompt completes.  Neither a stall limit nor an objective of a request alone keeps
a waiting request from starting, and such an objective leaves prompts as much time as the decoding rows take: otherwise
one client could keep all others waiting.

Where a cache group has a window, no chunk exceeds `max_chunk` under any discipline: between chunks the blocks behind
the window are freed, so that a prompt of any length holds a bounded number of them.

A model whose tokens attend to later ones (`whole_prompts`) computes each prompt in one step, whatever limits it: one
that does not fit the rest of a step waits for the next, and one that fits none has a step for itself.
"""

from __future__ import annotations

from collections.abc import Collection
from math import inf

from slotwise.core.interfaces import Discipline, Policy
from slotwise.core.plan_builder import PlanBuilder
from slotwise.core.request import Request
from slotwise.core.scheduler_limits import SchedulerLimits
from slotwise.core.step_budget import SHARE, StallLimit, StepBudget, stall_limit
from slotwise.core.step_time import StepTimeModel, Work

FLOOR = 16  # tokens that one prompt gets at every step at any cost, so that a long prompt progresses
AIM = 0.9  # of a step's time limit: predictions are medians, and half of the steps take longer


class Chunking:
    """Sizes prefill chunks, under fixed limits, a fixed discipline and a fixed policy."""

    def __init__(
        self, limits: SchedulerLimits, discipline: Discipline, policy: Policy, times: StepTimeModel,
    ) -> None:
        self._limits = limits
        self._discipline = discipline
        self._policy = policy
        self._times = times
        self._most = limits.max_chunk if limits.groups.are_windowed else inf
        cuts_prompts = discipline.chunk(2, 1) == 1
        self._stall = limits.max_stall_ms / 1000 if limits.max_stall_ms is not None and cuts_prompts else None

    @property
    def limits_time(self) -> bool:
        """Whether a limit bounds the time of steps, so that these are predicted."""
        return self._limits.max_step_ms is not None or self._stall is not None

    def time_budget(self, running: Collection[Request], num_waiting: int, num_with_tpot: int) -> StepBudget | None:
        """Returns the time budget of the next step; None: unlimited.

        Args:
            num_with_tpot: unfinished requests with a TPOT objective.
        """
        fixed = inf if self._limits.max_step_ms is None else self._limits.max_step_ms / 1000
        own = of_tiers = inf  # the lowest TPOT objective of the running requests, and the lowest that a tier backs
        if num_with_tpot:
            objectives = [(one.spec.slo.tpot, one.spec.slo.tier) for one in running if one.spec.slo.tpot is not None]
            own = min((tpot for tpot, _ in objectives), default=inf)
            of_tiers = min((tpot for tpot, tier in objectives if tier), default=inf)
        stall = self._stall_limit(self._stall, running, num_waiting) if self._stall is not None else None
        if stall is None and fixed == own == inf:
            return None
        promised = min(fixed, of_tiers)
        if own < promised:
            contexts = [one.num_scheduled for one in running if one.unscheduled <= 1]
            decode = Work(len(contexts), len(contexts), sum(contexts) + len(contexts), 0.0)
            own = max(own, SHARE * self._times.seconds(decode))
        return StepBudget(self._times, min(own, promised) * AIM, stall, promised * AIM)

    def _stall_limit(self, bound: float, running: Collection[Request], num_waiting: int) -> StallLimit | None:
        """Returns the stall limit of a step that mixes prefill and decode; None if this step cannot."""
        joining = min(num_waiting, max(0, self._limits.max_num_seqs - len(running)))
        contexts = [request.num_scheduled for request in running
                    if len(request.tokens) + request.pending - request.num_scheduled <= 1]
        newcomers = joining + len(running) - len(contexts)
        if not contexts or not newcomers:
            return None
        return StallLimit(*(AIM * limit for limit in stall_limit(self._times, bound, contexts, newcomers)))

    def fits(self, start: int, wanted: int, builder: PlanBuilder) -> bool:
        """Whether the step has time to start a prompt of `wanted` tokens; always true for an empty step."""
        if builder.time is None or not builder.num_rows:
            return True
        least = wanted if self._limits.whole_prompts else min(FLOOR, wanted)
        if builder.has_chunk:
            return builder.time.fitting(start, wanted) >= least
        return builder.time.lets_begin(start, least)

    def lacks_tokens(self, wanted: int, builder: PlanBuilder) -> bool:
        """Whether the token budget that is left cannot start a prompt of `wanted` tokens."""
        return builder.budget < 1 or (self._limits.whole_prompts and builder.num_rows > 0 and wanted > builder.budget)

    def chunk(self, request: Request, wanted: int, builder: PlanBuilder, num_behind: int = 0) -> int:
        """Returns how many of `wanted` prompt tokens to compute; `num_behind` rows are planned after it; 0: no time."""
        count = self._allowed(request, wanted, builder, num_behind)
        if builder.time is None:
            return count
        if self._limits.whole_prompts:
            builder.add_chunk(request.num_scheduled, count)
            return count
        start = request.num_scheduled
        is_first = not builder.has_chunk and request in builder.starting  # later chunks would only delay it
        fitting = builder.time.fitting(start, count, builder.isolated_steps if is_first else 1)
        if fitting < min(FLOOR, count):
            if builder.has_chunk:
                return 0
            fitting = min(FLOOR, count)
        count = self._discipline.chunk(count, fitting)
        builder.add_chunk(start, count)
        return count

    def first_chunk(self, request: Request, builder: PlanBuilder) -> int:
        """As `chunk`, for a newly admitted request; a short prompt is computed whole if its stall is acceptable."""
        start, wanted, time = request.num_scheduled, request.unscheduled, builder.time
        if time is None or builder.has_chunk or not time.takes_whole(start, wanted):
            return self.chunk(request, wanted, builder) or 1  # 0: fewer tokens are predicted to take longer
        count = self._allowed(request, wanted, builder, 0)
        builder.add_chunk(start, count)
        return count

    def _allowed(self, request: Request, wanted: int, builder: PlanBuilder, num_behind: int) -> int:
        """Returns the tokens that policy, discipline and token budget allow."""
        if self._limits.whole_prompts:
            return wanted
        cap = max(1, self._policy.cap(request, wanted, builder.now))
        return self._discipline.chunk(int(min(wanted, cap, self._most)), builder.budget - num_behind)
