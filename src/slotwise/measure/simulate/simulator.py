"""Runs servers on a virtual clock: simulates an hour of traffic on one or many of them in seconds.

Nothing is computed: a pace gives the time of each step, by which the clock advances.  Scheduler, discipline, policy,
admission control and loop are the server's, so orders, bounds and shares are exact; times are as good as the pace.

    arrivals ──► router ──► admission control ──► commands ──► Engine.step ──► record ──► SimulatedRequest
                 (fewest unfinished)   │ refused                  ▲    │
                                       ▼                          └────┴── VirtualMachine: now += pace.step(work)

Commands are handled between two steps, and each server has a clock of its own: the router sees of a
step in progress nothing that ends later than the request arrives.

Prefill and decode may be apart (`simulate_apart`): replicas that compute prompts, and others that answer.

    arrival ──► prefill replica ──prompt computed──► travels ──► decode replica: its last token again, then the output

A prompt is sent whole, when it is computed: the server sends each chunk while the next one is computed.  Blocks are not
pinned on the prefill replica meanwhile, and a prompt that the decode replica has cached travels, too.
"""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from math import inf
from typing import Any, NamedTuple

from slotwise.core.kv_transfers import KVTransfers
from slotwise.core.params import SamplingSpec
from slotwise.core.record import ReceivedBlocks, RowKind, StepRecord
from slotwise.core.request import KVTransfer, Request, RequestSpec
from slotwise.core.scheduler_limits import SLOTS, SchedulerLimits
from slotwise.core.speculation.proposer import proposer_of
from slotwise.core.speculation.speculation_settings import Speculation
from slotwise.core.step_time import Learned, StepTimeModel
from slotwise.engine.admission_control import AdmissionControl
from slotwise.engine.kv_link import KVLink, News
from slotwise.engine.messages import Add, Command, EngineInfo, Observer
from slotwise.engine.scheduling import Scheduling
from slotwise.measure.simulate.decode_run import RunEngine, RunInProgress, RunScheduler, RunTokens
from slotwise.measure.simulate.figures import REFUSED, SERVED, SimulatedRequest, new_clock
from slotwise.measure.simulate.pace import Pace, PaceStepTimes
from slotwise.measure.simulate.simulated_routing import RoutedServers
from slotwise.measure.simulate.virtual_machine import SimulatedDraftModel, Verifier, VirtualMachine
from slotwise.measure.workload.workloads import Workload

NEARLY = 0.999  # of a sum of lower bounds: it is added up in another order
MODEL = "simulated"  # the name of the model in what observers are told
OWN = 1 << 32  # ids from here on belong to one request, those from PREFIX on to a prefix
PREFIX = 1 << 33
LONG = 1e9  # seconds; no prompt is late

Traffic = Iterator[tuple[float, Command]]
"""Commands with their seconds, in order."""


class NoEnd(RuntimeError):
    """The simulation did not end within its maximal number of steps."""


class AdapterLoad(NamedTuple):
    """LoRA adapters, of which each request has one, in turn."""

    number: int = 0
    seconds: float = 0.0  # that each adapter among a step's rows takes


NO_ADAPTERS = AdapterLoad()


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
    speculation: Speculation | None = None  # where drafts come from; None: there are none
    draft_model: SimulatedDraftModel | None = None  # of speculation with one
    adapters: AdapterLoad = NO_ADAPTERS  # of the requests of a workload

    def changed(self, changes: Mapping[str, Any]) -> Setup:
        """Returns the setup with scheduling settings changed, as `Scheduling.changed` names them.

        The cache keeps its size, so more slots share the same blocks.

        Raises:
            ValueError: one line says why they cannot be.
        """
        scheduling = self.scheduling.changed(changes, replace(
            self.limits, max_num_seqs=min(self.limits.num_blocks, SLOTS), max_num_batched_tokens=1 << 24))
        return self.under(scheduling)

    def under(self, scheduling: Scheduling) -> Setup:
        """Returns the setup with these scheduling settings."""
        return replace(self, scheduling=scheduling, limits=scheduling.limits(self.limits))


