"""Schedulers of fifty lines, one for each policy, that tests hold the real one against.

Slots are the only thing there is too little of: whole prompts, a token a second, and everyone who waits is sorted anew
for every free slot, by the rule as `docs/policies.md` states it.
"""

from __future__ import annotations

from collections import defaultdict
from math import floor

from slotwise.core.request import Request

Key = tuple[float, ...]


class One:
    """A request, its arrival, and the tokens that it will have."""

    def __init__(self, request: Request, number: int, arrived: float, length: int) -> None:
        self.name, self.slo, self.prompt = request.request_id, request.spec.slo, request.num_prompt
        self.number, self.arrived, self.length, self.done = number, arrived, length, 0
        self.most = request.spec.params.max_tokens
        self.program = (request.spec.slo.tenant, request.spec.session or request.request_id)


class Naive:
    """First come, first served."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.waiting: list[One] = []
        self.running: list[One] = []
        self.admitted: list[str] = []
        self.shed: list[str] = []
        self.rested = 0  # steps in a row in which somebody stood back

    def key(self, one: One, now: float) -> Key:
        return (one.number,)

    def outranks(self, waiting: One, running: One) -> bool:
        return False

    def victim(self, one: One) -> Key:
        return ()

    def rests(self, one: One, first: One | None) -> bool:
        return False

    def arrives(self, one: One) -> None:
        self.waiting.append(one)

    def starts(self, one: One) -> None: ...
    def samples(self, one: One) -> None: ...
    def ends(self, one: One) -> None: ...

    def step(self, now: float) -> None:
        self._give_way(now)
        stands_back = False
        first = self._in_order(now)[0] if self.waiting and len(self.running) < self.slots else None
        resting = [one for one in self.running if self.rests(one, first)]
        while self.waiting and len(self.running) < self.slots:
            one = self._in_order(now)[0]
            if stands_back := one.slo.tenant in {other.slo.tenant for other in resting}:
                break
            self.waiting.remove(one)
            self.running.append(one)
            self.admitted.append(one.name)
            self.starts(one)
        self.rested = self.rested + 1 if resting or stands_back else 0
        for one in [one for one in self.running if one not in resting]:
            one.done += 1
            self.samples(one)
        for one in [one for one in self.running if one.done == one.length]:
            self.running.remove(one)
            self.ends(one)

    def _in_order(self, now: float) -> list[One]:
        return sorted(self.waiting, key=lambda one: (self.key(one, now), one.number))

    def _give_way(self, now: float) -> None:
        for _ in range(4):
            behind = self._in_order(now)[self.slots - len(self.running):]
            lower = [one for one in self.running if behind and self.outranks(behind[0], one)]
            if not lower:
                return
            last = max(lower, key=lambda one: (self.victim(one), one.number))
            self.running.remove(last)
            self.waiting.append(last)


class NaivePriority(Naive):
    def __init__(self, slots: int, ageing: float, gap: int) -> None:
        super().__init__(slots)
        self.ageing, self.gap = ageing, gap

    def key(self, one: One, now: float) -> Key:
        return (one.slo.priority + one.arrived / self.ageing,)

    def victim(self, one: One) -> Key:
        return (floor(self.key(one, 0)[0]),)

    def outranks(self, waiting: One, running: One) -> bool:
        is_ahead = running.slo.priority - waiting.slo.priority >= self.gap
        return is_ahead and self.key(waiting, 0) < self.key(running, 0)


class NaiveShortest(Naive):
    def __init__(self, slots: int, ageing: float, quantile: float) -> None:
        super().__init__(slots)
        self.ageing, self.quantile = ageing, quantile
        self.past: list[tuple[str, int, int]] = []  # tenant, bucket, length
        self.keys: dict[str, float] = {}

    @staticmethod
    def bucket(prompt: int) -> tuple[int, bool]:
        power = 1
        while power * 2 <= prompt:
            power *= 2
        return power, prompt >= 1.5 * power

    def guess(self, one: One) -> float:
        own = (one.slo.tenant, self.bucket(one.prompt))
        for alike in (lambda t, b: (t, b) == own, lambda t, b: b == own[1], lambda t, b: t == own[0],
                      lambda t, b: True):
            lengths = [length for tenant, bucket, length in self.past if alike(tenant, bucket)][-128:]
            if len(lengths) >= 8:
                return min(one.most, sorted(lengths)[min(len(lengths) - 1, int(self.quantile * len(lengths)))])
        return one.most

    def arrives(self, one: One) -> None:
        self.keys[one.name] = one.prompt / 16 + self.guess(one) + self.ageing * one.arrived
        super().arrives(one)

    def key(self, one: One, now: float) -> Key:
        return (self.keys[one.name],)

    def ends(self, one: One) -> None:
        self.past.append((one.slo.tenant, self.bucket(one.prompt), one.length))


class NaiveOracle(NaiveShortest):
    def guess(self, one: One) -> float:
        return one.length


class NaiveFair(Naive):
    def __init__(self, slots: int, weights: dict[str, float], credit: float) -> None:
        super().__init__(slots)
        self.weights, self.credit, self.last = weights, credit, 0.0
        self.counters: dict[str, float] = defaultdict(float)
        self.began: dict[str, float] = {}  # the counter before its prompt was charged

    def key(self, one: One, now: float) -> Key:
        return (self.counters[one.slo.tenant],)

    def arrives(self, one: One) -> None:
        tenants = {other.slo.tenant for other in self.waiting}
        if one.slo.tenant not in tenants:
            least = min((self.counters[tenant] for tenant in tenants), default=self.last)
            self.counters[one.slo.tenant] = max(self.counters[one.slo.tenant], least - self.credit)
        super().arrives(one)

    def weight(self, one: One) -> float:
        return self.weights.get(one.slo.tier, 1.0)

    def outranks(self, waiting: One, running: One) -> bool:
        mine, its = ((self.counters[one.slo.tenant], one.number) for one in (waiting, running))
        return mine < its and self.is_far_behind(waiting, running)

    def is_far_behind(self, waiting: One, running: One) -> bool:
        light, heavy = waiting.slo.tenant, running.slo.tenant
        tenants = [one.slo.tenant for one in self.running]
        rows = tenants.count(light) + (waiting not in self.running)
        is_far_ahead = 3 * rows / self.weight(waiting) <= tenants.count(heavy) / self.weight(running)
        return light != heavy and is_far_ahead and self.before(waiting) <= self.counters[heavy]

    def before(self, one: One) -> float:
        counter = self.counters[one.slo.tenant]
        return counter if one.done else self.began.get(one.name, counter)

    def victim(self, one: One) -> Key:
        return (self.counters[one.slo.tenant],)

    def rests(self, one: One, first: One | None) -> bool:
        return first is not None and not first.done and self.rested < 4 and self.is_far_behind(first, one)

    def _charge(self, one: One, work: float) -> None:
        self.counters[one.slo.tenant] += work / self.weight(one)

    def starts(self, one: One) -> None:
        if one.name not in self.began:
            self.began[one.name] = self.counters[one.slo.tenant]
            self._charge(one, one.prompt)
        self.last = self.counters[one.slo.tenant]

    def samples(self, one: One) -> None:
        self._charge(one, 2)


class NaiveProgram(Naive):
    def __init__(self, slots: int, ageing: float, quantum: float) -> None:
        super().__init__(slots)
        self.ageing, self.quantum = ageing, quantum
        self.service: dict[tuple[str, str], float] = defaultdict(float)
        self.keys: dict[str, float] = {}

    def arrives(self, one: One) -> None:
        level = 0
        while level < 8 and self.service[one.program] >= self.quantum * (2 ** (level + 1) - 1):
            level += 1
        self.keys[one.name] = one.arrived + self.ageing * level
        super().arrives(one)

    def key(self, one: One, now: float) -> Key:
        return (self.keys[one.name],)

    def starts(self, one: One) -> None:
        self.service[one.program] += one.prompt

    def ends(self, one: One) -> None:
        self.service[one.program] += 2 * one.length


class NaiveDeadline(Naive):
    def __init__(self, slots: int, ttft: float, ageing: float, sheds: bool) -> None:
        super().__init__(slots)
        self.ttft, self.ageing, self.sheds = ttft, ageing, sheds

    def latest(self, one: One) -> float:
        return one.arrived + (one.slo.ttft or self.ttft) - 0.25 * one.prompt

    def key(self, one: One, now: float) -> Key:
        if now < self.latest(one):
            return (2, self.latest(one))
        return (3 if now < one.arrived + self.ageing else 1, one.arrived)

    def step(self, now: float) -> None:
        late = [one for one in self.waiting if self.sheds and now >= self.latest(one)]
        self.shed += [one.name for one in late]
        self.waiting = [one for one in self.waiting if one not in late]
        super().step(now)
