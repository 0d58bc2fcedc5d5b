"""Runs servers on a virtual clock: simulates an hour of traffic on one or many of them in seconds.

Nothing is computed: a pace gives the time of each step, by which the clock advances.  Scheduler, discipline, policy,
admission control and loop are the server's, so orders, bounds and shares are exact; times are as good as the pace.

    arrivals ──► router ──► admission control ──► commands ──► Engine.step ──► record ──► SimulatedRequest
                 (fewest unfinished)   │ refused                  ▲    │
                                       ▼                          └────┴── VirtualMachine: now += pace.step(work)

Commands are handled between two steps, and each server has a clock of its own: the router sees of a
step in progress nothing that ends later than the request arrives.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any

from slotwise.core.limits import SchedulerLimits
from slotwise.core.scheduler import Scheduler
from slotwise.core.step import StepPlan, StepResult
from slotwise.core.step_time import Learned, StepTimeModel, work_of
from slotwise.engine.admission_control import AdmissionControl
from slotwise.engine.engine import Engine
from slotwise.engine.messages import Add, Command, EngineInfo, StepRecord
from slotwise.engine.observer import Observer
from slotwise.engine.scheduling import Scheduling
from slotwise.simulate.pace import Known, Pace

FILLER = 7  # the token that every row samples, where its output is not known
MODEL = "simulated"  # the name of the model in what observers are told
IDLE = 0.001  # seconds that a plan without rows takes
SERVED = ("stop", "length")  # the reasons of requests that were served whole
REFUSED = "refused"  # the reason of a request that admission control did not accept


class NoEnd(RuntimeError):
    """The simulation did not end within its maximal number of steps."""


@dataclass(slots=True)
class SimulatedRequest:
    """The results of one request.  Times are seconds of the virtual clock."""

    arrived: float
    token_times: list[float] = field(default_factory=list)
    ended: float = 0.0
    reason: str = ""  # as in the engine's records, or REFUSED
    replica: int = 0


@dataclass(frozen=True, slots=True)
class Setup:
    """What determines a server's schedule."""

    limits: SchedulerLimits
    scheduling: Scheduling
    pace: Pace
    depth: int = 0  # steps in flight while the next is planned
    eos_token_ids: tuple[int, ...] = ()
    max_queued: tuple[int | None, int | None] = (None, None)  # requests and prompt tokens that may wait; None: measured
    learns: bool = False  # its scheduler learns step times from its steps; else it knows the pace's
    learned: Learned | None = None  # what it has learned at the start

    def changed(self, changes: Mapping[str, Any]) -> Setup:
        """Returns the setup with scheduling settings changed, as `Scheduling.changed` names them.

        The cache keeps its size, so more slots share the same blocks.

        Raises:
            ValueError: one line says why they cannot be.
        """
        scheduling = self.scheduling.changed(changes, replace(self.limits, max_num_seqs=self.limits.num_blocks,
                                                              max_num_batched_tokens=1 << 24))
        return replace(self, scheduling=scheduling, limits=scheduling.limits(self.limits))


class VirtualMachine:
    """An executor that advances its clock by the pace of each step.

    Args:
        outputs: output tokens by request id, where they are known.
    """

    def __init__(self, pace: Pace, outputs: Mapping[str, Sequence[int]] | None = None) -> None:
        self.now = 0.0  # seconds
        self._pace = pace
        self._outputs = outputs or {}
        self._plans: deque[StepPlan] = deque()
        self._num_at_join: dict[int, float] = {}  # by slot: tokens known when its request joined; inf: it is pooled
        self._known: dict[int, tuple[int, Sequence[int]]] = {}  # by slot: prompt tokens and output

    def clock(self) -> int:
        """Nanoseconds."""
        return round(self.now * 1e9)

    def submit(self, plan: StepPlan) -> None:
        self._plans.append(plan)
        for join in plan.new_requests:
            self._num_at_join[join.slot] = len(join.tokens) if join.pooling is None else inf
            self._known[join.slot] = join.num_prompt, self._outputs.get(join.request_id, ())

    def collect(self) -> StepResult:
        plan = self._plans.popleft()
        work = work_of(plan.starts, plan.counts, plan.padding, plan.drafts)
        self.now += self._pace.step(work) if work.rows else IDLE
        at_join = self._num_at_join
        if not self._outputs:
            return StepResult(plan.step, tuple([
                _FILLERS if start + count >= at_join[slot] else ()
                for slot, start, count in zip(plan.slots, plan.starts, plan.counts, strict=True)]))
        return StepResult(plan.step, tuple([
            (self._token(slot, start + count),) if start + count >= at_join[slot] else ()
            for slot, start, count in zip(plan.slots, plan.starts, plan.counts, strict=True)]))

    def _token(self, slot: int, end: int) -> int:
        num_prompt, output = self._known[slot]
        index = end - num_prompt
        return output[index] if index < len(output) else FILLER


