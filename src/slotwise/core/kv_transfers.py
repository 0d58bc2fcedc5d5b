"""Prompts whose keys and values one engine computes and another one uses.

    producer   RUNNING ──last chunk──► FINISHED, its blocks pinned ──acknowledged, late, or needed──► released
                  │ blocks of each committed chunk
                  ▼
    consumer   WAITING_FOR_KV ──land──► holds blocks ──all arrived, late, or needed──► WAITING ──admit──► RUNNING

A request that waits for another engine holds no slot.  It holds all blocks of its prompt, into which they are written
beside the steps, as far as its tenant's share goes (`core/landings.py`); it keeps them in the queue for a slot.  What
has arrived counts as computed: it is published like blocks computed here.  At least the last token of a prompt is
computed here, because sampling needs its logits.  A request asks once: when it has lost its blocks to others that need
them, or was preempted, it computes its prompt like any other.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from slotwise.core.admission import Admission
from slotwise.core.plan_builder import PlanBuilder
from slotwise.core.reasons import WAITING_FOR_KV
from slotwise.core.request import Request, State
from slotwise.core.request_table import RequestTable
from slotwise.core.step import Arrival, Stop


class KVTransfers:
    """Applies what other engines send and acknowledge to the requests of a table."""

    def __init__(self, table: RequestTable) -> None:
        self._table = table

    @property
    def is_active(self) -> bool:
        """Whether a request waits for another engine, or blocks are pinned."""
        return bool(self._table.kv.pinned) or bool(self._table.incoming)

    @property
    def num_pinned_blocks(self) -> int:
        """Blocks of ended requests that another engine still reads."""
        return self._table.kv.pinned.num_blocks

    @property
    def next_moment(self) -> float:
        """When the next transfer is late, or a request that waits is due, in seconds; infinite: none will be."""
        if self._table.given_up:
            return 0.0
        return min([self._table.kv.pinned.next_moment, self._table.incoming.next_moment,
                    *(request.kv_until for request in self.receiving())])

    def objection(self, request: Request) -> str:
        """Returns why the blocks of a new request cannot be sent; "" if they can, or are not to be."""
        if request.kv is None or not request.kv.sends:
            return ""
        name = request.kv.transfer_id
        is_taken = name in self._table.kv.pinned or any(
            other.kv is not None and other.kv.transfer_id == name for other in self._table.unfinished.values())
        return f"transfer_id: another prompt is sent as {name:.40}" if is_taken else ""

    def receiving(self) -> Iterator[Request]:
        """The requests that hold blocks, and wait for their contents."""
        return (request for request in self._table.landings if request.state is State.WAITING_FOR_KV)

    def land(self, admission: Admission, now: float) -> None:
        """Give blocks to the requests that wait for another engine, in the policy's order and by their tenants' shares.

        The first one of a tenant that has to wait stops only those of its tenant.
        """
        if not self._table.incoming:
            return
        queue = self._table.incoming.walk(now)
        while (request := queue.next()) is not None:
            if request.tables:
                continue
            if (allocation := admission.landing(request)) is None:
                queue.close(request.slo.tenant)
            else:
                self._table.land(request, allocation, now)

    def refuse(self, builder: PlanBuilder) -> None:
        """Record in the plan that requests wait for another engine; those without blocks wait behind these."""
        waiting = list(self.receiving())
        for request in waiting:
            builder.refuse(request, WAITING_FOR_KV)
        if builder.stop is not None:
            builder.stop = builder.stop._replace(num_behind=builder.stop.num_behind + len(self._table.incoming))
        elif waiting:  # they stop no other request
            num_behind, host = len(self._table.incoming) - 1, self._table.kv.host
            may_land = num_behind >= len(waiting) and host.num_loads_left < host.max_loads  # in the next plan
            builder.stop = Stop(WAITING_FOR_KV, waiting[0].request_id, num_behind,
                                builder.now if may_land else self.next_moment)

    def first_missing(self, request: Request) -> int:
        """Index of the first block of its prompt that is not computed."""
        return request.num_computed // self._table.kv.block_size

    def pop_unwanted(self) -> list[Request]:
        """Returns the requests since the last call that will not ask: all is cached here, or they have ended."""
        unwanted, self._table.unwanted = self._table.unwanted, []
        return unwanted

    def sending(self) -> set[str]:
        """The transfers of unfinished requests whose blocks are to be sent."""
        return {request.kv.transfer_id for request in self._table.unfinished.values()
                if request.kv is not None and request.kv.sends}

    def readable(self, transfer_ids: Collection[str]) -> dict[str, list[int]]:
        """The blocks that may be read now, the first ones of each prompt; a waiting request has none.

        A block stays as it is until a plan is made that preempts or ends its request, or until its pin is released.
        """
        pinned = self._table.kv.pinned
        found = {name: list(pinned.blocks(name)) for name in transfer_ids if name in pinned}
        for request in self._table.running.values():
            if request.kv is not None and request.kv.sends and request.kv.transfer_id in transfer_ids:
                num_full = min(request.num_prompt, request.num_computed) // self._table.kv.block_size
                found[request.kv.transfer_id] = request.blocks[:num_full]
        return found

    def received(self, arrival: Arrival, now: float) -> None:
        """Count blocks as computed.  Does nothing for a request that does not wait for any."""
        request, kv = self._table.unfinished.get(arrival.request_id), self._table.kv
        if request is None or request.state is not State.WAITING_FOR_KV or not request.tables:
            return
        computed = min(arrival.num_blocks * kv.block_size, len(request.tokens) - 1)
        if computed > request.num_computed:
            request.num_received += computed - request.num_computed
            request.start_from(computed)
            if computed >= request.advance_at:
                kv.advance(request)
        if arrival.is_last:
            self._table.arrived(request, now)
        else:
            self._table.await_kv(request, now)

    def acknowledged(self, transfer_id: str) -> None:
        """Release the blocks that another engine has read, and keep none that it does not want any more."""
        self._table.kv.pinned.unpin(transfer_id)
        for request in self._table.unfinished.values():
            if request.kv is not None and request.kv.transfer_id == transfer_id and request.kv.sends:
                request.kv = None

    def expire(self, now: float) -> None:
        """Compute what is late or was given up, and release what is not read in time."""
        self._table.kv.pinned.expire(now)
        given_up, self._table.given_up = self._table.given_up, []
        late = [request for request in self.receiving() if request.kv_until <= now]
        for request in [*late, *(one for one in given_up if not one.ended)]:
            self._table.arrived(request, now)
