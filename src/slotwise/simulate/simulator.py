"""Runs the serving engine on a virtual clock: simulates an hour of traffic under a policy in seconds.

Nothing is computed: a cost function gives the time of each step, by which the clock advances.  Scheduler, discipline,
policy and loop are the server's, so orders, bounds and shares are exact; times are as good as the cost function.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from math import inf

from slotwise.core.limits import SchedulerLimits
from slotwise.core.scheduler import Scheduler
from slotwise.core.step import StepPlan, StepResult
from slotwise.core.step_time import StepTimeModel, Work, work_of
from slotwise.engine.engine import Engine
from slotwise.engine.messages import Add
from slotwise.engine.scheduling import Scheduling

Cost = Callable[[Work], float]
"""Returns the seconds that a step takes."""

FILLER = 7  # the token that every row samples
IDLE = 0.001  # seconds that a plan without rows takes


class NoEnd(RuntimeError):
    """The simulation did not end within its maximal number of steps."""


@dataclass(slots=True)
class SimulatedRequest:
    """The results of one request.  Times are seconds of the virtual clock."""

    arrived: float
    token_times: list[float] = field(default_factory=list)
    ended: float = 0.0
    reason: str = ""  # as in the engine's records


class _Machine:
    """An executor that advances the virtual clock by the cost of each step."""

    def __init__(self, cost: Cost) -> None:
        self.now = 0.0  # seconds
        self._cost = cost
        self._plans: deque[StepPlan] = deque()
        self._num_at_join: dict[int, float] = {}  # by slot: tokens known when its request joined; inf: it is pooled

    def clock(self) -> int:
        return round(self.now * 1e9)

    def submit(self, plan: StepPlan) -> None:
        self._plans.append(plan)
        self._num_at_join |= {
            join.slot: len(join.tokens) if join.pooling is None else inf for join in plan.new_requests}

    def collect(self) -> StepResult:
        plan = self._plans.popleft()
        work = work_of(plan.starts, plan.counts, plan.padding, plan.drafts)
        self.now += self._cost(work) if work.rows else IDLE
        rows = zip(plan.slots, plan.starts, plan.counts, strict=True)
        return StepResult(plan.step, tuple([
            (FILLER,) if start + count >= self._num_at_join[slot] else () for slot, start, count in rows]))


def simulate(
    arrivals: Iterable[tuple[float, Add]], scheduling: Scheduling, limits: SchedulerLimits, cost: Cost,
    max_steps: int = 1_000_000,
) -> dict[str, SimulatedRequest]:
    """Simulates `arrivals`, (seconds, request) in order, until all requests have ended.

    Raises:
        NoEnd: some have not ended after `max_steps` steps.
    """
    machine, times = _Machine(cost), StepTimeModel()
    scheduler = Scheduler(scheduling.limits(limits), scheduling.discipline(), scheduling.policy(times), times)
    engine = Engine(scheduler, machine, machine.clock, scheduling=scheduling)
    coming, requests = deque(arrivals), dict[str, SimulatedRequest]()
    for _ in range(max_steps):
        while coming and coming[0][0] <= machine.now:
            at, command = coming.popleft()
            requests[command.request_id] = SimulatedRequest(at)
            engine.handle(command)
        if not engine.has_work:
            if not coming:
                return requests
            machine.now = max(machine.now, coming[0][0])
            continue
        record = engine.step()
        for request_id, tokens in zip(record.request_ids, record.token_ids, strict=True):
            requests[request_id].token_times += [machine.now] * len(tokens)
        for end in record.ended:
            requests[end.request_id].ended, requests[end.request_id].reason = machine.now, end.reason
    raise NoEnd(
        f"{len(coming)} requests are still to come, and {scheduler.num_unfinished} to end, after {max_steps} steps")
