"""Where batching disciplines and scheduling policies plug in.

The scheduler alone acts.  A discipline only restricts, a policy only orders and caps; neither changes a state.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from slotwise.core.limits import SchedulerLimits
from slotwise.core.request import Request

Key = tuple[float, ...]

NEVER = float("inf")  # seconds: no moment of the clock opens the gate


class View(NamedTuple):
    """What a discipline may know of the moment."""

    num_running: int
    num_waiting: int
    max_num_seqs: int
    oldest_arrival: float  # seconds; of whoever has lived longest


class Gate(NamedTuple):
    """How many may join in this step, the reason nobody else may, and when the clock alone will let more in."""

    max_new: int
    reason: str
    reopens_at: float = NEVER  # seconds


class Discipline(Protocol):
    """When a request may join a batch, how its prompt may be cut, and when it may leave."""

    prompts_alone: bool
    """A step that starts prompts runs nothing beside them."""

    leaves_together: bool
    """Who has ended is held in the batch, computed again at every step and told nothing, until everyone has ended."""

    in_strict_order: bool
    """One that waits for blocks keeps everyone behind it waiting, too."""

    def gate(self, view: View, now: float) -> Gate: ...

    def reserve(self, request: Request) -> int:
        """Tokens of cache a request must be given when it takes a slot."""
        ...

    def budget(self, limits: SchedulerLimits) -> int:
        """Tokens after which a step takes in nobody else."""
        ...

    def chunk(self, wanted: int, left: int) -> int:
        """Of the `wanted` tokens of a prompt, those one step computes, with `left` of its budget."""
        ...

    def padding(self, counts: Sequence[int]) -> tuple[int, ...]:
        """Tokens of nothing computed beside the `counts` of a step that somebody joins; () for none."""
        ...


class Policy(Protocol):
    """Who goes next, who yields.  Smaller keys go first; ties fall to the arrival number."""

    def waiting_key(self, request: Request, now: float) -> Key: ...

    def victim_key(self, request: Request, now: float) -> Key:
        """The running request with the largest key yields first when blocks run out."""
        ...