_FILLERS = (FILLER,)


class Server:
    """One server on a virtual clock.

    Args:
        outputs: output tokens by request id, where they are known.
        observers: notified as those of an engine service are.
    """

    def __init__(self, setup: Setup, outputs: Mapping[str, Sequence[int]] | None = None,
                 observers: Sequence[Observer] = ()) -> None:
        limits = setup.scheduling.limits(setup.limits)
        times = StepTimeModel(setup.learned) if setup.learns else Known(setup.pace)
        scheduler = Scheduler(limits, setup.scheduling.discipline(), setup.scheduling.policy(times), times)
        self.machine = VirtualMachine(setup.pace, outputs)
        self.engine = Engine(
            scheduler, self.machine, self.machine.clock, setup.eos_token_ids, depth=setup.depth,
            scheduling=setup.scheduling)
        self.admission = AdmissionControl(limits, *setup.max_queued)
        self._observers = (self.admission, *observers)
        info = EngineInfo(
            MODEL, "simulated", "", 0, limits, setup.scheduling, setup.eos_token_ids, depth=setup.depth,
            learned=setup.learned)
        for observer in self._observers:
            observer.started(info)
        self._pace = setup.pace
        self._inbox: deque[tuple[float, Command]] = deque()
        self._ends: deque[float] = deque()  # of its requests, in order
        self._unfinished = 0

    @property
    def next_at(self) -> float:
        """When its next step is planned; infinite while it has nothing to do."""
        if self.engine.has_work:
            return self.machine.now + max(self._pace.between(), self.engine.wait())
        return max(self.machine.now, self._inbox[0][0]) if self._inbox else inf

    def load(self, now: float) -> int:
        """Requests unfinished at `now`, as its router knows them."""
        while self._ends and self._ends[0] <= now:
            self._ends.popleft()
            self._unfinished -= 1
        return self._unfinished

    def send(self, at: float, command: Command) -> bool:
        """Takes in a command sent at `at`; returns whether a request is accepted."""
        if isinstance(command, Add):
            if self.admission.objection(command.slo.tenant, 1, len(command.prompt)):
                return False
            self._unfinished += 1
        for observer in self._observers:
            observer.commanded(command, round(at * 1e9))
        self._inbox.append((at, command))
        return True

    def step(self) -> StepRecord:
        """Handles what was sent until its next step, then runs that."""
        plans_at = self.next_at
        while self._inbox and self._inbox[0][0] <= plans_at:
            at, command = self._inbox.popleft()
            self.machine.now = max(self.machine.now, at)
            self.engine.handle(command)
        self.machine.now = max(self.machine.now, plans_at)
        record = self.engine.step()
        for observer in self._observers:
            observer.stepped(record)
        self._ends.extend([self.machine.now] * len(record.ended))
        return record


def simulate(
    arrivals: Iterable[tuple[float, Command]], servers: Sequence[Server], max_steps: int = 10_000_000,
) -> dict[str, SimulatedRequest]:
    """Simulates `arrivals`, (seconds, command) in order, until all requests have ended.

    A request goes to the server with the fewest unfinished ones, the first of several.

    Raises:
        NoEnd: some have not ended after `max_steps` steps.
    """
    requests: dict[str, SimulatedRequest] = {}
    coming = iter(arrivals)
    following = next(coming, None)
    for _ in range(max_steps):
        server = min(servers, key=_next_at) if len(servers) > 1 else servers[0]
        while following is not None and following[0] <= server.next_at:
            _route(*following, servers, requests)
            following = next(coming, None)
            if len(servers) > 1:
                server = min(servers, key=_next_at)
        if server.next_at == inf:
            return requests
        record = server.step()
        now = server.machine.now
        for request_id, tokens in zip(record.request_ids, record.token_ids, strict=False):
            if tokens:
                requests[request_id].token_times += [now] * len(tokens)
        for end in record.ended:
            requests[end.request_id].ended, requests[end.request_id].reason = now, end.reason
    unfinished = sum(not request.reason for request in requests.values())
    raise NoEnd(f"after {max_steps} steps {unfinished} requests are to end, and more may come")


def _next_at(server: Server) -> float:
    return server.next_at


def _route(at: float, command: Command, servers: Sequence[Server], requests: dict[str, SimulatedRequest]) -> None:
    if not isinstance(command, Add):
        known = requests.get(getattr(command, "request_id", ""))
        for server in servers if known is None else [servers[known.replica]]:
            server.send(at, command)
        return
    replica = min(range(len(servers)), key=lambda index: servers[index].load(at)) if len(servers) > 1 else 0
    request = requests[command.request_id] = SimulatedRequest(at, replica=replica)
    if not servers[replica].send(at, command):
        request.ended, request.reason = at, REFUSED
