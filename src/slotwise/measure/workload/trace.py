"""Recorded traffic: a CSV with a column each for times, prompt tokens and output tokens.

Two headers are known: arrived_at (seconds), num_prefill_tokens, num_decode_tokens; and that of the Azure LLM inference
traces, TIMESTAMP (date and time), ContextTokens, GeneratedTokens.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import islice
from math import isfinite
from pathlib import Path
from typing import TextIO

from slotwise.measure.workload.distributions import (
    MAX_LENGTH,
    Arrivals,
    Prefixes,
    TraceTimes,
    require_within,
    stream,
    written,
)
from slotwise.measure.workload.workloads import MAX_REQUESTS, NO_PREFIX, Workload, requests_of

COLUMNS = ("arrived_at", "num_prefill_tokens", "num_decode_tokens")
AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
SECOND = 19  # characters of a date and time to the second
MAX_LINE = 65_536  # characters


@dataclass(frozen=True, slots=True)
class Trace:
    """Recorded requests, scaled."""

    name: str
    times: tuple[float, ...]  # seconds, the first at 0
    lengths: tuple[tuple[int, int], ...]  # prompt and output tokens of each
    length_scale: float = 1.0
    time_scale: float = 1.0


def read_trace(
    path: Path | str, length_scale: float = 1.0, time_scale: float = 1.0, limit: int = MAX_REQUESTS,
) -> Trace:
    """Returns the first `limit` requests of a trace.

    Args:
        length_scale: factor of the token counts, which are rounded, to 1 at least.
        time_scale: factor of the times: 0.5 doubles the arrival rate.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is not a trace; the message names the line.
    """
    require_within("a scale of lengths", length_scale, 1e-4, 100)
    require_within("a scale of time", time_scale, 0, 1e6)
    require_within("the number of requests", limit, 1, MAX_REQUESTS)
    path = Path(path)
    with path.open(encoding="utf-8-sig", errors="replace", newline="") as file:
        rows = list(islice(_rows(file, path), limit))
    if not rows:
        raise ValueError(f"{path}: the trace has no requests")
    start = rows[0][0]
    times = tuple((arrived_at - start) * time_scale for arrived_at, _, _ in rows)
    lengths = tuple((_scaled(prompt, length_scale), _scaled(output, length_scale)) for _, prompt, output in rows)
    return Trace(path.name, times, lengths, length_scale, time_scale)


def replay(
    trace: Trace, arrivals: Arrivals | None = None, max_tokens: int = 0, prefixes: Prefixes = NO_PREFIX, seed: int = 0,
) -> Workload:
    """Returns the workload of a trace, with its recorded or with other arrival times.

    Args:
        max_tokens: of every request, and its longest output; 0: the longest of the trace.
    """
    arrivals = arrivals or TraceTimes()
    times = (trace.times if isinstance(arrivals, TraceTimes)
             else arrivals.times(stream(seed, "arrivals"), len(trace.lengths)))
    max_tokens = max_tokens or max(output for _, output in trace.lengths)
    description = {
        "trace": trace.name, "length_scale": written(trace.length_scale),
        "time_scale": written(trace.time_scale), "arrivals": str(arrivals),
    } | ({"prefix": str(prefixes)} if prefixes.groups else {})
    requests = requests_of(trace.lengths, times, max_tokens, prefixes, seed)
    return Workload(requests, max_tokens, arrivals.users, seed, description)


def _rows(file: TextIO, path: Path) -> Iterator[tuple[float, int, int]]:
    """Yields validated rows; raises ValueError with the line of the first invalid one."""
    number, last = 1, float("-inf")
    try:
        places = _places(_row(file) or [])
        number += 1
        while (row := _row(file)) is not None:
            if row:  # else the line is blank
                arrived_at, prompt, output = (row[place] for place in places)
                checked = _checked(_seconds(arrived_at), int(prompt), int(output), last)
                yield checked
                last = checked[0]
            number += 1
    except (ValueError, IndexError, csv.Error) as error:
        raise ValueError(f"{path}, line {number}: {error}") from None


def _row(file: TextIO) -> list[str] | None:
    """Returns the fields of the next line, None at the end; raises ValueError if it is too long."""
    line = file.readline(MAX_LINE + 1)
    if len(line) > MAX_LINE:
        raise ValueError(f"longer than {MAX_LINE} characters")
    return next(csv.reader((line,)), []) if line else None


def _places(header: list[str]) -> list[int]:
    """Returns the place of each column."""
    names = [name.strip() for name in header]
    if set(AZURE) <= set(names):
        return [names.index(name) for name in AZURE]
    if missing := [name for name in COLUMNS if name not in names]:
        raise ValueError(f"the line must name the columns {', '.join(COLUMNS)}; {', '.join(missing)} is missing")
    return [names.index(name) for name in COLUMNS]


def _seconds(text: str) -> float:
    """Returns the seconds of a number, or of a date and time; raises ValueError for any other text."""
    if ":" not in text:
        return float(text)
    moment = text.strip().replace("T", " ")
    whole = datetime.fromisoformat(moment[:SECOND]).replace(tzinfo=UTC)
    return whole.timestamp() + float(f"0{moment[SECOND:].partition('+')[0]}")


def _checked(arrived_at: float, prompt: int, output: int, last: float) -> tuple[float, int, int]:
    if not isfinite(arrived_at) or arrived_at < last:
        raise ValueError(f"arrived_at must not fall, and {arrived_at} comes after {last}")
    require_within("num_prefill_tokens", prompt, 0, MAX_LENGTH)
    require_within("num_decode_tokens", output, 0, MAX_LENGTH)
    return arrived_at, prompt, output


def _scaled(length: int, scale: float) -> int:
    return max(1, min(MAX_LENGTH, round(length * scale)))
