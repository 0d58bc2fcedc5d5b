"""The engine loop: plan a step, execute it, commit its result.

    command ─► handle ─► Scheduler.schedule ─► Executor ─► Scheduler.commit ─► StepRecord
                               ▲                                  │
                               └──────────────────────────────────┘

The engine process (`compose/engine_process.py`), the offline API, a replay and benchmarks drive it: they call `handle`
for each command, then `step` while `has_work`, else `idle_record` for changes that no step records.  `wait` says how
long to sleep before the next `step` when the last plan had no rows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from slotwise.core.record import (
    NO_OUTCOME,
    NO_RESULT,
    CompiledGrammar,
    Counters,
    DiskNews,
    Inputs,
    Outcome,
    StepPlan,
    StepRecord,
    StepResult,
)
from slotwise.core.request import Request
from slotwise.core.scheduler import Scheduler
from slotwise.core.scheduler_limits import SchedulerLimits
from slotwise.engine.executor import POLL, AdapterStore, Executor, ExpertCounts, GrammarCompiler, Returnable
from slotwise.engine.kv_link import KVLink, News
from slotwise.engine.messages import (
    Add,
    Command,
    DivergenceAnswer,
    DivergenceQuery,
    Finish,
    QueuePositionAnswer,
    QueuePositionQuery,
    RequestPosition,
)
from slotwise.engine.scheduling import DEFAULT_ORDER, Scheduling

NO_DISK_NEWS = DiskNews()
EXPERTS_EVERY = 1_000_000_000  # nanoseconds between two records with token counts of experts, while there is work
NOT_GIVEN_BACK = "only the cache of device cpu, with one rank, can be given back to the system"

Clock = Callable[[], int]
"""Monotonic nanoseconds."""


class Engine:
    """One scheduler, one executor, one clock; used by one thread.

    Args:
        depth: steps that may be in flight while the next is planned: 0, 1, or one fewer than `limits.stages`.
        scheduling: the settings that `scheduler` was built with; None: first come, first served.
        grammars: compiles the grammars of requests; None: those with one are rejected.
        experts: counts the tokens of each expert; None: the model has no experts.
        memory: memory that can be given back to the system while no request runs; None: none can.
        adapters: the adapters that requests may name; None: requests name none.
        kv_link: moves blocks of prompts from and to other engines and a disk; None: this engine computes every prompt.
    """

    def __init__(
        self, scheduler: Scheduler, executor: Executor, clock: Clock, eos_ids: tuple[int, ...] = (), *, depth: int = 0,
        scheduling: Scheduling | None = None, grammars: GrammarCompiler | None = None,
        experts: ExpertCounts | None = None, memory: Returnable | None = None,
        adapters: AdapterStore | None = None, kv_link: KVLink | None = None,
    ) -> None:
        self._scheduler = scheduler
        self.executor = executor
        self.clock = clock
        self._eos_ids = eos_ids
        self.depth = depth
        self._in_flight: deque[tuple[StepPlan, int]] = deque()
        self._order = scheduling.order if scheduling else DEFAULT_ORDER
        self._grammars = grammars
        self._experts = experts
        self._memory = memory
        self._counted = 0  # nanoseconds, when the tokens of experts were counted last
        self.adapters = adapters
        self._unloading: set[int] = set()  # adapters that are forgotten when no request has them
        self._kv_link = kv_link
        # These five are not yet in a record.
        self._news = News()
        self._compiled: list[CompiledGrammar] = []
        self._configured: Scheduling | None = None
        self._handled: list[int] = []
        self._planned: list[int] = []
        self._idle_until = 0.0  # seconds; until then only a command, a grammar or blocks give `step` work

    @property
    def limits(self) -> SchedulerLimits:
        return self._scheduler.limits

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work or (self._kv_link is not None and self._scheduler.transfers.is_active)

    def handle(self, command: Command) -> None:
        """Executes one command.  The next record has its time, and a request that it ended."""
        handled = self.clock()
        self._handled.append(handled)
        now = handled * 1e-9
        self._idle_until = 0.0
        if isinstance(command, Add):
            request = Request(command.request_id, command.spec, self._eos_ids)
            self._scheduler.add(request, now)
            if self._kv_link is not None and not request.ended:
                self._kv_link.offer(request)
            if (grammar := command.spec.params.grammar) is not None and not request.ended:
                if self._grammars is None:
                    self._scheduler.compiled(command.request_id, f"{grammar.field}: not available here", now)
                else:
                    self._grammars.compile(command.request_id, grammar)
        elif isinstance(command, Finish):
            self._scheduler.finish(command.request_id, command.reason, now)
            self._serve_transfers()
        else:
            self._configured = command.scheduling
            self._configure(command.scheduling, now)

    def unload_adapter(self, number: int) -> None:
        """Forgets an adapter as soon as no request has it."""
        self._unloading.add(number)
        self._unload()

    def _unload(self) -> None:
        assert self.adapters is not None
        needed = {request.spec.adapter for request in self._scheduler.requests()}
        for number in self._unloading - needed:
            self.adapters.unload(number)
        self._unloading &= needed

    def queue_positions(self, query: QueuePositionQuery) -> QueuePositionAnswer:
        """Returns the positions of the unfinished requests of `query`; changes nothing."""
        asked = frozenset(query.request_ids)
        positions = self._scheduler.queue_positions(query.request_ids, self.clock() * 1e-9)
        return QueuePositionAnswer(query.number, tuple([
            RequestPosition(name, request.state.value, request.num_output, positions.get(name))
            for request in self._scheduler.requests() if (name := request.request_id) in asked]))

    def divergences(self, query: DivergenceQuery) -> DivergenceAnswer:
        """Returns the cached tokens around the divergences of the requests of `query`; changes nothing."""
        return DivergenceAnswer(query.number, tuple(self._scheduler.kv.prompts.diverged(query.request_ids)))

    def give_back(self) -> str:
        """Gives memory back to the system while nothing runs; returns why it could not, or "".

        Blocks keep their entries in the prefix cache: the caller must change the salt, so that no later request finds
        them.
        """
        if self._memory is None:
            return NOT_GIVEN_BACK
        if self.has_work:
            return "requests are running"
        if self._kv_link is not None:
            self._kv_link.lose_memory()
        try:
            self._memory.give_back()
        except OSError as error:
            return str(error)
        return ""

    def remove_stored(self, tenant: str | None = None) -> Callable[[], int]:
        """Stops storing blocks of a tenant, or of all; returns what removes the stored ones.  See `KVLink.remove`.

        Blocks in memory keep their entries in the prefix cache: the caller must change the salt or the generation.
        """
        return (lambda: 0) if self._kv_link is None else self._kv_link.remove(tenant)

    def _configure(self, scheduling: Scheduling, now: float) -> None:
        """Applies new settings; a policy whose settings are unchanged keeps its state."""
        policy = self._scheduler.policy
        if scheduling.order != self._order:
            policy = scheduling.policy(self._scheduler.times)
        self._order = scheduling.order
        self._scheduler.configure(scheduling.limits(self._scheduler.limits), scheduling.discipline(), policy, now)

    def wait(self) -> float:
        """Seconds until `step` may have work, when it waits for the clock, a grammar or blocks; else 0."""
        left = 0.0 if self._in_flight else max(0.0, self._idle_until - self.clock() * 1e-9)
        if left and self._kv_link is not None and self._scheduler.transfers.is_active:
            return 0.0 if self._kv_link.has_news else min(left, POLL)
        if left and self._grammars is not None and self._grammars.is_compiling:
            return 0.0 if self._grammars.has_compiled else min(left, POLL)
        return left

    def step(self) -> StepRecord:
        """Plans as far ahead as `depth` allows, then waits for the oldest step and commits it."""
        is_first = True
        while len(self._in_flight) <= self.depth and (self._scheduler.can_plan_rows or not self._in_flight):
            started = self.clock()
            self._planned.append(started)
            if is_first:
                self._apply_news(started * 1e-9)
            is_first = False
            plan = self._scheduler.schedule(started * 1e-9)
            self._in_flight.append((plan, started))
            self._submit(plan)
        plan, started = self._in_flight.popleft()
        try:
            result = self.executor.collect()
        except Exception as error:
            return self._failed(error, plan, started)
        ended = self.clock()
        outcome = self._scheduler.commit(plan, result, ended * 1e-9)
        self._serve_transfers()
        self._idle_until = 0.0 if plan.slots else self._reopens_at(plan)
        done = result.executed(plan)
        if result.drafts:
            result = result._replace(drafts=())  # they are those of the plan
        return self._record(started, ended, (_without_new_requests(done),), result, outcome)

    def _submit(self, plan: StepPlan) -> None:
        self._serve_transfers()
        self.executor.submit(plan)
        if self._kv_link is not None:
            self._kv_link.begin(self._scheduler.transfers)

    def _serve_transfers(self) -> None:
        if self._kv_link is not None:
            self._kv_link.follow(self._scheduler.transfers, self._scheduler.transfers.pop_unwanted())

    def _reopens_at(self, plan: StepPlan) -> float:
        """Returns when a plan without rows may be followed by one with rows, in seconds of the clock; 0: unknown."""
        transfers = self._scheduler.transfers
        if plan.stop is None and (self._scheduler.num_running or not transfers.is_active):
            return 0.0
        reopens_at = plan.stop.reopens_at if plan.stop else None
        return transfers.next_moment if reopens_at is None else min(reopens_at, transfers.next_moment)

    def _apply_news(self, now: float) -> None:
        """Tells the scheduler what happened outside its steps: grammars were compiled, blocks arrived or were read."""
        if self._grammars is not None:
            self._apply_compiled(self._grammars, now)
        if self._kv_link is not None and self._kv_link.has_news:
            self._news = self._kv_link.pop_news()
            disk = self._news.disk or NO_DISK_NEWS
            for found in disk.found:
                self._scheduler.found_on_disk(found, now)
            for arrival in (*self._news.arrivals, *disk.arrivals):
                self._scheduler.received(arrival, now)
            for transfer_id in self._news.acknowledged:
                self._scheduler.acknowledged(transfer_id)

    def _apply_compiled(self, grammars: GrammarCompiler, now: float) -> None:
        """Lets requests with compiled grammars be admitted, and rejects those with grammars that cannot be compiled."""
        if grammars.is_compiling:
            compiled = grammars.pop_compiled()
            self._compiled += compiled
            for request_id, objection in compiled:
                self._scheduler.compiled(request_id, objection, now)

    def idle_record(self) -> StepRecord | None:
        """Returns a record of requests that ended and settings that changed between steps; None if nothing happened."""
        ended = self._scheduler.pop_ended()
        if not ended and self._configured is None:
            return None
        now = self.clock()
        return self._record(now, now, outcome=Outcome(ended=ended))

    def _failed(self, error: Exception, plan: StepPlan, started: int) -> StepRecord:
        """Rolls back to the last commit after a failed step, and ends in error the requests that cannot go on.

        These are the failed step's; with recurrent states, those of all steps in flight.  Others are planned again.
        """
        plans = [_without_new_requests(plan)]
        while self._in_flight:
            plans.append(_without_new_requests(self._in_flight.popleft()[0]))
            try:
                self.executor.collect()
            except Exception:  # the result of a step after a failed one is dropped in any case
                continue
        now = self.clock()
        failure = f"{type(error).__name__}: {error}"
        for request_id in self._scheduler.rollback():
            self._scheduler.finish(request_id, "error", now * 1e-9, failure)
        return self._record(
            started, now, tuple(plans), outcome=Outcome(ended=self._scheduler.pop_ended(), failure=failure))

    def _record(self, started: int, ended: int, plans: tuple[StepPlan, ...] = (), result: StepResult = NO_RESULT,
                outcome: Outcome = NO_OUTCOME) -> StepRecord:
        """Returns the record of a step, with the inputs since the last record and the engine's counters.

        Inputs are collected anew from here on, and what ended requests and unloaded adapters held is released.
        """
        inputs = Inputs(tuple(self._planned), tuple(self._handled), tuple(self._compiled), tuple(self._news.arrivals),
                        tuple(self._news.acknowledged), self._configured, self._news.disk)
        self._planned, self._handled, self._configured = [], [], None
        if self._compiled:
            self._compiled = []
        num_pinned = 0
        if self._kv_link is not None:
            self._news = News()
            num_pinned = self._scheduler.transfers.num_pinned_blocks
        if self._grammars is not None:
            for end in outcome.ended:
                self._grammars.release(end.request_id)
        experts = () if self._experts is None or outcome.failure else self._expert_tokens(self._experts, ended)
        if self._unloading:
            self._unload()
        scheduler = self._scheduler
        return StepRecord(started, ended, plans, result, outcome, inputs, Counters(
            scheduler.num_running, scheduler.num_waiting, scheduler.num_free_blocks, num_pinned, experts))

    def _expert_tokens(self, experts: ExpertCounts, now: int) -> tuple[tuple[int, ...], ...]:
        """Returns the tokens of experts that no record has; () while the last count is recent and work remains."""
        if self.has_work and now - self._counted < EXPERTS_EVERY:
            return ()
        self._counted = now
        return experts.pop(is_idle=not self._in_flight)


def _without_new_requests(plan: StepPlan) -> StepPlan:
    """A plan as records have it: the specs of its new requests are in their commands."""
    return plan._replace(new_requests=()) if plan.new_requests else plan
