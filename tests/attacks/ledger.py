"""The arithmetic of a scenario: outcomes of requests, leaked blocks, promises that were kept."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

COMPLETED = "completed"
ABORTED = "aborted"  # ended by the server, with a finish reason in the stream
FAILED = "error"  # ended by an explicit error
REFUSED = "refused (503)"
IMPOSSIBLE = "refused (400)"
HUNG_UP = "hung up"  # ended by this client
UNHEARD = "door closed"  # the connection was refused: the request never reached the server
LOST = "lost"  # no end, or not exactly one
FATES = (COMPLETED, ABORTED, FAILED, REFUSED, IMPOSSIBLE, HUNG_UP, UNHEARD, LOST)


def fate(status: int, ends: int, finish_reason: str, failed: bool) -> str:
    """Returns the outcome of a request that its client did not abort.

    Args:
        status: of the response; 0 without one.
        ends: the number of finish reasons and errors, each of which ends a request.
    """
    if ends != 1:
        return LOST
    if status == 503:
        return REFUSED
    if 400 <= status < 500:
        return IMPOSSIBLE
    if failed or status >= 500:
        return FAILED
    return ABORTED if finish_reason == "abort" else COMPLETED


@dataclass(slots=True)
class Row:
    """The account of one scenario."""

    scenario: str
    fates: dict[str, int]
    leaked: int  # blocks
    holds: dict[str, bool]  # each promise, and whether it was kept
    seen: list[str]  # measurements as text
    figures: dict[str, Any] = field(default_factory=dict)  # the same as numbers

    @property
    def sent(self) -> int:
        return sum(self.fates.values()) - self.fates.get(UNHEARD, 0)

    @property
    def lost(self) -> int:
        return self.fates.get(LOST, 0)

    @property
    def ended(self) -> int:
        return self.sent - self.lost

    @property
    def broken(self) -> list[str]:
        """Returns the promises that were not kept."""
        kept = {"no request lost": self.lost == 0, "no block leaked": self.leaked == 0} | self.holds
        return [promise for promise, was_kept in kept.items() if not was_kept]

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {
            "sent": self.sent, "ended": self.ended, "lost": self.lost, "broken": self.broken}


def tally(fates: Iterable[str]) -> dict[str, int]:
    """Returns the number of requests by outcome, in the order of `FATES`."""
    counts = Counter(fates)
    return {name: counts[name] for name in FATES if counts[name]}


def leaked_blocks(usage: float, num_blocks: int, needed: int) -> int:
    """Returns the blocks in use beyond those of the only active request.

    Args:
        usage: share of all blocks in use.
    """
    return round(usage * num_blocks) - needed


def drift(first: float, last: float) -> float:
    """Returns the growth from `first` to `last` as a share of `first`."""
    return last / first - 1
