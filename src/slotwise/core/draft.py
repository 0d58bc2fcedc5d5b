"""A plan in the making: columns that grow row by row, and the token budget that shrinks."""

from __future__ import annotations

from slotwise.core.limits import SchedulerLimits
from slotwise.core.plan import NO_BLOCKS, Decision, Grant, Join, StepPlan, Stop
from slotwise.core.request import Request


class Draft:
    """Filled by one `Scheduler.plan`, then closed into a StepPlan."""

    __slots__ = (
        "_threshold", "budget", "counts", "epochs", "grants", "joins", "preempted", "refused", "request_ids",
        "requests", "samples", "slots", "starts", "stop",
    )

    def __init__(self, limits: SchedulerLimits) -> None:
        self.budget = limits.max_num_batched_tokens  # tokens this step may still take
        self._threshold = limits.long_prefill_token_threshold or limits.max_num_batched_tokens
        self.requests: list[Request] = []
        self.epochs: list[int] = []
        self.request_ids: list[str] = []
        self.slots: list[int] = []
        self.starts: list[int] = []
        self.counts: list[int] = []
        self.samples: list[bool] = []
        self.joins: list[Join] = []
        self.grants: list[Grant] = []
        self.preempted: list[Decision] = []
        self.refused: list[Decision] = []
        self.stop: Stop | None = None

    def chunk(self, wanted: int, behind: int) -> int:
        """Tokens a row may take of the `wanted`, leaving one for each of the `behind` rows still to be planned."""
        return max(1, min(wanted, self._threshold, self.budget - behind))

    def row(self, request: Request, start: int, count: int, known: int) -> None:
        """Plan `count` tokens of `request` from position `start`; at the end of the `known` ones it will sample."""
        samples = start + count == known
        self.requests.append(request)
        self.epochs.append(request.epoch)
        self.request_ids.append(request.request_id)
        self.slots.append(request.slot)
        self.starts.append(start)
        self.counts.append(count)
        self.samples.append(samples)
        self.budget -= count
        request.num_scheduled = start + count
        if samples:
            request.pending += 1

    def has(self, request: Request) -> bool:
        return request in self.requests

    def grant(self, request: Request, blocks: tuple[int, ...]) -> None:
        if blocks:
            self.grants.append(Grant(request.slot, blocks))

    def refuse(self, request: Request, reason: str) -> None:
        self.refused.append(Decision(request.request_id, reason))

    def preempt(self, request: Request) -> None:
        self.preempted.append(Decision(request.request_id, NO_BLOCKS))

    def close(self, step: int, now: float, leaves: list[int]) -> StepPlan:
        return StepPlan(
            step, now, tuple(leaves), tuple(self.joins), tuple(self.grants), tuple(self.request_ids),
            tuple(self.slots), tuple(self.starts), tuple(self.counts), tuple(self.samples), tuple(self.preempted),
            tuple(self.refused), self.stop)
