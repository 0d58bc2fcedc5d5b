"""slotwise simulate and what-if, as a user calls them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slotwise import builtin
from slotwise.cli import main
from slotwise.observe.event_log import Step, read_file

SHORT = ["--num-prompts", "30", "--input-lengths", "uniform:20:80", "--output-lengths", "uniform:4:12",
         "--arrivals", "poisson:400", "--seed", "3"]


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An event log; the simulator writes the same as a server."""
    path = tmp_path_factory.mktemp("log") / "events"
    assert main(["simulate", "--machine", "xeon", "--model", str(builtin.path()), "--max-num-seqs", "4", *SHORT,
                 "--event-log", str(path)]) == 0
    return path


def test_a_machine_of_the_file_serves_a_workload(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    arguments = ["simulate", "--machine", "epyc", "--model", str(builtin.path()), *SHORT, "--json"]
    assert main([*arguments, str(tmp_path / "one")]) == main([*arguments, str(tmp_path / "two")]) == 0
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
    result = json.loads((tmp_path / "one").read_text())
    assert result["figures"]["served"] == 30 and result["figures"]["ttft_p50"] > 0
    assert "first token, p99" in capsys.readouterr().out


def test_a_log_is_a_machine_with_its_settings(log: Path, tmp_path: Path):
    assert main(["simulate", "--machine", str(log), *SHORT, "--set", "max_num_seqs=2", "--replicas", "2",
                 "--json", str(tmp_path / "json")]) == 0
    result = json.loads((tmp_path / "json").read_text())
    assert result["settings"]["max_num_seqs"] == 2 and result["figures"]["served"] == 30


def test_what_if_shows_what_was_measured_replayed_and_changed(log: Path, tmp_path: Path):
    steps = [entry for entry in read_file(log) if isinstance(entry, Step)]
    assert max(len(step.slots) for step in steps) == 4
    assert main(["what-if", str(log), "--set", "max_num_seqs=1", "--ttft-ms", "50", "--json",
                 str(tmp_path / "json")]) == 0
    figures = json.loads((tmp_path / "json").read_text())["groups"]["all requests"]
    assert figures["replayed"]["ttft_p50"] == pytest.approx(figures["measured"]["ttft_p50"], rel=0.1)
    assert figures["what if"]["ttft_p99"] > figures["replayed"]["ttft_p99"]


@pytest.mark.parametrize(("arguments", "said"), [
    (["simulate", "--machine", "xeon"], "needs --model"),
    (["simulate", "--machine", "abacus", "--model", str(builtin.path())], "there is no machine"),
    (["simulate", "--machine", "xeon", "--model", str(builtin.path()), "--arrivals", "closed:2"], "closed loop"),
    (["simulate", "--machine", "xeon", "--model", str(builtin.path()), "--set", "slots=2"], "no scheduling setting"),
    (["simulate", "--machine", "LOG", "--model", str(builtin.path())], "--model is for a machine of the file"),
    (["what-if", "LOG"], "--set NAME=VALUE"),
    (["what-if", "LOG", "--set", "scheduling_policy=slowest"], "scheduling_policy must be one of"),
])
def test_each_error_is_one_line(log: Path, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]):
    assert main([str(log) if word == "LOG" else word for word in arguments]) == 1
    shown = capsys.readouterr().err
    assert said in shown and shown.count("\n") == 1
