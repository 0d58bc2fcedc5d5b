"""What a step computes for nothing, what it leaves empty, and why those are not in it who are not.

Folds over steps alike, whether the engine tells of them (`engine.messages.StepRecord`) or a log (`observe.log.Step`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from slotwise.core import reasons

DECODE, MIXED, PREFILL = KINDS = ("decode", "mixed", "prefill")
STEP_UNDER_WAY = "step_under_way"  # it came while a step ran, and no plan has seen it yet
WAITS = (
    STEP_UNDER_WAY, reasons.NO_SLOT, reasons.NO_BLOCKS, reasons.TOKEN_BUDGET, reasons.BATCH_RUNNING,
    reasons.WINDOW_OPEN, reasons.ONE_AT_A_TIME)
STALLS = (reasons.TOKEN_BUDGET, reasons.ENDING, reasons.PROMPTS_ALONE)


class Columns(Protocol):
    """Of a step, what is read here; who is named by what is all the same."""

    counts: Sequence[int]
    padding: Sequence[int]
    held: Sequence[int]
    refused: Sequence[tuple[Any, str]]
    stop: Any  # (reason, first_blocked, num_behind, ...) or None


def kind(step: Columns) -> str:
    """`decode`: a token for each row; `prefill`: more than one for each; else `mixed`."""
    if max(step.counts) == 1:
        return DECODE
    return PREFILL if min(step.counts) > 1 else MIXED


def held_tokens(step: Columns) -> int:
    """Computed for rows that have their last token already."""
    return sum([step.counts[row] for row in step.held]) if step.held else 0


def why_waiting(step: Columns) -> dict[str, int]:
    """Requests that wait for a slot, by why.  Who was not examined waits for what stopped the first."""
    if step.stop is None:
        return {}
    reason, first, num_behind = step.stop[:3]
    waiting = {reason: 1 + num_behind}
    for _, other in _refused_from(step, first)[1:]:
        if other != reason:
            waiting[other] = waiting.get(other, 0) + 1
            waiting[reason] -= 1
    return waiting


def why_stalled(step: Columns) -> dict[str, int]:
    """Running requests without a row in this step, by why."""
    if not step.refused:
        return {}
    stalled: dict[str, int] = {}
    waiting = {name for name, _ in _refused_from(step, step.stop[1])} if step.stop is not None else ()
    for name, reason in step.refused:
        if name not in waiting:
            stalled[reason] = stalled.get(reason, 0) + 1
    return stalled


def _refused_from(step: Columns, first: Any) -> list[tuple[Any, str]]:
    """Those examined who wait, in their order; who runs is refused before them, or afterwards for prompts alone."""
    names = [name for name, _ in step.refused]
    return [entry for entry in step.refused[names.index(first):] if entry[1] != reasons.PROMPTS_ALONE]
