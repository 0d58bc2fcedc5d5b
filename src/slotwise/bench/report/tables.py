"""The tables of the report: every run's figures, and the amount of each kind of waste."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from slotwise.bench.report.data import Run, Seen
from slotwise.bench.report.words import count, faster, figure, median, reference, seconds, share, span, times


@dataclass(frozen=True)
class Cell:
    text: str
    best: bool
    span: str  # of all rounds


@dataclass(frozen=True)
class Table:
    heads: tuple[str, ...]
    rows: tuple[tuple[str, str, tuple[Cell, ...]], ...]  # the row's name, what it means (or ""), its cells


Read = Callable[[Run], float | None]
Write = Callable[[float | None], str]
WHOLE = "whole"


@dataclass(frozen=True)
class Column:
    head: str
    read: Read
    write: Write
    better: Callable[[Sequence[float]], float] | None = None  # max, min, or neither
    rounds: Callable[[Run], Sequence[float]] = lambda run: ()  # the values of each round, where they are known

    def span(self, run: Run) -> str:
        """The range of the rounds' values; empty where there is none."""
        return span(self.rounds(run), self.write)


def _seen(head: str, read: Callable[[Seen], float | None], write: Write, better: Any = None) -> Column:
    return Column(head, read, write, better,
                  lambda run: [value for one in run.repeats if (value := read(one)) is not None])


def speed_columns(runs: Sequence[Run]) -> list[Column]:
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


def known(columns: Iterable[Column], runs: Sequence[Run]) -> list[Column]:
    """The columns that have a value for any run."""
    return [column for column in columns if any(column.read(run) is not None for run in runs)]


def runs_table(runs: Sequence[Run]) -> Table:
    """A row for each run and a column for each measure; the best is marked where better is meaningful."""
    columns = known([*speed_columns(runs), *STEPS], runs)
    cells = [_cells(column, runs) for column in columns]
    return Table(tuple(column.head for column in columns),
                 tuple((run.label, "", tuple(column[run.index] for column in cells)) for run in runs))


def waste_table(runs: Sequence[Run]) -> Table:
    """A row for each kind of waste, with its meaning, and a column for each run."""
    return Table(tuple(run.label for run in runs), tuple(
        (column.head, WASTE[column], tuple(Cell(column.write(column.read(run)), False, "") for run in runs))
        for column in known(WASTE, runs)))


def _cells(column: Column, runs: Sequence[Run]) -> list[Cell]:
    values = [column.read(run) for run in runs]
    known = [value for value in values if value is not None]
    # Alone, or equal to all others, no run is best.
    texts = [column.write(value) for value in values]
    best = column.write(column.better(known)) if column.better and len({*texts}) > 1 and known else None
    return [Cell(text, text == best, column.span(run)) for text, run in zip(texts, runs, strict=True)]


def _gap(value: float | None) -> str:
    """No gap at all means that an answer came at once."""
    return WHOLE if value == 0 else seconds(value)
