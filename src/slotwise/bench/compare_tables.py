"""A comparison as tables for a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from slotwise.terminal import plain

NONE = "–"


def comparison_tables(result: Mapping[str, Any]) -> RenderableType:
    """The output of `slotwise compare`: speed, then waste, then other findings."""
    runs = result["runs"]
    parts: list[RenderableType] = []
    if runs:
        parts.append(_speed(result, runs))
        if any(run["waste"] for run in runs):
            parts.append(_waste(runs))
        parts += [Text(line) for line in _findings(result)]
    for sweep in result["sweeps"]:
        parts += [Text(f"\n{sweep['title']}", style="bold"), *(Text(f"  {note}") for note in sweep["notes"])]
    return Group(*parts)


def _speed(result: Mapping[str, Any], runs: Sequence[Mapping[str, Any]]) -> Table:
    first = runs[0]
    priced = result["price_per_hour"] is not None
    table = _table(
        f"{result['model']}, {result['dtype']}, {result['slots']} slots, {_workload(result['workload'])}",
        ["discipline", "output tok/s", f"× {first['label']}", "TTFT p50", "p99", "ITL p50", "p99", "E2E p50", "p99",
         *(["cost / M"] if priced else [])])
    for run in runs:
        itl = run["itl"] if run["itl_values"] else {}
        faster = run["output_throughput"] / first["output_throughput"] if first["output_throughput"] else None
        table.add_row(
            run["label"], _number(run["output_throughput"], ",.0f"), _number(faster, ".2f"),
            *(_seconds(values.get(name)) for values in (run["ttft"], itl, run["e2e"]) for name in ("p50", "p99")),
            *([_number(run["cost_per_million"], ".3f")] if priced else []))
    return table


def _waste(runs: Sequence[Mapping[str, Any]]) -> Table:
    table = _table("Where the steps went", [
        "discipline", "decode steps", "theory", "rows", "most", "occupancy", "padded tokens", "held", "empty",
        "blocked", "reserved, unused", "preempted"])
    for run in runs:
        waste = run["waste"]
        table.add_row(
            run["label"], _number(run["decode_steps"], ",d"), _number(run["theory_steps"], ",d"),
            _number(run["mean_rows"], ".1f"), _number(run["max_rows"], "d"), _number(run["occupancy"], ".0%"),
            _number(waste["padded_tokens"], ",d"), _number(waste["held_row_steps"], ",d"),
            _number(waste["empty_slot_steps"], ",d"), f"{waste['head_of_line_seconds']:,.1f} s",
            _number(waste["reserved_unused"], ".0%"), _number(run["preemptions"], "d"))
    table.caption = ("held, empty: slot-steps · blocked: seconds that requests waited while a slot was empty or held, "
                     "summed · reserved, unused: mean share of the cache")
    return table


def _findings(result: Mapping[str, Any]) -> list[str]:
    found = _headline({run["name"]: run for run in result["runs"]})
    if result["identical_tokens"] is not None:
        requests = result["workload"]["num_requests"]
        found.append(f"tokens: the same under all, for each of {requests} requests" if result["identical_tokens"] else
                     f"tokens: {result['same_answers']} of {requests} answers are the same under all")
    fits = [(run["label"], run["step_time"]) for run in result["runs"] if run["step_time"]]
    if fits:
        fit = fits[0][1]
        errors = ", ".join(f"{label} {one['error']:+.1%}" for label, one in fits)
        found.append(f"decode step = {fit['a'] * 1e3:.2f} ms + {fit['b'] * 1e3:.4f} ms x rows, fitted to all runs; "
                     f"predicted against measured decode time: {errors}")
    return found


def _headline(runs: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """How continuous compares with static."""
    if not {"static", "continuous"} <= runs.keys():
        return []
    static, continuous = runs["static"], runs["continuous"]
    faster = continuous["output_throughput"] / static["output_throughput"]
    sooner = [f"{static['ttft'][name] / continuous['ttft'][name]:.2f}x at {name}" for name in ("p50", "p99")]
    return [f"continuous over static: {faster:.2f}x the output tokens per second, first token {', '.join(sooner)}"]


def _workload(facts: Mapping[str, Any]) -> str:
    return (f"{facts['num_requests']} requests, {facts['prompt_tokens']:,} prompt and {facts['output_tokens']:,} "
            f"output tokens (CV {facts['output_cv']:.2f})")


def _table(title: str, columns: Sequence[str]) -> Table:
    table = Table(title=plain(title), title_justify="left", caption_justify="left", header_style="bold")
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left")
    return table


def _number(value: float | None, form: str) -> str:
    return NONE if value is None else format(value, form)


def _seconds(value: float | None) -> str:
    if value is None:
        return NONE
    return f"{value:.2f} s" if value >= 1 else f"{value * 1e3:.1f} ms" if value < 0.1 else f"{value * 1e3:.0f} ms"
