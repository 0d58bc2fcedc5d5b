"""Recorded traffic: scaled, cut, replayed at its own times or others; broken files name the line."""

from __future__ import annotations

from pathlib import Path

import pytest

from slotwise.measure.workload.distributions import Closed, Poisson, Prefixes
from slotwise.measure.workload.trace import read_trace, replay

TRACE = "arrived_at,num_prefill_tokens,num_decode_tokens\n2.5,374,44\n4.5,396,109\n4.5,879,4\n8.0,3,1\n"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    written = tmp_path / "trace.csv"
    written.write_text(TRACE)
    return written


def test_a_trace_is_replayed_as_it_was(path: Path) -> None:
    workload = replay(read_trace(path))
    assert [(r.arrives_at, r.num_prompt, r.num_output) for r in workload.requests] == [
        (0.0, 374, 44), (2.0, 396, 109), (2.0, 879, 4), (5.5, 3, 1)]
    assert workload.max_tokens == 109


def test_lengths_and_times_scale(path: Path) -> None:
    workload = replay(read_trace(path, length_scale=0.125, time_scale=0.5, limit=4), max_tokens=10)
    assert [(r.arrives_at, r.num_prompt, r.num_output) for r in workload.requests] == [
        (0.0, 47, 6), (1.0, 50, 10), (1.0, 110, 1), (2.75, 1, 1)]
    assert workload.max_tokens == 10
    assert workload.description == {
        "trace": "trace.csv", "length_scale": "0.125", "time_scale": "0.5", "arrivals": "trace"}


def test_the_first_so_many_requests(path: Path) -> None:
    assert len(read_trace(path, limit=2).lengths) == 2


def test_lengths_of_a_trace_at_other_times(path: Path) -> None:
    trace = read_trace(path)
    poisson = replay(trace, Poisson(10.0), seed=1)
    assert [r.num_prompt for r in poisson.requests] == [374, 396, 879, 3]
    assert poisson.requests[-1].arrives_at not in (None, 5.5)
    assert replay(trace, Closed(2)).users == 2


def test_prefixes_come_before_the_prompts_of_a_trace(path: Path) -> None:
    workload = replay(read_trace(path), prefixes=Prefixes(2, 100))
    assert [r.num_prompt for r in workload.requests] == [474, 496, 979, 103]


def test_other_columns_and_another_order_do_not_matter(tmp_path: Path) -> None:
    path = tmp_path / "wide.csv"
    path.write_text("num_decode_tokens, user ,num_prefill_tokens,arrived_at\n7,someone,5,1.0\n")
    assert read_trace(path).lengths == ((5, 7),)


def test_spreadsheets_mark_the_encoding_and_leave_lines_blank(tmp_path: Path) -> None:
    path = tmp_path / "excel.csv"
    path.write_bytes(b"\xef\xbb\xbf" + TRACE.replace("\n", "\r\n\r\n", 2).encode() + b"\n\n")
    (tmp_path / "plain.csv").write_text(TRACE)
    assert read_trace(path).lengths == read_trace(tmp_path / "plain.csv").lengths


@pytest.mark.parametrize(("text", "says"), [
    ("", "must name the columns"), ("a,b\n1,2\n", "must name the columns"), (TRACE.splitlines()[0], "no requests"),
    (TRACE + "9.0,many,1\n", "line 6"), (TRACE + "9.0,1\n", "line 6"), (TRACE + "7.0,1,1\n", "line 6"),
    (TRACE + "nan,1,1\n", "line 6"), (TRACE + "9.0,-1,1\n", "line 6"), (TRACE + "9.0,1,99999999\n", "line 6"),
    (TRACE + f"9.0,{'9' * 200_000},1\n", "line 6"),
])
def test_a_broken_trace_names_the_line(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "broken.csv"
    path.write_text(text)
    with pytest.raises(ValueError, match=says) as told:
        read_trace(path)
    assert "broken.csv" in str(told.value) and "\n" not in str(told.value)


@pytest.mark.parametrize(("before", "line"), [("", 1), ("arrived_at,num_prefill_tokens,num_decode_tokens\n", 2)])
@pytest.mark.parametrize("letter", ["a", "\0", ","])
def test_a_line_without_end_is_refused_at_its_bound(tmp_path: Path, before: str, line: int, letter: str) -> None:
    path = tmp_path / "long.csv"
    path.write_text(before + letter * 200_000 + "\n")
    with pytest.raises(ValueError, match=rf"long\.csv, line {line}: longer than 65536 characters"):
        read_trace(path)


@pytest.mark.parametrize("scaling", [{"length_scale": 0}, {"time_scale": -1}, {"limit": 0}])
def test_scales_out_of_range_are_refused(path: Path, scaling: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="must be between"):
        read_trace(path, **scaling)


def test_the_columns_of_azures_traces_are_read(tmp_path: Path):
    path = tmp_path / "azure.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n"
                    "2023-11-16 18:15:50.9951690,396,109\n2024-05-10 00:00:00.009930+00:00,879,55\n")
    trace = read_trace(path)
    assert trace.lengths == ((374, 44), (396, 109), (879, 55))
    assert trace.times[:2] == (0.0, pytest.approx(4.314579, abs=1e-6))
