"""Bytes of commands that the engine has not read yet, shared by tenants.

    ├──── read by the kernel or the engine ────┤ Add of a │ Add of b │ Finish │ Add of a ┤
    0                             written - unsent                                 written

The transport sends in order, so the commands that end before `written - unsent` have left it.
"""

from __future__ import annotations

from collections import deque

from slotwise.core.tenant_capacity import TenantCapacity

MAX_UNSENT = 64 << 20  # bytes; a reserve and the last request accepted may exceed it


class UnsentCommands:
    """Counts the unsent bytes of each tenant's requests."""

    def __init__(self) -> None:
        self._capacity = TenantCapacity("bytes of requests have not reached the engine", MAX_UNSENT)
        self._written = 0
        self._unsent: deque[tuple[int, str, int]] = deque()  # end of a command, its tenant and size

    def objection(self, tenant: str, num_unsent: int) -> str:
        """Why a tenant may send no further request while `num_unsent` bytes are unsent; empty when it may."""
        self._release(num_unsent)
        return self._capacity.objection(tenant, 1)

    def wrote(self, tenant: str, size: int, num_unsent: int) -> None:
        """Counts a command of `size` bytes; `num_unsent` bytes are unsent now.  The few queries are not counted."""
        self._written += size
        self._unsent.append((self._written, tenant, size))
        self._capacity.acquire(tenant, size)
        self._release(num_unsent)

    def clear(self) -> None:
        """Forgets all commands: the connection was lost."""
        self._release(0)

    def _release(self, num_unsent: int) -> None:
        while self._unsent and self._unsent[0][0] <= self._written - num_unsent:
            _, tenant, size = self._unsent.popleft()
            self._capacity.release(tenant, size)
