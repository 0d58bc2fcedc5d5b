"""A bounded capacity that tenants share, so that a flood of one leaves places to the others.

    ├──────── held by the flood: at most SHARE times what is free ────────┤ light ┤── free ──┤── reserve ──┤

A tenant that holds places may hold at most `SHARE` times the free ones: the dynamic threshold of switches that share a
buffer (Choudhury and Hahne, 1998).  It does not depend on the number of tenants.  A single tenant gets `SHARE / (SHARE
+ 1)` of the capacity; `n` saturating tenants get `SHARE / (n * SHARE + 1)` each, and when another arrives the threshold
falls, so that they are refused until it has its share.  The last place is left to a tenant that holds none.

A bound may fall below what is held.  Above it the capacity accepts only tenants that hold nothing, into a reserve of a
`SHARE`-th of the bound.  Above the bound there are only (1) places held before it fell, (2) the reserve, (3) one
request of any size accepted into an empty reserve.

The owner sets the bound, and asks for an objection before it acquires places; `objection` changes nothing.
"""

from __future__ import annotations

from collections import Counter

SHARE = 8  # multiple of the free places that a tenant may hold: 8/9 of the capacity for a single tenant
UNBOUNDED = 1 << 62  # places


class TenantCapacity:
    """Counts the places each tenant holds.

    Args:
        what: names the counted items in messages, such as "requests wait".
        bound: places of the capacity.
        includes_reserve: the reserve is a part of the bound; else it is above it.
    """

    def __init__(self, what: str, bound: int = UNBOUNDED, *, includes_reserve: bool = False) -> None:
        self.total = 0
        self._what = what
        self._bound, self._idle = bound, 0
        self._includes_reserve = includes_reserve
        self._held: Counter[str] = Counter()
        self._late: set[str] = set()  # tenants that began to hold places above it
        self._num_late = 0  # places that these hold

    def held(self, tenant: str) -> int:
        """Places that the tenant holds."""
        return self._held[tenant]

    def set_bound(self, bound: int, idle: int = 0) -> None:
        """Sets the bound, and the further places that are about to become free."""
        self._bound, self._idle = bound, idle

    def acquire(self, tenant: str, places: int) -> None:
        """Takes places unconditionally; the caller checks `objection` first."""
        bound, _ = self._parts(tenant)
        self.total += places
        if places > 0 and not self._held[tenant] and self.total > bound + self._idle:
            self._late.add(tenant)
        self._held[tenant] += places
        if tenant in self._late:
            self._num_late += places
        if not self._held[tenant]:  # the number of tenants over time is unbounded
            del self._held[tenant]
            self._late.discard(tenant)
        if self._late and self.total <= bound + self._idle:
            self._late.clear()
        if not self._late:
            self._num_late = 0

    def release(self, tenant: str, places: int) -> None:
        """Gives places back."""
        self.acquire(tenant, -places)

    def objection(self, tenant: str, places: int) -> str:
        """Why a tenant cannot take `places` more, with the numbers; empty when it can.

        What is held in places that are about to become free does not count against the bound, nor in the message.

        An empty capacity accepts any amount, as does an empty reserve, and only the bound and the reserve stop a tenant
        that holds nothing: requests too large for the machine are rejected elsewhere and for good.

        Args:
            tenant: "" stands for all unidentified clients, whose share is the whole.
        """
        bound, reserve = self._parts(tenant)
        free = bound + self._idle - self.total - places
        held = self._held[tenant]
        if free < 0 and self.total:
            may_use = bool(tenant) and not held and reserve > 0
            if may_use and (not self._num_late or self._num_late + places <= reserve):
                return ""
            return f"{max(0, self.total - self._idle)} {self._what}, at most {bound} may"
        if tenant and held and held + places > self._idle + SHARE * free:
            return (f"{self.total} {self._what}, {held} of them this client's, and what is left of "
                    f"{bound + self._idle} is for others")
        return ""

    def _parts(self, tenant: str) -> tuple[int, int]:
        """Returns the bound for `tenant`, without the reserve, and the reserve."""
        if not self._includes_reserve:
            return self._bound, reserve_of(self._bound)
        reserve = self._bound // (SHARE + 1) if tenant else 0
        return self._bound - reserve, reserve


def reserve_of(bound: int) -> int:
    """Places above `bound` that are left to tenants that hold none."""
    return max(1, bound // SHARE) if bound else 0
