"""The door: how many may wait for their first slot, and what is said to those who may not.

    entering ──► waiting ──► first slot, or an end
    (tokenised)  (bounded)
                     └─ the drain rate: what leaves for a slot in a second, while others still wait

By Little's law (1961) a queue that drains at `r` requests a second keeps its last for `waiting / r` seconds.  So a
bound of `r` times what a client may sensibly be kept is found by measuring, and follows the engine's speed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from math import ceil, exp
from typing import NamedTuple

from slotwise.core.limits import SchedulerLimits
from slotwise.core.request import NO_TERMS
from slotwise.core.terms import Terms
from slotwise.engine.messages import Add, Command, EngineInfo, StepRecord
from slotwise.engine.observer import Observer

PATIENCE = 60.0  # seconds: who comes last is expected to start within this time
MEMORY = 30.0  # seconds of queueing after which a measurement counts for 1/e
ENOUGH = 2.0  # seconds of queueing that make a measurement
UNMEASURED = (16, 4)  # slots' worth of requests and caches' worth of tokens that may wait before there is one
LEAST = (4, 1)  # and at all times, so that slots and cache find somebody when they become free
LONGEST_RETRY = 60  # seconds; OpenAI's client ignores what is longer
NS = 1e-9


class DrainRate:
    """Requests, and tokens of their prompts, that leave the queue for a slot in a second.

    An exponentially weighted mean over the time in which somebody waited: what starts at other times says how many
    came, not how many could have.
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
        """A second."""
        return self._requests / self._seconds if self._seconds else 0.0

    @property
    def tokens(self) -> float:
        """A second."""
        return self._tokens / self._seconds if self._seconds else 0.0


class Outlook(NamedTuple):
    """What somebody who comes now may expect, where everybody is served in the order of arrival."""

    position: int  # how many wait for a slot before it
    start: float | None  # seconds until it has one; None: nothing was measured yet


