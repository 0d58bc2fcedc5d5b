"""Fair sharing between tenants: the least served tenant goes next.  Virtual token counters (Sheng et al., OSDI 2024).

Every tenant has a counter of the service it received, in tokens of work divided by its weight: prompt tokens on
admission, output tokens as they are sampled.  The lane with the smallest counter is next.  A tenant that was idle is
lifted to the smallest counter of the waiting tenants, less a small credit: without it the second of two simultaneous
requests would wait until all other tenants were served as much as the first one cost.

    two tenants that always have waiting requests differ in service by at most
        2 * (max(PROMPT * longest prompt, OUTPUT * tokens that fit the cache) + credit)

which without the credit is their theorem 4.4.  Queue order alone does not help a request that arrives when a flood
holds every slot and fills every step.  So a request that starts next to a tenant far ahead (FAR times its rows, by
weight, and not served less) preempts that tenant's row if no slot is free, and the tenant's rows pause while the prompt
is computed: at most `core.prefill_isolation.MAX_ISOLATED_STEPS` steps in a row.  A preempting request precedes its
victim, so slots are never exchanged back and forth, and tenants of similar size do neither to each other.  If another
tenant was active lately, steps without paused rows are short: it may come back while one runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from math import inf

from slotwise.core.interfaces import Key
from slotwise.core.policies.fcfs import FirstComeFirstServed
from slotwise.core.request import Request

PROMPT = 1.0  # work of a prompt's token, as in the paper
OUTPUT = 2.0
FAR = 3  # a tenant is far ahead of another that has at most a third of its rows, by weight
CREDIT = 2048.0  # work that a tenant which was idle may do at once
MAX_AWAY = 4096  # tenants without a request whose counters are kept
LATELY = 2.0**20  # work served to a single tenant after which it counts as alone


class Fair(FirstComeFirstServed):
    """
    Args:
        weights: by tier, default 1; a request's work is divided by its tier's weight.
        credit: work that a tenant which was idle may do before the others are served as much.
    """

    orders_running = True
    may_preempt = True

    def __init__(self, weights: Mapping[str, float], credit: float = CREDIT) -> None:
        self._weights = dict(weights)
        self._credit = credit
        self.counters: dict[str, float] = {}  # by tenant: work over weight; the longest idle first
        self._waiting: Counter[str] = Counter()  # by tenant: waiting requests
        self._unfinished: Counter[str] = Counter()  # by tenant: unfinished requests
        self._rows: Counter[str] = Counter()  # by tenant: running requests
        self._charged: dict[int, float] = {}  # by request: its tenant's counter before its prompt was charged
        self._level = 0.0  # the counter of the tenant admitted last
        self._latest: str | None = None  # the tenant that arrived or was admitted last
        self._company = -inf  # the level when another tenant was last active

    def lane(self, request: Request) -> str:
        return request.spec.slo.tenant

    def lane_key(self, lane: str, now: float) -> Key:
        return (self.counters.get(lane, 0.0),)

    def running_key(self, request: Request, now: float) -> Key:
        """Prefill tokens of a step go first to the tenant served least before this prompt was charged."""
        return (self._standing(request),)

    def _standing(self, request: Request) -> float:
        """Returns its tenant's counter; until its first token, the value before its prompt was charged."""
        counter = self.counters.get(request.spec.slo.tenant, 0.0)
        return counter if request.num_output else self._charged.get(request.request_id, counter)

    def victim_key(self, request: Request, now: float) -> Key:
        return (self.counters.get(request.spec.slo.tenant, 0.0), request.arrival)

    def preempts(self, waiting: Request, running: Request, now: float) -> bool:
        """Only if it precedes the other in the queue: else the victim would be the first to be admitted again."""
        mine, its = ((self.counters[one.spec.slo.tenant], one.arrival) for one in (waiting, running))
        return mine < its and self._is_far_behind(waiting, running)

    def paused(self, requests: Sequence[Request], beginning: Sequence[Request], now: float) -> frozenset[int]:
        found: dict[tuple[str, str], bool] = {}  # the same for all of a tenant's requests of one tier
        for request in requests:
            kind = request.spec.slo.tenant, request.spec.slo.tier
            if kind not in found:
                found[kind] = any(self._is_far_behind(one, request) for one in beginning)
        return frozenset([one.request_id for one in requests if found[one.spec.slo.tenant, one.spec.slo.tier]])

    def _is_far_behind(self, request: Request, other: Request) -> bool:
        """Whether its tenant was not served more than the other's, and has at most 1/FAR of its rows, by weight."""
        tenant, ahead = request.spec.slo.tenant, other.spec.slo.tenant
        if tenant == ahead:
            return False
        rows = self._rows[tenant] + (not request.holds_slot)
        return (FAR * rows * self._weight(other) <= self._rows[ahead] * self._weight(request)
                and self._standing(request) <= self.counters[ahead])

    def arrived(self, request: Request, now: float) -> None:
        tenant = request.spec.slo.tenant
        self._unfinished[tenant] += 1
        self._reckon(tenant)
        if not self._waiting[tenant]:
            self._lift(tenant)
        self._waiting[tenant] += 1

    def _lift(self, tenant: str) -> None:
        others = [self.counters[other] for other, count in self._waiting.items() if count]
        least = min(others, default=self._level)
        counter = max(self.counters.pop(tenant, 0.0), least - self._credit)
        self.counters[tenant] = counter

    def admitted(self, request: Request, now: float) -> None:
        tenant = request.spec.slo.tenant
        self._leave_queue(tenant)
        self._rows[tenant] += 1
        if request.request_id not in self._charged:
            self._charged[request.request_id] = self.counters[tenant]
            self._charge(request, PROMPT * max(0, request.num_prompt - request.num_computed))
        self._level = self.counters[tenant]
        self._reckon(tenant)

    def preempted(self, request: Request, now: float) -> None:
        self._waiting[request.spec.slo.tenant] += 1
        self._leave_slot(request.spec.slo.tenant)

    def served(self, requests: Sequence[Request], counts: Sequence[int], tokens: Sequence[Sequence[int]]) -> None:
        for request, sampled in zip(requests, tokens, strict=True):
            if sampled and request.request_id in self._charged:
                self._charge(request, OUTPUT * len(sampled))

    def finished(self, request: Request, reason: str, now: float) -> None:
        tenant = request.spec.slo.tenant
        if not request.holds_slot:
            self._leave_queue(tenant)
        else:
            self._leave_slot(tenant)
        self._charged.pop(request.request_id, None)
        self._unfinished[tenant] -= 1
        if not self._unfinished[tenant]:
            del self._unfinished[tenant]
            self._forget()

    def _reckon(self, tenant: str) -> None:
        """Isolate prefill while other tenants are active, and for LATELY work after that."""
        if len(self._unfinished) > 1 or self._latest not in (tenant, None):
            self._company = self._level
        self._latest = tenant
        self.isolates_prefill = self._level - self._company < LATELY

    def _charge(self, request: Request, work: float) -> None:
        self.counters[request.spec.slo.tenant] += work / self._weight(request)

    def _weight(self, request: Request) -> float:
        return self._weights.get(request.spec.slo.tier, 1.0)

    def _leave_slot(self, tenant: str) -> None:
        self._rows[tenant] -= 1
        if not self._rows[tenant]:
            del self._rows[tenant]

    def _leave_queue(self, tenant: str) -> None:
        self._waiting[tenant] -= 1
        if not self._waiting[tenant]:
            del self._waiting[tenant]

    def _forget(self) -> None:
        """Bound the counters kept of idle tenants; a dropped tenant comes back as a new one."""
        if len(self.counters) <= len(self._unfinished) + 2 * MAX_AWAY:
            return
        away = [tenant for tenant in self.counters if tenant not in self._unfinished]
        for tenant in away[:-MAX_AWAY]:
            del self.counters[tenant]
