"""A token bucket: so much a minute, and up to a minute's worth at once.

    level
    capacity ┐╲        ╱‾‾‾‾‾‾     level(t) = min(capacity, level + rate · t)
             │ ╲   ╱╲ ╱            who takes `amount` must find it there, and never takes what is not
           0 ┴──╲╱───╳─── time

So what is taken in any time `t`, less what was given back, is at most capacity + rate · t, whatever the order.  Kept in
integers, so that this is exact, and that who comes back when it was told to finds what it needs.

J. Turner: New directions in communications (or which way to the information age?), 1986.
"""

from __future__ import annotations

MINUTE_NS = 60 * 10**9


class Bucket:
    """Full at first.  Times are monotonic nanoseconds.

    Args:
        capacity: what it holds, and what flows in every minute.
        now: when it is made.
    """

    __slots__ = ("_at", "_parts", "capacity")

    def __init__(self, capacity: int, now: int) -> None:
        self.capacity = capacity
        self._parts = capacity * MINUTE_NS  # what was there at `_at`: in a nanosecond `capacity` of them flow in
        self._at = now

    def level(self, now: int) -> int:
        """What is there, rounded down."""
        return self._parts_at(now) // MINUTE_NS

    def until(self, amount: int, now: int) -> int:
        """Nanoseconds until so much would be there, were nobody else to come; 0: it is."""
        return -min(0, (self._parts_at(now) - amount * MINUTE_NS) // self.capacity)

    def take(self, amount: int, now: int) -> bool:
        """Whether so much was there, and is taken."""
        parts = self._parts_at(now) - amount * MINUTE_NS
        if parts < 0:
            return False
        self._parts, self._at = parts, max(now, self._at)
        return True

    def give(self, amount: int, now: int) -> None:
        """Back, of what was taken; what there is no room for is lost."""
        self._parts, self._at = self._parts_at(now) + amount * MINUTE_NS, max(now, self._at)

    def change(self, capacity: int, now: int) -> None:
        """From here on another size; what is there stays, as far as it fits."""
        self._parts, self._at = min(self._parts_at(now), capacity * MINUTE_NS), max(now, self._at)
        self.capacity = capacity

    def _parts_at(self, now: int) -> int:
        """What there is room for of what was there and has flowed in."""
        return min(self.capacity * MINUTE_NS, self._parts + self.capacity * max(0, now - self._at))
