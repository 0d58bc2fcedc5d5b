"""The scheduler: which requests run in the next step, with how many tokens and which cache blocks.

    schedule(now)                returns a StepPlan: usually running requests first, then waiting ones
    ... the executor runs it ...
    commit(plan, result, now)    appends tokens, finishes requests, frees blocks; returns the Outcome

The Scheduler owns every request from its arrival to its end.  Its methods stand in the order in which a step happens:
waiting requests expire, requests that wait for another engine or the disk get blocks, running rows are preempted for
higher ranks, then running and waiting rows are planned; then commit.  States change only in the last section of this
file, in `add` and in `found_on_disk`, along TRANSITIONS of `core/request.py`:

    add ──┬─────────► WAITING ──admit──► RUNNING ──finish──► FINISHED    also: finish from every unfinished state,
          │              ▲          preempt ▼  ▲ admit                   and from add or a wait to REJECTED,
          │  arrived, or late        PREEMPTED ┘                         with an objection
          └─► WAITING_FOR_KV

A *discipline* says when requests may join a batch and leave it (continuous batching, or a baseline); a *policy* orders
requests and chooses victims (`core/interfaces.py` has both).  The modules that it calls do not know the scheduler: the
cache (`core/kv_manager.py`), the sizes of prompt chunks (`core/chunking.py`), which rows pause for another tenant's
prompt (`core/prefill_isolation.py`), drafts (`core/drafting.py`), and prompts that another engine computes
(`core/kv_transfers.py`).

A running request that gets no token in this step is in the plan's `refused`, unless the plan preempts it.  The reason
is one of these: its last token is in flight (ENDING), its drafts are in flight (VERIFYING), it is in another step
(MICRO_BATCH), a budget is spent (TOKEN_BUDGET, SHORT_STEP, TIME_BUDGET), it pauses for a prompt (FIRST_TOKEN), or the
discipline starts prompts alone (PROMPTS_ALONE).  A waiting request is admitted if the discipline's gate is open and
slots, token budget, blocks and step time suffice; `_decide` has all conditions, in their order.

One step may be in flight while the next is planned; a model divided into n stages may have n - 1 in flight.  schedule()
works from *scheduled* token counts, commit() advances *computed* ones.  A prefix hit always ends before the last known
token, which is computed for its logits.  A freed block may be reused by the very next plan, although a step in flight
still reads it, because executors run plans in order.  If a request finishes after its next row was planned, that row's
tokens are dropped.  A preemption keeps the pending token of a row in flight, and the request is not admitted again
until that token is committed.  A decoding row may carry drafts: it yields 1 to 1 + drafts tokens, and only the commit
tells how many, so it is in no other step before that.  Where a model's layers are divided into stages that compute in
parallel, a decode row is in one step at a time, too:

    stage 0    | a b | c d | a b | c d |          a step has half of the decode rows, where there are two stages
    stage 1          | a b | c d | a b | c d |

The scheduler is deterministic: time is an argument, ties fall to the arrival number, and no code here reads a clock,
draws a random number or iterates a set.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import chain, repeat
from operator import length_hint

from slotwise.core.chunking import Chunking
from slotwise.core.drafting import Drafting
from slotwise.core.eviction import eviction_orders
from slotwise.core.host_cache import HostCache
from slotwise.core.interfaces import NEVER, Discipline, Gate, Policy, Proposer, View
from slotwise.core.kv_manager import Allocation, KVManager
from slotwise.core.kv_transfers import KVTransfers
from slotwise.core.plan_builder import InFlight, PlanBuilder
from slotwise.core.prefill_isolation import PrefillIsolation, goes_before
from slotwise.core.reasons import (
    ENDING,
    FIRST_TOKEN,
    GRAMMAR_COMPILING,
    LOAD_LIMIT,
    MICRO_BATCH,
    NO_ADAPTER_SLOT,
    NO_BLOCKS,
    NO_SLOT,
    OUTRANKED,
    PROMPTS_ALONE,
    TIER_CAP,
    TIME_BUDGET,
    TOKEN_PENDING,
    VERIFYING,
    WAITING_FOR_KV,
)
from slotwise.core.record import (
    NO_OUTCOME,
    Admission,
    CacheLookup,
    Logprobs,
    NewRequest,
    Outcome,
    PrefixOnDisk,
    ReceivedBlocks,
    RequestEnd,
    RowKind,
    StepPlan,
    StepResult,
    Stop,
    Tokens,
)
from slotwise.core.request import NO_SLOT_HELD, KVTransfer, Request, State
from slotwise.core.scheduler_limits import ERROR, SchedulerLimits
from slotwise.core.step_time import StepTimeModel, work_of
from slotwise.core.waiting_queue import SubQueue, WaitingQueue

PREFILL, DECODE = RowKind.PREFILL, RowKind.DECODE
COMPLETE = ("stop", "length")  # finish reasons that imply that the whole prompt was computed
MAX_OUTRANKED = 4  # waiting requests that a step preempts for, and running ones that it preempts for each of them
# Requests that a step examines after one that waits for blocks: each costs a prefix lookup in every step of the wait.
MAX_LOOK = 8
MAX_UNSLOTTED = 64  # requests waiting for an adapter's slot that a step examines; each costs a microsecond

NO_PROBABILITIES = "the model gave no valid probabilities for the next token"  # of a row that failed alone

Ended = list[tuple[Request, str]]
"""Requests, and the reasons for which they finish."""


class Scheduler:
    """Owns the state of every request.

    Args:
        times: predicts step times; commit() trains it while any policy, limit or request needs predictions.
        proposer: drafts tokens for decoding rows; None: no row has drafts.
    """

    def __init__(
        self, limits: SchedulerLimits, discipline: Discipline, policy: Policy, times: StepTimeModel | None = None,
        proposer: Proposer | None = None,
    ) -> None:
        self.times = times or StepTimeModel()
        self.policy = policy
        self.kv = KVManager(
            limits.num_blocks, limits.groups, HostCache(limits.num_host_blocks, limits.max_loads),
            shares=limits.enable_prefix_caching)
        self.unfinished: dict[int, Request] = {}  # in order of arrival
        self.running: dict[int, Request] = {}  # in order of admission
        self._rows_in_order: Sequence[Request] | None = None  # None: not known
        self.waiting = WaitingQueue(policy.lane_key)
        self.transfers = KVTransfers(
            self.kv.pinned, limits.block_size, self.unfinished, self.running, policy.lane_key,
            limits.max_num_seqs, limits.num_blocks)
        self.ended: list[RequestEnd] = []  # in no outcome yet
        self.num_slots = limits.max_num_seqs
        self._free_slots = list(range(self.num_slots))  # a heap: the lowest one is taken first
        self._released_slots: list[int] = []  # since the last plan
        self._in_flight: deque[InFlight] = deque()  # planned and not yet committed, oldest first
        self._held: dict[int, tuple[Tokens, Logprobs]] = {}  # outputs kept until a batch that leaves together has ended
        self._drafting = Drafting(self.kv, self.times, proposer)
        self._isolation = PrefillIsolation()
        self._eviction_policy = ""  # not set
        self._last_victim = -1
        self._num_with_tpot = 0  # unfinished requests with a TPOT objective
        self._arrivals = 0
        self._steps = 0
        self._set_limits(limits, discipline)

    def _set_limits(self, limits: SchedulerLimits, discipline: Discipline) -> None:
        policy, share = limits.eviction_policy, limits.tenant_cache_share
        if policy != self._eviction_policy:
            orders = eviction_orders(limits, self.kv.prefix, self.kv.host.content, self.times)
            self.kv.pool.order_by(orders.device)
            self.kv.host.order_by(orders.host)
            self._eviction_policy = policy
        for order in (self.kv.pool.cached, self.kv.host.order):
            order.share_is(share)
        self.limits = limits
        self._discipline = discipline
        self._chunking = Chunking(limits, discipline, self.policy, self.times)
        self._reserved = {tier.name: tier.slots for tier in limits.tiers if tier.slots}

    # -- state ---------------------------------------------------------------------------------------------------

    @property
    def num_running(self) -> int:
        return len(self.running)

    @property
    def num_waiting(self) -> int:
        return len(self.waiting)

    @property
    def num_unfinished(self) -> int:
        return len(self.unfinished)

    @property
    def num_free_blocks(self) -> int:
        """Blocks without a reference; some of them may hold cached prefixes."""
        return self.kv.pool.num_available

    @property
    def has_work(self) -> bool:
        return bool(self.unfinished) or bool(self._in_flight)

    @property
    def can_plan_rows(self) -> bool:
        """Whether a step planned now may have rows."""
        if self.limits.stages == 1:
            return bool(self.unfinished)
        return bool(self.waiting and self._free_slots) or any(
            not request.pending for request in self.running.values())

    def _learns_from(self, counts: Sequence[int]) -> bool:
        """Whether the step-time model is trained on a step of rows with `counts` tokens."""
        return self.times.learns and (
            self._chunking.limits_time or self._num_with_tpot > 0 or self.policy.needs_step_times
            or (self.kv.pool.cached.prices_chunks and sum(counts) > len(counts)))

    def requests(self) -> tuple[Request, ...]:
        """All unfinished requests, in order of arrival."""
        return tuple(self.unfinished.values())

    def queue_positions(self, request_ids: Collection[int], now: float) -> dict[int, int]:
        """Queue position of each waiting request among `request_ids`: how many are to start before it, as of `now`."""
        return self.waiting.positions(request_ids, now)

    def pop_ended(self) -> tuple[RequestEnd, ...]:
        """The ends of requests since the last call, or the last commit."""
        ended, self.ended = tuple(self.ended), []
        return ended

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
            assert bool(request.tables) == (holds_slot or self.transfers.is_holder(request)), request
            assert request.num_computed <= request.num_scheduled <= request.num_known, request
            assert request.pending >= 0, request
            ends = [table.end for table in request.tables]
            assert request.num_scheduled <= request.capacity == min(ends, default=0) * self.kv.block_size, request
            holds_all = not holds_slot or request.num_known <= request.capacity + 1
            assert holds_all or self.kv.is_windowed, request
        assert len(self.unfinished) == len(self.running) + len(self.waiting) + len(self.transfers.incoming)
        ordered = self.running.values() if self._rows_in_order is None else self._rows_in_order
        assert sorted([request.request_id for request in ordered]) == sorted(self.running)
        taken = [request.slot for request in self.running.values()]
        assert sorted([*taken, *self._free_slots]) == list(range(self.num_slots))

    # -- commands ------------------------------------------------------------------------------------------------

    def configure(self, limits: SchedulerLimits, discipline: Discipline, policy: Policy, now: float) -> None:
        """Replace limits, discipline and policy from the next plan on.  Running requests keep their slots.

        Raises:
            ValueError: the limits change what is fixed at the start: the cache, `max_model_len`, or more slots.
        """
        if limits.fixed != self.limits.fixed:
            raise ValueError("the cache and the longest sequence are fixed at the start")
        if limits.max_num_seqs > self.num_slots:
            raise ValueError(f"max_num_seqs is at most the {self.num_slots} slots made at the start")
        if policy is not self.policy:
            self.policy, self._rows_in_order = policy, None
            self.waiting, self.transfers.incoming = WaitingQueue(policy.lane_key), WaitingQueue(policy.lane_key)
            for request in self.unfinished.values():
                policy.arrived(request, now)
                if request.holds_slot:
                    policy.admitted(request, now)
                else:
                    self._enqueue(request, now)
        self._set_limits(limits, discipline)

    def add(self, request: Request, now: float) -> None:
        """Enqueue a request, or reject it if it could never run or its id is in use."""
        spec = request.spec
        request.limit(self.limits.longest(request.num_prompt, spec.max_tokens) + (spec.pooling is not None))
        request.arrived_at = now
        if spec.queue_timeout:
            request.deadline = now + spec.queue_timeout
        request.arrival = self._arrivals
        self._arrivals += 1
        objection = self.limits.objection(request.num_prompt, spec.max_tokens) or self.transfers.objection(request)
        if request.request_id in self.unfinished:
            objection = f"request id {request.request_id} is already in use"
        if objection:
            request.transition(State.REJECTED)
            request.reason = objection
            self.ended.append(RequestEnd(request.request_id, "rejected", 0, objection))
            return
        self.unfinished[request.request_id] = request
        if request.kv is not None and not request.kv.sends:
            request.transition(State.WAITING_FOR_KV)
        self._num_with_tpot += request.spec.slo.tpot is not None
        self.policy.arrived(request, now)
        self._enqueue(request, now)

    def finish(self, request_id: int, reason: str, now: float, message: str = "") -> None:
        """Finish a request in any state.  Does nothing if the id is unknown or already finished."""
        request = self.unfinished.get(request_id)
        if request is not None:
            self.kv.pool.cached.now = now
            self._finish(request, reason, now, message)

    def compiled(self, request_id: int, objection: str, now: float) -> None:
        """The compilation of a waiting request's grammar has ended; with an objection, the request is rejected."""
        request = self.unfinished.get(request_id)
        if request is not None and request.is_compiling:
            request.is_compiling = False
            if objection:
                self._reject(request, objection, now)

    def found_on_disk(self, found: PrefixOnDisk, now: float) -> None:
        """Let a new request wait for the blocks of its prompt that are on disk.  Does nothing for any other."""
        request = self.unfinished.get(found.request_id)
        if request is None or request.state is not State.WAITING or request.kv is not None:
            return
        self.waiting.remove(request)
        request.kv = KVTransfer("", sends=False, timeout=found.timeout, num_on_disk=found.num_blocks)
        request.transition(State.WAITING_FOR_KV)
        self._enqueue(request, now)

    def received(self, arrival: ReceivedBlocks, now: float) -> None:
        """Count blocks that have arrived, from another engine or from disk, as computed.

        Does nothing for a request that waits for none.
        """
        request = self.unfinished.get(arrival.request_id)
        if request is None or request.state is not State.WAITING_FOR_KV or not request.tables:
            return
        computed = min(arrival.num_blocks * self.kv.block_size, len(request.tokens) - 1)
        if computed > request.num_computed:
            request.num_received += computed - request.num_computed
            request.start_from(computed)
            if computed >= request.advance_at:
                self.kv.advance(request)
        if arrival.is_last:
            self._end_kv_wait(request, now)
        else:
            self.transfers.await_blocks(request, now)

    def acknowledged(self, transfer_id: str) -> None:
        """Release the blocks that another engine has read, and keep none that it no longer wants."""
        self.kv.pinned.unpin(transfer_id)
        for request in self.unfinished.values():
            if request.kv is not None and request.kv.transfer_id == transfer_id and request.kv.sends:
                request.kv = None

    # -- a step --------------------------------------------------------------------------------------------------

    def schedule(self, now: float) -> StepPlan:
        """Returns the next step; it has no rows when no request can run.

        Raises:
            RuntimeError: more steps than `limits.max_in_flight` are uncommitted.
        """
        if len(self._in_flight) > self.limits.max_in_flight:
            raise RuntimeError(f"commit a step in flight before planning {len(self._in_flight)} ahead")
        self.kv.pool.cached.now = now
        self._expire(now)
        builder = PlanBuilder(
            self._steps, now, self._discipline.budget(self.limits),
            self._chunking.time_budget(self.running.values(), len(self.waiting), self._num_with_tpot))
        self._allocate_incoming(now)
        if self.policy.may_preempt and not self._discipline.leaves_together:
            self._preempt_outranked(builder)
        if self._discipline.prompts_alone:
            running = tuple(self.running.values())
            self._add_waiting(builder)
            if builder.new_requests:
                for request in running:
                    builder.refuse(request, PROMPTS_ALONE)
            else:
                self._add_running(builder)
        elif self.policy.isolates_prefill and not self._discipline.leaves_together:
            self._add_isolated(builder)
        else:
            self._add_running(builder)
            self._add_waiting(builder)
        self._refuse_receiving(builder)
        self._drafting.add(builder)
        if builder.new_requests:  # in other steps all rows of a padded batch have one token
            builder.padding = self._discipline.padding(builder.counts)
        step = builder.close(
            self.pop_released_slots(), self.kv.pop_freed(), self.kv.pop_expired(), self.kv.host.pop_copies())
        self._steps += 1
        self._in_flight.append(step)
        return step.plan

    def _expire(self, now: float) -> None:
        """Finish waiting requests past their deadline or shed by the policy; requeue the others that are due.

        If blocks from another engine are late, the request computes its own prompt.
        """
        for request in [*self.waiting.due(now), *self.transfers.incoming.due(now)]:
            if request.state is not State.PREEMPTED and request.deadline <= now:
                what = "its prompt did not arrive" if request.state is State.WAITING_FOR_KV else "no slot came free"
                waited = f"{what} in {now - request.arrived_at:.1f} s, and it was to wait no longer"
                self._finish(request, "timeout", now, waited)
            elif why := self.policy.overdue(request, now):
                self._finish(request, "shed", now, why)
            else:
                self._queue_of(request).remove(request)
                self._enqueue(request, now)
        self.kv.pinned.expire(now)
        for request in self.transfers.pop_late(now):
            self._end_kv_wait(request, now)

    def _allocate_incoming(self, now: float) -> None:
        """Give blocks to the requests that wait for another engine or the disk.

        In the policy's order, and by their tenants' shares.  A request that does not get its blocks stops only the
        later ones of its tenant.
        """
        if not self.transfers.incoming:
            return
        queue = self.transfers.incoming.walk(now)
        while (request := queue.next()) is not None:
            if request.tables:
                continue
            needed = self._needed(request)
            allowed = self.transfers.allows(request.spec.slo.tenant, sum(needed.ends))
            if not allowed or len(needed.on_host) > self.kv.host.num_loads_left or (
                    allocation := self._free_for(request, ())) is None:
                queue.close(request.spec.slo.tenant)
                continue
            request.start_from(self.kv.allocate(request, allocation, now))
            self.transfers.add_holder(request)
            if self.transfers.is_missing_blocks(request):
                self.transfers.await_blocks(request, now)
            else:
                self.transfers.unwanted.append(request)
                self._end_kv_wait(request, now)

    def _refuse_receiving(self, builder: PlanBuilder) -> None:
        """Record in the plan which requests wait for blocks of their prompts; those without blocks wait behind them."""
        if not self.transfers.incoming:
            return
        receiving, num_incoming = list(self.transfers.receiving()), len(self.transfers.incoming)
        for request in receiving:
            builder.refuse(request, WAITING_FOR_KV)
        if builder.stop is not None:
            builder.stop = builder.stop._replace(num_behind=builder.stop.num_behind + num_incoming)
        elif receiving:  # they stop no other request
            host = self.kv.host
            may_follow = num_incoming > len(receiving) and host.num_loads_left < host.max_loads  # in the next plan
            builder.stop = Stop(WAITING_FOR_KV, receiving[0].request_id, num_incoming - 1,
                                builder.now if may_follow else _known(self.transfers.next_moment))

    # -- preemption ----------------------------------------------------------------------------------------------

    def _preempt_outranked(self, builder: PlanBuilder) -> None:
        """Preempt running requests for the first waiting ones without capacity: all victims that one needs, or none."""
        for _ in range(MAX_OUTRANKED):
            request, before = self._first_without_capacity(builder)
            victims = [] if request is None else self._outranked(request, before, builder.now)
            for victim in victims:
                builder.preempt(victim, OUTRANKED, victim.num_computed)
                self._preempt(victim, builder.now)
            if not victims:
                return

    def _first_without_capacity(self, builder: PlanBuilder) -> tuple[Request | None, int]:
        """Returns the first waiting request that cannot get a slot, or the head of the queue if it cannot get blocks.

        Also returns its position in the queue.  None: every waiting request fits.
        """
        if not self.waiting:
            return None, 0
        walk = self.waiting.walk(builder.now)
        num_free = min(len(self._free_slots), max(0, self._gate(builder.now).max_new))
        for before in range(num_free + 1):
            while (request := walk.next()) is not None and self._waits_apart(request):
                pass
            if request is None or min(num_free, self._num_slots_for(request)) <= before:
                break
            if before == 0 and self._allocation(request, builder) is None:
                break
        return request, before

    def _outranked(self, request: Request, before: int, now: float) -> list[Request]:
        """Returns the requests to preempt so that `request`, at queue position `before`, gets a slot and blocks."""
        surplus = self._surplus()
        ranked = sorted(
            (running for running in self.running.values() if not running.reason),
            key=lambda running: (self.policy.victim_key(running, now), running.arrival), reverse=True)
        needed = self._needed(request)

        def num_missing(leaving: Collection[Request]) -> int:
            return self.kv.missing(needed, leaving) + self._spare(request, len(self.running) - len(leaving))

        missing = num_missing(())
        slots = min(self._num_slots_for(request), self._gate(now).max_new) - before
        victims: list[Request] = []
        for running in ranked:
            if (slots >= 1 and missing <= 0) or len(victims) == MAX_OUTRANKED:
                break
            tier = running.spec.slo.tier
            if surplus.get(tier, 1) <= 0 and tier != request.spec.slo.tier:
                continue  # its slot is reserved for its tier
            if not self.policy.preempts(request, running, now):
                continue
            victims.append(running)
            surplus[tier] -= 1
            slots += 1
            missing = num_missing(victims)
        return victims if slots >= 1 and missing <= 0 else []

    def _extend(self, request: Request, num_tokens: int, builder: PlanBuilder) -> bool:
        """Allocate the blocks a running row needs, preempting victims; False if the row itself was preempted or ended.

        Blocks that no row holds go first: pinned ones, then those of requests without a slot.
        """
        while (blocks := self.kv.extend(request, num_tokens, builder.now)) is None:
            if self._reclaim(lambda: self.kv.num_lacking_to(request, num_tokens), (), list(self.transfers.holders)):
                continue
            victim = self._victim(builder)
            builder.preempt(victim, NO_BLOCKS, 0 if self.limits.on_pressure == ERROR else victim.num_computed)
            if self.limits.on_pressure == ERROR:
                message = "the cache is full, and this server ends requests instead of preempting them; try again later"
                self._finish(victim, "error", builder.now, message)
            else:
                self._preempt(victim, builder.now)
            if victim is request:
                return False
        builder.new_blocks += blocks
        return True

    def _victim(self, builder: PlanBuilder) -> Request:
        """Choose the victim for blocks among the rows that are not planned yet.

        Of the half that ranks lower, rounded up, those with the worst priority; of them the one with the fewest
        computed tokens, but the last victim only where it is the only one.
        """
        key = self.policy.victim_key
        ranked = [(key(r, builder.now), r.arrival, r)
                  for r in self.running.values() if not r.reason and not builder.has(r)]
        ranked.sort(key=lambda entry: entry[:2])
        worst = ranked[-1][0][0]
        last = [request for rank, _, request in ranked[len(ranked) // 2 :] if rank[0] == worst]
        victim = min(last, key=lambda r: (r.request_id == self._last_victim, r.num_computed, -r.arrival))
        self._last_victim = victim.request_id
        return victim

    # -- running rows --------------------------------------------------------------------------------------------

    def rows_in_order(self, now: float) -> Sequence[Request]:
        """The running requests in the order of a plan's rows."""
        if not self.policy.orders_running:
            return tuple(self.running.values())
        if self._rows_in_order is None or not self.policy.ranks_once:
            key = self.policy.running_key
            self._rows_in_order = tuple(sorted(
                self.running.values(), key=lambda request: (key(request, now), request.arrival)))
        return self._rows_in_order

    def _add_running(self, builder: PlanBuilder) -> None:
        """Plan all running rows but those paused or deferred, in the policy's order."""
        running = self.rows_in_order(builder.now)
        if builder.paused or builder.deferred:
            left_out = builder.paused.union(request.request_id for request in builder.deferred)
            running = [request for request in running if request.request_id not in left_out]
        self._add_rows(running, builder)

    def _add_late(self, running: Sequence[Request], builder: PlanBuilder) -> None:
        """Plan running rows after admissions; in `refused` they are still listed before waiting requests."""
        refused, builder.refused = builder.refused, []
        self._add_rows(running, builder)
        builder.refused += refused

    def _add_rows(self, running: Sequence[Request], builder: PlanBuilder) -> None:
        """Plan a token, or a prefill chunk, of each request; or refuse it, with the reason."""
        if self.limits.stages > 1:
            running = self._micro_batch(running, builder)
        if builder.time is not None:  # decoding rows are charged before any prefill chunk
            builder.time.add_decodes([
                request.num_scheduled for request in running
                if (known := len(request.tokens) + request.pending) == request.num_scheduled + 1
                and known < request.max_len and not request.reason and request.pending < 2])
        drafts = self._drafting.proposer is not None
        rows = iter(running)
        for request in rows:  # `length_hint(rows)`: those after this one
            if builder.preempted and request.state is not State.RUNNING:
                continue  # preempted in this plan, for a row before it
            num_known = len(request.tokens) + request.pending
            count = num_known - request.num_scheduled
            if request.pending > 1 and not request.reason:
                builder.refuse(request, VERIFYING)
                continue
            if request.reason or (num_known >= request.max_len and self._discipline.leaves_together):
                builder.hold(request)
                continue
            if num_known >= request.max_len:
                builder.refuse(request, ENDING)
                continue
            if builder.budget < 1:
                builder.refuse(request, builder.shortage)
                continue
            start = num_known - count
            if count > 1 and not (count := self._chunking.chunk(request, count, builder, length_hint(rows))):
                builder.refuse(request, TIME_BUDGET)
                continue
            kind = DECODE if start >= request.num_at_join else PREFILL
            if drafts and kind is DECODE and self._drafting.waits(request):
                builder.refuse(request, VERIFYING)
                continue
            if start + count > request.capacity and not self._extend(request, start + count, builder):
                continue
            builder.add_row(request, start, count, kind)

    def _micro_batch(self, running: Sequence[Request], builder: PlanBuilder) -> Sequence[Request]:
        """Returns those of `running` that a step of one of several stages may have, in order; refuses the others.

        A row's next token is known when the last stage is done.  Chunks of a prompt follow each other at once: a stage
        computes steps in order, and nothing is sampled between them.
        """
        left = -(-len(self.running) // self.limits.stages) - sum(row[-1] is DECODE for row in builder.rows)
        ready = []
        for request in running:
            decodes = request.unscheduled == 1 and request.num_scheduled >= request.num_at_join and not request.reason
            if (request.pending and not request.reason) or (decodes and left < 1):
                builder.refuse(request, MICRO_BATCH)
                continue
            left -= decodes
            ready.append(request)
        return ready

    def _add_isolated(self, builder: PlanBuilder) -> None:
        """Plan paused rows after admissions, and only if this step does not compute the prompts that they pause for."""
        isolation = self._isolation
        isolation.start(builder, self.policy, self.running.values(), self._next_in_line(builder.now))
        self._add_running(builder)
        self._add_waiting(builder)
        self._add_late([request for request in builder.deferred if request in builder.starting], builder)
        self._add_late(isolation.settle(builder, self.running.values()), builder)
        self._add_late([request for request in builder.deferred if request not in builder.starting], builder)
        isolation.count(builder)

    def _catch_up(self, builder: PlanBuilder, request: Request) -> None:
        """Continue deferred prefills that outrank the waiting `request`; reserve a token for each paused row."""
        ahead = [prefill for prefill in builder.deferred if goes_before(self.policy, prefill, request, builder.now)]
        if ahead:
            builder.deferred = builder.deferred[len(ahead):]
            builder.budget -= len(builder.paused)
            self._add_late(ahead, builder)
            builder.budget += len(builder.paused)

    # -- waiting rows --------------------------------------------------------------------------------------------

    def _add_waiting(self, builder: PlanBuilder) -> None:
        """Admit waiting requests from the head of the queue, and record in the plan why the others wait.

        A few requests that fit may pass one that waits for blocks or for an adapter's slot, unless it was preempted.
        Any may pass one whose grammar is still being compiled, or whose tier has its share of the slots.
        """
        if not self.waiting:
            return
        gate = self._gate(builder.now)
        queue = self.waiting.walk(builder.now)
        examined: list[Request] = []  # and not admitted
        unslotted: list[Request] = []  # that wait for an adapter's slot: they stop only others that need one
        compiling: Request | None = None  # the first one whose grammar is being compiled
        while all(map(self._may_be_passed, examined)) and (request := queue.next()) is not None:
            if builder.deferred:
                self._catch_up(builder, request)
            is_open = len(builder.new_requests) < gate.max_new
            decision = self._decide(request, builder) if is_open else gate.reason
            if isinstance(decision, Allocation):
                self._admit(request, decision, builder)
                for before in examined if not request.spec.adapter else [*examined, *unslotted]:
                    before.num_passed_by += 1
                continue
            builder.refuse(request, decision)
            if decision == GRAMMAR_COMPILING:
                compiling = compiling or request
                continue
            reopens_at = _known(min(gate.reopens_at, self.waiting.next_moment))
            builder.stop = builder.stop or Stop(  # the next plan loads as much again
                decision, request.request_id, 0, builder.now if decision == LOAD_LIMIT else reopens_at)
            if decision == NO_ADAPTER_SLOT and not self._discipline.in_strict_order:
                unslotted.append(request)
                builder.is_adapter_overdue |= not self._may_be_passed(request)
                if len(unslotted) < MAX_UNSLOTTED:
                    continue
                break
            if decision == TIER_CAP:
                queue.close(request.spec.slo.tier)
                continue
            examined.append(request)
            if decision != NO_BLOCKS or builder.is_pressed or len(examined) > MAX_LOOK:
                break
        if compiling is not None and builder.stop is None:  # it stops no other request
            reopens_at = _known(min(gate.reopens_at, self.waiting.next_moment))
            builder.stop = Stop(GRAMMAR_COMPILING, compiling.request_id, 0, reopens_at)
        if builder.stop:
            builder.stop = builder.stop._replace(num_behind=len(self.waiting) - 1)

    def _decide(self, request: Request, builder: PlanBuilder) -> Allocation | str:
        """Returns the blocks with which a waiting request may join the step, or the reason why it may not.

        A preempted request may still have a token in flight, and is not admitted again before that is committed.
        """
        if request.is_compiling:
            return GRAMMAR_COMPILING
        if request.pending:
            return TOKEN_PENDING
        if not self._free_slots:
            return NO_SLOT
        if self._num_slots_for(request) < 1:
            return TIER_CAP
        if request.spec.adapter and (builder.is_adapter_overdue or not self._has_adapter_slot(request)):
            return NO_ADAPTER_SLOT
        if self._chunking.lacks_tokens(len(request.tokens), builder):
            return builder.shortage
        if builder.lanes and self.policy.lane(request) in builder.lanes:
            return FIRST_TOKEN
        allocation = self._allocation(request, builder)
        if allocation is None:
            return NO_BLOCKS
        if len(allocation.on_host) > self.kv.host.num_loads_left:
            return LOAD_LIMIT
        start = allocation.num_computed
        return allocation if self._chunking.fits(start, len(request.tokens) - start, builder) else TIME_BUDGET

    def _gate(self, now: float) -> Gate:
        """Returns the discipline's gate: how many requests it admits now, why no more, and when that changes."""
        oldest = next(iter(self.unfinished.values())).arrived_at
        return self._discipline.gate(
            View(len(self.running), len(self.waiting), self.limits.max_num_seqs, oldest), now)

    def _next_in_line(self, now: float) -> Request | None:
        """Returns the request to admit first in this step, if blocks suffice; None: no slot, or a closed gate."""
        if not self.waiting or not self._free_slots or self._gate(now).max_new < 1:
            return None
        walk = self.waiting.walk(now)
        while (request := walk.next()) is not None and self._waits_apart(request):
            pass
        return request if request is not None and self._num_slots_for(request) > 0 else None

    def _has_adapter_slot(self, request: Request) -> bool:
        """Whether this request may join the running ones: a step has rows of at most `max_loras` adapters."""
        if not request.spec.adapter:
            return True
        adapters = {running.spec.adapter for running in self.running.values() if running.spec.adapter}
        return request.spec.adapter in adapters or len(adapters) < self.limits.max_loras

    def _waits_apart(self, request: Request) -> bool:
        """Whether a request waits for its grammar or for an adapter's slot, which others need not wait for."""
        return request.is_compiling or not self._has_adapter_slot(request)

    def _may_be_passed(self, request: Request) -> bool:
        """Whether a later arrival may be admitted before this request, which waits for blocks or an adapter's slot."""
        limit = 0 if self._discipline.in_strict_order else self.limits.max_passes
        return request.state is State.WAITING and request.num_passed_by < limit

    def _num_slots_for(self, request: Request) -> int:
        """Free slots that are not reserved for other tiers."""
        free = min(len(self._free_slots), self.limits.max_num_seqs - len(self.running))
        if not self._reserved:
            return free
        surplus = self._surplus()
        return free - sum(max(0, -surplus[tier]) for tier in self._reserved if tier != request.spec.slo.tier)

    def _surplus(self) -> Counter[str]:
        """By tier: slots in use minus slots reserved; below zero, reserved slots that are unused."""
        used = Counter(request.spec.slo.tier for request in self.running.values())
        used.subtract(self._reserved)
        return used

    # -- blocks --------------------------------------------------------------------------------------------------

    def _needed(self, request: Request) -> Allocation:
        """Returns the blocks that `request` needs to be admitted, whether they are free or not."""
        return self.kv.match(request, self._discipline.reserve(request))

    def _spare(self, request: Request, num_running: int) -> int:
        """Blocks that stay free next to running requests; none where every request reserves its maximum."""
        grows = self._discipline.reserve(request) < request.max_len - 1
        return self.limits.watermark_blocks if num_running and grows else 0

    def _allocation(self, request: Request, builder: PlanBuilder) -> Allocation | None:
        """Returns blocks for a waiting request; None: too few, or this plan preempted a request for want of them.

        Pins are released for it, and so are the blocks of requests without a slot that the policy orders after it; if
        nothing runs that could free blocks later, those of all requests without a slot.
        """
        if builder.is_pressed:
            return None
        holders = [] if request.state is State.WAITING_FOR_KV else [
            other for other in self.transfers.holders if other is not request and (
                not self.running or goes_before(self.policy, request, other, builder.now))]
        return self._free_for(request, holders)

    def _free_for(self, request: Request, holders: Collection[Request]) -> Allocation | None:
        """Returns the blocks that a request needs, if they are free or can be taken from pins and `holders`."""
        spare = self._spare(request, len(self.running))
        allocation = self._needed(request)
        kept = {cached.block for cached in chain(*allocation.used)}
        return allocation if self._reclaim(lambda: self.kv.num_lacking(allocation) + spare, kept, holders) else None

    def _reclaim(self, lacking: Callable[[], int], kept: Collection[int], holders: Collection[Request]) -> bool:
        """Release blocks that no running request holds, until `lacking` returns less than 1.

        Pins go first, the oldest before the others; then requests of `holders` lose their blocks, and compute their
        prompts.  Returns whether there is enough; else nothing changes.

        Args:
            kept: blocks that the request itself reuses: releasing them gains nothing.
        """
        if lacking() <= 0:
            return True
        pinned = self.kv.pinned
        held = [*pinned.block_lists, *[request.blocks for request in holders]]
        dropped = Counter(block for blocks in held for block in blocks if block not in kept)
        if self.kv.pool.num_freed(dropped) < lacking():
            return False
        left = list(holders)
        while lacking() > 0:
            if pinned:
                pinned.unpin_oldest()
                continue
            victim = self.transfers.victim(left)
            left.remove(victim)
            self._lose_blocks(victim)
            if victim.state is State.WAITING_FOR_KV:
                victim.kv = None
                self.transfers.lost_blocks.append(victim)
        return True

    # -- committing a step ---------------------------------------------------------------------------------------

    def commit(self, plan: StepPlan, result: StepResult, now: float) -> Outcome:
        """Apply the result of the oldest uncommitted step: append tokens, finish requests.

        Returns what is published, and which requests have ended since the last commit.

        Raises:
            RuntimeError: `plan` is not that step, or `result` is not a result of it.
        """
        if not self._in_flight or self._in_flight[0].plan is not plan:
            raise RuntimeError(f"step {plan.step} is not the next to commit")
        result.check(plan)
        step = self._in_flight.popleft()
        self.kv.pool.cached.now = now
        kept, ended = self._append(step, result)
        for request, forced in zip(step.requests, result.forced, strict=False):
            request.forced = (len(request.tokens), forced)
        failed = dict(step.failed(result)) if result.failed else {}
        ended += [(request, "rejected" if objection else "error") for request, objection in failed.items()]
        done = result.executed(plan)
        self._drafting.committed(step.requests, done.drafts, result.proposing)
        if self._learns_from(done.counts) or self._drafting.needs_step_times:
            started = done.now + (result.proposing.seconds if result.proposing else 0.0)
            if done.drafts or done.padding or not self.times.skips(done.starts, done.counts, started, now):
                self.times.step(work_of(done.starts, done.counts, done.padding, done.drafts), started, now)
        self.policy.served(step.requests, done.counts, result.tokens)
        published = NO_OUTCOME
        if self._discipline.leaves_together or self._held or plan.held:  # a pooled row holds no output
            published, ended = self._hold(plan, _published(result, kept), ended)
        elif kept:
            published = _published(result, kept)
        for request, reason in ended:
            message = failed.get(request, "") or (NO_PROBABILITIES if reason in ("error", "rejected") else "")
            self._finish(request, reason, now, message)
        if published.tokens == result.tokens:
            published = NO_OUTCOME
        return published._replace(ended=self.pop_ended())

    def _append(self, step: InFlight, result: StepResult) -> tuple[dict[int, Tokens], Ended]:
        """Append each row's tokens to its request, and advance what is computed.

        Returns, for each row that sampled nothing or kept fewer tokens than it sampled, the tokens kept; and the
        requests that end.  A request that ended after its row was planned keeps nothing of it.  A request that was
        preempted after its row was planned keeps the tokens, and their positions are computed again.
        """
        plan, kept = step.plan, dict[int, Tokens]()
        ended: Ended = []
        num_drafts = map(len, plan.drafts) if plan.drafts else repeat(0)
        rows = zip(step.requests, step.epochs, plan.counts, num_drafts, result.tokens, strict=False)
        for row, (request, epoch, count, drafted, tokens) in enumerate(rows):
            if request.reason:  # finished or held since it was planned
                kept[row] = ()
                continue
            accepted, reason = request.append(tokens, drafted) if tokens else ((), "")
            if not tokens and request.spec.pooling is not None and row not in result.failed:
                reason = request.pool(plan.starts[row] + count)
            if request.epoch == epoch:
                computed = len(accepted) if drafted else count
                request.num_computed += computed
                if request.num_computed >= request.advance_at:
                    self.kv.advance(request)
                if computed < count:  # drafts were not accepted
                    request.num_scheduled -= count - computed
                    self.kv.truncate(request)
            if not accepted or accepted != tokens:
                kept[row] = accepted
            if reason:
                ended.append((request, reason))
        return kept, ended

    def _hold(self, plan: StepPlan, outputs: Outcome, ended: Ended) -> tuple[Outcome, Ended]:
        """Hold the outputs of a batch that leaves together until all of its requests have ended.

        Returns the outputs to publish now, and those of `ended` that may finish now.
        """
        rows = zip(plan.request_ids, outputs.tokens or (), outputs.logprobs or repeat(()), strict=False)
        for request_id, tokens, logprobs in rows:
            if tokens:
                before = self._held.get(request_id, ((), ()))
                self._held[request_id] = (before[0] + tokens, before[1] + logprobs)
        gone = [(request, reason) for request, reason in ended if request.state is not State.RUNNING]
        for request, reason in ended:
            if request.state is State.RUNNING:
                request.reason = reason  # held: it keeps its slot until its batch has ended
        held = [request for request in self.running.values() if request.reason]
        if self._discipline.leaves_together and len(held) < len(self.running):
            return self._release_outputs(plan, {request.request_id for request, _ in gone}), gone
        present = frozenset(plan.request_ids)  # a held row that is not in this plan finishes in its next step
        ending = gone + [(request, request.reason) for request in held if request.request_id in present]
        return self._release_outputs(plan, present), ending

    def _release_outputs(self, plan: StepPlan, request_ids: Collection[int]) -> Outcome:
        """Remove and return the outputs held for these requests, by row of the plan."""
        nothing: tuple[Tokens, Logprobs] = ((), ())
        found = [self._held.pop(name, nothing) if name in request_ids else nothing for name in plan.request_ids]
        logprobs = tuple([logprobs for _, logprobs in found])
        return Outcome(tuple([tokens for tokens, _ in found]), logprobs if any(logprobs) else ())

    def rollback(self) -> list[int]:
        """Drop all steps in flight after a failure, and set their requests back to the last commit.

        Returns the ids of the unfinished requests that cannot go on: those in the oldest of these steps, or in any of
        them if a cache group has recurrent states, which may have advanced since that commit.
        """
        steps = list(self._in_flight)
        self._in_flight.clear()
        for step in steps:
            for request in step.requests:
                request.unschedule()
        lost = steps if self.kv.has_states else steps[:1]
        return list(dict.fromkeys(
            request.request_id for step in lost for request in step.requests if not request.ended))

    # -- transitions of a request --------------------------------------------------------------------------------

    def _admit(self, request: Request, allocation: Allocation, builder: PlanBuilder) -> None:
        """Give a waiting request a slot, the blocks of `allocation` and its first row; cached tokens count as computed.
        """
        self.waiting.remove(request)
        self.transfers.remove_holder(request)
        request.slot = heapq.heappop(self._free_slots)
        self.running[request.request_id] = request
        self._rows_in_order = None
        request.num_at_join = len(request.tokens)
        builder.lookups.append(CacheLookup(request.request_id, self.kv.lookup(request, allocation)))
        request.start_from(self.kv.allocate(request, allocation, builder.now))
        request.transition(State.RUNNING)
        self.policy.admitted(request, builder.now)
        cached = request.num_computed - (0 if request.num_on_disk else request.num_received)
        builder.admitted.append(Admission(request.request_id, cached))
        builder.new_requests.append(NewRequest(
            request.request_id, request.slot, request.spec, tuple(sorted(request.stop_ids)),
            tuple(request.tokens[request.num_prompt :])))
        builder.new_blocks += self.kv.allocated(request)
        count = self._chunking.first_chunk(request, builder)
        builder.add_row(request, request.num_scheduled, count, PREFILL)

    def _preempt(self, request: Request, now: float) -> None:
        """Release slot and blocks, and requeue; known tokens are kept, and so are those of a step in flight."""
        self._release(request)
        request.transition(State.PREEMPTED)
        request.epoch += 1
        request.num_received = 0
        request.start_from(0)
        self.policy.preempted(request, now)
        self._enqueue(request, now)

    def _finish(self, request: Request, reason: str, now: float, message: str = "") -> None:
        """Finish an unfinished request: release what it holds, and record the event."""
        self.policy.finished(request, reason, now)
        if request.holds_slot:
            if request.kv is not None and request.kv.sends and reason in COMPLETE:
                self.kv.pin(request, request.kv, now)
            self._release(request)
        else:
            self._leave_queue(request)
        self._held.pop(request.request_id, None)
        request.transition(State.FINISHED)
        request.reason = reason
        request.epoch += 1
        self._forget(request)
        self.ended.append(
            RequestEnd(request.request_id, reason, request.num_output, message, request.num_retained))
        self._drafting.finished(request)

    def _reject(self, request: Request, objection: str, now: float) -> None:
        """Reject a waiting request that turns out never to be able to run."""
        self.policy.finished(request, "rejected", now)
        self._leave_queue(request)
        request.transition(State.REJECTED)
        request.reason = objection
        self._forget(request)
        self.ended.append(RequestEnd(request.request_id, "rejected", 0, objection))

    def _end_kv_wait(self, request: Request, now: float) -> None:
        """Enqueue a request WAITING_FOR_KV for a slot: it computes what has not arrived."""
        self.transfers.incoming.remove(request)
        request.transition(State.WAITING)
        self._enqueue(request, now)

    def _forget(self, request: Request) -> None:
        del self.unfinished[request.request_id]
        self._num_with_tpot -= request.spec.slo.tpot is not None

    def _queue_of(self, request: Request) -> WaitingQueue:
        return self.transfers.incoming if request.state is State.WAITING_FOR_KV else self.waiting

    def _enqueue(self, request: Request, now: float) -> None:
        moment = self.policy.patience(request, now)
        if request.state is not State.PREEMPTED:
            moment = min(moment, request.deadline)
        group = request.spec.slo.tenant if request.state is State.WAITING_FOR_KV else request.spec.slo.tier
        sub_queue = SubQueue(group, self.policy.lane(request))
        self._queue_of(request).add(request, sub_queue, self.policy.waiting_key(request, now), moment)

    def _leave_queue(self, request: Request) -> None:
        """Take a request without a slot, which is about to end, out of its queue."""
        self._queue_of(request).remove(request)
        if self.transfers.is_holder(request):
            self._lose_blocks(request)
        elif request.state is State.WAITING_FOR_KV and request.kv is not None:
            self.transfers.unwanted.append(request)  # the other engine keeps its blocks until it is told

    def _release(self, request: Request) -> None:
        """Release slot and blocks.  The next plan may reuse them, because executors run plans in order."""
        self.kv.release(request)
        heapq.heappush(self._free_slots, request.slot)
        self._released_slots.append(request.slot)
        request.slot = NO_SLOT_HELD
        del self.running[request.request_id]
        self._rows_in_order = None

    def _lose_blocks(self, request: Request) -> None:
        """Release the blocks that a request without a slot has for the prompt that is sent to it."""
        self.transfers.remove_holder(request)
        self.kv.release(request)
        request.num_received = 0
        request.start_from(0)


def _known(moment: float) -> float | None:
    return moment if moment < NEVER else None


def _published(result: StepResult, kept: Mapping[int, Tokens]) -> Outcome:
    """Returns the tokens each row sampled; of rows in `kept` those that are kept."""
    tokens, logprobs = list(result.tokens), list(result.logprobs)
    for row, some in kept.items():
        tokens[row] = some
        if logprobs:
            logprobs[row] = logprobs[row][: len(some)]
    return Outcome(tuple(tokens), tuple(logprobs) if any(logprobs) else ())
