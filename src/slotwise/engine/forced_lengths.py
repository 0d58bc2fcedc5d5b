"""Lengths that a benchmark drew: the output ends there as if the model had said so.

Neither scheduler, nor discipline, nor policy can see them: like a model's own end they come to light only with the
token that ends the output.
"""

from __future__ import annotations

from slotwise.core.step import StepPlan, StepResult


class ForcedLengths:
    """Falsy while nobody alive has one."""

    def __init__(self) -> None:
        self._lengths: dict[str, int] = {}  # known tokens, prompt and output, with which a request ends

    def __bool__(self) -> bool:
        return bool(self._lengths)

    def expect(self, request_id: str, num_tokens: int) -> None:
        self._lengths[request_id] = num_tokens

    def forget(self, request_id: str) -> None:
        self._lengths.pop(request_id, None)

    def applied(self, plan: StepPlan, result: StepResult) -> StepResult:
        """`result`, with those complete whose sampled token is their last."""
        known = self._lengths
        complete = tuple(
            row for row, (request_id, start, count) in enumerate(
                zip(plan.request_ids, plan.starts, plan.counts, strict=True))
            if result.tokens[row] and start + count + len(result.tokens[row]) >= known.get(request_id, 1 << 62))
        return result._replace(complete=complete)
