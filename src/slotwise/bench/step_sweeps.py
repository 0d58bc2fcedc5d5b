"""The cost of a step: by rows, and while long prompts arrive beside running streams."""

from __future__ import annotations

import statistics
from typing import Any

from slotwise.batching.settings import PREFILLS
from slotwise.bench.accounting import Accounts
from slotwise.bench.compare import Make
from slotwise.bench.fit import Fitted, Steps
from slotwise.bench.measures import percentile, summary
from slotwise.bench.offline_run import Stand, run_offline, run_warm, warm_up
from slotwise.bench.sweeps import OnPoint
from slotwise.workload.requests import Workload, as_workload

ROWS = (1, 2, 4, 8, 16, 32, 64)
PROMPT = 64  # tokens of each row
DECODE_STEPS = 32  # the median is used
REPEATS = 3  # of a prefill step

STREAMS = 8  # that decode while long prompts arrive
STREAM_OUTPUT = 160  # tokens of each
LONG_PROMPTS = 4
LONG_PROMPT = 1024  # tokens, or three quarters of the longest sequence
STEP_TOKENS = 128  # of a step with chunks of a prompt
PERCENTILES = (50, 75, 90, 95, 99, 100)


def rows(make: Make, on_point: OnPoint) -> dict[str, Any]:
    """Throughput and speed per user against rows: why batching helps decode and hardly helps prefill.

    A decode step reads all weights for one token per row, so that rows share its cost.  A prefill step has enough work
    for the processor with one row.
    """
    def alike(count: int, output: int) -> Workload:
        return as_workload([(0.0, PROMPT, output)] * count)

    stand = make({"batching": "continuous", "max_num_seqs": max(ROWS), "max_num_batched_tokens": max(ROWS) * PROMPT})
    warm_up(stand, alike(max(ROWS), DECODE_STEPS))
    decode_steps = Steps()
    decode, prefill = [], []
    for count in ROWS:
        on_point(f"{count} rows")
        decode_step = statistics.median(run_offline(stand, alike(count, DECODE_STEPS + 1)).decode_times)
        prompt_step = statistics.median(
            seconds for _ in range(REPEATS) for seconds in run_offline(stand, alike(count, 1)).prompt_times)
        decode_steps.add(count, decode_step)
        decode.append([count, count / decode_step])
        prefill.append([count, count * PROMPT / prompt_step])
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
            {"label": f"prefill, prompts of {PROMPT} tokens", "points": prefill, "style": "measured"},
        ],
        "notes": [
            _knee(fitted),
            f"{max(ROWS)} rows instead of one: {decode[-1][1] / decode[0][1]:.1f}x the tokens per second in decode, "
            f"{prefill[-1][1] / prefill[0][1]:.1f}x in prefill"],
    }


def _knee(fitted: Fitted) -> str:
    """The number of rows from which further rows cost as much as they bring."""
    costs = f"a decode step takes {fitted.a * 1e3:.2f} ms and {fitted.b * 1e3:.3f} ms for each row"
    if fitted.b <= 0 or fitted.a / fitted.b > 10 * max(ROWS):
        return f"{costs}: no knee up to {max(ROWS)} rows, each comes nearly free"
    return f"{costs}: the knee is at a/b = {max(fitted.a, 0) / fitted.b:.0f} rows"


def prefill(make: Make, on_point: OnPoint) -> dict[str, Any]:
    """Step times of the three prefill modes while long prompts arrive beside running streams."""
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
    streams = [(0.0, PROMPT // 2, STREAM_OUTPUT)] * STREAMS
    calibration = as_workload([(0.0, PROMPT // 2, DECODE_STEPS)] * STREAMS)
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
