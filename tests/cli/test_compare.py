"""slotwise compare as a user types it: refusals in one line, and small comparisons on the built-in model."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from slotwise.cli import main
from slotwise.measure.bench.comparison import DISCIPLINES, Comparison

FEW = (
    "--model", "builtin", "--dtype", "float32", "--slots", "4", "--num-prompts", "10", "--input-lengths",
    "uniform:4:40", "--output-lengths", "lognormal:8:1.0:48")


def compare(tmp_path: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    """The exit status and the figures written."""
    figures = tmp_path / "figures.json"
    status = main(["compare", "--output", str(tmp_path / "report.html"), "--json", str(figures), *arguments])
    return status, json.loads(figures.read_text()) if figures.exists() else {}


@pytest.mark.parametrize(("message", "arguments"), [
    ("there is no 'always'", ("--output-lengths", "always")),
    ("leave out --online", ("--online", "--vary", "rows")),
    ("leave out --online", ("--online", "--equal-memory", "auto")),
    ("leave out --kv-cache-memory", ("--equal-memory", "auto", "--kv-cache-memory", "1000000")),
    ("batching must be one of", ("--disciplines", "static,fastest")),
    ("give each once", ("--disciplines", "static,static")),
    ("a --batch-size of 5 needs as many slots", ("--slots", "4", "--batch-size", "5")),
    ("belongs to dynamic, which is not compared", ("--disciplines", "static", "--max-wait-ms", "5")),
    ("leave out --online", ("--online", "--speculative-config", '{"method": "ngram"}')),
    ("not by draft_model", ("--speculative-config", '{"model": "smaller"}')),
    ("cannot be written", ("--json", "/nowhere/figures.json")),
])
def test_impossible_options_are_one_line(
    message: str, arguments: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["compare", "--output", str(tmp_path / "report.html"), *arguments]) == 1
    said = capsys.readouterr().err.strip()
    assert message in said
    assert "\n" not in said
    assert not (tmp_path / "report.html").exists()


@pytest.mark.parametrize("arguments", [
    ("--equal-memory", "much"), ("--vary", "weather"), ("--repeats", "0"), ("--repeats", "101"), ("--repeats", "2.5")])
def test_unreadable_options_are_refused(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["compare", *arguments])
    assert arguments[0] in capsys.readouterr().err


@pytest.mark.slow
def test_continuous_batching_with_drafts_beside_without(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(8):  # beside other programs steps may take so long that an engine leaves drafts out
        status, result = compare(
            tmp_path, *FEW, "--output-lengths", "fixed:300", "--repeats", "1", "--disciplines", "continuous",
            "--speculative-config", '{"method": "suffix", "prompt_lookup_min": 2, "prompt_lookup_max": 4}')
        plain, drafted = result["runs"]
        if drafted["draft_tokens"]:
            break
    assert status == 0 and result["identical_tokens"] is True
    assert (plain["name"], drafted["name"]) == ("continuous", "continuous, suffix")
    assert drafted["settings"]["speculative_config"]["prompt_lookup_max"] == 4 and drafted["theory_steps"] is None
    assert drafted["draft_tokens"] >= drafted["accepted_draft_tokens"] > 0 == plain["draft_tokens"]
    assert f"{drafted['accepted_draft_tokens']:,}" in capsys.readouterr().out


@pytest.mark.slow
def test_a_small_comparison_from_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, result = compare(tmp_path, *FEW, "--equal-memory", "auto", "--price-per-hour", "1.5")
    assert status == 0
    runs = {run["name"]: run for run in result["runs"]}
    assert tuple(runs) == (*DISCIPLINES, "orca, same cache", "continuous, same cache")
    assert result["identical_tokens"] is True
    assert result["dtype"] == "float32"
    assert {run["output_tokens"] for run in runs.values()} == {result["workload"]["output_tokens"]}
    for name in ("one_at_a_time", "static", "dynamic"):
        assert runs[name]["decode_steps"] == runs[name]["theory_steps"]
    assert runs["continuous"]["decode_steps"] < runs["static"]["decode_steps"] < runs["one_at_a_time"]["decode_steps"]
    assert runs["static"]["waste"]["held_row_steps"] > 0 == runs["continuous"]["waste"]["held_row_steps"]
    assert all(run["cost_per_million"] > 0 and "a" in run["step_time"] for run in runs.values())
    assert [len(run["repeats"]) for run in runs.values()] == [3] * len(runs)
    said, progress = capsys.readouterr()
    assert "continuous over static" in said
    assert "medians and ranges of 3 rounds" in " ".join(said.split())
    assert "report.html" in said
    assert "one at a time" in (tmp_path / "report.html").read_text()
    assert [line for line in progress.splitlines() if line.startswith("compare: ")] == [
        f"compare: round {number} of 3, {run['label']}" for number in (1, 2, 3) for run in runs.values()]


@pytest.mark.slow
def test_chats_end_by_themselves_alike_under_every_discipline(tmp_path: Path) -> None:
    status, result = compare(
        tmp_path, "--model", "builtin", "--dtype", "float32", "--slots", "4", "--dataset-name", "chats",
        "--num-prompts", "8", "--max-tokens", "40", "--disciplines", "static,continuous", "--repeats", "2")
    assert status == 0 and result["identical_tokens"] is True
    static, continuous = result["runs"]
    facts = result["workload"]
    assert static["output_tokens"] == continuous["output_tokens"] == facts["output_tokens"] < 8 * 40
    assert facts["output_cv"] > 0 and facts["description"]["dataset"] == "chats"
    assert static["decode_steps"] == static["theory_steps"] > continuous["decode_steps"]


@pytest.mark.slow
def test_the_slots_sweep_on_a_real_model_counts_what_theory_does(tmp_path: Path) -> None:
    status, result = compare(tmp_path, *FEW, "--disciplines", "continuous", "--vary", "slots")
    assert status == 0
    series = {one["label"]: one["points"] for one in result["sweeps"][0]["series"]}
    assert series["steps, measured"] == series["steps, theory"]
    assert all(steps == 1.0 for _, steps in series["steps, fixed lengths (control)"])


@pytest.mark.slow
def test_an_interrupt_keeps_the_runs_that_are_complete(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = Comparison.run

    def interrupted(self: Comparison, contender: Any, make: Any, on_step: Any) -> None:
        def press(accounts: Any, record: Any) -> None:
            if contender.name == "continuous" and accounts.sampled_tokens > 10:
                signal.raise_signal(signal.SIGINT)

        whole(self, contender, make, press)

    monkeypatch.setattr(Comparison, "run", interrupted)
    status, result = compare(tmp_path, *FEW, "--disciplines", "static,continuous")
    assert status == 130
    assert result["interrupted"]
    assert [run["name"] for run in result["runs"]] == ["static"]
    assert "interrupted: 1 runs" in capsys.readouterr().err
    assert "static" in (tmp_path / "report.html").read_text()


@pytest.mark.slow
def test_disciplines_behind_a_real_server(tmp_path: Path) -> None:
    status, result = compare(
        tmp_path, *FEW, "--online", "--disciplines", "static,continuous", "--arrivals", "poisson:50", "--batch-size",
        "3", "--repeats", "2")
    assert status == 0
    assert result["mode"] == "server"
    assert result["dtype"] == "float32"
    static, continuous = result["runs"]
    assert static["output_tokens"] == continuous["output_tokens"] == result["workload"]["output_tokens"]
    assert continuous["itl"]["p50"] > 0
    assert continuous["cumulative"][-1][1] == pytest.approx(continuous["output_tokens"])
    assert static["chart"] is None
    assert [len(run["repeats"]) for run in result["runs"]] == [2, 2]
    assert result["identical_tokens"] is None
