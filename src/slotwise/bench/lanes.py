"""The slot x step chart: what each slot computed at every step, run-length encoded.

    slot 0   P d d d d d d          [0, 0, 1, "prefill", 0, 6], [0, 1, 6, "decode", 0, 6]
    slot 1   P d d H H H H          [1, 0, 1, "prefill", 1, 4], [1, 1, 2, "decode", 1, 2], [1, 3, 4, "held", 1, 4]
"""

from __future__ import annotations

from typing import Any

MAX_STEPS = 3000  # more than a screen can show; later steps are counted but not drawn

PREFILL = "prefill"  # tokens of a prompt, or tokens computed again after a preemption
DECODE = "decode"  # the last token known, to sample the next
HELD = "held"  # a request that has ended, computed again until its batch has drained


class Lanes:
    """Collects rows step by step; a run is `[slot, first step, steps, kind, request number, tokens]`."""

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._step_ends = [0.0]
        self._runs: list[list[Any]] = []
        self._open: dict[int, list[Any]] = {}  # slot -> its latest run
        self._pads: list[list[int]] = []
        self._truncated = False

    def row(self, slot: int, kind: str, number: int, tokens: int, padding: int) -> None:
        """Add a row to the step that `end_step` closes."""
        if self._full:
            return
        step = len(self._step_ends) - 1
        run = self._open.get(slot)
        if run is not None and run[3] == kind and run[4] == number and run[1] + run[2] == step:
            run[2] += 1
            run[5] += tokens
        else:
            self._open[slot] = run = [slot, step, 1, kind, number, tokens]
            self._runs.append(run)
        if padding:
            self._pads.append([slot, step, padding])

    def end_step(self, at: float) -> None:
        """Close the step, which ended `at` seconds after the run began."""
        if self._full:
            self._truncated = True
        else:
            self._step_ends.append(round(at, 6))

    @property
    def _full(self) -> bool:
        return len(self._step_ends) > MAX_STEPS

    def chart(self) -> dict[str, Any]:
        return {
            "slots": self._num_slots, "steps": len(self._step_ends) - 1, "step_ends": self._step_ends,
            "runs": self._runs, "pads": self._pads, "truncated": self._truncated,
        }
