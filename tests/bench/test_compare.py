"""Disciplines side by side, on engines without a model whose steps take a + b rows seconds."""

from __future__ import annotations

import io
import json
from array import array
from collections.abc import Mapping
from typing import Any

import pytest
from bench.lengths import drawn
from bench.virtual import BLOCK_BYTES, ROW_NS, STEP_NS, arriving, queued, stand
from rich.console import Console

from slotwise.bench.accounting import Accounts
from slotwise.bench.compare import DISCIPLINES, Comparison, contenders, same_cache
from slotwise.bench.compare_tables import comparison_tables
from slotwise.bench.offline_run import Stand
from slotwise.bench.report import render
from slotwise.engine.messages import StepRecord
from slotwise.workload.requests import Workload

OUTPUTS = [max(1, length // 8) for length in drawn("log-normal median 128, sigma 1", 40)]
PROMPTS = drawn("uniform 1-128", 40)
HEAD = {
    "environment": {"slotwise": "0", "commit": "", "cores": 1}, "model": "fake", "dtype": "float32", "mode": "offline",
    "seed": 0, "slots": 8}


def compared(workload: Workload, *disciplines: str, price_per_hour: float | None = None) -> Comparison:
    comparison = Comparison(workload, dict(HEAD), price_per_hour)
    for contender in contenders(disciplines or DISCIPLINES, 8):
        comparison.run(contender, stand)
    return comparison


@pytest.fixture(scope="module")
def all_compared() -> Comparison:
    """Every discipline on one workload.  Shared: look, and change nothing."""
    return compared(queued(OUTPUTS, PROMPTS), price_per_hour=1.0)


def printed(result: Mapping[str, Any]) -> str:
    written = io.StringIO()
    Console(file=written, width=200).print(comparison_tables(result))
    return written.getvalue()


def test_all_disciplines_on_one_workload(all_compared: Comparison) -> None:
    result = all_compared.result()
    runs = {run["name"]: run for run in result["runs"]}
    assert tuple(runs) == DISCIPLINES
    assert DISCIPLINES[-1] == "continuous"
    assert result["identical_tokens"] is True
    assert result["same_answers"] == 40
    assert {run["output_tokens"] for run in runs.values()} == {sum(OUTPUTS)}
    static, continuous = runs["static"], runs["continuous"]
    assert continuous["output_throughput"] > static["output_throughput"] > runs["one_at_a_time"]["output_throughput"]
    for percentile in ("p50", "p99"):
        assert continuous["ttft"][percentile] < static["ttft"][percentile]


def test_decode_steps_stand_beside_theory() -> None:
    runs = compared(queued(OUTPUTS)).result()["runs"]
    assert [run["decode_steps"] for run in runs] == [run["theory_steps"] for run in runs]
    late = compared(arriving([0.0, 1.0], [3, 3]), "continuous").result()["runs"]
    assert late[0]["theory_steps"] is None


def test_step_times_lie_on_one_line(all_compared: Comparison) -> None:
    """Decode steps of the virtual engine take exactly a + b rows, under every discipline."""
    for run in all_compared.result()["runs"]:
        fit = run["step_time"]
        assert fit["a"] == pytest.approx(STEP_NS * 1e-9)
        assert fit["b"] == pytest.approx(ROW_NS * 1e-9)
        assert fit["error"] == pytest.approx(0.0, abs=1e-6)
        assert abs(fit["wall_error"]) < 0.02  # steps of prompts have rows as well as tokens
    alone = compared(queued(OUTPUTS), "static").result()
    assert alone["runs"][0]["step_time"] is None
    assert alone["identical_tokens"] is None


def test_a_run_that_is_off_the_line_is_seen() -> None:
    comparison = compared(queued(OUTPUTS), "static", "continuous")
    slow = comparison._accounts[1].decode_times
    for rows, seconds in slow.by_x.items():  # as if every step of this run had taken half as long again
        slow.by_x[rows] = array("d", [1.5 * one for one in seconds])
    static, continuous = (run["step_time"]["error"] for run in comparison.result()["runs"])
    assert continuous < -0.1
    assert abs(static) < 0.05


def test_the_same_cache_holds_more_rows_in_pages() -> None:
    """Room for 4 reservations of 16 + 511 places; pages hold nearly everyone's short answers."""
    workload = queued(OUTPUTS, [16] * 40, max_tokens=512)
    comparison = Comparison(workload, dict(HEAD))
    for contender in same_cache(4 * 33 * BLOCK_BYTES, 40):
        comparison.run(contender, stand)
    orca, pages = comparison.result()["runs"]
    assert (orca["label"], pages["label"]) == ("orca, same cache", "continuous, same cache")
    assert orca["max_rows"] == 4 < pages["max_rows"]
    assert pages["output_throughput"] > orca["output_throughput"]
    assert orca["waste"]["reserved_unused"] > 0.5 > pages["waste"]["reserved_unused"]
    assert comparison.identical_tokens


def test_what_a_million_tokens_cost() -> None:
    run = compared(queued([10]), "continuous", price_per_hour=7.2).result()["runs"][0]
    assert run["cost_per_million"] == pytest.approx(7.2 * run["seconds"] / 3600 / 10 * 1e6)
    assert compared(queued([10]), "continuous").result()["runs"][0]["cost_per_million"] is None


def test_different_tokens_are_seen() -> None:
    def other(settings: Mapping[str, Any]) -> Stand:
        return stand(settings, counting=True)  # another model

    comparison = compared(queued([5, 1, 7]), "static")
    comparison.run(contenders(["continuous"], 8)[0], other)
    result = comparison.result()
    assert result["identical_tokens"] is False
    assert f"tokens: {result['same_answers']} of 3 answers are the same" in printed(result)


def test_an_interrupted_comparison_keeps_what_it_has() -> None:
    comparison = compared(queued(OUTPUTS), "static")

    def interrupt(accounts: Accounts, record: StepRecord) -> None:
        if accounts.sampled_tokens > 20:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        comparison.run(contenders(["continuous"], 8)[0], stand, interrupt)
    result = comparison.result()
    assert [run["name"] for run in result["runs"]] == ["static"]
    assert "static" in render(result)


def test_the_result_is_json_and_draws_a_report_and_tables(all_compared: Comparison) -> None:
    result = all_compared.result()
    json.dumps(result, allow_nan=False)
    page, text = render(result), printed(result)
    for run in result["runs"]:
        assert run["label"] in text
        assert run["label"] in page
    assert "continuous over static: " in text
    assert "the same under all, for each of 40 requests" in text


@pytest.mark.parametrize(("message", "asked"), [
    ("batching must be one of", {"disciplines": ["static", "magic"]}),
    ("give each once", {"disciplines": ["static", "static"]}),
    ("give each once", {"disciplines": []}),
    ("slots must be at least 1", {"slots": 0}),
    ("a batch_size of 9 needs as many slots", {"batch_size": 9}),
    ("batch_size must be a whole number from 1 to", {"batch_size": 0}),
    ("neither is compared", {"disciplines": ["orca"], "batch_size": 2}),
    ("belongs to dynamic, which is not compared", {"disciplines": ["static"], "max_wait_ms": 5.0}),
    ("max_wait_ms must be a number from 0 to 3600000", {"max_wait_ms": -1.0}),
])
def test_impossible_comparisons_are_refused_in_one_line(message: str, asked: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=message) as refusal:
        contenders(**{"disciplines": DISCIPLINES, "slots": 8, **asked})
    assert "\n" not in str(refusal.value)


def test_settings_reach_those_they_belong_to() -> None:
    found = {one.name: one.settings for one in contenders(DISCIPLINES, 8, batch_size=4, max_wait_ms=7.0)}
    assert found["static"] == {"batching": "static", "max_num_seqs": 8, "batch_size": 4}
    assert found["dynamic"] == {"batching": "dynamic", "max_num_seqs": 8, "batch_size": 4, "max_wait_ms": 7.0}
    assert found["continuous"] == {"batching": "continuous", "max_num_seqs": 8}
