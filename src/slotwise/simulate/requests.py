"""Results of requests: when each had its tokens, as the steps of its server that gave it one.

    clock     0.10   0.21   0.32   0.45   0.50   0.61     when each step of the server ended, in seconds
    spans            1 ─────────── 3             5 5      the request has tokens at 0.21, 0.32, 0.45 and 0.61

A million requests share the clocks of their servers; each has two numbers a span.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain

SERVED = ("stop", "length")  # the reasons of requests that were served whole
REFUSED = "refused"  # the reason of a request that admission control did not accept


def new_clock() -> array[float]:
    return array("d")


@dataclass(slots=True)
class SimulatedRequest:
    """The results of one request.  Times are seconds of the virtual clock."""

    arrived: float
    clock: array[float] = field(default_factory=new_clock)
    spans: list[int] = field(default_factory=list)  # first and last step of each span, in order
    ended: float = 0.0
    reason: str = ""  # as in the engine's records, or REFUSED
    replica: int = 0

    @classmethod
    def measured(cls, arrived: float, token_times: Sequence[float], ended: float, reason: str) -> SimulatedRequest:
        """Returns a request with a clock of its own."""
        spans = [0, len(token_times) - 1] if token_times else []
        return cls(arrived, array("d", token_times), spans, ended, reason)

    def add_tokens(self, first: int, last: int) -> None:
        """A token in each step from `first` to `last`."""
        spans = self.spans
        if spans and spans[-1] == first - 1:
            spans[-1] = last
        else:
            spans += (first, last)

    @property
    def num_tokens(self) -> int:
        return sum(self.spans[1::2]) - sum(self.spans[::2]) + len(self.spans) // 2

    @property
    def first_token(self) -> float | None:
        """When its first token came; None: it has none."""
        return self.clock[self.spans[0]] if self.spans else None

    @property
    def ttft(self) -> float | None:
        """Seconds from its arrival to its first token; None: it has none."""
        return self.clock[self.spans[0]] - self.arrived if self.spans else None

    @property
    def tpot(self) -> float:
        """Seconds a token after the first; 0 without any."""
        number = self.num_tokens
        return (self.clock[self.spans[-1]] - self.clock[self.spans[0]]) / (number - 1) if number > 1 else 0.0

    @property
    def token_times(self) -> list[float]:
        pairs = zip(self.spans[::2], self.spans[1::2], strict=True)
        return list(chain.from_iterable(self.clock[first : last + 1] for first, last in pairs))
