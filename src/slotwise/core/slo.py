"""On what terms a request is served: who asks, and what they were promised.

Fixed when it came in.  Policies read it; nothing else in the core does.
"""

from __future__ import annotations

from dataclasses import dataclass

PRIORITIES = range(-1000, 1001)
LEAST_WEIGHT, MOST_WEIGHT = 0.001, 1e6


@dataclass(frozen=True, slots=True)
class SLO:
    """Raises ValueError for promises that mean nothing."""

    tenant: str = ""  # whose service is counted together: a key's holder, or the `user` of a request
    tier: str = ""  # the name of one of the limits' tiers; "": of none
    priority: int = 0  # lower is earlier
    ttft: float | None = None  # seconds from its arrival in which its first token is promised
    tpot: float | None = None  # seconds between two tokens that it is promised

    def __post_init__(self) -> None:
        if self.priority not in PRIORITIES:
            raise ValueError(f"priority must be between {PRIORITIES[0]} and {PRIORITIES[-1]}, not {self.priority}")
        for name in ("ttft", "tpot"):
            value = getattr(self, name)
            if value is not None and not 0 < value < 86_400:
                raise ValueError(f"{name} must be positive and less than a day, not {value}")


@dataclass(frozen=True, slots=True)
class Tier:
    """A class of service.  Raises ValueError for numbers that mean nothing."""

    name: str
    ttft: float | None = None  # seconds, as in Terms, of requests that bring no objective of their own
    tpot: float | None = None
    priority: int = 0  # of requests that bring none
    weight: float = 1.0  # of its service beside that of others, where a policy shares
    slots: int = 0  # kept for it: others may not take them, even while they are free

    def __post_init__(self) -> None:
        SLO("", self.name, self.priority, self.ttft, self.tpot)
        if not self.name:
            raise ValueError("a tier needs a name")
        if not LEAST_WEIGHT <= self.weight <= MOST_WEIGHT:
            raise ValueError(f"tier {self.name}: weight must be between {LEAST_WEIGHT:g} and {MOST_WEIGHT:g}, not "
                             f"{self.weight}")
        if self.slots < 0:
            raise ValueError(f"tier {self.name}: slots must not be negative")