class Server:
    """One server on a virtual clock.

    Args:
        outputs: output tokens by request id, where they are known.
        observers: notified as those of an engine service are.
        replica: its number, which its requests have.
        kv_link: to engines that compute prompts for it; None: it computes them.
        takes_runs: it takes steps without a decision at once; the results are the same.
    """

    def __init__(
        self, setup: Setup, outputs: Mapping[int, Sequence[int]] | None = None, observers: Sequence[Observer] = (),
        replica: int = 0, *, kv_link: KVLink | None = None, takes_runs: bool = True,
    ) -> None:
        limits = setup.scheduling.limits(setup.limits)
        times = StepTimeModel(setup.learned) if setup.learns else PaceStepTimes(setup.pace)
        scheduler = RunScheduler(limits, setup.scheduling.discipline(), setup.scheduling.policy(times), times,
                              proposer_of(setup.speculation, times))
        self.machine = VirtualMachine(
            setup.pace, outputs, Verifier(setup.draft_model, replica), setup.limits.stages, setup.adapters.seconds)
        self.engine = RunEngine(
            scheduler, self.machine, self.machine.clock, setup.eos_token_ids, depth=setup.depth,
            scheduling=setup.scheduling, kv_link=kv_link)
        self.admission = AdmissionControl(limits, *setup.max_queued)
        self.clock = new_clock()  # when its steps ended, in seconds
        self._observers = (self.admission, *observers)
        info = EngineInfo(
            MODEL, "simulated", "", 0, limits, setup.scheduling, setup.eos_token_ids, depth=setup.depth,
            learned=setup.learned, speculation=setup.speculation)
        for observer in self._observers:
            observer.started(info)
        self._pace = setup.pace
        self._replica = replica
        self._takes_runs = takes_runs
        self._inbox: deque[tuple[float, Command]] = deque()
        self._requests: dict[int, SimulatedRequest] = {}  # unfinished
        self._ends: list[float] = []  # of its requests, in order
        self._run: RunInProgress | None = None

    @property
    def next_at(self) -> float:
        """When its next step is planned; infinite while it has nothing to do."""
        if self._run is not None:
            return self.machine.now + self._pace.between()
        if not self.engine.has_work:
            return max(self.machine.now, self._inbox[0][0]) if self._inbox else inf
        soon = self.machine.now + self._pace.between()
        if not (wait := self.engine.wait()):
            return soon
        woken = self._inbox[0][0] if self._inbox else inf  # a command ends the wait
        return max(soon, min(self.machine.now + wait, woken))

    @property
    def quiet_until(self) -> float:
        """Until when none of its requests ends, as far as that is known: not before its next step."""
        if (running := self._run) is None:
            return self.next_at
        least = running.left * self._pace.least(running.run.work(len(running.ended))) * NEARLY
        return max(self.next_at, min(self.machine.now + least, running.run.until))

    def pop_ends(self) -> list[float]:
        """Returns when its requests ended, since the last call."""
        ends, self._ends = self._ends, []
        return ends

    def ask(self, at: float, command: Add) -> SimulatedRequest:
        """Takes in a request sent at `at`, or refuses it."""
        self._end_run()
        request = SimulatedRequest(at, self.clock, replica=self._replica)
        if self.admission.objection(command.spec.slo.tenant, 1, len(command.spec.prompt)):
            request.ended, request.reason = at, REFUSED
        else:
            self._requests[command.request_id] = request
            self.send(at, command)
        return request

    def send(self, at: float, command: Command) -> None:
        """Takes in a command sent at `at`."""
        self._end_run()
        for observer in self._observers:
            observer.commanded(command, round(at * 1e9))
        self._inbox.append((at, command))

    def tell(self) -> None:
        """Lets the observers know all steps that it has taken."""
        self._end_run()

    def run_until(self, at: float, most: int) -> int:
        """Takes the steps that are planned before `at`, in seconds, at most `most`.  Returns their number."""
        number = 0
        while number < most and (plans_at := self.next_at) < at:
            if self._run is None or _on_clock(plans_at) >= self._run.run.until:
                self._end_run()
                self._begin(plans_at)
            if self._run is not None:
                number += self._go_on(self._run, plans_at, at, most - number)
            else:
                self._take_in(self.engine.step())
                number += 1
        return number

    def _begin(self, plans_at: float) -> None:
        """Handles what was sent until the next step, which may be the first of a run."""
        while self._inbox and self._inbox[0][0] <= plans_at:
            sent_at, command = self._inbox.popleft()
            self.machine.now = max(self.machine.now, sent_at)
            self.engine.handle(command)
        self.machine.now = plans_at
        if self._takes_runs and (run := self.engine.decode_run()) is not None:
            self._run = RunInProgress(
                run, self.machine.rows(run), self._pace, self.machine.of_adapters(run.slots), plans_at)

    def _go_on(self, running: RunInProgress, plans_at: float, at: float, most: int) -> int:
        """Takes steps of a run, the first planned at `plans_at`, as `run_until` does."""
        number, most, until = 0, min(most, running.left), running.run.until
        plan, end, between = running.planned.append, running.ended.append, self._pace.between
        while number < most and plans_at < at and (until == inf or _on_clock(plans_at) < until):
            ended = plans_at + (next(running.seconds) + running.adapter_seconds)
            plan(plans_at)
            end(ended)
            number += 1
            if number < most:
                plans_at = ended + between()
        if number:
            self.machine.now = running.ended[-1]
        if not running.left:
            self._end_run()
        return number

    def _end_run(self) -> None:
        """Let the scheduler and the observers know the steps of a run: they are to decide, or to be asked."""
        run, self._run = self._run, None
        if run is None:
            return
        first, number = len(self.clock), len(run.ended)
        self.clock.extend(run.ended)
        for request_id in run.run.request_ids:
            self._requests[request_id].add_tokens(first, first + number - 1)
        outputs = RunTokens(run.rows, self.machine.steps(run.rows, number))
        is_watched = len(self._observers) > 1 or run.run.stop is not None or self.admission.is_queueing
        for record in self.engine.take(run.run, number, run.times, outputs, each=is_watched):
            self._tell(record)

    def _take_in(self, record: StepRecord) -> None:
        """Count the tokens of a step that was not in a run."""
        at, requests = len(self.clock), self._requests
        self.clock.append(self.machine.now)
        for request_id, tokens in zip(record.plan.request_ids, record.tokens, strict=False):
            for _ in tokens:
                requests[request_id].add_tokens(at, at)
        count_prompts(record, requests)
        self._tell(record)

    def _tell(self, record: StepRecord) -> None:
        for observer in self._observers:
            observer.stepped(record)
        for end in record.ended:
            request = self._requests.pop(end.request_id)
            request.ended, request.reason = self.machine.now, end.reason
            self._ends.append(self.machine.now)


