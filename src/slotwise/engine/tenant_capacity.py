"""A bounded room that tenants share, so that one who floods it leaves places to the others.

    ├──────── held by the flood: at most SHARE times what is free ────────┤ light ┤── free ──┤

Whoever holds something may hold at most `SHARE` times what is still free: the dynamic threshold of switches that share
a buffer (Choudhury and Hahne, 1998).  Nobody has to know how many tenants there are.  One alone has `SHARE / (SHARE +
1)` of the room; `n` who ask without end come to `SHARE / (n * SHARE + 1)` each, and when another comes the threshold
falls, so that they are refused until it has its part.  The last place goes to nobody but one who held none.
"""

from __future__ import annotations

from collections import Counter

SHARE = 8  # times what is free that a tenant may hold: 8/9 of the room where it is alone


class TenantCapacity:
    """
    Args:
        what: those who are counted, and what they do, for a person: "requests wait".
    """

    def __init__(self, what: str) -> None:
        self.total = 0
        self._what = what
        self._held: Counter[str] = Counter()

    def held(self, tenant: str) -> int:
        """Places that it holds."""
        return self._held[tenant]

    def acquire(self, tenant: str, places: int) -> None:
        """Whether or not there is room: who asks for `objection` first decides what comes of it."""
        self.total += places
        self._held[tenant] += places
        if not self._held[tenant]:  # tenants may come and go without end
            del self._held[tenant]

    def release(self, tenant: str, places: int) -> None:
        """Back, of what it took."""
        self.acquire(tenant, -places)

    def objection(self, tenant: str, places: int, bound: int, idle: int = 0) -> str:
        """Why a tenant cannot have so many more, with the numbers; empty when it can.

        An empty room takes anybody, and one who holds nothing is stopped by the bound alone: what is too large for the
        machine is refused elsewhere and for good.

        Args:
            tenant: "" is whoever cannot be told from others, and has no share but the whole.
            bound: places of the room.
            idle: further ones, that are about to be left.
        """
        free = bound + idle - self.total - places
        if free < 0 and self.total:
            return f"{self.total} {self._what}, at most {bound} may"
        held = self._held[tenant]
        if tenant and held and held + places > idle + SHARE * free:
            return f"{self.total} {self._what}, {held} of them this client's, and what is left of {bound} is for others"
        return ""
