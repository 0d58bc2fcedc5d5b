"""Sweeps of one parameter: measurements, each next to its theory.

The two sweeps of ratios (`output_cv`, `number_of_slots`) run static and continuous batching on prompts of a few tokens,
so that steps are those of decoding, and include the control: outputs of one fixed length, for which no discipline can
gain a step.  The two of steps time a step by its rows (`rows`), and steps while long prompts arrive during running
streams (`prefill`).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from slotwise.core.disciplines.batching_settings import PREFILLS
from slotwise.measure.bench import theory
from slotwise.measure.bench.accounting import Accounts, StepSeconds, StepTimeLine
from slotwise.measure.bench.comparison import Make
from slotwise.measure.bench.measures import percentile, summary
from slotwise.measure.bench.offline_run import Stand, run_offline, run_warm, warm_up
from slotwise.measure.workload.distributions import Exponential, Fixed, LengthDistribution, LogNormal, Uniform, stream
from slotwise.measure.workload.workloads import Workload, as_workload

SLOTS = (4, 8, 16, 32)
PROMPT = 8  # tokens: the prompts of all slots fit the first step
TAIL = 16  # times the mean: the longest output
CONTROL_GROUPS = 3  # batches of the fixed-length control

OnPoint = Callable[[str], None]
"""Receives a description of what is measured next."""
ROWS = (1, 2, 4, 8, 16, 32, 64)
ROW_PROMPT = 64  # tokens of each row
DECODE_STEPS = 32  # the median is used
REPEATS = 3  # of a prefill step
STREAMS = 8  # that decode while long prompts arrive
STREAM_OUTPUT = 160  # tokens of each
LONG_PROMPTS = 4
LONG_PROMPT = 1024  # tokens, or three quarters of the longest sequence
STEP_TOKENS = 128  # of a step with chunks of a prompt
PERCENTILES = (50, 75, 90, 95, 99, 100)


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


def _of_mean(mean: int) -> list[LengthDistribution]:
    """Distributions of about this mean, from the control to long tails."""
    def lognormal(sigma: float) -> LengthDistribution:
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


# -- the cost of a step ------------------------------------------------------------------------------------------------


def rows(make: Make, on_point: OnPoint) -> dict[str, Any]:
    """Throughput and speed per user against rows: why batching helps decode and hardly helps prefill.

    A decode step reads all weights for one token per row, so that rows share its cost.  A prefill step has enough work
    for the processor with one row.
    """
    def alike(count: int, output: int) -> Workload:
        return as_workload([(0.0, ROW_PROMPT, output)] * count)

    most = max(ROWS)
    stand = make({"batching": "continuous", "max_num_seqs": most, "max_num_batched_tokens": most * ROW_PROMPT})
    warm_up(stand, alike(max(ROWS), DECODE_STEPS))
    decode_steps = StepSeconds()
    decode, prefill = [], []
    for count in ROWS:
        on_point(f"{count} rows")
        decode_step = statistics.median(run_offline(stand, alike(count, DECODE_STEPS + 1)).decode_times)
        prompt_step = statistics.median(
            seconds for _ in range(REPEATS) for seconds in run_offline(stand, alike(count, 1)).prompt_times)
        decode_steps.add(count, decode_step)
        decode.append([count, count / decode_step])
        prefill.append([count, count * ROW_PROMPT / prompt_step])
    fitted = decode_steps.fitted()
    return {
        "name": "rows", "title": "Tokens per second by rows of a step", "x": {"label": "rows", "log": True},
        "y": {"label": "tokens per second", "log": True},
        "series": [
            {"label": "decode, all users", "points": decode, "style": "measured"},
            {"label": "decode, all users, a + b rows", "style": "theory", "subject": "decode, all users",
             "points": [[count, count / (fitted.a + fitted.b * count)] for count in ROWS]},
            {"label": "decode, each user", "points": [[count, total / count] for count, total in decode],
             "style": "measured"},
            {"label": f"prefill, prompts of {ROW_PROMPT} tokens", "points": prefill, "style": "measured"},
        ],
        "notes": [
            _knee(fitted),
            f"{max(ROWS)} rows instead of one: {decode[-1][1] / decode[0][1]:.1f}x the tokens per second in decode, "
            f"{prefill[-1][1] / prefill[0][1]:.1f}x in prefill"],
    }


def _knee(fitted: StepTimeLine) -> str:
    """The number of rows from which further rows cost as much as they bring."""
    costs = f"a decode step takes {fitted.a * 1e3:.2f} ms and {fitted.b * 1e3:.3f} ms for each row"
    if fitted.b <= 0 or fitted.a / fitted.b > 10 * max(ROWS):
        return f"{costs}: no knee up to {max(ROWS)} rows, each comes nearly free"
    return f"{costs}: the knee is at a/b = {max(fitted.a, 0) / fitted.b:.0f} rows"


def prefill(make: Make, on_point: OnPoint) -> dict[str, Any]:
    """Step times of the three prefill modes while long prompts arrive during running streams."""
    on_point("streams without long prompts")
    settings = {"batching": "continuous", "max_num_seqs": STREAMS + LONG_PROMPTS, "max_num_batched_tokens": STEP_TOKENS}
    stand = make(settings)
    workload = _interrupted_streams(stand)
    del stand
    series, notes = [], []
    for mode in reversed(PREFILLS):
        on_point(f"prefill {mode}")
        accounts = run_warm(make({**settings, "prefill": mode}), workload)
        steps = sorted([*accounts.decode_times, *accounts.prompt_times])
        series.append({
            "label": mode, "style": "measured",
            "points": [[percent, percentile(steps, percent) * 1e3] for percent in PERCENTILES]})
        notes.append(_felt(mode, accounts))
    return {
        "name": "prefill", "title": f"Step times while {LONG_PROMPTS} prompts of {workload.requests[-1].num_prompt} "
        f"tokens arrive beside {STREAMS} streams", "x": {"label": "percentile of steps", "log": False},
        "y": {"label": "milliseconds", "log": True}, "series": series, "notes": notes,
    }


def _interrupted_streams(stand: Stand) -> Workload:
    """Streams from the start, and long prompts that arrive while they run, spread evenly over their expected time."""
    streams = [(0.0, ROW_PROMPT // 2, STREAM_OUTPUT)] * STREAMS
    calibration = as_workload([(0.0, ROW_PROMPT // 2, DECODE_STEPS)] * STREAMS)
    warm_up(stand, calibration)
    duration = statistics.median(run_offline(stand, calibration).decode_times) * STREAM_OUTPUT
    long = min(LONG_PROMPT, stand.limits.max_model_len * 3 // 4)
    return as_workload([*streams, *(
        (duration * (number + 1) / (LONG_PROMPTS + 2), long, 1) for number in range(LONG_PROMPTS))])


def _felt(mode: str, accounts: Accounts) -> str:
    """Times of steps, and the gaps between tokens that streams see."""
    def percentiles(values: dict[str, float]) -> str:
        return f"p50 {values['p50'] * 1e3:.1f}, p99 {values['p99'] * 1e3:.1f}, max {values['max'] * 1e3:.1f} ms"

    steps = summary([*accounts.decode_times, *accounts.prompt_times])
    first = statistics.fmean(seconds for number, seconds in accounts.ttft.items() if number >= STREAMS)
    gaps = percentiles(accounts.entry()["itl"])
    return (f"{mode}: steps {percentiles(steps)}; gaps between a stream's tokens {gaps}; "
            f"first token of a long prompt after {first * 1e3:.0f} ms")
