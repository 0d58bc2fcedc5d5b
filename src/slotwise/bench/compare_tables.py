"""A comparison as tables for a terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from slotwise.bench.report.data import Run, read
from slotwise.bench.report.tables import STEPS, WASTE, Column, known, speed_columns
from slotwise.bench.report.words import count, faster, fit_warning, gains, median, span, times
from slotwise.terminal import plain

WIDEST = 1000  # characters of a table
HEAD_WIDTH = 10  # of a line of a column's head
DECODE_STEPS = (
    Column("decode steps", lambda run: run.decode_steps, count),
    Column("in theory", lambda run: run.theory_steps, count),
    Column("drafts", lambda run: run.draft_tokens or None, count),
    Column("of them right", lambda run: run.accepted_draft_tokens if run.draft_tokens else None, count))


def comparison_tables(result: Mapping[str, Any]) -> RenderableType:
    """The output of `slotwise compare`: speed, then waste, then other findings."""
    runs = read(result).runs
    parts: list[RenderableType] = []
    if runs:
        title = f"{result['model']}, {result['dtype']}, {result['slots']} slots, {_workload(result['workload'])}"
        parts.append(_Tables(title, known(speed_columns(runs), runs), runs))
        if known(WASTE, runs):
            parts.append(_Tables("Where the steps went", known([*DECODE_STEPS, *STEPS[1:], *WASTE], runs), runs))
        parts += [Text(line) for line in _findings(result, runs)]
        if warning := fit_warning(runs):
            parts.append(plain(f"warning: {warning}", "bold yellow"))
    for sweep in result["sweeps"]:
        parts += [Text(f"\n{sweep['title']}", style="bold"), *(Text(f"  {note}") for note in sweep["notes"])]
    return Group(*parts)


@dataclass(frozen=True)
class _Tables:
    """A row for each run; columns that do not fit beside the others are in a further table below."""

    title: str
    columns: Sequence[Column]
    runs: Sequence[Run]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        unbounded = options.update(max_width=WIDEST)
        yield plain(self.title, "italic")
        rest = list(self.columns)
        while rest:
            fitting = len(rest)
            while fitting > 1 and (Measurement.get(console, unbounded, _table(rest[:fitting], self.runs)).maximum
                                   > options.max_width):
                fitting -= 1
            yield _table(rest[:fitting], self.runs)
            rest = rest[fitting:]
        meanings = " · ".join(f"{column.head}: {WASTE[column]}" for column in self.columns if column in WASTE)
        if meanings:
            yield Text(meanings, style="italic dim")


def _table(columns: Sequence[Column], runs: Sequence[Run]) -> Table:
    table = Table(header_style="bold")
    table.add_column("discipline", overflow="fold")
    for column in columns:
        table.add_column(textwrap.fill(column.head, HEAD_WIDTH), justify="right")
    for run in runs:
        table.add_row(plain(run.label), *(_cell(column, run) for column in columns))
    return table


def _cell(column: Column, run: Run) -> Text:
    """The median, and below it the range of the rounds."""
    text, span = Text(column.write(column.read(run))), column.span(run)
    return text.append(f"\n{span}", style="dim") if span else text


def _findings(result: Mapping[str, Any], runs: Sequence[Run]) -> list[str]:
    found = _headline({run.name: run for run in runs})
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


def _headline(runs: Mapping[str, Run]) -> list[str]:
    """How continuous compares with static."""
    if not {"static", "continuous"} <= runs.keys():
        return []
    static, continuous = runs["static"], runs["continuous"]
    first = [_gain(gains(static, continuous, read)) for read in (
        lambda seen: seen.ttft.p50, lambda seen: seen.ttft.p99)]
    rounds = f"; medians and ranges of {number} rounds" if (number := len(continuous.rounds)) > 1 else ""
    return [f"continuous over static: {_gain(faster(continuous, static))} the output tokens per second, first token "
            f"{first[0]} sooner at p50, {first[1]} at p99{rounds}"]


def _gain(values: Sequence[float]) -> str:
    found = span(values, times)
    return times(median(values)) + f" ({found})" * bool(found)


def _workload(facts: Mapping[str, Any]) -> str:
    return (f"{facts['num_requests']} requests, {facts['prompt_tokens']:,} prompt and {facts['output_tokens']:,} "
            f"output tokens (CV {facts['output_cv']:.2f})")
