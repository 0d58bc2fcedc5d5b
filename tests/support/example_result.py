"""A realistic result of a comparison, simulated from drawn lengths: nothing is computed but time.

A step takes BASE + ROW x rows + TOKEN x prompt tokens seconds, as a small model on two cores does.

usage: python tests/support/example_result.py [FILE.html]
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

BASE, ROW, TOKEN = 0.0125, 0.0004, 0.00011  # seconds
MAX_TOKENS = 384


@dataclass
class Asked:
    """A request: its prompt, its answer, and how far it has come."""

    number: int
    prompt: int
    output: int
    computed: int = 0
    given: int = 0
    times: list[float] = field(default_factory=list)  # when each token was returned


@dataclass(frozen=True)
class Row:
    slot: int
    asked: Asked
    kind: str
    tokens: int
    pad: int = 0


Steps = Iterator[tuple[list[Row], list[Asked]]]  # the rows of a step, and who is returned everything at its end


def drawn(count: int, seed: int) -> list[Asked]:
    rng = random.Random(seed)
    return [Asked(number, min(256, max(1, round(rng.lognormvariate(3.9, 0.8)))),
                  min(MAX_TOKENS, max(1, round(rng.lognormvariate(3.7, 1.0))))) for number in range(count)]


def whole_batches(queue: list[Asked], size: int) -> Steps:
    """Groups of `size`: padded, decoded until the longest has ended, then returned together."""
    for begin in range(0, len(queue), size):
        batch = queue[begin:begin + size]
        longest = max(one.prompt for one in batch)
        yield [Row(slot, one, "prefill", one.prompt, longest - one.prompt) for slot, one in enumerate(batch)], (
            batch if max(one.output for one in batch) == 1 else [])
        last = max(one.output for one in batch)
        for token in range(1, last):
            yield [Row(slot, one, "decode" if token < one.output else "held", 1) for slot, one in enumerate(batch)], (
                batch if token == last - 1 else [])


def refilled(queue: list[Asked], slots: int, chunk: int) -> Steps:
    """A freed slot is refilled at the next step; prompts share `chunk` tokens a step with decode."""
    waiting, running = [*queue], dict[int, Asked]()
    while waiting or running:
        for slot in range(slots):
            if slot not in running and waiting:
                running[slot] = waiting.pop(0)
        budget, rows = chunk, []
        for slot, one in sorted(running.items(), key=lambda item: item[1].number):
            wanted = max(1, one.prompt - one.computed)
            taken = min(wanted, budget)
            if taken:
                rows.append(Row(slot, one, "prefill" if one.computed < one.prompt else "decode", taken))
                budget -= taken
        yield rows, []
        running = {slot: one for slot, one in running.items() if one.given < one.output}


def simulate(name: str, slots: int, steps: Steps, speed: float = 1.0) -> dict[str, Any]:
    """Runs the steps on a virtual clock and folds them into one run of a result."""
    ends, history, now = [0.0], [], 0.0
    for rows, returned in steps:
        tokens = sum(row.tokens + row.pad for row in rows)
        now += (BASE + ROW * len(rows) + TOKEN * (tokens - len(rows))) / speed
        ends.append(now)
        history.append(rows)
        for row in rows:
            row.asked.computed += row.tokens
            if row.kind != "held" and row.asked.computed >= row.asked.prompt:
                row.asked.given += 1
                if name not in ("static", "dynamic", "one_at_a_time"):
                    row.asked.times.append(now)
        for one in returned:
            one.times += [now] * one.output
    return _fold(name, slots, ends, history)


def _fold(name: str, slots: int, ends: list[float], history: list[list[Row]]) -> dict[str, Any]:
    everyone = {row.asked.number: row.asked for rows in history for row in rows}.values()
    times = sorted(time for one in everyone for time in one.times)
    total, steps = len(times), len(history)
    computed = sum(len(rows) for rows in history)
    held = sum(row.kind == "held" for rows in history for row in rows)
    first = sorted(one.times[0] for one in everyone)
    gaps = sorted(b - a for one in everyone for a, b in zip(one.times, one.times[1:], strict=False))
    return {
        "name": name, "label": name.replace("_", " "), "settings": {"batching": name}, "num_slots": slots,
        "seconds": ends[-1], "steps": steps,
        "decode_steps": sum(any(row.kind != "prefill" for row in rows) for rows in history),
        "output_tokens": total, "output_throughput": total / ends[-1], "request_throughput": len(everyone) / ends[-1],
        "occupancy": (computed - held) / (steps * slots), "mean_rows": computed / steps,
        "max_rows": max(map(len, history)), "preemptions": 0,
        "cost_per_million": 0.19 / 3600 / (total / ends[-1]) * 1e6,
        "ttft": _spread(first), "itl": _spread(gaps), "e2e": _spread(sorted(one.times[-1] for one in everyone)),
        "ttft_values": _thin(first), "itl_values": _thin(gaps),
        "waste": {
            "padded_tokens": sum(row.pad for rows in history for row in rows), "held_row_steps": held,
            "empty_slot_steps": steps * slots - computed,
            "head_of_line_seconds": sum(first) * (0.8 if name in ("static", "dynamic") else 0.01),
            "reserved_unused": {"continuous": 0.03, "orca": 0.61}.get(name, 0.72)},
        "step_time": {"a": BASE, "b": ROW, "error": 0.034},
        "chart": _chart(slots, ends, history),
        "cumulative": _thin([[time, index + 1] for index, time in enumerate(times)])}


def _chart(slots: int, ends: list[float], history: list[list[Row]]) -> dict[str, Any]:
    cells = sorted((row.slot, row.asked.number, row.kind, step, row.tokens)
                   for step, rows in enumerate(history) for row in rows)
    runs = []
    for (slot, request, kind, _), members in groupby(
            enumerate(cells), key=lambda item: (*item[1][:3], item[1][3] - item[0])):
        columns = [cell for _, cell in members]
        runs.append([slot, columns[0][3], len(columns), kind, request, sum(column[4] for column in columns)])
    pads = [[row.slot, step, row.pad] for step, rows in enumerate(history) for row in rows if row.pad]
    return {"slots": slots, "steps": len(history), "step_ends": [round(end, 5) for end in ends], "runs": runs,
            "pads": pads, "truncated": False}


def _spread(values: list[float]) -> dict[str, float | None]:
    if not values:
        return dict.fromkeys(("mean", "p50", "p90", "p99", "max"))
    at = {f"p{share}": values[min(len(values) - 1, len(values) * share // 100)] for share in (50, 90, 99)}
    return {"mean": sum(values) / len(values), **at, "max": values[-1]}


def _thin(values: list[Any]) -> list[Any]:
    if len(values) <= 400:
        return values
    return [values[round(index * (len(values) - 1) / 399)] for index in range(400)]


def result(count: int = 64, slots: int = 8, seed: int = 0) -> dict[str, Any]:
    """The five disciplines on one workload, and two sweeps."""
    lengths = drawn(count, seed)
    runs = [
        simulate("one_at_a_time", 1, whole_batches(drawn(count, seed), 1)),
        simulate("static", slots, whole_batches(drawn(count, seed), slots)),
        simulate("dynamic", slots, whole_batches(drawn(count, seed), max(1, slots * 3 // 4))),
        simulate("orca", max(1, slots * 3 // 4), refilled(drawn(count, seed), max(1, slots * 3 // 4), 1 << 30)),
        simulate("continuous", slots, refilled(drawn(count, seed), slots, 64 + slots))]
    outputs = [one.output for one in lengths]
    mean = sum(outputs) / count
    deviation = (sum((output - mean) ** 2 for output in outputs) / count) ** 0.5
    return {
        "version": 1, "model": "SmolLM2-135M shape", "dtype": "bfloat16", "mode": "offline", "seed": seed,
        "environment": {"slotwise": "0.1.0", "python": "3.11.7", "torch": "2.13.0", "commit": "60d2423f1c",
                        "machine": "Xeon (AVX-512, AMX)", "cores": 2, "created": "2026-11-21T09:12:44+00:00"},
        "workload": {"description": {"input": "lognormal:50:0.8:256", "output": f"lognormal:40:1.0:{MAX_TOKENS}",
                                     "arrivals": "at-once"},
                     "num_requests": count, "max_tokens": MAX_TOKENS, "prompt_tokens": sum(x.prompt for x in lengths),
                     "output_tokens": sum(outputs), "output_cv": deviation / mean},
        "slots": slots, "price_per_hour": 0.19, "identical_tokens": True, "runs": runs, "sweeps": sweeps()}


def sweeps() -> list[dict[str, Any]]:
    """How the gain grows with spread and with slots, and how a step's time grows with its rows."""
    by_slots = {"fixed": (1.0, 1.0, 1.0, 1.0), "uniform 1–128": (1.58, 1.77, 1.84, 1.89),
                "log-normal": (2.18, 2.93, 3.77, 4.5)}
    series = []
    for label, ratios in by_slots.items():
        points = list(zip((4, 8, 16, 32), ratios, strict=True))
        series += [{"label": f"{label}, theory", "style": "theory", "subject": label, "points": points},
                   {"label": f"{label}, measured", "style": "measured", "subject": label,
                    "points": [[x, y * 0.985] for x, y in points]}]
    rows = [2**power for power in range(8)]
    speed = [[n, n / (BASE + ROW * n + 0.00001 * n * n)] for n in rows]
    return [
        {"name": "slots", "title": "Decode steps, static ÷ continuous, by number of slots",
         "x": {"label": "slots", "log": True}, "y": {"label": "static ÷ continuous", "log": False}, "series": series,
         "notes": ["The fixed-length control is 1.00: where nobody finishes early there is nothing to refill."]},
        {"name": "rows", "title": "Decode throughput by rows in a step", "x": {"label": "rows", "log": True},
         "y": {"label": "tokens per second", "log": True},
         "series": [{"label": "decode", "style": "measured", "points": speed},
                    {"label": "prefill", "style": "measured", "points": [[n, 5200 + 40 * n] for n in rows]}],
         "notes": ["The knee is at 31 rows: from there on a row more costs as much as it brings.",
                   "Prefill is bound by arithmetic already, so rows bring it hardly anything."]}]


if __name__ == "__main__":
    from slotwise.measure.bench.report.comparison_page import write_report
    target = Path(sys.argv[1] if len(sys.argv) > 1 else "report.html")
    write_report(result(), target)
    print(f"wrote {target}")
