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
    """Who goes next, who yields, how much a prompt gets.  Smaller keys go first; ties fall to the arrival number.

    A policy reads requests and is told what becomes of them; it changes none, and it knows no time but the one it is
    given.  Orders must be total, and the same for the same history: a recorded run is planned again to the byte.
    """

    orders_running: bool
    """Running rows are planned in the order of `running_key`; else in the order in which they took their slots."""

    may_preempt: bool
    """Somebody who waits may take the place of somebody who runs: `preempts` is asked."""

    needs_step_times: bool
    """It asks the model of step times, which then learns from every step."""

    isolates_prefill: bool
    """Somebody who runs may have to rest where somebody begins: `paused` is asked, and other steps are kept short."""

    # -- orders --------------------------------------------------------------------------------------------------

    def lane(self, request: Request) -> str:
        """The lane it waits in.  Within a lane the order is that of `waiting_key`."""
        ...

    def lane_key(self, lane: str, now: float) -> Key:
        """Of lanes in which somebody waits; asked again whenever somebody was admitted from one."""
        ...

    def waiting_key(self, request: Request, now: float) -> Key:
        """Its place in its lane, asked when it comes, when it comes back, and when its `patience` is at an end."""
        ...

    def running_key(self, request: Request, now: float) -> Key: ...

    def victim_key(self, request: Request, now: float) -> Key:
        """Its rank, and its place within the rank.

        When blocks run out, somebody of the largest rank yields: of the last in line the one with the least to lose.
        """
        ...

    # -- decisions -----------------------------------------------------------------------------------------------

    def preempts(self, waiting: Request, running: Request, now: float) -> bool:
        """Whether one that waits may take the place of one that runs."""
        ...

    def cap(self, request: Request, wanted: int, now: float) -> int:
        """Of the `wanted` tokens of a prompt, at least one: most that it may have in a step."""
        ...

    def paused(self, requests: Sequence[Request], starting: Sequence[Request], now: float) -> frozenset[str]:
        """Of those who run, or would, the names of those who rest while the prompts of others are computed."""
        ...

    def patience(self, request: Request, now: float) -> float:
        """The moment, in seconds, at which one that waits is to be looked at again; NEVER."""
        ...

    def overdue(self, request: Request, now: float) -> str:
        """Its patience is at an end: why it is given up, in words for its client; "" to give it another place."""
        ...

    # -- what it is told -----------------------------------------------------------------------------------------

    def arrived(self, request: Request, now: float) -> None:
        """It waits, for the first time or because this policy took over from another."""
        ...

    def admitted(self, request: Request, now: float) -> None:
        """It has a slot; `num_computed` of its tokens need not be computed."""
        ...

    def preempted(self, request: Request, now: float) -> None:
        """It gave its slot back, and waits again."""
        ...

    def served(self, requests: Sequence[Request], counts: Sequence[int], tokens: Sequence[Sequence[int]]) -> None:
        """A step was committed: of each row, the tokens computed and those sampled."""
        ...

    def finished(self, request: Request, reason: str, now: float) -> None:
        """It ends; its state is the one in which that happens."""
        ...