def count_prompts(record: StepRecord, requests: Mapping[int, SimulatedRequest]) -> None:
    """Count what a step's requests found in the prefix cache, and what the step computed of prompts."""
    for plan in record.plans:
        for admission in plan.admitted:
            requests[admission.request_id].admitted(admission.num_cached)
    plan = record.plan
    if RowKind.PREFILL in plan.kinds:
        for request_id, kind, number in zip(plan.request_ids, plan.kinds, plan.counts, strict=True):
            if kind is RowKind.PREFILL:
                requests[request_id].num_prefilled += number


def _on_clock(seconds: float) -> float:
    """Returns the time as the engine's clock shows it, which counts nanoseconds."""
    return round(seconds * 1e9) * 1e-9


# -- several servers ---------------------------------------------------------------------------------------------------


class SimulatedFleet:
    """Servers behind a router: a request goes to the one with the fewest unfinished ones, the first of several.

    Servers meet only there.  So a server is left alone until one of its requests may end, or one is sent to it.

    Args:
        routed: chooses in the place of that rule, from what servers tell it.
    """

    def __init__(self, servers: Sequence[Server], max_steps: int, routed: RoutedServers | None = None) -> None:
        self._servers = servers
        self._routed = routed
        self._left = max_steps
        self._loads = [0] * len(servers)  # requests unfinished when the last one arrived, as the router knows them
        self._ends: list[tuple[float, int]] = []  # a heap: of requests, with their server
        self._queue: list[tuple[float, int]] = []  # a heap: until when each server that has work is left alone
        self._alone_until = [inf] * len(servers)  # the same by server; other entries of the heap are out of date
        self.requests: dict[int, SimulatedRequest] = {}

    def run_until(self, at: float) -> None:
        """Take the steps that are planned before `at`, in seconds, of all servers whose requests may have ended."""
        while self._queue and self._queue[0][0] < at:
            until, index = heappop(self._queue)
            if self._left < 1:
                raise NoEnd
            if until == self._alone_until[index]:
                self._run(index, at)

    def _run(self, index: int, at: float) -> None:
        self._left -= self._servers[index].run_until(at, self._left)
        self._leave_alone(index)

    def _leave_alone(self, index: int) -> None:
        for ended in self._servers[index].pop_ends():
            heappush(self._ends, (ended, index))
        self._alone_until[index] = until = self._servers[index].quiet_until
        if until < inf:
            heappush(self._queue, (until, index))

    def _chosen(self, at: float, command: Add) -> int:
        """The server of a request."""
        if self._routed is not None:
            for index, server in enumerate(self._servers):
                self._run(index, at)
                server.tell()
            return self._routed.choose(at, command)
        while self._ends and self._ends[0][0] <= at:
            self._loads[heappop(self._ends)[1]] -= 1
        return self._loads.index(min(self._loads))

    def route(self, at: float, command: Command) -> None:
        """Send a command: a request to one server, what concerns it to the same, other commands to all."""
        servers = self._servers
        known = self.requests.get(getattr(command, "request_id", -1))
        if isinstance(command, Add):
            chosen: Sequence[int] = (self._chosen(at, command),)
        else:
            chosen = range(len(servers)) if known is None else (known.replica,)
        for index in chosen:
            self._run(index, at)
            if isinstance(command, Add):
                self.requests[command.request_id] = request = servers[index].ask(at, command)
                self._loads[index] += request.reason != REFUSED
                if self._routed is not None and request.reason == REFUSED:
                    self._routed.refused(command.request_id)
            else:
                servers[index].send(at, command)
            self._leave_alone(index)


