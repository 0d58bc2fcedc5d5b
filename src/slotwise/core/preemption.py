"""Preemption: which running requests give up slot and blocks, for blocks or for a request that outranks them.

Decides only; the scheduler changes states.
"""

from __future__ import annotations

from slotwise.core.admission import Admission
from slotwise.core.plan_builder import PlanBuilder
from slotwise.core.request import Request
from slotwise.core.request_table import RequestTable

MAX_OUTRANKED = 4  # running requests that may be preempted per step for waiting ones


class Preemption:
    """Chooses victims among the running requests, in the policy's order."""

    def __init__(self, table: RequestTable) -> None:
        self._table = table
        self._last_victim = ""

    def victim(self, builder: PlanBuilder) -> Request:
        """Choose the victim for blocks: of the last rank (at most half of all rows) the one with the fewest computed
        tokens; never the same victim twice in a row if another exists.
        """
        key = self._table.policy.victim_key
        ranked = [(key(r, builder.now), r.arrival, r)
                  for r in self._table.running.values() if not r.reason and not builder.has(r)]
        ranked.sort(key=lambda entry: entry[:2])
        lowest = ranked[-1][0][0]
        last = [request for rank, _, request in ranked[len(ranked) // 2 :] if rank[0] == lowest]
        victim = min(last, key=lambda r: (r.request_id == self._last_victim, r.num_computed, -r.arrival))
        self._last_victim = victim.request_id
        return victim

    def outranked(self, admission: Admission, builder: PlanBuilder) -> list[Request]:
        """Returns the running requests to preempt for the first waiting request without slot or blocks.

        All victims that it needs, or none; the policy allows each of them.
        """
        request, before = self._first_without_capacity(admission, builder)
        return [] if request is None else self._victims(request, before, admission, builder.now)

    def _first_without_capacity(self, admission: Admission, builder: PlanBuilder) -> tuple[Request | None, int]:
        """Returns the first waiting request without slot (at the head: or blocks), and its position; None: all fit."""
        if not self._table.waiting:
            return None, 0
        walk = self._table.waiting.walk(builder.now)
        num_free = min(self._table.num_free_slots, max(0, admission.gate(builder.now).max_new))
        for before in range(num_free + 1):
            while (request := walk.next()) is not None and admission.waits_apart(request):
                pass
            if request is None or min(num_free, admission.num_slots_for(request)) <= before:
                break
            if before == 0 and admission.allocation(request, builder) is None:
                break
        return request, before

    def _victims(self, request: Request, before: int, admission: Admission, now: float) -> list[Request]:
        """Returns the requests to preempt so that `request`, at queue position `before`, gets a slot and blocks."""
        policy, surplus = self._table.policy, admission.surplus()
        ranked = sorted(
            (running for running in self._table.running.values() if not running.reason),
            key=lambda running: (policy.victim_key(running, now), running.arrival), reverse=True)
        needed = admission.needed(request)
        missing = admission.num_missing_blocks(request, needed, ())
        slots = min(admission.num_slots_for(request), admission.gate(now).max_new) - before
        victims: list[Request] = []
        for running in ranked:
            if (slots >= 1 and missing <= 0) or len(victims) == MAX_OUTRANKED:
                break
            tier = running.slo.tier
            if surplus.get(tier, 1) <= 0 and tier != request.slo.tier:
                continue  # its slot is reserved for its tier
            if not policy.preempts(request, running, now):
                continue
            victims.append(running)
            surplus[tier] -= 1
            slots += 1
            missing = admission.num_missing_blocks(request, needed, victims)
        return victims if slots >= 1 and missing <= 0 else []
