"""Disciplines side by side, on engines without a model whose steps take a + b rows seconds."""

from __future__ import annotations

import io
import json
import re
from array import array
from collections.abc import Mapping
from typing import Any

import pytest
from rich.console import Console
from support.lengths import drawn
from support.virtual import BLOCK_BYTES, ROW_NS, STEP_NS, arriving, queued, stand

from slotwise.core.record import StepRecord
from slotwise.measure.bench.accounting import Accounts
from slotwise.measure.bench.comparison import DISCIPLINES, Comparison, contenders, rounds, same_cache
from slotwise.measure.bench.offline_run import Stand
from slotwise.measure.bench.report import words
from slotwise.measure.bench.report.comparison_page import render
from slotwise.measure.bench.report.tables import comparison_tables
from slotwise.measure.workload.workloads import Workload

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


def printed(result: Mapping[str, Any], width: int = 200) -> str:
    written = io.StringIO()
    Console(file=written, width=width).print(comparison_tables(result))
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
    slow = comparison._rounds["continuous"].decode_times
    for rows, seconds in slow.by_x.items():  # as if every step of this run had taken half as long again
        slow.by_x[rows] = array("d", [1.5 * one for one in seconds])
    static, continuous = (run["step_time"]["error"] for run in comparison.result()["runs"])
    assert continuous < -0.1
    assert abs(static) < 0.05


@pytest.mark.parametrize(("errors", "warning"), [
    ((0.29, -0.29), ""),
    ((0.02, -0.35), "misses: 35% under the decode time of continuous."),
    ((0.3, -0.412), "misses: 30% over the decode time of static and 41% under the decode time of continuous."),
])
def test_a_fit_that_misses_by_30_percent_is_warned_of_in_one_line(errors: tuple[float, float], warning: str) -> None:
    result = compared(queued(OUTPUTS), "static", "continuous").result()
    for run, error in zip(result["runs"], errors, strict=True):
        run["step_time"]["error"] = error
    lines = [line for line in printed(result).splitlines() if line.startswith("warning:")]
    assert len(lines) == bool(warning)
    assert all(warning in line for line in lines)
    assert ("The step-time fit misses" in render(result)) == bool(warning)
    assert warning in render(result)


# -- rounds ------------------------------------------------------------------------------------------------------------


def test_every_round_runs_each_discipline_once_in_turn() -> None:
    chosen = contenders(["static", "orca", "continuous"], 8)
    assert list(rounds(2, chosen)) == [
        ("round 1 of 2, static", chosen[0]), ("round 1 of 2, orca", chosen[1]), ("round 1 of 2, continuous", chosen[2]),
        ("round 2 of 2, static", chosen[0]), ("round 2 of 2, orca", chosen[1]), ("round 2 of 2, continuous", chosen[2])]


def slowed(entry: Mapping[str, Any], factor: float) -> dict[str, Any]:
    """A run whose every step took `factor` times as long."""
    late = {name: {key: value * factor for key, value in entry[name].items()} for name in ("ttft", "itl", "e2e")}
    return {**entry, **late, "seconds": entry["seconds"] * factor, "steps": round(100 * factor),
            "output_throughput": entry["output_throughput"] / factor}


@pytest.fixture
def repeated() -> Comparison:
    """Static and continuous batching in three rounds; the second round is slow, and in the third continuous is."""
    plain = {run["name"]: run for run in compared(queued(OUTPUTS), "static", "continuous").result()["runs"]}
    comparison = Comparison(queued(OUTPUTS), dict(HEAD), price_per_hour=1.0)
    for factors in ((1.0, 1.0), (2.0, 2.0), (1.1, 1.65)):
        for contender, factor in zip(contenders(["static", "continuous"], 8), factors, strict=True):
            comparison.add(contender, slowed(plain[contender.name], factor), OUTPUTS)
    return comparison


def test_figures_are_medians_of_the_rounds_and_the_rest_is_the_run_in_the_middle(repeated: Comparison) -> None:
    alone = compared(queued(OUTPUTS), "static", "continuous").result()["runs"]
    for one, run, factor in zip(alone, repeated.result()["runs"], (1.1, 1.65), strict=True):
        assert run["output_throughput"] == pytest.approx(one["output_throughput"] / factor)
        assert run["seconds"] == pytest.approx(one["seconds"] * factor)
        for name in ("ttft", "itl", "e2e"):
            assert run[name] == pytest.approx({key: value * factor for key, value in one[name].items()})
        assert run["steps"] == round(100 * factor)
        assert [repeat["seconds"] / one["seconds"] for repeat in run["repeats"]] == pytest.approx(
            [1.0, 2.0, factor])
        assert run["cost_per_million"] == pytest.approx(1e6 / 3600 / run["output_throughput"])


def test_a_gain_is_the_median_of_the_rounds_own_gains(repeated: Comparison) -> None:
    """A slow round slows both: it does not widen the range."""
    alone = compared(queued(OUTPUTS), "static", "continuous").result()
    static, continuous = (run["output_throughput"] for run in alone["runs"])
    gain, least = continuous / static, continuous / static / 1.5
    result = repeated.result()
    said = printed(result)
    assert f"continuous over static: {gain:.2f}× ({least:.2f}–{gain:.2f}×) the output tokens per second" in said
    assert "medians and ranges of 3 rounds" in said
    page = render(result)
    assert f"{gain:.1f}× the tokens per second of static" in page
    assert f"The gain was {least:.2f}–{gain:.2f}× in tokens per second and" in page
    assert "Each ran in 3 rounds, in turn; figures are medians." in page
    assert f"<small>{least:.2f}–{gain:.2f}×</small>" in page


@pytest.mark.parametrize("width", [60, 80, 100, 160])
def test_tables_fit_a_terminal_and_cut_nothing_off(repeated: Comparison, all_compared: Comparison, width: int) -> None:
    for result in (repeated.result(), all_compared.result()):
        lines = printed(result, width).splitlines()
        assert max(map(len, lines)) <= width and not any("…" in line for line in lines)
        heads = "".join(line for line in lines if line.startswith("┃"))
        for head in ("tok/s", "TTFT p50", "E2E p99", "padded", "line wait"):
            assert heads.count(head) == 1
        for run in result["runs"]:
            rows = [line for line in lines if line.startswith(f"│ {run['label']} ")]
            assert len(rows) == sum(line.startswith("┃ discipline") for line in lines)
    cells = " ".join(printed(repeated.result(), 60).split())
    rates = [one["output_throughput"] for one in repeated.result()["runs"][0]["repeats"]]
    assert words.span(rates, words.figure) in cells


def test_one_round_has_no_range(all_compared: Comparison) -> None:
    result = all_compared.result()
    assert all(len(run["repeats"]) == 1 for run in result["runs"])
    assert "rounds" not in printed(result)
    assert not re.search("<td[^>]*>[^<]*<small>", render(result))
    assert "figures are medians" not in render(result)


def test_rounds_with_other_tokens_are_seen() -> None:
    contender = contenders(["continuous"], 8)[0]
    comparison = Comparison(queued([5, 1, 7]), dict(HEAD))
    comparison.run(contender, stand)
    comparison.run(contender, lambda settings: stand(settings, counting=True))
    assert comparison.result()["identical_tokens"] is False


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
