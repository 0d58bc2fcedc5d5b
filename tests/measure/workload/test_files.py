"""Workloads on disk: they come back whole, and what is not one is refused with its line."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slotwise.measure.workload.distributions import Uniform
from slotwise.measure.workload.workloads import Recipe, Workload, WorkRequest, generate, load_workload, save_workload


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    users = draw(st.integers(0, 3))
    count = draw(st.integers(1, 6))
    times = sorted(draw(st.lists(st.floats(0, 1e6), min_size=count, max_size=count)))
    requests = []
    for number in range(count):
        num_prompt = draw(st.integers(1, 5000))
        num_prefix = draw(st.integers(0, num_prompt))
        requests.append(WorkRequest(
            number, None if users else times[number], num_prompt, draw(st.integers(1, 500)),
            draw(st.integers(0, 9)) if num_prefix else -1, num_prefix))
    description = draw(st.dictionaries(st.text(max_size=8), st.text(max_size=20), max_size=3))
    return Workload(tuple(requests), 500, users, draw(st.integers(-(2**63), 2**63)), description)


@settings(deadline=None)
@given(workloads())
def test_any_workload_comes_back_as_it_was(workload: Workload) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "workload.jsonl"
        save_workload(workload, path)
        assert load_workload(path) == workload


@pytest.fixture
def lines(tmp_path: Path) -> list[str]:
    path = tmp_path / "workload.jsonl"
    save_workload(generate(Recipe(3, Uniform(1, 9), Uniform(1, 9)), 0), path)
    return path.read_text().splitlines()


def refusal(tmp_path: Path, lines: list[str]) -> str:
    path = tmp_path / "broken.jsonl"
    path.write_text("\n".join(lines) + "\n", errors="surrogateescape")
    with pytest.raises(ValueError, match=r"broken\.jsonl") as told:
        load_workload(path)
    assert "\n" not in str(told.value)
    return str(told.value)


def with_field(line: str, name: str, value: object) -> str:
    return json.dumps(json.loads(line) | {name: value})


@pytest.mark.parametrize(("name", "value", "says"), [
    ("num_prompt", 0, "num_prompt"), ("num_output", "9", "wrong type"), ("num_output", True, "wrong type"),
    ("arrives_at", float("nan"), "arrives_at"), ("num_prompt", 10**400, "num_prompt"), ("arrives_at", -1, "arrives_at"),
    ("strange", 1, "must be an object of"),
])
def test_a_request_that_cannot_be_names_its_line(
    tmp_path: Path, lines: list[str], name: str, value: object, says: str,
) -> None:
    told = refusal(tmp_path, [*lines[:2], with_field(lines[2], name, value), lines[3]])
    assert "line 3:" in told and says in told


@pytest.mark.parametrize(("name", "value", "says"), [
    ("slotwise_workload", 2, "version 2"), ("num_requests", 10**9, "num_requests"), ("num_requests", 0, "num_requests"),
    ("max_tokens", None, "wrong type"), ("description", {"a": 1}, "description"), ("users", -1, "users"),
])
def test_a_header_that_cannot_be_is_line_1(
    tmp_path: Path, lines: list[str], name: str, value: object, says: str,
) -> None:
    told = refusal(tmp_path, [with_field(lines[0], name, value), *lines[1:]])
    assert "line 1:" in told and says in told


def test_files_that_are_cut_or_go_on_are_refused(tmp_path: Path, lines: list[str]) -> None:
    assert "line 4: the file ends here" in refusal(tmp_path, lines[:3])
    assert "line 5: more lines" in refusal(tmp_path, [*lines, lines[1]])
    assert "line 2: not valid JSON" in refusal(tmp_path, [lines[0], lines[1][:20]])
    assert "line 1: must be an object" in refusal(tmp_path, ["[]"])
    assert "line 1: not valid JSON" in refusal(tmp_path, ["[" * 50_000])
    assert "line 1: longer" in refusal(tmp_path, [" " * 100_000])
    assert "line 1: not valid JSON" in refusal(tmp_path, ["\udcff\udcfe"])


def test_requests_that_do_not_go_together_are_refused(tmp_path: Path, lines: list[str]) -> None:
    assert "numbered" in refusal(tmp_path, [lines[0], lines[2], lines[1], lines[3]])
    assert "max_tokens" in refusal(tmp_path, [with_field(lines[0], "max_tokens", 1), *lines[1:]])
