"""Request table: all unfinished requests, with their states, slots and blocks.

    add ──► WAITING ──admit──► RUNNING ──end──► FINISHED      also: end from WAITING and PREEMPTED,
               │         preempt ▼  ▲▲ admit                  and add to REJECTED, with an objection
         admit │          PREEMPTED ┘│ arrived, or late
               └─► WAITING_FOR_KV ───┘                        also: preempt and end

Every state change happens here, along TRANSITIONS of `core/request.py`, on the scheduler's decision, and is recorded as
an event.  The lowest free slot is taken first.
"""

from __future__ import annotations

import heapq

from slotwise.core.events import Admitted, Arrived, Event, Finished, Preempted, Rejected
from slotwise.core.held_outputs import HeldOutputs, Outputs
from slotwise.core.host_cache import HostCache
from slotwise.core.interfaces import Policy
from slotwise.core.kv_manager import Allocation, KVManager
from slotwise.core.limits import SchedulerLimits
from slotwise.core.request import NO_SLOT_HELD, Request, State
from slotwise.core.step import StepPlan
from slotwise.core.waiting_queue import Lane, WaitingQueue

HOLDING = (State.WAITING_FOR_KV, State.RUNNING)  # states with a slot and blocks
COMPLETE = ("stop", "length")  # finish reasons of requests whose prompts are computed
Ended = tuple[Request, str]  # and its finish reason


