"""Settings of the scheduling policy: validated together, then turned into a Policy."""

from __future__ import annotations

from dataclasses import dataclass

from slotwise.core.interfaces import Policy
from slotwise.core.policies.deadline import Deadline
from slotwise.core.policies.fair import Fair
from slotwise.core.policies.fcfs import FirstComeFirstServed
from slotwise.core.policies.priority import Priority
from slotwise.core.policies.program import LeastServedProgram
from slotwise.core.policies.shortest import Shortest
from slotwise.core.scheduler_limits import LEAST_MS, Tier
from slotwise.core.setting_fields import LIVE, check_settings, real, setting, whole
from slotwise.core.step_time import StepTimeModel

POLICIES = ("fcfs", "priority", "shortest", "fair", "deadline", "program")
AGEING = 60.0  # seconds; default of the policies that age
AGED_TOKENS = 100.0  # of work that `ageing` makes up for under `shortest`
GAP = 1
QUANTILE = 0.5
TTFT_MS = 10_000.0


@dataclass(frozen=True, slots=True)
class Ordering:
    """Settings of a policy.  None is the default, so that a setting which does not belong to `kind` can be refused.

    Raises:
        ValueError: one line that says which settings contradict each other.
    """

    kind: str = setting("fcfs", "order of requests: docs/policies.md says what each policy promises", choices=POLICIES,
                        phase=LIVE, name="scheduling_policy")
    ageing: float | None = setting(
        None, "priority: waiting time that makes up for one priority; shortest: for 100 tokens of work; deadline: "
        "after which a late request goes first; program: for each level of service that its session had",
        unit="seconds", range=real(0.001, 86_400.0), otherwise=f"{AGEING:g}", phase=LIVE)
    preemption_gap: int | None = setting(
        None, "priority: a waiting request preempts a running one that is behind it by so many priorities",
        unit="priorities", range=whole(1, 10_000), otherwise=f"{GAP}", phase=LIVE)
    length_quantile: float | None = setting(
        None, "shortest: the quantile of similar requests' output lengths that predicts a request's", unit="share",
        range=real(0, 1), otherwise=f"{QUANTILE:g}, the median", phase=LIVE)
    length_oracle: bool = setting(
        default=False, help="shortest: use the output lengths that a benchmark fixed, to measure the cost of "
        "predicting them", phase=LIVE)
    # An objective is less than a day.
    default_ttft_ms: float | None = setting(
        None, "deadline: objective of requests without one", unit="ms", range=real(LEAST_MS, 86_400_000 - 1),
        otherwise=f"{TTFT_MS:g}", phase=LIVE)
    shed_late: bool = setting(
        default=False, help="deadline: end requests at once that can no longer meet their objective", phase=LIVE)

    def __post_init__(self) -> None:
        check_settings(self)
        self._belongs("ageing", given=self.ageing is not None, kinds=("priority", "shortest", "deadline", "program"))
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
        ageing = AGEING if self.ageing is None else self.ageing
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
        if self.kind == "program":
            return LeastServedProgram(ageing)
        return FirstComeFirstServed()
