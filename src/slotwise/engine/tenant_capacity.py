"""A bounded capacity that tenants share, so that a flood of one leaves places to the others.

    ├──────── held by the flood: at most SHARE times what is free ────────┤ light ┤── free ──┤

A tenant that holds places may hold at most `SHARE` times the free ones: the dynamic threshold of switches that share a
buffer (Choudhury and Hahne, 1998).  It does not depend on the number of tenants.  A single tenant gets `SHARE / (SHARE
+ 1)` of the capacity; `n` saturating tenants get `SHARE / (n * SHARE + 1)` each, and when another arrives the threshold
falls, so that they are refused until it has its share.  The last place is left to a tenant that holds none.
"""

from __future__ import annotations

from collections import Counter

SHARE = 8  # multiple of the free places that a tenant may hold: 8/9 of the capacity for a single tenant


class TenantCapacity:
    """Counts the places each tenant holds; `what` names the counted items in messages, such as "requests wait"."""

    def __init__(self, what: str) -> None:
        self.total = 0
        self._what = what
        self._held: Counter[str] = Counter()

    def held(self, tenant: str) -> int:
        """Places that the tenant holds."""
        return self._held[tenant]

    def acquire(self, tenant: str, places: int) -> None:
        """Takes places unconditionally; the caller checks `objection` first."""
        self.total += places
        self._held[tenant] += places
        if not self._held[tenant]:  # the number of tenants over time is unbounded
            del self._held[tenant]

    def release(self, tenant: str, places: int) -> None:
        """Gives places back."""
        self.acquire(tenant, -places)

    def objection(self, tenant: str, places: int, bound: int, idle: int = 0) -> str:
        """Why a tenant cannot take `places` more, with the numbers; empty when it can.

        An empty capacity accepts any amount, and only the bound stops a tenant that holds nothing: requests too large
        for the machine are rejected elsewhere and for good.

        Args:
            tenant: "" stands for all unidentified clients, whose share is the whole.
            bound: places of the capacity.
            idle: further places that are about to become free.
        """
        free = bound + idle - self.total - places
        if free < 0 and self.total:
            return f"{self.total} {self._what}, at most {bound} may"
        held = self._held[tenant]
        if tenant and held and held + places > idle + SHARE * free:
            return f"{self.total} {self._what}, {held} of them this client's, and what is left of {bound} is for others"
        return ""