class RequestTable:
    """All unfinished requests.  Only the scheduler changes it."""

    def __init__(self, limits: SchedulerLimits, policy: Policy) -> None:
        self.policy = policy
        self.kv = KVManager(
            limits.num_blocks, limits.groups, HostCache(limits.num_host_blocks, limits.max_loads),
            shares=limits.enable_prefix_caching)
        self.num_slots = limits.max_num_seqs
        self._free_slots = list(range(self.num_slots))  # a heap
        self._released_slots: list[int] = []
        self.unfinished: dict[str, Request] = {}  # in order of arrival
        self.waiting = WaitingQueue(policy.lane_key)
        self.running: dict[str, Request] = {}  # in order of admission
        self.unwanted: list[Request] = []  # requests that will not ask for the blocks another engine keeps for them
        self.held_outputs = HeldOutputs()
        self.events: list[Event] = []
        self.num_with_tpot = 0  # unfinished requests with a TPOT objective
        self._arrivals = 0

    @property
    def num_free_slots(self) -> int:
        return len(self._free_slots)

    def pop_released_slots(self) -> tuple[int, ...]:
        """Slots released since the last call."""
        released, self._released_slots = tuple(self._released_slots), []
        return released

    def check(self) -> None:
        """Check the conservation of requests, slots and blocks.  Raises AssertionError naming the violation."""
        self.kv.check(self.unfinished.values())
        for request in self.unfinished.values():
            holds_slot = request.holds_slot
            assert holds_slot == (request.state in HOLDING) == (request.request_id in self.running), request
            assert request.num_computed <= request.num_scheduled <= request.num_known, request
            assert request.pending >= 0, request
            ends = [table.end for table in request.tables]
            assert request.num_scheduled <= request.capacity == min(ends, default=0) * self.kv.block_size, request
            holds_all = not holds_slot or request.num_known <= request.capacity + 1
            assert holds_all or self.kv.is_windowed, request
        assert len(self.unfinished) == len(self.running) + len(self.waiting)
        taken = [request.slot for request in self.running.values()]
        assert sorted([*taken, *self._free_slots]) == list(range(self.num_slots))

    def add(self, request: Request, objection: str, now: float) -> None:
        """Enqueue a request; with an objection, reject it."""
        request.arrived_at = now
        request.arrival = self._arrivals
        self._arrivals += 1
        if request.request_id in self.unfinished:
            objection = f"a request named {request.request_id} is still alive"
        if objection:
            request.transition(State.REJECTED)
            request.reason = objection
            self.events.append(Rejected(now, request.request_id, objection))
            return
        self.unfinished[request.request_id] = request
        self.num_with_tpot += request.slo.tpot is not None
        self.policy.arrived(request, now)
        self._enqueue(request, now)
        self.events.append(Arrived(now, request.request_id, request.num_prompt))

    def admit(self, request: Request, allocation: Allocation, step: int, now: float) -> None:
        """Give a waiting request a slot and the blocks of `allocation`; cached tokens count as computed."""
        self.waiting.remove(request)
        request.slot = heapq.heappop(self._free_slots)
        self.running[request.request_id] = request
        request.num_at_join = len(request.tokens)
        request.start_from(self.kv.allocate(request, allocation))
        if self._may_receive(request) and request.num_computed < len(request.tokens) - 1:
            request.transition(State.WAITING_FOR_KV)
            self.await_kv(request, now)
        else:
            self._need_no_kv(request)
            request.transition(State.RUNNING)
        self.policy.admitted(request, now)
        self.events.append(Admitted(now, request.request_id, request.slot, step, request.num_computed))

    def _may_receive(self, request: Request) -> bool:
        """True before a request asks another engine for its blocks, which it does once."""
        return request.kv is not None and not request.kv.sends and request.state is State.WAITING

    def _need_no_kv(self, request: Request) -> None:
        """Remember that a request which has not asked will not."""
        if self._may_receive(request):
            self.unwanted.append(request)

    def await_kv(self, request: Request, now: float) -> None:
        """Wait for the next blocks of a request from now on."""
        assert request.kv is not None
        request.kv_until = now + request.kv.timeout

    def preempt(self, request: Request, step: int, now: float) -> None:
        """Release slot and blocks, and requeue; known tokens are kept, and so are those of a step in flight."""
        self.events.append(Preempted(now, request.request_id, step, request.num_computed))
        self._release(request)
        request.transition(State.PREEMPTED)
        request.epoch += 1
        request.start_from(0)
        self.policy.preempted(request, now)
        self._enqueue(request, now)

    def end(self, request: Request, reason: str, now: float, message: str = "") -> None:
        """Finish an unfinished request: release what it holds, and record the event."""
        self.policy.finished(request, reason, now)
        if request.holds_slot:
            if request.kv is not None and request.kv.sends and reason in COMPLETE:
                self.kv.pin(request, request.kv, now)
            self._release(request)
        else:
            self._need_no_kv(request)
            self.waiting.remove(request)
        self.held_outputs.drop(request.request_id)
        request.transition(State.FINISHED)
        request.reason = reason
        request.epoch += 1
        del self.unfinished[request.request_id]
        self.num_with_tpot -= request.slo.tpot is not None
        self.events.append(Finished(now, request.request_id, reason, request.num_output, message))

    def reject(self, request: Request, objection: str, now: float) -> None:
        """Reject a waiting request that turns out never to be able to run."""
        self.policy.finished(request, "rejected", now)
        self._need_no_kv(request)
        self.waiting.remove(request)
        request.transition(State.REJECTED)
        request.reason = objection
        del self.unfinished[request.request_id]
        self.num_with_tpot -= request.slo.tpot is not None
        self.events.append(Rejected(now, request.request_id, objection))

    def hold(
        self, outputs: Outputs, ended: list[Ended], plan: StepPlan, *, together: bool,
    ) -> tuple[Outputs, list[Ended]]:
        """Hold the outputs of a batch that leaves `together` until all of its requests have ended.

        Returns the outputs to publish now, and those of `ended` that may finish now.
        """
        self.held_outputs.keep(outputs)
        gone = [(request, reason) for request, reason in ended if request.state is not State.RUNNING]
        for request, reason in ended:
            if request.state is State.RUNNING:
                request.reason = reason  # held: it keeps its slot until its batch has ended
        held = [request for request in self.running.values() if request.reason]
        if together and len(held) < len(self.running):
            return self.held_outputs.release(request.request_id for request, _ in gone), gone
        present = frozenset(plan.request_ids)  # a held row that pauses here finishes in its next step
        ending = gone + [(request, request.reason) for request in held if request.request_id in present]
        return self.held_outputs.release(plan.request_ids), ending

    def set_policy(self, policy: Policy, now: float) -> None:
        """Replace the policy, and requeue all waiting requests by it."""
        self.policy = policy
        self.waiting = WaitingQueue(policy.lane_key)
        for request in self.unfinished.values():
            policy.arrived(request, now)
            if request.holds_slot:
                policy.admitted(request, now)
            else:
                self._enqueue(request, now)

    def requeue(self, request: Request, now: float) -> None:
        """Re-insert a waiting request by its key as of `now`."""
        self.waiting.remove(request)
        self._enqueue(request, now)

    def _enqueue(self, request: Request, now: float) -> None:
        policy = self.policy
        moment = policy.patience(request, now)
        if request.state is State.WAITING:
            moment = min(moment, request.deadline)
        lane = Lane(request.slo.tier, policy.lane(request))
        self.waiting.add(request, lane, policy.waiting_key(request, now), moment)

    def _release(self, request: Request) -> None:
        """Release slot and blocks.  The next plan may reuse them, because executors run plans in order."""
        self.kv.release(request)
        heapq.heappush(self._free_slots, request.slot)
        self._released_slots.append(request.slot)
        request.slot = NO_SLOT_HELD
        del self.running[request.request_id]
