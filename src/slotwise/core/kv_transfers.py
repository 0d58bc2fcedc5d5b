"""Prompts whose keys and values one engine computes and another one uses, or that are read from this engine's disk.

    producer   RUNNING ──last chunk──► FINISHED, its blocks pinned ──acknowledged, late, or needed──► released
                  │ blocks of each committed chunk
                  ▼
    consumer   WAITING_FOR_KV ──allocate──► holds blocks ──all arrived, late, or needed──► WAITING ──admit──► RUNNING

A request that waits for another engine holds no slot.  It holds all blocks of its prompt, into which they are written
between steps or during them, and keeps them in the queue for a slot.  What has arrived counts as computed: it is
published like blocks computed here.  At least the last token of a prompt is computed here, because sampling needs its
logits.  A request asks once: when it has lost its blocks to others that need them, or was preempted, it computes its
prompt like any other.

A new request whose prompt begins with blocks on disk (`engine/kv_disk.py`) waits for them in the same states, and then
computes the rest.

A pin is a reference of its own, so a pinned block is neither reused nor evicted.  Nothing forces another engine to ask
for it, and prompts may never arrive.  So tenants share (`core/tenant_capacity.py`) the blocks that pins may keep, where
a pin beyond a tenant's share takes the place of its oldest ones; the number of requests that hold blocks without a
slot; and the half of the cache that these may hold.  A flood costs its own tenant time, and others none.

The scheduler changes states; this module keeps the requests that send or receive.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

from slotwise.core.block_pool import BlockPool
from slotwise.core.interfaces import Key
from slotwise.core.request import Request, State
from slotwise.core.tenant_capacity import TenantCapacity
from slotwise.core.waiting_queue import WaitingQueue


class Pin(NamedTuple):
    tenant: str
    blocks: Sequence[int]
    until: float  # seconds


class PinnedBlocks:
    """Pins by the id of the transfer that reads them, the oldest first."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._pins: dict[str, Pin] = {}
        self._held = TenantCapacity("blocks", pool.total, includes_reserve=True)

    def __contains__(self, transfer_id: str) -> bool:
        return transfer_id in self._pins

    def __len__(self) -> int:
        return len(self._pins)

    @property
    def block_lists(self) -> list[Sequence[int]]:
        """The blocks of each pin."""
        return [pin.blocks for pin in self._pins.values()]

    @property
    def num_blocks(self) -> int:
        return sum(len(pin.blocks) for pin in self._pins.values())

    @property
    def next_moment(self) -> float:
        """When the next pin ends by itself, in seconds; infinite: none does."""
        return min((pin.until for pin in self._pins.values()), default=float("inf"))

    def blocks(self, transfer_id: str) -> Sequence[int]:
        """The blocks of a pin; none where there is no such pin."""
        pin = self._pins.get(transfer_id)
        return pin.blocks if pin is not None else ()

    def pin(self, transfer_id: str, tenant: str, blocks: Sequence[int], until: float) -> None:
        """Keep `blocks`, which are referenced, until `unpin`, or `until`.

        Releases the oldest pins of the tenant beyond its share, and of all tenants beyond the whole.
        """
        while self._pins and self._held.objection(tenant, len(blocks)):
            mine = (name for name, pin in self._pins.items() if pin.tenant == tenant)
            self.unpin(next(mine, next(iter(self._pins))))
        self._pool.share(blocks)
        self._pins[transfer_id] = Pin(tenant, tuple(blocks), until)
        self._held.acquire(tenant, len(blocks))

    def unpin_oldest(self) -> None:
        self.unpin(next(iter(self._pins)))

    def unpin(self, transfer_id: str) -> None:
        """Release the blocks of a pin, the last one first.  Does nothing if there is none."""
        pin = self._pins.pop(transfer_id, None)
        if pin is not None:
            self._held.release(pin.tenant, len(pin.blocks))
            self._pool.release(reversed(pin.blocks))

    def expire(self, now: float) -> None:
        """Release the blocks of pins whose time is over."""
        for transfer_id in [name for name, pin in self._pins.items() if pin.until <= now] if self._pins else ():
            self.unpin(transfer_id)