def traffic_of(workload: Workload, adapters: int = 0) -> Traffic:
    """Yields the requests of an open loop with their seconds of arrival.

    Args:
        adapters: of which each request has one, in turn; 0: none has any.

    Raises:
        ValueError: the workload is a closed loop.
    """
    if workload.users:
        raise ValueError("a closed loop is not simulated: its arrivals depend on answers; name other arrivals")
    params = SamplingSpec(temperature=0.0, max_tokens=workload.max_tokens, ignore_eos=True)
    for request in workload.requests:
        prompt = (PREFIX + request.prefix,) * request.num_prefix
        prompt += (OWN + request.number,) * (request.num_prompt - request.num_prefix)
        yield request.arrives_at or 0.0, Add(request.number, RequestSpec(
            prompt, params, request.number, adapter=1 + request.number % adapters if adapters else 0,
            forced_length=request.num_output), name=str(request.number))


@contextmanager
def without_collector() -> Iterator[None]:
    """Turns Python's garbage collector off: of the millions of objects here, none forms a cycle."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def simulate(
    arrivals: Iterable[tuple[float, Command]], servers: Sequence[Server], max_steps: int = 100_000_000,
    routed: RoutedServers | None = None,
) -> dict[int, SimulatedRequest]:
    """Simulates `arrivals`, (seconds, command) in order, until all requests have ended.

    Args:
        routed: the router in front of the servers, which its observers watch; None: the fewest unfinished requests.

    Raises:
        NoEnd: some have not ended after `max_steps` steps.
    """
    fleet = SimulatedFleet(servers, max_steps, routed)
    try:
        with without_collector():
            for at, command in arrivals:
                fleet.run_until(at)
                fleet.route(at, command)
            fleet.run_until(inf)
    except NoEnd:
        unfinished = sum(not request.reason for request in fleet.requests.values())
        raise NoEnd(f"after {max_steps} steps {unfinished} requests are to end, and more may come") from None
    return fleet.requests


# -- prefill and decode apart ------------------------------------------------------------------------------------------


class InstantKVLink(KVLink):
    """A link to other engines whose prompts have arrived when their requests get a slot."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._arrivals: dict[int, ReceivedBlocks] = {}

    @property
    def has_news(self) -> bool:
        return bool(self._arrivals)

    def pop_news(self) -> News:
        arrivals, self._arrivals = self._arrivals, {}
        return News(tuple(arrivals.values()))

    def offer(self, request: Request) -> None:
        """No blocks are sent."""

    def follow(self, transfers: KVTransfers, unwanted: Sequence[Request]) -> None:
        """None of the blocks is read or written."""

    def begin(self, transfers: KVTransfers) -> None:
        for request in transfers.receiving():
            blocks = -(-len(request.tokens) // self._block_size)
            self._arrivals[request.request_id] = ReceivedBlocks(request.request_id, blocks, is_last=True)


def simulate_apart(
    arrivals: Iterable[tuple[float, Command]], prefill: Sequence[Server], decode: Sequence[Server],
    seconds_per_token: float = 0.0,
) -> dict[int, SimulatedRequest]:
    """Simulates requests, in order of arrival, on replicas with roles; each goes to the fewest unfinished ones.

    Args:
        decode: made with an `Arrived` as their links.
        seconds_per_token: in which the keys and values of a prompt's token travel.
    """
    requests = [(at, command) for at, command in arrivals if isinstance(command, Add)]
    found = simulate([(at, Add(one.request_id, replace(one.spec, forced_length=1), name=one.name))
                      for at, one in requests], prefill)
    computed = [(found[one.request_id].ended + len(one.spec.prompt) * seconds_per_token, _received(one))
                for _, one in requests if found[one.request_id].reason in SERVED]
    answered = simulate(sorted(computed, key=lambda each: each[0]), decode)
    return found | {name: replace(one, arrived=found[name].arrived) for name, one in answered.items()}


def _received(command: Add) -> Add:
    return Add(command.request_id, replace(
        command.spec, kv=KVTransfer(str(command.request_id), sends=False, timeout=LONG)), name=command.name)
