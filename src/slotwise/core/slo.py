"""Service-level objectives: tenant, tier, priority and latency targets of a request.

Fixed on arrival.  Policies read all of them, the rest of the core `tier` and `tpot` only.
"""

from __future__ import annotations

from dataclasses import dataclass

PRIORITIES = range(-1000, 1001)
LEAST_WEIGHT, MOST_WEIGHT = 0.001, 1e6


@dataclass(frozen=True, slots=True)
class SLO:
    """Objectives of one request.  Raises ValueError for values out of range."""

    tenant: str = ""  # the unit of fairness: the holder of an API key, or the `user` of a request
    tier: str = ""  # name of one of the limits' tiers; "": none
    priority: int = 0  # lower is earlier
    ttft: float | None = None  # seconds from arrival to the first token
    tpot: float | None = None  # seconds between two output tokens

    def __post_init__(self) -> None:
        if self.priority not in PRIORITIES:
            raise ValueError(f"priority must be between {PRIORITIES[0]} and {PRIORITIES[-1]}, not {self.priority}")
        for name in ("ttft", "tpot"):
            value = getattr(self, name)
            if value is not None and not 0 < value < 86_400:
                raise ValueError(f"{name} must be positive and less than a day, not {value}")


@dataclass(frozen=True, slots=True)
class Tier:
    """A class of service.  Raises ValueError for values out of range."""

    name: str
    ttft: float | None = None  # seconds, as in SLO; the default of its requests
    tpot: float | None = None
    priority: int = 0  # the default of its requests
    weight: float = 1.0  # share of the service, under a policy that shares
    slots: int = 0  # slots reserved for it, even while they are free

    def __post_init__(self) -> None:
        SLO("", self.name, self.priority, self.ttft, self.tpot)
        if not self.name:
            raise ValueError("a tier needs a name")
        if not LEAST_WEIGHT <= self.weight <= MOST_WEIGHT:
            raise ValueError(f"tier {self.name}: weight must be between {LEAST_WEIGHT:g} and {MOST_WEIGHT:g}, not "
                             f"{self.weight}")
        if self.slots < 0:
            raise ValueError(f"tier {self.name}: slots must not be negative")
