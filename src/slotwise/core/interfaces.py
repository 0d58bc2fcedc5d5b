"""Interfaces of the scheduler: Discipline (how a batch is formed), Policy (in which order) and Proposer (drafts).

The scheduler alone changes state.  A discipline restricts batches and chunks, a policy orders requests and caps chunks,
a proposer proposes drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from slotwise.core.record import Proposing
from slotwise.core.request import Request
from slotwise.core.scheduler_limits import SchedulerLimits
from slotwise.core.step_time import Work

Key = tuple[float, ...]

NEVER = float("inf")  # seconds; time alone never opens the gate


class View(NamedTuple):
    """The scheduler's state as a discipline sees it."""

    num_running: int
    num_waiting: int
    max_num_seqs: int
    oldest_arrival: float  # seconds; of the oldest unfinished request


class Gate(NamedTuple):
    """Requests that may join this step, the reason for refusing others, and when time alone admits more."""

    max_new: int
    reason: str
    reopens_at: float = NEVER  # seconds


class Discipline(Protocol):
    """Decides when a request may join a batch, how its prompt is chunked, and when it may leave."""

    prompts_alone: bool
    """A step that starts prompts computes no other rows."""

    leaves_together: bool
    """An ended request stays in the batch: computed again at every step, output held, until the whole batch ends."""

    in_strict_order: bool
    """A request that waits for blocks blocks every request behind it."""

    def gate(self, view: View, now: float) -> Gate: ...

    def reserve(self, request: Request) -> int:
        """Tokens of cache capacity that a request is allocated on admission."""
        ...

    def budget(self, limits: SchedulerLimits) -> int:
        """Token budget of a step: once spent, no further request is admitted."""
        ...

    def chunk(self, wanted: int, left: int) -> int:
        """Returns how many of `wanted` prompt tokens one step computes, with `left` tokens of its budget."""
        ...

    def padding(self, counts: Sequence[int]) -> tuple[int, ...]:
        """Returns padding tokens a row, for a step of `counts` tokens that a request joins; () for none."""
        ...


class Policy(Protocol):
    """Orders requests, chooses victims and caps chunks.  Smaller keys go first; ties fall to the arrival number.

    A policy reads requests and is notified of their transitions; it changes none, and reads no clock.  Orders are total
    and depend on the history alone: replaying a recorded run reproduces every plan to the byte.
    """

    orders_running: bool
    """Running rows are planned in the order of `running_key`; else in the order in which they took their slots."""

    ranks_once: bool
    """The `running_key` of a request stays as it is while the request runs."""

    may_preempt: bool
    """A waiting request may preempt a running one: the scheduler calls `preempts`."""

    needs_step_times: bool
    """The policy reads the step-time model, which then learns from every step."""

    isolates_prefill: bool
    """Running rows may pause while a prompt is computed: the scheduler calls `paused`, and shortens other steps."""

    # -- orders --------------------------------------------------------------------------------------------------

    def lane(self, request: Request) -> str:
        """Returns the lane it waits in.  `waiting_key` orders requests within a lane."""
        ...

    def lane_key(self, lane: str, now: float) -> Key:
        """Orders non-empty lanes; read again after every admission from one."""
        ...

    def waiting_key(self, request: Request, now: float) -> Key:
        """Orders a lane; read when a request arrives, is preempted, or reaches its `patience`."""
        ...

    def running_key(self, request: Request, now: float) -> Key: ...

    def victim_key(self, request: Request, now: float) -> Key:
        """Returns (rank, order within the rank).

        When blocks run out, the victim is, among the last of the largest rank, the one with the fewest computed tokens.
        """
        ...

    # -- decisions -----------------------------------------------------------------------------------------------

    def preempts(self, waiting: Request, running: Request, now: float) -> bool:
        """Whether `waiting` may preempt `running`."""
        ...

    def cap(self, request: Request, wanted: int, now: float) -> int:
        """Returns the maximum, at least 1, of the `wanted` prompt tokens that it may get in a step."""
        ...

    def paused(self, requests: Sequence[Request], starting: Sequence[Request], now: float) -> frozenset[int]:
        """Returns the ids among `requests` to pause while the prompts of `starting` are computed."""
        ...

    def patience(self, request: Request, now: float) -> float:
        """Returns when a waiting request is to be checked again, in seconds; NEVER: not at all."""
        ...

    def overdue(self, request: Request, now: float) -> str:
        """Called when `patience` is reached.  Returns the message with which it is shed; "": requeue it."""
        ...

    # -- notifications -------------------------------------------------------------------------------------------

    def arrived(self, request: Request, now: float) -> None:
        """It is enqueued, or it is unfinished when this policy replaces another."""
        ...

    def admitted(self, request: Request, now: float) -> None:
        """It holds a slot; `num_computed` of its tokens are cached."""
        ...

    def preempted(self, request: Request, now: float) -> None:
        """It released its slot and waits again."""
        ...

    def served(self, requests: Sequence[Request], counts: Sequence[int], tokens: Sequence[Sequence[int]]) -> None:
        """A step was committed: by row, the number of tokens computed, and the tokens sampled."""
        ...

    def finished(self, request: Request, reason: str, now: float) -> None:
        """It is about to finish; `request.state` is still the state before."""
        ...


class Due(NamedTuple):
    """Places of the rows that may have drafts in this step; if there are none, why, and for how many steps to come."""

    places: Sequence[int]
    reason: str
    rest: int = 0  # steps of these rows in which none of them will be due, either


class DraftRow(NamedTuple):
    """A decoding row that may verify drafts, and the most that its output and the free blocks have room for."""

    request: Request
    limit: int


class Proposal(NamedTuple):
    """Drafts by row, () for a plain one, and why there are no more (`core/drafting.py`); "": `most`.

    A draft is a token, or PROPOSED.
    """

    drafts: Sequence[tuple[int, ...]]
    reason: str


class Proposer(Protocol):
    """Proposes draft tokens, which the step verifies: speculative decoding (Leviathan et al., ICML 2023).

    It depends on the history alone, as a policy does.
    """

    def due(self, requests: Sequence[Request]) -> Due:
        """Returns which of a step's decoding rows, those without a token in flight, to call `propose` with.

        Called once a step, after all of its rows are planned.  It takes a fraction of a microsecond a row.
        """
        ...

    def propose(self, rows: Sequence[DraftRow], num_decoding: int, work: Work, most: int) -> Proposal:
        """Returns tokens that may follow `request.tokens` of each row: at most its `limit`, and `most` in total.

        Args:
            rows: those that `due` named.
            num_decoding: rows that `due` was called with.
            work: of the step without drafts.
        """
        ...

    def seconds(self, num_rows: int, num_drafts: int) -> float:
        """Returns the predicted seconds in which an executor proposes `num_drafts` drafts of `num_rows` rows."""
        ...

    def waits(self, request: Request) -> bool:
        """Whether a decoding row with a token in flight leaves out a step, so that drafts may follow that token.

        Else it runs without drafts, and an engine that overlaps steps never finds it without a token in flight.
        """
        ...

    def committed(
        self, requests: Sequence[Request], drafts: Sequence[Sequence[int]], proposing: Proposing | None = None,
    ) -> None:
        """A step was committed: its rows' requests, with the tokens it appended, and the drafts of each row, or ().

        Args:
            proposing: what the executor's draft model took.
        """
        ...

    def finished(self, request: Request) -> None:
        """It has ended, in any state."""
        ...
