"""Preemption: running requests give up slot and blocks, for blocks or for a request that outranks them."""

from __future__ import annotations

from functools import partial

from slotwise.core.admission import Admission
from slotwise.core.commits import Commits
from slotwise.core.limits import ERROR
from slotwise.core.plan_builder import PlanBuilder
from slotwise.core.reasons import NO_BLOCKS, OUTRANKED
from slotwise.core.request import Request
from slotwise.core.request_table import RequestTable

MAX_OUTRANKED = 4  # running requests that may be preempted per step for waiting ones


class Preemption:
    """Chooses victims among the running requests, in the policy's order, and preempts them."""

    def __init__(self, table: RequestTable, commits: Commits) -> None:
        self._table = table
        self._commits = commits
        self._last_victim = ""

    def preempt_outranked(self, admission: Admission, builder: PlanBuilder) -> None:
        """Preempt running requests for the first waiting ones without capacity."""
        for _ in range(MAX_OUTRANKED):
            victims = self.outranked(admission, builder)
            for victim in victims:
                builder.preempt(victim, OUTRANKED)
                self._table.preempt(victim, builder.step, builder.now)
            if not victims:
                return

    def extend(self, request: Request, num_tokens: int, builder: PlanBuilder, on_pressure: str) -> bool:
        """Allocate the blocks a running row needs, preempting victims; False if the row itself was preempted.

        Blocks that no row holds, pinned or landed, go first.

        Args:
            on_pressure: of the limits; ERROR: a victim ends instead.
        """
        table = self._table
        lacking = partial(table.kv.num_lacking_to, request, num_tokens)
        while (blocks := table.kv.extend(request, num_tokens)) is None:
            if table.reclaim(lacking, (), list(table.landings)):
                continue
            victim = self.victim(builder)
            builder.preempt(victim, NO_BLOCKS)
            if on_pressure == ERROR:
                message = "the cache is full, and this server ends requests instead of preempting them; try again later"
                self._commits.end(victim, "error", builder.now, message)
            else:
                table.preempt(victim, builder.step, builder.now)
            if victim is request:
                return False
        builder.new_blocks += blocks
        return True

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
