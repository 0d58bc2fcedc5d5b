"""Prompts whose keys and values one engine computes and another one uses.

    producer   RUNNING ──last chunk──► FINISHED, its blocks pinned ──acknowledged, or too late──► released
                  │ blocks of each committed chunk
                  ▼
    consumer   WAITING ──admit──► WAITING_FOR_KV ──all arrived, or too late──► RUNNING: computes what has not arrived

A request that waits for its blocks holds a slot and all blocks of its prompt, into which they are written beside the
steps, and is in no plan.  What has arrived counts as computed: it is published like blocks computed here.  At least the
last token of a prompt is computed here, because sampling needs its logits.  A request asks once: after a preemption it
computes its prompt like any other.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from slotwise.core.request import Request, State
from slotwise.core.request_table import RequestTable
from slotwise.core.step import Arrival


class KVTransfers:
    """Applies what other engines send and acknowledge to the requests of a table."""

    def __init__(self, table: RequestTable) -> None:
        self._table = table

    @property
    def is_active(self) -> bool:
        """Whether a request waits for blocks, or blocks are pinned."""
        return bool(self._table.kv.pinned) or any(True for _ in self.receiving())

    @property
    def num_pinned_blocks(self) -> int:
        """Blocks of ended requests that another engine still reads."""
        return self._table.kv.pinned.num_blocks

    @property
    def all_wait(self) -> bool:
        """Whether all requests with a slot wait for blocks, and there are any."""
        running = self._table.running.values()
        return bool(running) and all(request.state is State.WAITING_FOR_KV for request in running)

    @property
    def next_moment(self) -> float:
        """When the next transfer is late, in seconds; infinite: none will be."""
        return min([self._table.kv.pinned.next_moment, *(request.kv_until for request in self.receiving())])

    def objection(self, request: Request) -> str:
        """Returns why the blocks of a new request cannot be sent; "" if they can, or are not to be."""
        if request.kv is None or not request.kv.sends:
            return ""
        name = request.kv.transfer_id
        is_taken = name in self._table.kv.pinned or any(
            other.kv is not None and other.kv.transfer_id == name for other in self._table.unfinished.values())
        return f"transfer_id: another prompt is sent as {name:.40}" if is_taken else ""

    def receiving(self) -> Iterator[Request]:
        """The requests that wait for blocks."""
        return (request for request in self._table.running.values() if request.state is State.WAITING_FOR_KV)

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
            if request.kv is not None and request.kv.transfer_id in transfer_ids:
                num_full = min(request.num_prompt, request.num_computed) // self._table.kv.block_size
                found[request.kv.transfer_id] = request.blocks[:num_full]
        return found

    def received(self, arrival: Arrival, now: float) -> None:
        """Count blocks as computed.  Does nothing for a request that does not wait for any."""
        request, kv = self._table.unfinished.get(arrival.request_id), self._table.kv
        if request is None or request.state is not State.WAITING_FOR_KV:
            return
        computed = min(arrival.num_blocks * kv.block_size, len(request.tokens) - 1)
        if computed > request.num_computed:
            request.start_from(computed)
            if computed >= request.advance_at:
                kv.advance(request)
        if arrival.is_last:
            request.transition(State.RUNNING)
        else:
            self._table.await_kv(request, now)

    def acknowledged(self, transfer_id: str) -> None:
        """Release the blocks that another engine has read, and keep none that it does not want any more."""
        self._table.kv.pinned.unpin(transfer_id)
        for request in self._table.unfinished.values():
            if request.kv is not None and request.kv.transfer_id == transfer_id and request.kv.sends:
                request.kv = None

    def expire(self, now: float) -> None:
        """Compute what is late, and release what is not read in time."""
        self._table.kv.pinned.expire(now)
        for request in [late for late in self.receiving() if late.kv_until <= now]:
            request.transition(State.RUNNING)
