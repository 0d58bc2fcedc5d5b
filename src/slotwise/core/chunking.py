"""Chunked prefill: the tokens of a prompt that a step computes, as policy, discipline and both budgets allow."""

from __future__ import annotations

from slotwise.core.interfaces import Discipline
from slotwise.core.plan_builder import PlanBuilder
from slotwise.core.request import Request
from slotwise.core.request_table import RequestTable
from slotwise.core.step_budget import FLOOR


class Chunking:
    def __init__(self, table: RequestTable, discipline: Discipline) -> None:
        self._table = table
        self._discipline = discipline

    def fits(self, start: int, wanted: int, builder: PlanBuilder) -> bool:
        """Whether the step has time to start a prompt of `wanted` tokens; always true for an empty step."""
        if builder.time is None or not builder.num_rows:
            return True
        least = min(FLOOR, wanted)
        if builder.has_chunk:
            return builder.time.fitting(start, wanted) >= least
        return builder.time.lets_begin(start, least)

    def of(self, request: Request, wanted: int, builder: PlanBuilder, behind: int = 0) -> int:
        """Returns how many of `wanted` prompt tokens to compute, with `behind` rows still to plan; 0: no time left.

        The first chunk of a step gets at least FLOOR tokens whatever it takes, so that every prompt completes.
        """
        count = self._allowed(request, wanted, builder, behind)
        if builder.time is None:
            return count
        start = request.num_scheduled
        is_first = not builder.has_chunk and request in builder.starting  # later chunks would only delay it
        fitting = builder.time.fitting(start, count, builder.isolated_steps if is_first else 1)
        if fitting < min(FLOOR, count):
            if builder.has_chunk:
                return 0
            fitting = min(FLOOR, count)
        count = self._discipline.chunk(count, fitting)
        builder.time.add(start, count)
        builder.has_chunk = True
        return count

    def first(self, request: Request, builder: PlanBuilder) -> int:
        """As `of`, for a newly admitted request; a short prompt is computed whole if its stall is acceptable."""
        start, wanted, time = request.num_scheduled, request.unscheduled, builder.time
        if time is None or builder.has_chunk or not time.takes_whole(start, wanted):
            return self.of(request, wanted, builder)
        count = self._allowed(request, wanted, builder)
        time.add(start, count)
        builder.has_chunk = True
        return count

    def _allowed(self, request: Request, wanted: int, builder: PlanBuilder, behind: int = 0) -> int:
        """Returns the tokens that policy, discipline and token budget allow."""
        cap = max(1, self._table.policy.cap(request, wanted, builder.now))
        return self._discipline.chunk(min(wanted, cap), builder.budget - behind)
