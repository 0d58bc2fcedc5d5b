"""Events of the scheduler, which the engine turns into step records; observers read the records.

The core never reads an event back.

Every event starts with the engine's time in seconds and, except `Committed`, the request id.
"""

from __future__ import annotations

from typing import NamedTuple

from slotwise.core.step import TokenLogprobs


class Arrived(NamedTuple):
    now: float
    request_id: int
    num_prompt: int


class Rejected(NamedTuple):
    """Refused on arrival or when its grammar was compiled, because it could never run.  Ends the request."""

    now: float
    request_id: int
    message: str


class Admitted(NamedTuple):
    now: float
    request_id: int
    slot: int
    step: int
    num_cached: int  # tokens found in the prefix cache, and not computed


class Preempted(NamedTuple):
    """Released its slot and blocks; keeps its tokens and waits to be recomputed."""

    now: float
    request_id: int
    step: int
    num_computed: int


class Committed(NamedTuple):
    """Tokens published by one step, in plan order; rows without tokens are left out.

    Tokens of a batch that leaves together are published at once, by the step that ends the batch.
    """

    now: float
    step: int
    request_ids: tuple[int, ...]
    tokens: tuple[tuple[int, ...], ...]
    logprobs: tuple[tuple[TokenLogprobs, ...], ...]  # an entry is () for a request without log-probabilities


class Finished(NamedTuple):
    now: float
    request_id: int
    reason: str  # stop, length, abort, timeout, error, ...
    num_output: int
    message: str = ""  # for the client, where the reason needs one


Event = Arrived | Rejected | Admitted | Preempted | Committed | Finished
