"""Rank 0's executor over all ranks: it sends each plan with what was sampled since the one before, and samples."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable

from slotwise.compose.rank_messages import Known
from slotwise.compose.ranks import Ranks
from slotwise.core.step import RankSpan, StepPlan, StepResult
from slotwise.engine.executor import Executor
from slotwise.runner.input_batch import SlotTable


class LeadingExecutor:
    """Runs plans on all ranks: `runner` on this one.

    Args:
        slots: of this rank, that learn what is sampled as those of the other ranks do; None: `runner` sees to it.
    """

    def __init__(self, runner: Executor, ranks: Ranks, slots: SlotTable | None) -> None:
        self.ranks = ranks
        self._runner = runner
        self._slots = slots
        self._in_flight: deque[tuple[StepPlan, RankSpan]] = deque()

    def submit(self, plan: StepPlan) -> None:
        """Raises RankLostError once a rank is lost."""
        if not plan.has_proposed:  # else the draft model announces the plan, with its drafts
            self.ranks.run(plan)
        began = time.monotonic_ns()
        self._runner.submit(plan)
        self._in_flight.append((plan, RankSpan(0, began, time.monotonic_ns())))

    def collect(self) -> StepResult:
        plan, first = self._in_flight.popleft()
        began = time.monotonic_ns()
        try:
            self.ranks.collect()
            result = self._runner.collect()
        except Exception as error:  # the ranks may have stopped at different places
            self.ranks.lose(f"a step failed on rank 0: {type(error).__name__}: {error}")
            raise
        self.ranks.check()
        last = RankSpan(0, max(began, self.ranks.returned_at), time.monotonic_ns())
        self._learn(known_after(plan, result, [later for later, _ in self._in_flight]))
        if not plan.slots:
            return result
        others = [span for span in self.ranks.spans(plan.step) if span.started_ns >= first.started_ns]
        return result._replace(ranks=(first, last, *others))

    def _learn(self, known: list[Known]) -> None:
        self.ranks.learn(known)
        if self._slots is not None:
            for one in known:
                self._slots.learn(one.slot, one.start, one.tokens)


def known_after(plan: StepPlan, result: StepResult, later: Iterable[StepPlan]) -> list[Known]:
    """What a plan has sampled, but for slots that `later` plans, submitted already, have given to other requests."""
    left = {slot for one in later for slot in one.released_slots}
    drafts = plan.drafts or ((),) * plan.num_rows
    rows = zip(plan.slots, plan.starts, plan.counts, drafts, result.tokens, strict=True)
    return [Known(slot, start + count - len(drafted), tokens)
            for slot, start, count, drafted, tokens in rows if tokens and slot not in left]
