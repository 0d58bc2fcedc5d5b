"""Settings of the scheduling policy: validated together, then turned into a Policy."""

from __future__ import annotations

from dataclasses import dataclass

from slotwise.core.interfaces import Policy
from slotwise.core.limits import LEAST_MS
from slotwise.core.settings import real, whole
from slotwise.core.slo import Tier
from slotwise.core.step_time import StepTimeModel
from slotwise.policies.deadline import Deadline
from slotwise.policies.fair import Fair
from slotwise.policies.fcfs import FirstComeFirstServed
from slotwise.policies.priority import Priority
from slotwise.policies.shortest import Shortest

POLICIES = ("fcfs", "priority", "shortest", "fair", "deadline")
AGEING = {"priority": 60.0, "shortest": 60.0, "deadline": 60.0}  # seconds; defaults
AGED_TOKENS = 100.0  # of work that `ageing` makes up for under `shortest`
GAP = 1
QUANTILE = 0.5
TTFT_MS = 10_000.0
RANGES = {
    "ageing": real(0.001, 86_400.0), "preemption_gap": whole(1, 10_000), "length_quantile": real(0, 1),
    "default_ttft_ms": real(LEAST_MS, 86_400_000 - 1)}  # an objective is less than a day


@dataclass(frozen=True, slots=True)
class Ordering:
    """Settings of a policy.  None is the default, so that a setting which does not belong to `kind` can be refused.

    Raises:
        ValueError: one line that says which settings contradict each other.
    """

    kind: str = "fcfs"
    ageing: float | None = None  # seconds of waiting that make up for a priority, or 100 tokens of work, or lateness
    preemption_gap: int | None = None  # priority: lead that a waiting request needs to preempt a running one
    length_quantile: float | None = None  # shortest: quantile of similar requests' output lengths
    length_oracle: bool = False  # shortest: output lengths fixed by a benchmark are known beforehand
    default_ttft_ms: float | None = None  # deadline: milliseconds; objective of requests without one
    shed_late: bool = False  # deadline: requests that can no longer be in time end at once

    def __post_init__(self) -> None:
        for name, allowed in RANGES.items():
            if (value := getattr(self, name)) is not None and (wrong := allowed.objection(value)):
                raise ValueError(f"{name} {wrong}")
        for name in ("length_oracle", "shed_late"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be true or false, not {getattr(self, name)!r:.40}")
        if self.kind not in POLICIES:
            raise ValueError(f"scheduling_policy must be one of {', '.join(POLICIES)}, not {self.kind!r}")
        self._belongs("ageing", given=self.ageing is not None, kinds=tuple(AGEING))
        self._belongs("preemption_gap", given=self.preemption_gap is not None, kinds=("priority",))
        self._belongs("length_quantile", given=self.length_quantile is not None, kinds=("shortest",))
        self._belongs("length_oracle", given=self.length_oracle, kinds=("shortest",))
        self._belongs("default_ttft_ms", given=self.default_ttft_ms is not None, kinds=("deadline",))
        self._belongs("shed_late", given=self.shed_late, kinds=("deadline",))

    def _belongs(self, name: str, *, given: bool, kinds: tuple[str, ...]) -> None:
        if given and self.kind not in kinds:
            raise ValueError(f"{name} belongs to scheduling_policy {' and '.join(kinds)}, not to {self.kind}")

    def policy(self, tiers: tuple[Tier, ...], times: StepTimeModel) -> Policy:
        """Returns the policy; `times` predicts step times if it needs them."""
        ageing = AGEING.get(self.kind, 0.0) if self.ageing is None else self.ageing
        if self.kind == "priority":
            return Priority(ageing, self.preemption_gap or GAP)
        if self.kind == "shortest":
            quantile = QUANTILE if self.length_quantile is None else self.length_quantile
            return Shortest(AGED_TOKENS / ageing, quantile, oracle=self.length_oracle)
        if self.kind == "fair":
            return Fair({tier.name: tier.weight for tier in tiers})
        if self.kind == "deadline":
            ttft = TTFT_MS if self.default_ttft_ms is None else self.default_ttft_ms
            return Deadline(times, ttft / 1000, ageing, sheds=self.shed_late)
        return FirstComeFirstServed()
