"""What a what-if is worth is said before its figures, and a server's question ends in time."""

from __future__ import annotations

import time
from math import inf
from pathlib import Path
from typing import Any

import pytest

from slotwise import builtin
from slotwise.cli import main
from slotwise.core.record import StepRecord
from slotwise.measure.simulate.what_if import CALLS, error_of, in_words, is_reliable
from slotwise.observe.event_log import Entry, RequestEntry, line_of
from slotwise.observe.log_file import read_file
from slotwise.platform.terminal import duration

PAUSE = 200_000_000_000  # nanoseconds


@pytest.fixture(scope="module")
def entries(tmp_path_factory: pytest.TempPathFactory) -> list[Entry]:
    """Of a simulated server."""
    path = tmp_path_factory.mktemp("log") / "events"
    assert main(["simulate", "--machine", "xeon", "--model", str(builtin.path()), "--max-num-seqs", "2",
                 "--num-prompts", "60", "--input-lengths", "uniform:20:80", "--output-lengths", "uniform:4:12",
                 "--arrivals", "poisson:100", "--seed", "3", "--event-log", str(path)]) == 0
    return list(read_file(path))


def paused(entries: list[Entry]) -> list[Entry]:
    """The log of a server that was stopped for a while between two steps, which no model of its steps can foresee."""
    steps = [entry for entry in entries if isinstance(entry, StepRecord)]
    middle = steps[len(steps) // 2].started_ns

    def later(ns: int, *, ends: bool = False) -> int:
        return ns + PAUSE * (ns > middle or (ns == middle and not ends))

    return [entry._replace(
        started_ns=later(entry.started_ns), ended_ns=later(entry.ended_ns, ends=True), inputs=entry.inputs._replace(
            planned=tuple(map(later, entry.inputs.planned)), handled=tuple(map(later, entry.inputs.handled))))
        if isinstance(entry, StepRecord) else entry for entry in entries]


def written(entries: list[Entry], path: Path) -> Path:
    path.write_bytes(b"".join(map(line_of, entries)))
    return path


def test_a_replay_that_misses_is_said_first_and_at_each_figure(
    entries: list[Entry], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "120")  # so that no cell is wrapped
    request = next(entry.id for entry in reversed(entries) if isinstance(entry, RequestEntry))
    log = written(paused(entries), tmp_path / "log")
    assert main(["what-if", str(log), "--set", "max_num_seqs=1", "--request", request]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("NOT RELIABLE: the replay of what was misses the measurement ")
    rows = [line for line in shown.splitlines() if "│" in line]
    late = next(row for row in rows if "first token, p99" in row)
    assert "3 min 20 s" in late, "minutes, and not 200,000 ms"
    assert any("not reliable" in row for row in rows)
    assert "not reliable" not in next(row for row in rows if "requests served" in row)
    assert shown.count("NOT RELIABLE") == 2, "the sentence on one request has its own"


def test_a_replay_that_is_near_says_how_near(entries: list[Entry], tmp_path: Path,
                                             capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["what-if", str(written(entries, tmp_path / "log")), "--set", "max_num_seqs=1"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("The replay of what was is within ") and "not reliable" not in shown.lower()


def test_the_error_of_a_replay() -> None:
    assert error_of(1.0, 4.42) == pytest.approx(3.42) and error_of(0.0, 0.0) == 0.0 and error_of(0.0, 1.0) == inf
    assert is_reliable(0.3) and is_reliable(-0.3) and not is_reliable(0.31) and not is_reliable(-0.31)
    assert "by 342% (first token)" in in_words(3.42, "first token")
    assert "misses the measurement altogether" in in_words(inf, "goodput")


@pytest.mark.parametrize(("seconds", "said"), [
    (0.0, "0.0 ms"), (0.0843, "84.3 ms"), (7.484, "7.48 s"), (59.999, "1 min 0 s"), (724, "12 min 4 s"),
    (3599.6, "1 h 0 min"), (8040, "2 h 14 min")])
def test_durations_are_said_as_a_person_says_them(seconds: float, said: str) -> None:
    assert duration(seconds) == said


def asked(entries: list[Entry], seconds: float, changes: dict[str, Any]) -> tuple[Any, str, float]:
    """Returns the end of a server's question that has this many seconds."""
    now = time.monotonic()
    return CALLS["what_if"](b"".join(map(line_of, entries)), changes, None, None, "", {}, now + seconds / 2,
                               now + seconds)


def test_a_servers_question_ends_in_time_with_an_estimate(entries: list[Entry]) -> None:
    answer, refusal, work = asked(entries, 60.0, {"max_num_seqs": 1})
    assert not refusal and answer["requests"] == 60 and work > 0
    assert next(iter(answer)) == "verdicts" and answer["verdicts"]["all requests"]["is_reliable"]
    answer, refusal, estimate = asked(entries, 0.001, {"max_num_seqs": 1})
    assert answer is None and not refusal and estimate > 0.001
    answer, refusal, work = asked(entries, 60.0, {"slots": 1})
    assert answer is None and "no scheduling setting" in refusal and work > 0