class Door(Observer):
    """An observer of the engine service that knows who waits.

    Args:
        max_requests: most requests that may wait; None: what the engine is expected to start within `PATIENCE`.
        max_tokens: most tokens of their prompts, likewise.
    """

    def __init__(self, limits: SchedulerLimits, max_requests: int | None = None, max_tokens: int | None = None) -> None:
        self.rate = DrainRate()
        self._asked = (max_requests, max_tokens)
        self._limits = limits
        self._waiting: dict[str, int] = {}  # tokens of each prompt
        self._num_tokens = 0
        self._num_entering = 0
        self._terms: dict[str, Terms] = {}  # of those who wait
        self._in_tier: Counter[str] = Counter()  # who waits, and who enters
        self._of_tenant: Counter[str] = Counter()  # likewise
        self._slots = limits.max_num_seqs
        self._free = (self._slots, limits.cache_tokens)  # slots and tokens that nobody needs to wait for
        self._queueing_since = 0  # nanoseconds; 0: nobody was left waiting by the last step

    # -- who waits -----------------------------------------------------------------------------------------------

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_waiting_tokens(self) -> int:
        return self._num_tokens

    @contextmanager
    def entering(self, terms: Terms = NO_TERMS) -> Iterator[None]:
        """Holds a place for who is about to be submitted, so that a crowd is not tokenised only to be refused."""
        self._num_entering += 1
        self._count(terms, 1)
        try:
            yield
        finally:
            self._num_entering -= 1
            self._count(terms, -1)

    def started(self, info: EngineInfo) -> None:
        """An engine without anybody in it."""
        self._limits, self._slots = info.limits, info.scheduling.max_num_seqs
        self._free = (self._slots, info.limits.cache_tokens)
        self._queueing_since = 0

    def arrived(self, request_id: str, num_prompt: int, now_ns: int) -> None:
        self._waiting[request_id] = num_prompt
        self._num_tokens += num_prompt

    def commanded(self, command: Command, now_ns: int) -> None:
        if isinstance(command, Add) and command.request_id in self._waiting:
            self._terms[command.request_id] = command.terms
            self._count(command.terms, 1)

    def stepped(self, record: StepRecord) -> None:
        before = self._num_tokens
        started = sum([self._leave(request_id) for request_id in record.admitted])
        if self._queueing_since:
            seconds = max(0.0, (record.ended_ns - self._queueing_since) * NS)
            self.rate.observe(started, before - self._num_tokens, seconds)
        for row in record.ended:
            self._leave(row.request_id)
        self._queueing_since = record.ended_ns if record.num_waiting else 0
        if record.configured is not None:
            self._slots = record.configured.max_num_seqs
        if record.num_waiting:
            self._free = (0, 0)
        else:
            self._free = (self._slots - record.num_running, record.num_free_blocks * self._limits.block_size)

    def _leave(self, request_id: str) -> bool:
        """Whether it was here: a request that had to yield takes a slot more than once."""
        num_tokens = self._waiting.pop(request_id, None)
        self._num_tokens -= num_tokens or 0
        if (terms := self._terms.pop(request_id, None)) is not None:
            self._count(terms, -1)
        return num_tokens is not None

    def _count(self, terms: Terms, change: int) -> None:
        for counter, name in ((self._in_tier, terms.tier), (self._of_tenant, terms.tenant)):
            counter[name] += change
            if not counter[name]:  # tenants may come and go without end
                del counter[name]

    # -- who may come in -----------------------------------------------------------------------------------------

    @property
    def bounds(self) -> tuple[int, int]:
        """Most requests and most tokens that may wait now."""
        batches, caches = LEAST if self.rate.measured else UNMEASURED
        requests, tokens = batches * self._slots, caches * self._limits.cache_tokens
        if self.rate.measured:
            requests = max(requests, int(PATIENCE * self.rate.requests))
            tokens = max(tokens, int(PATIENCE * self.rate.tokens))
        max_requests, max_tokens = self._asked
        return requests if max_requests is None else max_requests, tokens if max_tokens is None else max_tokens

    def objection(self, num_requests: int = 1, num_tokens: int = 0) -> str:
        """Why so many cannot wait as well, with the numbers; empty when they can.

        Where nobody waits anybody may: what is too large for the machine is refused elsewhere and for good.
        """
        waiting = len(self._waiting) + self._num_entering
        if not waiting:
            return ""
        max_requests, max_tokens = self.bounds
        free_slots, free_tokens = self._free
        if waiting + num_requests <= max_requests + free_slots and (
                self._num_tokens + num_tokens <= max_tokens + free_tokens):
            return ""
        pace = f", and about {self.rate.requests:.2g} start a second" if self.rate.measured else ""
        return (f"the queue is full: {waiting} requests wait ({self._num_tokens} prompt tokens), at most "
                f"{max_requests} ({max_tokens} tokens) may{pace}; this one adds {num_requests} ({num_tokens} tokens)")

    def tier_objection(self, tier: str, bound: int, num_requests: int = 1) -> str:
        """Why so many of a tier cannot wait as well, of which at most `bound` may; empty when they can."""
        return self._objection(f"the queue of the tier {tier} is full", self._in_tier[tier], bound, num_requests)

    def tenant_objection(self, tenant: str, bound: int, num_requests: int = 1) -> str:
        """Likewise of a tenant."""
        return self._objection("this key's queue is full", self._of_tenant[tenant], bound, num_requests)

    def _objection(self, what: str, waiting: int, bound: int, num_requests: int) -> str:
        if not waiting or waiting + num_requests <= bound + self._free[0]:
            return ""
        return f"{what}: {waiting} requests wait, at most {bound} may; this one adds {num_requests}"

    def outlook(self) -> Outlook:
        """Of one more."""
        ahead = len(self._waiting) + self._num_entering
        if ahead < self._free[0]:
            return Outlook(0, 0.0)
        position = ahead - self._free[0]
        return Outlook(position, self.start_of(position))

    def start_of(self, position: int) -> float | None:
        """Seconds until somebody has a slot before whom `position` others are to start; None: nobody knows."""
        return (position + 1) / self.rate.requests if self.rate.measured and self.rate.requests else None

    def tier_retry_after(self, tier: str, bound: int) -> int:
        """Seconds until half of a tier's full queue has drained, were all slots its own."""
        return self._until_half(self._in_tier[tier], bound)

    def tenant_retry_after(self, tenant: str, bound: int) -> int:
        """Likewise of a tenant's."""
        return self._until_half(self._of_tenant[tenant], bound)

    def _until_half(self, waiting: int, bound: int) -> int:
        surplus = waiting - bound / 2
        return max(1, min(LONGEST_RETRY, ceil(surplus / self.rate.requests))) if (
            self.rate.measured and self.rate.requests) else 1

    @property
    def retry_after(self) -> int:
        """Seconds until half of a full queue should have drained: who returns finds a place, the engine still work."""
        if not self.rate.measured:
            return 1
        waits = [0.0]
        for waiting, bound, rate in ((len(self._waiting), self.bounds[0], self.rate.requests),
                                     (self._num_tokens, self.bounds[1], self.rate.tokens)):
            if waiting > bound / 2:
                waits.append((waiting - bound / 2) / rate if rate else LONGEST_RETRY)
        return max(1, min(LONGEST_RETRY, ceil(max(waits))))
