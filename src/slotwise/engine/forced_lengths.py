"""Output lengths fixed by a workload: the output ends there as if the model had ended it.

Scheduler, discipline and policy cannot see them: as with a model's own end, only the last token reveals it.
"""

from __future__ import annotations

from slotwise.core.step import StepPlan, StepResult


class ForcedLengths:
    """The forced lengths of the unfinished requests; false when there are none."""

    def __init__(self) -> None:
        self._lengths: dict[str, int] = {}  # request -> tokens, prompt and output, at which it ends

    def __bool__(self) -> bool:
        return bool(self._lengths)

    def expect(self, request_id: str, num_tokens: int) -> None:
        self._lengths[request_id] = num_tokens

    def forget(self, request_id: str) -> None:
        self._lengths.pop(request_id, None)

    def applied(self, plan: StepPlan, result: StepResult) -> StepResult:
        """Returns `result` with `complete`: the rows whose sampled token is their last."""
        known = self._lengths
        complete = tuple(
            row for row, (request_id, start, count) in enumerate(
                zip(plan.request_ids, plan.starts, plan.counts, strict=True))
            if result.tokens[row] and start + count + len(result.tokens[row]) >= known.get(request_id, 1 << 62))
        return result._replace(complete=complete)
