"""What happened, as the core tells it.  Observers fold over these; nothing in the core reads them back.

Every event starts with the engine's time in seconds and, but for `Committed`, the request's id.
"""

from __future__ import annotations

from typing import NamedTuple

from slotwise.core.step import TokenLogprobs


class Arrived(NamedTuple):
    now: float
    request_id: str
    num_prompt: int


class Rejected(NamedTuple):
    """Refused at the door: it could never run.  Ends the request."""

    now: float
    request_id: str
    message: str


class Admitted(NamedTuple):
    now: float
    request_id: str
    slot: int
    step: int
    num_cached: int  # tokens whose blocks were found, so that they are not computed


class Preempted(NamedTuple):
    """Gave its slot and blocks back; keeps its tokens and waits to compute them again."""

    now: float
    request_id: str
    step: int
    num_computed: int


class Committed(NamedTuple):
    """Tokens published by one step, in plan order.  Rows that yielded nothing are not named.

    Where a batch returns as one they are published by the step that ends the batch, all at once.
    """

    now: float
    step: int
    request_ids: tuple[str, ...]
    tokens: tuple[tuple[int, ...], ...]
    logprobs: tuple[tuple[TokenLogprobs, ...], ...]  # an entry is () where nobody asked
    num_overrun: int  # results dropped because their request had ended meanwhile


class Finished(NamedTuple):
    now: float
    request_id: str
    reason: str  # stop, length, abort, timeout, error, ...
    num_output: int
    message: str = ""  # for the client, where the reason needs one


Event = Arrived | Rejected | Admitted | Preempted | Committed | Finished
