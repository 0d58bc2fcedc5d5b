"""Sweeps of one parameter: measurements, each beside its theory.

The two sweeps of ratios run static and continuous batching on prompts of a few tokens, so that steps are those of
decoding, and include the control: outputs of one fixed length, for which no discipline can gain a step.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from slotwise.bench import theory
from slotwise.bench.compare import Make
from slotwise.bench.offline_run import run_warm
from slotwise.workload.forms import stream
from slotwise.workload.lengths import Exponential, Fixed, Lengths, LogNormal, Uniform
from slotwise.workload.requests import as_workload

SLOTS = (4, 8, 16, 32)
PROMPT = 8  # tokens: the prompts of all slots fit the first step
TAIL = 16  # times the mean: the longest output
CONTROL_GROUPS = 3  # batches of the fixed-length control

OnPoint = Callable[[str], None]
"""Receives a description of what is measured next."""


class Ratio(NamedTuple):
    """Static over continuous batching."""

    steps: float
    time: float
    theory: float  # steps, from the lengths alone

    @property
    def text(self) -> str:
        return f"{self.steps:.2f}x the steps (theory {self.theory:.2f}x), {self.time:.2f}x the time"


def output_cv(make: Make, slots: int, num_requests: int, mean: int, on_point: OnPoint) -> dict[str, Any]:
    """Ratios against the coefficient of variation of output lengths of about `mean` tokens."""
    points: list[tuple[float, Ratio]] = []
    notes = []
    for lengths in _of_mean(mean):
        on_point(f"output lengths {lengths}")
        rng = stream(0, f"sweep {lengths}")
        drawn = [lengths.draw(rng) for _ in range(num_requests)]
        variation = theory.coefficient_of_variation(drawn)
        ratio = measure_ratio(make, slots, drawn)
        points.append((variation, ratio))
        control = " (the control)" if variation == 0 else ""
        notes.append(f"{lengths}{control}: CV {variation:.2f}, {ratio.text}")
    return _ratio_sweep(
        "output-cv", f"Static over continuous, by how much output lengths vary ({slots} slots)",
        {"label": "coefficient of variation of output lengths", "log": False}, points, notes)


def number_of_slots(make: Make, outputs: Sequence[int], on_point: OnPoint) -> dict[str, Any]:
    """Ratios for these output lengths against the number of slots, with the control at each."""
    points: list[tuple[float, Ratio]] = []
    notes, control = [], []
    mean = round(statistics.fmean(outputs))
    for slots in SLOTS:
        on_point(f"{slots} slots")
        ratio = measure_ratio(make, slots, outputs)
        fixed = measure_ratio(make, slots, [mean] * (CONTROL_GROUPS * slots))
        points.append((slots, ratio))
        control.append([slots, fixed.steps])
        notes.append(f"{slots} slots: {ratio.text}; control with outputs of {mean} tokens each: {fixed.text}")
    sweep = _ratio_sweep(
        "slots", "Static over continuous, by the number of slots", {"label": "slots", "log": True}, points, notes)
    sweep["series"].append({"label": "steps, fixed lengths (control)", "points": control, "style": "measured"})
    return sweep


def measure_ratio(make: Make, slots: int, outputs: Sequence[int]) -> Ratio:
    """Run these output lengths, all queued at the start, under both disciplines."""
    workload = as_workload([(0.0, PROMPT, output) for output in outputs])
    static, continuous = (
        run_warm(make({"batching": kind, "max_num_seqs": slots}), workload).entry()
        for kind in ("static", "continuous"))
    return Ratio(
        static["decode_steps"] / continuous["decode_steps"], static["seconds"] / continuous["seconds"],
        theory.step_ratio(outputs, slots))


def fitting_mean(wanted: float, max_model_len: int) -> int:
    """The mean output length nearest to `wanted` whose longest tail still fits a sequence."""
    return max(1, min(round(wanted), (max_model_len - PROMPT) // TAIL))


def _of_mean(mean: int) -> list[Lengths]:
    """Distributions of about this mean, from the control to long tails."""
    def lognormal(sigma: float) -> Lengths:
        return LogNormal(max(1.0, round(mean / math.exp(sigma**2 / 2), 1)), sigma, TAIL * mean)

    return [
        Fixed(mean), Uniform(mean // 2 or 1, 2 * mean - (mean // 2 or 1)), Uniform(1, 2 * mean - 1),
        Exponential(mean, TAIL * mean), lognormal(1.0), lognormal(1.4)]


def _ratio_sweep(
    name: str, title: str, x: dict[str, Any], points: list[tuple[float, Ratio]], notes: list[str],
) -> dict[str, Any]:
    ordered = sorted(points)
    return {
        "name": name, "title": title, "x": x, "y": {"label": "static / continuous", "log": False},
        "series": [
            {"label": "steps, measured", "points": [[at, ratio.steps] for at, ratio in ordered], "style": "measured",
             "subject": "steps"},
            {"label": "steps, theory", "points": [[at, ratio.theory] for at, ratio in ordered], "style": "theory",
             "subject": "steps"},
            {"label": "time, measured", "points": [[at, ratio.time] for at, ratio in ordered], "style": "measured",
             "subject": "time"},
        ],
        "notes": notes,
    }
