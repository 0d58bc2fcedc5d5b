"""Blocks of ended requests that another engine still reads.

    referenced ──its request ends──► pinned ──acknowledged, or its time is over──► free or cached

A pin is a reference of its own, so a pinned block is neither reused nor evicted.  Nothing forces another engine to ask
for it, so tenants share the blocks that pins may keep (`core/tenant_capacity.py`): a pin beyond a tenant's share takes
the place of its oldest ones.  `RequestTable.reclaim` releases pins, the oldest first, for requests that need blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from slotwise.core.block_pool import BlockPool
from slotwise.core.tenant_capacity import TenantCapacity


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
    def holders(self) -> list[Sequence[int]]:
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
        for transfer_id in [name for name, pin in self._pins.items() if pin.until <= now]:
            self.unpin(transfer_id)
