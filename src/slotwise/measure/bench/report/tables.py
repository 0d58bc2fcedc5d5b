"""The columns of a comparison, as tables of the page and of a terminal: each run's figures, each kind of waste."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.measure import Measurement
from rich.table import Table as TerminalTable
from rich.text import Text

from slotwise.measure.bench.report.data import ClientFigures, DisciplineRun, read
from slotwise.measure.bench.report.words import (
    count,
    faster,
    figure,
    fit_warning,
    gains,
    median,
    reference,
    seconds,
    share,
    span,
    times,
)
from slotwise.platform.terminal import plain

WHOLE = "whole"
WIDEST = 1000  # characters of a table
HEAD_WIDTH = 10  # of a line of a column's head


@dataclass(frozen=True)
class Cell:
    text: str
    best: bool
    span: str  # of all rounds


@dataclass(frozen=True)
class Table:
    heads: tuple[str, ...]
    rows: tuple[tuple[str, str, tuple[Cell, ...]], ...]  # the row's name, what it means (or ""), its cells


Read = Callable[[DisciplineRun], float | None]
Write = Callable[[float | None], str]


@dataclass(frozen=True)
class Column:
    head: str
    read: Read
    write: Write
    better: Callable[[Sequence[float]], float] | None = None  # max, min, or neither
    # the values of each round, where they are known
    rounds: Callable[[DisciplineRun], Sequence[float]] = lambda run: ()

    def span(self, run: DisciplineRun) -> str:
        """The range of the rounds' values; empty where there is none."""
        return span(self.rounds(run), self.write)


def _seen(head: str, read: Callable[[ClientFigures], float | None], write: Write, better: Any = None) -> Column:
    return Column(head, read, write, better,
                  lambda run: [value for one in run.repeats if (value := read(one)) is not None])


def speed_columns(runs: Sequence[DisciplineRun]) -> list[Column]:
    """What clients see: tokens per second, latencies and costs."""
    base = reference(tuple(runs))
    return [
        _seen("output tok/s", lambda seen: seen.output_throughput, figure, max),
        Column(f"×\u00a0{base.label}", lambda run: median(faster(run, base)), times,
               rounds=lambda run: faster(run, base)),
        _seen("TTFT p50", lambda seen: seen.ttft.p50, seconds, min),
        _seen("TTFT p99", lambda seen: seen.ttft.p99, seconds, min),
        _seen("ITL p50", lambda seen: 0.0 if seen.whole else seen.itl.p50, _gap),
        _seen("ITL p99", lambda seen: 0.0 if seen.whole else seen.itl.p99, _gap),
        _seen("E2E p50", lambda seen: seen.e2e.p50, seconds, min),
        _seen("E2E p99", lambda seen: seen.e2e.p99, seconds, min),
        Column("cost of 1 M tokens", lambda run: run.cost_per_million, figure, min)]


STEPS = (
    Column("steps", lambda run: run.steps, count, min),
    Column("rows, mean", lambda run: run.mean_rows, figure),
    Column("rows, most", lambda run: run.max_rows, count),
    Column("occupancy", lambda run: run.occupancy, share),
    Column("preemptions", lambda run: run.preemptions or None, count))
WASTE = {  # with what it means
    Column("padded tokens", lambda run: run.waste.padded_tokens, count):
        "computed only to bring a batch's prompts to one length",
    Column("held row-steps", lambda run: run.waste.held_row_steps, count):
        "rows computed again after their last token, because their batch had not drained",
    Column("empty slot-steps", lambda run: run.waste.empty_slot_steps, count):
        "slots without a request while a step ran, or whose request was left out of it",
    Column("head-of-line wait", lambda run: run.waste.head_of_line_seconds, seconds):
        "time that requests stood in line while a slot was empty or held, summed over requests",
    Column("reserved, unused cache", lambda run: run.waste.reserved_unused, share):
        "mean share of the cache set aside for tokens that were not there"}


def known(columns: Iterable[Column], runs: Sequence[DisciplineRun]) -> list[Column]:
    """The columns that have a value for any run."""
    return [column for column in columns if any(column.read(run) is not None for run in runs)]


def runs_table(runs: Sequence[DisciplineRun]) -> Table:
    """A row for each run and a column for each measure; the best is marked where better is meaningful."""
    columns = known([*speed_columns(runs), *STEPS], runs)
    cells = [_cells(column, runs) for column in columns]
    return Table(tuple(column.head for column in columns),
                 tuple((run.label, "", tuple(column[run.index] for column in cells)) for run in runs))


def waste_table(runs: Sequence[DisciplineRun]) -> Table:
    """A row for each kind of waste, with its meaning, and a column for each run."""
    return Table(tuple(run.label for run in runs), tuple(
        (column.head, WASTE[column], tuple(Cell(column.write(column.read(run)), False, "") for run in runs))
        for column in known(WASTE, runs)))


def _cells(column: Column, runs: Sequence[DisciplineRun]) -> list[Cell]:
    values = [column.read(run) for run in runs]
    known = [value for value in values if value is not None]
    # Alone, or equal to all others, no run is best.
    texts = [column.write(value) for value in values]
    best = column.write(column.better(known)) if column.better and len({*texts}) > 1 and known else None
    return [Cell(text, text == best, column.span(run)) for text, run in zip(texts, runs, strict=True)]


def _gap(value: float | None) -> str:
    """No gap at all means that an answer came at once."""
    return WHOLE if value == 0 else seconds(value)


# -- for a terminal ----------------------------------------------------------------------------------------------------

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
    """A row for each run; columns that do not fit the width go into a further table below."""

    title: str
    columns: Sequence[Column]
    runs: Sequence[DisciplineRun]

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


def _table(columns: Sequence[Column], runs: Sequence[DisciplineRun]) -> TerminalTable:
    table = TerminalTable(header_style="bold")
    table.add_column("discipline", overflow="fold")
    for column in columns:
        table.add_column(textwrap.fill(column.head, HEAD_WIDTH), justify="right")
    for run in runs:
        table.add_row(plain(run.label), *(_cell(column, run) for column in columns))
    return table


def _cell(column: Column, run: DisciplineRun) -> Text:
    """The median, and below it the range of the rounds."""
    text, span = Text(column.write(column.read(run))), column.span(run)
    return text.append(f"\n{span}", style="dim") if span else text


def _findings(result: Mapping[str, Any], runs: Sequence[DisciplineRun]) -> list[str]:
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


def _headline(runs: Mapping[str, DisciplineRun]) -> list[str]:
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
    known = (f", {facts['prompt_tokens']:,} prompt and {facts['output_tokens']:,} output tokens (CV "
             f"{facts['output_cv']:.2f})" if facts["output_tokens"] else "")
    return f"{facts['num_requests']} {facts['description'].get('dataset', 'requests')}{known}"