class KVTransfers:
    """Requests that send or receive prompts, and the blocks that those without a slot hold.

    Args:
        pinned: blocks of ended requests.
        unfinished: all requests, as the scheduler has them, like `running`.
        lane_key: `Policy.lane_key`.
        max_holders: requests that may hold blocks at once; each is received by a thread of its own.
        num_blocks: of the cache.
    """

    def __init__(
        self, pinned: PinnedBlocks, block_size: int, unfinished: dict[int, Request], running: dict[int, Request],
        lane_key: Callable[[str, float], Key], max_holders: int, num_blocks: int,
    ) -> None:
        self._pinned = pinned
        self._block_size = block_size
        self._unfinished, self._running = unfinished, running
        self.incoming = WaitingQueue(lane_key)  # requests WAITING_FOR_KV
        self.lost_blocks: list[Request] = []  # of these, whose blocks others took; enqueued before the next plan
        self.unwanted: list[Request] = []  # requests that will not ask for the blocks another engine keeps for them
        self._holders: dict[int, Request] = {}  # requests without a slot that hold blocks, in the order they got them
        self._places = TenantCapacity("requests", max_holders, includes_reserve=True)
        self._blocks = TenantCapacity("blocks", max(1, num_blocks // 2), includes_reserve=True)

    # -- what an engine asks -------------------------------------------------------------------------------------

    @property
    def is_active(self) -> bool:
        """Whether a request waits for another engine, or blocks are pinned."""
        return bool(self._pinned) or bool(self.incoming)

    @property
    def num_pinned_blocks(self) -> int:
        """Blocks of ended requests that another engine still reads."""
        return self._pinned.num_blocks

    @property
    def next_moment(self) -> float:
        """When the next transfer is late, or a request that waits is due, in seconds; infinite: none will be."""
        if self.lost_blocks:
            return 0.0
        return min([self._pinned.next_moment, self.incoming.next_moment,
                    *(request.kv_until for request in self.receiving())])

    def receiving(self) -> Iterator[Request]:
        """The requests that hold blocks, and wait for their contents."""
        return (request for request in self._holders.values() if request.state is State.WAITING_FOR_KV)

    def first_missing(self, request: Request) -> int:
        """Index of the first block of its prompt that is not computed."""
        return request.num_computed // self._block_size

    def is_missing_blocks(self, request: Request) -> bool:
        """Whether a request with blocks lacks some that it waits for: all of its prompt, or those on disk."""
        wanted = min(request.num_on_disk * self._block_size or len(request.tokens), len(request.tokens) - 1)
        return request.num_computed < wanted

    def pop_unwanted(self) -> list[Request]:
        """Returns the requests since the last call that will not ask: all is cached here, or they have ended."""
        unwanted, self.unwanted = self.unwanted, []
        return unwanted

    def sending(self) -> set[str]:
        """The transfers of unfinished requests whose blocks are to be sent."""
        return {request.kv.transfer_id for request in self._unfinished.values()
                if request.kv is not None and request.kv.sends}

    def readable(self, transfer_ids: Collection[str]) -> dict[str, list[int]]:
        """The blocks that may be read now, the first ones of each prompt; a waiting request has none.

        A block stays as it is until a plan is made that preempts or ends its request, or until its pin is released.
        """
        found = {name: list(self._pinned.blocks(name)) for name in transfer_ids if name in self._pinned}
        for request in self._running.values():
            if request.kv is not None and request.kv.sends and request.kv.transfer_id in transfer_ids:
                num_full = min(request.num_prompt, request.num_computed) // self._block_size
                found[request.kv.transfer_id] = request.blocks[:num_full]
        return found

    # -- what the scheduler asks ---------------------------------------------------------------------------------

    def objection(self, request: Request) -> str:
        """Returns why the blocks of a new request cannot be sent; "" if they can, or need not be."""
        if request.kv is None or not request.kv.sends:
            return ""
        name = request.kv.transfer_id
        is_taken = name in self._pinned or any(
            other.kv is not None and other.kv.transfer_id == name for other in self._unfinished.values())
        return f"transfer_id: another prompt is sent as {name:.40}" if is_taken else ""

    @property
    def holders(self) -> Iterable[Request]:
        """The requests without a slot that hold blocks, in the order in which they got them."""
        return self._holders.values()

    def is_holder(self, request: Request) -> bool:
        return request.request_id in self._holders

    def allows(self, tenant: str, num_blocks: int) -> bool:
        """Whether the tenant's share has room for one more request with so many blocks."""
        return not (self._places.objection(tenant, 1) or self._blocks.objection(tenant, num_blocks))

    def add_holder(self, request: Request) -> None:
        """Count a request without a slot that has got its blocks."""
        self._holders[request.request_id] = request
        self._count(request, 1)

    def remove_holder(self, request: Request) -> None:
        """Stop counting a request, if it is a holder: it is admitted, or is about to release its blocks."""
        if self._holders.pop(request.request_id, None) is not None:
            self._count(request, -1)

    def _count(self, request: Request, sign: int) -> None:
        self._places.acquire(request.spec.slo.tenant, sign)
        self._blocks.acquire(request.spec.slo.tenant, sign * len(request.blocks))

    def victim(self, candidates: Collection[Request]) -> Request:
        """The request that gives up its blocks first: the last arrival of the tenant that holds most."""
        return max(candidates, key=lambda request: (self._blocks.held(request.spec.slo.tenant), request.arrival))

    def await_blocks(self, request: Request, now: float) -> None:
        """Wait for the next blocks of a request from now on."""
        assert request.kv is not None
        request.kv_until = now + request.kv.timeout

    def pop_late(self, now: float) -> list[Request]:
        """Returns the requests that no longer wait for blocks, which are late or were lost."""
        if not (self._holders or self.lost_blocks):
            return []
        lost_blocks, self.lost_blocks = self.lost_blocks, []
        late = [request for request in self.receiving() if request.kv_until <= now]
        return [*late, *(one for one in lost_blocks if not one.ended)]
