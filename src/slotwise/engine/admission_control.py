"""Admission control: bounds on waiting and unfinished requests, and the answer to a refused one.

    entering ──► waiting ──► first slot ──► an end
    (tokenized)  (bounded)   └─ the drain rate: requests a second that get a slot, while others still wait
    ├──────── unfinished (bounded) ───────┤

By Little's law (1961) the last request of a queue that drains at `r` requests a second waits `waiting / r` seconds.
The bound is `r` times the longest acceptable wait, so it is measured and follows the engine's speed.  Tenants share
the capacity of each bound (`core.tenant_capacity`): a flood of one is refused while others still have capacity.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from math import ceil, exp
from typing import NamedTuple

from slotwise.core.record import StepRecord
from slotwise.core.request import NO_SLO
from slotwise.core.scheduler_limits import SLO, SchedulerLimits
from slotwise.core.tenant_capacity import TenantCapacity
from slotwise.engine.client import MAX_LIVE
from slotwise.engine.messages import Add, Command, EngineInfo, Observer
from slotwise.engine.scheduling import Scheduling

PATIENCE = 60.0  # seconds within which the last request of the queue is expected to start
MEMORY = 30.0  # seconds of queueing after which a measurement counts for 1/e
ENOUGH = 2.0  # seconds of queueing that make a measurement
UNMEASURED = (16, 4)  # slots' worth of requests and caches' worth of tokens that may wait before a measurement
LEAST = (4, 1)  # the same at all times, so that free slots and blocks always find a request
LONGEST_RETRY = 60  # seconds; OpenAI's client ignores longer ones
NS = 1e-9


class DrainRate:
    """Requests, and their prompt tokens, that leave the queue for a slot per second.

    An exponentially weighted mean over the time in which the queue was not empty: at other times the starts measure
    the arrivals, not the capacity.
    """

    def __init__(self) -> None:
        self._requests = self._tokens = self._seconds = 0.0

    def observe(self, requests: int, tokens: int, seconds: float) -> None:
        kept = exp(-seconds / MEMORY)
        self._requests = self._requests * kept + requests
        self._tokens = self._tokens * kept + tokens
        self._seconds = self._seconds * kept + seconds

    @property
    def measured(self) -> bool:
        return self._seconds >= ENOUGH

    @property
    def requests(self) -> float:
        """Requests per second."""
        return self._requests / self._seconds if self._seconds else 0.0

    @property
    def tokens(self) -> float:
        """Prompt tokens per second."""
        return self._tokens / self._seconds if self._seconds else 0.0


class WaitEstimate(NamedTuple):
    """The expected wait of a request that arrives now, under first come, first served."""

    position: int  # requests that wait for a slot before it
    start: float | None  # seconds until it has a slot; None: not measured yet


class AdmissionControl(Observer):
    """Observes the engine service, counts the waiting requests and refuses those beyond the bounds.

    Args:
        max_requests: most requests that may wait; None: as many as the engine is expected to start within `PATIENCE`.
        max_tokens: most prompt tokens that may wait; None: as for `max_requests`.
        max_live: most requests that may wait or run.
    """

    def __init__(self, limits: SchedulerLimits, max_requests: int | None = None, max_tokens: int | None = None,
                 max_live: int = MAX_LIVE) -> None:
        self.rate = DrainRate()
        self._given = (max_requests, max_tokens)
        self._max_live = max_live
        self._limits = limits
        self._requests = TenantCapacity("requests wait", includes_reserve=max_requests is not None)
        self._tokens = TenantCapacity("prompt tokens wait", includes_reserve=max_tokens is not None)
        self._unfinished = TenantCapacity("requests wait or run", max_live, includes_reserve=True)
        self._tenant_of: dict[int, str] = {}  # unfinished request -> tenant
        self._waiting: dict[int, tuple[SLO, int]] = {}  # waiting request -> objectives, prompt tokens
        self._in_tier: defaultdict[str, TenantCapacity] = defaultdict(
            lambda: TenantCapacity("requests wait", includes_reserve=True))
        self._slots = limits.max_num_seqs
        self._free = (self._slots, limits.cache_tokens)  # slots and tokens that are free at once
        self._queueing_since = 0  # nanoseconds; 0: the last step left the queue empty

    # -- waiting requests ----------------------------------------------------------------------------------------

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def drain_rate(self) -> float:
        """Requests per second that leave the queue for a slot; 0: not measured, or no request waits.

        The rate is measured only while requests wait.  If a router were told an old, low rate at other times, it would
        shed every request that could queue, and the rate would never be measured again.
        """
        return self.rate.requests if self.rate.measured and self._waiting else 0.0

    @property
    def is_queueing(self) -> bool:
        """Whether the last step left requests in the queue: the next one's time counts."""
        return self._queueing_since > 0

    @property
    def num_waiting_tokens(self) -> int:
        return self._tokens.total

    @contextmanager
    def entering(self, slo: SLO = NO_SLO) -> Iterator[None]:
        """Reserves a place for a request before it is tokenized, so that a burst is refused before that work."""
        self._unfinished.acquire(slo.tenant, 1)
        self._count(slo, 1, 0)
        try:
            yield
        finally:
            self._unfinished.release(slo.tenant, 1)
            self._count(slo, -1, 0)

    def started(self, info: EngineInfo) -> None:
        """Resets the free capacity: the new engine holds no requests."""
        self._limits, self._slots = info.limits, info.scheduling.max_num_seqs
        self._free = (self._slots, info.limits.cache_tokens)
        self._queueing_since = 0

    def commanded(self, command: Command, now_ns: int) -> None:
        if isinstance(command, Add):
            slo, num_tokens = command.spec.slo, len(command.spec.prompt)
            self._tenant_of[command.request_id] = slo.tenant
            self._unfinished.acquire(slo.tenant, 1)
            self._waiting[command.request_id] = slo, num_tokens
            self._count(slo, 1, num_tokens)

    def stepped(self, record: StepRecord) -> None:
        before = self._tokens.total
        started = sum([self._leave_queue(admission.request_id) for admission in record.admitted])
        if self._queueing_since:
            seconds = max(0.0, (record.ended_ns - self._queueing_since) * NS)
            self.rate.observe(started, before - self._tokens.total, seconds)
        for row in record.ended:
            self._leave_queue(row.request_id)
            if (tenant := self._tenant_of.pop(row.request_id, None)) is not None:
                self._unfinished.release(tenant, 1)
        self._queueing_since = record.ended_ns if record.counters.num_waiting else 0
        if isinstance(configured := record.inputs.configured, Scheduling):
            self._slots = configured.max_num_seqs
        if record.counters.num_waiting:
            self._free = (0, 0)
        else:
            self._free = (self._slots - record.counters.num_running,
                          self._limits.tokens_in(record.counters.num_free_blocks))

    def _leave_queue(self, request_id: int) -> bool:
        """Returns whether the request waited: a preempted one is admitted more than once."""
        if (left := self._waiting.pop(request_id, None)) is None:
            return False
        slo, num_tokens = left
        self._count(slo, -1, -num_tokens)
        return True

    def _count(self, slo: SLO, requests: int, tokens: int) -> None:
        self._requests.acquire(slo.tenant, requests)
        self._tokens.acquire(slo.tenant, tokens)
        self._in_tier[slo.tier].acquire(slo.tenant, requests)

    # -- admission -----------------------------------------------------------------------------------------------

    @property
    def bounds(self) -> tuple[int, int]:
        """The most requests and the most prompt tokens that may wait now."""
        batches, caches = LEAST if self.rate.measured else UNMEASURED
        requests, tokens = batches * self._slots, caches * self._limits.cache_tokens
        if self.rate.measured:
            requests = max(requests, int(PATIENCE * self.rate.requests))
            tokens = max(tokens, int(PATIENCE * self.rate.tokens))
        max_requests, max_tokens = self._given
        return requests if max_requests is None else max_requests, tokens if max_tokens is None else max_tokens

    def objection(self, tenant: str, num_requests: int = 1, num_tokens: int = 0) -> str:
        """Why a tenant's `num_requests` more cannot wait, with the numbers; empty when they can."""
        for capacity, bound, free in zip((self._requests, self._tokens), self.bounds, self._free, strict=True):
            capacity.set_bound(bound, free)  # they follow the engine's speed
        why = (self._requests.objection(tenant, num_requests) or self._tokens.objection(tenant, num_tokens)
               or self._unfinished.objection(tenant, num_requests))
        if not why:
            return ""
        rate = f"; about {self.rate.requests:.2g} start a second" if self.rate.measured else ""
        return f"the queue is full: {why}{rate}; this one adds {num_requests} ({num_tokens} tokens)"

    def tier_objection(self, slo: SLO, bound: int, num_requests: int = 1) -> str:
        """Why a tenant's requests cannot wait in a tier that takes at most `bound`; empty when they can."""
        capacity = self._in_tier[slo.tier]
        capacity.set_bound(bound, self._free[0])
        why = capacity.objection(slo.tenant, num_requests)
        return f"the queue of the tier {slo.tier} is full: {why}; this one adds {num_requests}" if why else ""

    def tenant_objection(self, tenant: str, bound: int, num_requests: int = 1) -> str:
        """Why a tenant that may have at most `bound` waiting cannot add these; empty when it can."""
        held, free = self._requests.held(tenant), self._free[0]  # those that free slots take do not count
        if not held or held + num_requests <= bound + free:
            return ""
        return (f"this key's queue is full: {max(0, held - free)} requests wait, at most {bound} may; this one adds "
                f"{num_requests}")

    def wait_estimate(self) -> WaitEstimate:
        """The expected wait of one more request."""
        ahead = self._requests.total
        if ahead < self._free[0]:
            return WaitEstimate(0, 0.0)
        position = ahead - self._free[0]
        return WaitEstimate(position, self.start_of(position))

    def start_of(self, position: int) -> float | None:
        """Seconds until the request at `position` of the queue has a slot; None: not measured."""
        return (position + 1) / self.rate.requests if self.rate.measured and self.rate.requests else None

    def tier_retry_after(self, tier: str, bound: int) -> int:
        """Seconds until half of a tier's full queue has drained, if every slot went to the tier."""
        return self._until_half(self._in_tier[tier].total, bound)

    def tenant_retry_after(self, tenant: str, bound: int) -> int:
        """Seconds until half of a tenant's full queue has drained, if every slot went to the tenant."""
        return self._until_half(self._requests.held(tenant), bound)

    def _until_half(self, waiting: int, bound: int) -> int:
        surplus = waiting - bound / 2
        return max(1, min(LONGEST_RETRY, ceil(surplus / self.rate.requests))) if (
            self.rate.measured and self.rate.requests) else 1

    @property
    def retry_after(self) -> int:
        """Seconds until every full bound should be half free: a retry then succeeds, and the engine still has work.

        It also holds for a tenant whose share was full: shares refuse only where hardly any capacity is free.
        """
        if not self.rate.measured:
            return 1
        max_requests, max_tokens = self.bounds
        waits = [0.0]
        for held, bound, rate in ((self._requests.total, max_requests, self.rate.requests),
                                  (self._tokens.total, max_tokens, self.rate.tokens),
                                  (self._unfinished.total, self._max_live, self.rate.requests)):
            if held > bound / 2:
                waits.append((held - bound / 2) / rate if rate else LONGEST_RETRY)
        return max(1, min(LONGEST_RETRY, ceil(max(waits))))
