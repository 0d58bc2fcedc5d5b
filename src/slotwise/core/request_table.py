"""Request table: all unfinished requests, with their states, slots and blocks.

    add ──┬─────────► WAITING ──admit──► RUNNING ──end──► FINISHED    also: end from every state,
          │              ▲          preempt ▼  ▲ admit                and add to REJECTED, with an objection
          │  arrived, or late        PREEMPTED ┘
          └─► WAITING_FOR_KV

States change here alone, along TRANSITIONS of `core/request.py`, on the scheduler's decision.  Each change is recorded
as an event, except that from WAITING_FOR_KV to WAITING.  The lowest free slot is taken first.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Collection

from slotwise.core.events import Admitted, Arrived, Event, Finished, Preempted, Rejected
from slotwise.core.held_outputs import HeldOutputs, Outputs
from slotwise.core.host_cache import HostCache
from slotwise.core.interfaces import Policy
from slotwise.core.kv_manager import Allocation, KVManager
from slotwise.core.landings import Landings
from slotwise.core.limits import SchedulerLimits
from slotwise.core.request import NO_SLOT_HELD, Request, State
from slotwise.core.step import StepPlan
from slotwise.core.waiting_queue import Lane, WaitingQueue

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
        self.incoming = WaitingQueue(policy.lane_key)  # those WAITING_FOR_KV
        self.landings = Landings(self.num_slots, limits.num_blocks)
        self.running: dict[str, Request] = {}  # in order of admission
        self.given_up: list[Request] = []  # WAITING_FOR_KV, without the blocks they had; enqueued before the next plan
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
            assert holds_slot == (request.state is State.RUNNING) == (request.request_id in self.running), request
            assert bool(request.tables) == (holds_slot or request.request_id in self.landings), request
            assert request.num_computed <= request.num_scheduled <= request.num_known, request
            assert request.pending >= 0, request
            ends = [table.end for table in request.tables]
            assert request.num_scheduled <= request.capacity == min(ends, default=0) * self.kv.block_size, request
            holds_all = not holds_slot or request.num_known <= request.capacity + 1
            assert holds_all or self.kv.is_windowed, request
        assert len(self.unfinished) == len(self.running) + len(self.waiting) + len(self.incoming)
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
        if request.kv is not None and not request.kv.sends:
            request.transition(State.WAITING_FOR_KV)
        self.num_with_tpot += request.slo.tpot is not None
        self.policy.arrived(request, now)
        self._enqueue(request, now)
        self.events.append(Arrived(now, request.request_id, request.num_prompt))

    def land(self, request: Request, allocation: Allocation, now: float) -> None:
        """Give a request WAITING_FOR_KV the blocks of `allocation`, which another engine's contents are written to."""
        request.start_from(self.kv.allocate(request, allocation))
        self.landings.add(request)
        if request.num_computed < len(request.tokens) - 1:
            self.await_kv(request, now)
        else:
            self.unwanted.append(request)
            self.arrived(request, now)

    def await_kv(self, request: Request, now: float) -> None:
        """Wait for the next blocks of a request from now on."""
        assert request.kv is not None
        request.kv_until = now + request.kv.timeout

    def arrived(self, request: Request, now: float) -> None:
        """Enqueue a request WAITING_FOR_KV: it computes what has not arrived."""
        self.incoming.remove(request)
        request.transition(State.WAITING)
        self._enqueue(request, now)

    def reclaim(self, lacking: Callable[[], int], kept: Collection[int], landed: Collection[Request]) -> bool:
        """Release blocks that no running request holds, until `lacking` returns less than 1.

        Pins go first, the oldest before the others; then requests of `landed` lose their blocks, and compute their
        prompts.  Returns whether there is enough; else nothing changes.

        Args:
            kept: blocks that are of no use when they are released.
        """
        if lacking() <= 0:
            return True
        holders = [*self.kv.pinned.holders, *[request.blocks for request in landed]]
        dropped = Counter(block for blocks in holders for block in blocks if block not in kept)
        if self.kv.pool.num_freed(dropped) < lacking():
            return False
        left = list(landed)
        while lacking() > 0:
            if self.kv.pinned:
                self.kv.pinned.unpin_oldest()
                continue
            victim = self.landings.victim(left)
            left.remove(victim)
            self._lose_blocks(victim)
            if victim.state is State.WAITING_FOR_KV:
                victim.kv = None
                self.given_up.append(victim)
        return True

    def _lose_blocks(self, request: Request) -> None:
        """A request without a slot releases the blocks in which it has landed."""
        self.landings.remove(request)
        self.kv.release(request)
        request.num_received = 0
        request.start_from(0)

    def admit(self, request: Request, allocation: Allocation, step: int, now: float) -> None:
        """Give a waiting request a slot and the blocks of `allocation`; cached tokens count as computed."""
        self.waiting.remove(request)
        if request.request_id in self.landings:
            self.landings.remove(request)
        request.slot = heapq.heappop(self._free_slots)
        self.running[request.request_id] = request
        request.num_at_join = len(request.tokens)
        request.start_from(self.kv.allocate(request, allocation))
        request.transition(State.RUNNING)
        self.policy.admitted(request, now)
        cached = request.num_computed - request.num_received
        self.events.append(Admitted(now, request.request_id, request.slot, step, cached))

    def preempt(self, request: Request, step: int, now: float) -> None:
        """Release slot and blocks, and requeue; known tokens are kept, and so are those of a step in flight."""
        self.events.append(Preempted(now, request.request_id, step, request.num_computed))
        self._release(request)
        request.transition(State.PREEMPTED)
        request.epoch += 1
        request.num_received = 0
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
            self._leave_queue(request)
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
        self._leave_queue(request)
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
        self.waiting, self.incoming = WaitingQueue(policy.lane_key), WaitingQueue(policy.lane_key)
        for request in self.unfinished.values():
            policy.arrived(request, now)
            if request.holds_slot:
                policy.admitted(request, now)
            else:
                self._enqueue(request, now)

    def requeue(self, request: Request, now: float) -> None:
        """Re-insert a waiting request by its key as of `now`."""
        self._queue_of(request).remove(request)
        self._enqueue(request, now)

    def _queue_of(self, request: Request) -> WaitingQueue:
        return self.incoming if request.state is State.WAITING_FOR_KV else self.waiting

    def _enqueue(self, request: Request, now: float) -> None:
        policy = self.policy
        moment = policy.patience(request, now)
        if request.state is not State.PREEMPTED:
            moment = min(moment, request.deadline)
        group = request.slo.tenant if request.state is State.WAITING_FOR_KV else request.slo.tier
        lane = Lane(group, policy.lane(request))
        self._queue_of(request).add(request, lane, policy.waiting_key(request, now), moment)

    def _leave_queue(self, request: Request) -> None:
        """A request without a slot is about to end."""
        self._queue_of(request).remove(request)
        if request.request_id in self.landings:
            self._lose_blocks(request)
        elif request.state is State.WAITING_FOR_KV and request.kv is not None:
            self.unwanted.append(request)  # it has not asked, and will not

    def _release(self, request: Request) -> None:
        """Release slot and blocks.  The next plan may reuse them, because executors run plans in order."""
        self.kv.release(request)
        heapq.heappush(self._free_slots, request.slot)
        self._released_slots.append(request.slot)
        request.slot = NO_SLOT_HELD
        del self.running[request.request_id]
