"""A token bucket: `capacity` tokens a minute, and up to a minute's worth at once.

    level
    capacity ┐╲        ╱‾‾‾‾‾‾     level(t) = min(capacity, level + rate · t)
             │ ╲   ╱╲ ╱            `take` takes all of `amount` or nothing
           0 ┴──╲╱───╳─── time

So what is taken in any time `t`, less what was given back, is at most capacity + rate · t, whatever the order.  Kept in
integers: this bound is exact, and a client that returns after `until` finds the amount.

J. Turner: New directions in communications (or which way to the information age?), 1986.
"""

from __future__ import annotations

MINUTE_NS = 60 * 10**9


class Bucket:
    """A token bucket, full at first.  Times are monotonic nanoseconds.

    Args:
        capacity: tokens it holds, and tokens that flow in every minute.
        now: when it is created.
    """

    __slots__ = ("_at", "_parts", "capacity")

    def __init__(self, capacity: int, now: int) -> None:
        self.capacity = capacity
        self._parts = capacity * MINUTE_NS  # the level at `_at`, in units of which `capacity` flow in every nanosecond
        self._at = now

    def level(self, now: int) -> int:
        """Tokens in the bucket, rounded down."""
        return self._parts_at(now) // MINUTE_NS

    def until(self, amount: int, now: int) -> int:
        """Nanoseconds until `amount` is there if nothing is taken meanwhile; 0: it is there."""
        return -min(0, (self._parts_at(now) - amount * MINUTE_NS) // self.capacity)

    def take(self, amount: int, now: int) -> bool:
        """Take `amount` if it is there.  Returns whether it was."""
        parts = self._parts_at(now) - amount * MINUTE_NS
        if parts < 0:
            return False
        self._parts, self._at = parts, max(now, self._at)
        return True

    def give(self, amount: int, now: int) -> None:
        """Give back tokens that were taken; what exceeds the capacity is lost."""
        self._parts, self._at = self._parts_at(now) + amount * MINUTE_NS, max(now, self._at)

    def change(self, capacity: int, now: int) -> None:
        """Set the capacity; the level stays, up to it."""
        self._parts, self._at = min(self._parts_at(now), capacity * MINUTE_NS), max(now, self._at)
        self.capacity = capacity

    def _parts_at(self, now: int) -> int:
        """The level at `now`, in `_parts`, up to the capacity."""
        return min(self.capacity * MINUTE_NS, self._parts + self.capacity * max(0, now - self._at))
