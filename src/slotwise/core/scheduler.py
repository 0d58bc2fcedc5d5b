"""The roster: at every step, who runs, with how many tokens, in which blocks.

A step is three verbs, and two of them are here:

    plan(now)                    running rows first, in the order they joined, then those who wait
    ... the executor runs it ...
    commit(plan, result, now)    append tokens, end, free, tell what happened

One step may be in flight: `plan` works from *scheduled* counts, `commit` advances *computed* ones.  A request that ends
while it stands in a planned step leaves a *void* row there, whose result is dropped.  Time is an argument; ties fall to
the arrival number; nothing here reads a clock, draws a random number or iterates a set.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from slotwise.core.draft import Draft, Flight
from slotwise.core.events import Admitted, Arrived, Committed, Event, Finished, Preempted, Rejected
from slotwise.core.kv import BlockTables
from slotwise.core.limits import SchedulerLimits
from slotwise.core.plan import Join, StepPlan, StepResult, Stop, TokenLogprobs
from slotwise.core.queue import WaitingQueue
from slotwise.core.reasons import ENDING, NO_BLOCKS, NO_SLOT, PROMPTS_ALONE, TOKEN_BUDGET
from slotwise.core.request import NO_SLOT_HELD, Request, State
from slotwise.core.seams import NEVER, Discipline, Policy, View
from slotwise.core.slots import Slots
from slotwise.core.withheld import Told, Withheld

MAX_IN_FLIGHT = 1  # uncommitted steps that plan() may look past


class Scheduler:
    """The one owner of every request's state."""

    def __init__(self, limits: SchedulerLimits, discipline: Discipline, policy: Policy) -> None:
        self.limits = limits
        self._discipline = discipline
        self._policy = policy
        self._kv = BlockTables(limits.num_blocks, limits.block_size)
        self._living: dict[str, Request] = {}
        self._waiting = WaitingQueue()
        self._running: dict[str, Request] = {}  # in the order they took their slots
        self._slots = Slots(limits.max_num_seqs)
        self._flights: deque[Flight] = deque()
        self._withheld = Withheld()
        self._events: list[Event] = []
        self._steps = 0
        self._arrivals = 0

    # -- what others may read ------------------------------------------------------------------------------------

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_living(self) -> int:
        return len(self._living)

    @property
    def num_free_blocks(self) -> int:
        return self._kv.pool.num_free

    @property
    def has_work(self) -> bool:
        return bool(self._living) or bool(self._flights)

    def requests(self) -> Iterator[Request]:
        """All who live, in order of arrival."""
        return iter(self._living.values())

    def take_events(self) -> list[Event]:
        """What happened since the last call."""
        events, self._events = self._events, []
        return events

    def check(self) -> None:
        """Law 4, conservation.  Raises an AssertionError that names what is wrong."""
        self._kv.check(self._living.values())
        for request in self._living.values():
            holds_slot = request.slot != NO_SLOT_HELD
            assert holds_slot == (request.state is State.RUNNING) == (request.request_id in self._running), request
            assert request.num_computed <= request.num_scheduled <= len(request.tokens) + request.pending, request
            assert request.num_scheduled <= len(request.blocks) * self.limits.block_size, request
        assert len(self._living) == len(self._running) + len(self._waiting)
        self._slots.check(request.slot for request in self._running.values())

    def configure(self, limits: SchedulerLimits, discipline: Discipline) -> None:
        """Other limits and another discipline, from the next plan on.  Whoever runs goes on.

        Raises:
            ValueError: the limits ask for what was fixed at the start: the cache, the longest sequence, more slots.
        """
        now = self.limits
        fixed = (limits.num_blocks, limits.block_size, limits.max_model_len)
        if fixed != (now.num_blocks, now.block_size, now.max_model_len):
            raise ValueError("the cache and the longest sequence are fixed at the start")
        if limits.max_num_seqs > self._slots.total:
            raise ValueError(f"max_num_seqs is at most the {self._slots.total} slots made at the start")
        self.limits = limits
        self._discipline = discipline

    # -- arriving and ending -------------------------------------------------------------------------------------

    def add(self, request: Request, now: float) -> None:
        """Let a request in, or refuse it for good when it could never run."""
        request.arrived_at = now
        request.arrival = self._arrivals
        self._arrivals += 1
        objection = self.limits.objection(request.num_prompt, request.params.max_tokens)
        if request.request_id in self._living:
            objection = f"a request named {request.request_id} is still alive"
        if objection:
            request.become(State.REJECTED)
            request.reason = objection
            self._events.append(Rejected(now, request.request_id, objection))
            return
        request.end = self.limits.longest(request.num_prompt, request.params.max_tokens)
        self._living[request.request_id] = request
        self._waiting.add(request, self._policy.waiting_key(request, now))
        self._events.append(Arrived(now, request.request_id, request.num_prompt))

    def finish(self, request_id: str, reason: str, now: float) -> None:
        """End a request from outside, in any state.  One that has ended already, or never was, is left alone."""
        request = self._living.get(request_id)
        if request is not None:
            self._end(request, reason, now)

    def _end(self, request: Request, reason: str, now: float) -> None:
        if request.state is State.RUNNING:
            self._vacate(request)
        else:
            self._waiting.remove(request)
        self._withheld.drop(request.request_id)
        request.become(State.FINISHED)
        request.reason = reason
        request.epoch += 1
        del self._living[request.request_id]
        self._events.append(Finished(now, request.request_id, reason, request.num_output))

    def _vacate(self, request: Request) -> None:
        """Slot and blocks come back, and may be given out in the very next plan: executors run plans in order."""
        self._kv.release(request)
        self._slots.give_back(request.slot)
        request.slot = NO_SLOT_HELD
        del self._running[request.request_id]

    # -- plan ----------------------------------------------------------------------------------------------------

    def plan(self, now: float) -> StepPlan:
        """The next step; it has no rows when nothing can run.

        Raises:
            RuntimeError: more than one step is uncommitted.
        """
        if len(self._flights) > MAX_IN_FLIGHT:
            raise RuntimeError("commit the step in flight before planning two ahead")
        draft = Draft(self._discipline.budget(self.limits))
        if not self._discipline.prompts_alone:
            self._plan_running(draft, now)
            self._plan_waiting(draft, now)
        elif not self._plan_prompts(draft, now):
            self._plan_running(draft, now)
        if draft.joins:
            draft.padding = self._discipline.padding(draft.counts)
        flight = draft.close(self._steps, now, self._slots.take_leaves())
        self._steps += 1
        self._flights.append(flight)
        return flight.plan

    def _plan_running(self, draft: Draft, now: float) -> None:
        """Every running row gets at least a token, so a long prompt never stalls those behind it.

        Only when the budget was lowered below the number who run do the last of them wait until others have ended.
        """
        block_size = self.limits.block_size
        running = tuple(self._running.values())
        behind = len(running)
        for request in running:
            behind -= 1
            if draft.preempted and request.state is not State.RUNNING:
                continue  # preempted a moment ago, for one before it
            start = request.num_scheduled
            known = len(request.tokens) + request.pending
            if request.reason or known >= request.end:
                self._plan_ended(request, draft)
                continue
            if draft.budget < 1:
                draft.refuse(request, TOKEN_BUDGET)
                continue
            count = known - start
            if count > 1:
                count = self._discipline.chunk(count, draft.budget - behind)
            target = start + count
            if target > len(request.blocks) * block_size and not self._extend(request, target, draft, now):
                continue
            draft.row(request, start, count, known)

    def _plan_ended(self, request: Request, draft: Draft) -> None:
        """Its last token is known or in flight."""
        if request.reason or self._discipline.leaves_together:
            draft.hold(request)
        else:
            draft.refuse(request, ENDING)

    def _extend(self, request: Request, num_tokens: int, draft: Draft, now: float) -> bool:
        """Find blocks for a running row, taking them from those last in line; False when it had to yield itself."""
        while (blocks := self._kv.reserve(request, num_tokens)) is None:
            unplanned = [r for r in self._running.values() if not r.reason and not draft.has(r)]
            victim = max(unplanned, key=lambda r: (self._policy.victim_key(r, now), r.arrival))
            self._preempt(victim, draft, now)
            if victim is request:
                return False
        draft.grant(request, blocks)
        return True

    def _preempt(self, request: Request, draft: Draft, now: float) -> None:
        """Drop what was computed; the tokens stay, and so does one that a step in flight is about to sample."""
        self._events.append(Preempted(now, request.request_id, self._steps, request.num_computed))
        draft.preempt(request)
        self._vacate(request)
        request.become(State.PREEMPTED)
        request.epoch += 1
        request.num_scheduled = request.num_computed = 0
        self._waiting.add(request, self._policy.waiting_key(request, now))

    def _plan_prompts(self, draft: Draft, now: float) -> bool:
        """A step of newcomers alone; False when nobody can join."""
        running = tuple(self._running.values())
        self._plan_waiting(draft, now)
        if draft.joins:
            for request in running:
                draft.refuse(request, PROMPTS_ALONE)
        return bool(draft.joins)

    def _plan_waiting(self, draft: Draft, now: float) -> None:
        if not self._waiting:
            return
        oldest = next(iter(self._living.values())).arrived_at
        view = View(len(self._running), len(self._waiting), self.limits.max_num_seqs, oldest)
        gate = self._discipline.gate(view, now)
        may_join = gate.max_new
        while self._waiting:
            request = self._waiting.first()
            reason, reopens_at = self._why_not(request, draft), NEVER
            if may_join <= 0:
                reason, reopens_at = gate.reason, gate.reopens_at
            if reason:
                draft.refuse(request, reason)
                draft.stop = Stop(reason, request.request_id, len(self._waiting) - 1, reopens_at)
                return
            self._admit(request, draft, now)
            may_join -= 1

    def _why_not(self, request: Request, draft: Draft) -> str:
        if not self._slots.num_free:
            return NO_SLOT
        if draft.budget < 1:
            return TOKEN_BUDGET
        missing = self._kv.missing(request, self._discipline.reserve(request))
        if missing > self.num_free_blocks or draft.preempted:  # who just yielded must not come straight back
            return NO_BLOCKS
        return ""

    def _admit(self, request: Request, draft: Draft, now: float) -> None:
        self._waiting.remove(request)
        request.become(State.RUNNING)
        request.slot = self._slots.take()
        self._running[request.request_id] = request
        blocks = self._kv.reserve(request, self._discipline.reserve(request))
        assert blocks is not None
        draft.joins.append(Join(
            request.request_id, request.slot, tuple(request.tokens), request.num_prompt, request.params, request.seed,
            tuple(sorted(request.stop_ids))))
        draft.grant(request, blocks)
        known = len(request.tokens)
        draft.row(request, 0, self._discipline.chunk(known, draft.budget), known)
        self._events.append(Admitted(now, request.request_id, request.slot, self._steps))

    # -- commit --------------------------------------------------------------------------------------------------

    def commit(self, plan: StepPlan, result: StepResult, now: float) -> None:
        """Take in what the oldest uncommitted step yielded.

        Raises:
            RuntimeError: `plan` is not that step, or `result` is another's.
        """
        if not self._flights or self._flights[0].plan is not plan or result.step != plan.step:
            raise RuntimeError(f"step {plan.step} is not the next to commit, or result {result.step} is not its own")
        flight = self._flights.popleft()
        request_ids: list[str] = []
        published: list[tuple[int, ...]] = []
        published_logprobs: list[tuple[TokenLogprobs, ...]] = []
        ended: list[tuple[Request, str]] = []
        overrun = 0
        for request, epoch, count, tokens, logprobs in zip(
                flight.requests, flight.epochs, plan.counts, result.tokens,
                result.logprobs or ((),) * plan.num_rows, strict=True):
            if request.reason:  # ended or held meanwhile
                overrun += len(tokens)
                continue
            if request.epoch == epoch:
                request.num_computed += count
            if tokens:
                request.pending -= 1
                tokens, reason = request.append(tokens)
                request_ids.append(request.request_id)
                published.append(tokens)
                published_logprobs.append(logprobs)
                if reason:
                    ended.append((request, reason))
        ended += self._declared(flight, result, ended)
        told = self._release(Told(request_ids, published, published_logprobs), ended)
        overrun -= sum(len(result.tokens[row]) for row in plan.held)
        self._events.append(Committed(
            now, plan.step, tuple(told.request_ids), tuple(told.tokens), tuple(told.logprobs), overrun))
        for request, reason in ended:
            self._end(request, reason, now)

    @staticmethod
    def _declared(
        flight: Flight, result: StepResult, ended: list[tuple[Request, str]],
    ) -> Iterator[tuple[Request, str]]:
        """Those whom the executor ended: complete, or unable to sample."""
        known = {request.request_id for request, _ in ended}
        for rows, reason in ((result.complete, "stop"), (result.failed, "error")):
            for row in rows:
                request = flight.requests[row]
                if not request.reason and request.request_id not in known:
                    yield request, reason

    def _release(self, told: Told, ended: list[tuple[Request, str]]) -> Told:
        """What may be told now; `ended` is left with those who may go now."""
        together = self._discipline.leaves_together
        if not (together or self._withheld):
            return told
        self._withheld.keep(told)
        gone = [(request, reason) for request, reason in ended if request.state is not State.RUNNING]
        for request, reason in ended:
            if request.state is State.RUNNING:
                request.reason = reason
        held = [request for request in self._running.values() if request.reason]
        if together and len(held) < len(self._running):
            ended[:] = gone
            return self._withheld.release(request.request_id for request, _ in gone)
        ended[:] = gone + [(request, request.reason) for request in held]
        return self._withheld.release_all()

    def rollback(self) -> list[str]:
        """Forget all steps in flight, after a failed one: their rows will be planned again from the last commit.

        Returns the ids of the requests that stood in the oldest of them.
        """
        flights = list(self._flights)
        self._flights.clear()
        for flight in flights:
            for request in flight.requests:
                request.pending = 0
                if request.state is State.RUNNING:
                    request.num_scheduled = request.num_computed
        first = flights[0].requests if flights else ()
        return [request.request_id for request in first if not request.ended]
