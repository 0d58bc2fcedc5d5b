"""Where batching disciplines and scheduling policies plug in.

The scheduler alone acts.  A discipline only restricts, a policy only orders and caps; neither changes a state.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from slotwise.core.request import Request

Key = tuple[float, ...]


class View(NamedTuple):
    """What a discipline may know of the moment."""

    num_running: int
    num_waiting: int
    max_num_seqs: int


class Gate(NamedTuple):
    """How many may join in this step, and the reason nobody else may."""

    max_new: int
    reason: str


class Discipline(Protocol):
    """When a request may join and how its prompt may be cut."""

    def gate(self, view: View, now: float) -> Gate: ...

    def reserve(self, request: Request) -> int:
        """Tokens of cache a request must be given when it takes a slot."""
        ...


class Policy(Protocol):
    """Who goes next, who yields.  Smaller keys go first; ties fall to the arrival number."""

    def waiting_key(self, request: Request, now: float) -> Key: ...

    def victim_key(self, request: Request, now: float) -> Key:
        """The running request with the largest key yields first when blocks run out."""
        ...
