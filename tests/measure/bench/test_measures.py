"""The arithmetic of a run's figures, exactly, from timestamps that are given."""

from __future__ import annotations

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slotwise.measure.bench.measures import (
    COMPLETED,
    FAILED,
    REJECTED,
    UNFINISHED,
    GoodputLimits,
    RequestOutcome,
    latencies,
    most_at_once,
    percentile,
    samples,
    serving_metrics,
    summary,
)

NOTHING_ASKED = GoodputLimits({})
values = st.lists(st.floats(0, 1e6), min_size=1, max_size=50)


def done(number: int, sent: float, times: tuple[float, ...], **more: object) -> RequestOutcome:
    fields = {"ended": times[-1], "num_prompt": 10, "num_output": len(times)} | more
    return RequestOutcome(number, COMPLETED, sent, sent, times, **fields)


def test_the_times_of_one_request() -> None:
    outcome = done(0, 1.0, (1.5, 1.75, 2.5))
    assert outcome.ttft == 0.5
    assert outcome.itls == [0.25, 0.75]
    assert outcome.tpot == 0.5
    assert outcome.e2el == 1.5


def test_several_tokens_in_one_event() -> None:
    """Nine tokens in three events: gaps are those between events, time per token is what a token took."""
    outcome = done(0, 0.0, (1.0, 3.0, 5.0), num_output=9)
    assert outcome.itls == [2.0, 2.0]
    assert outcome.tpot == 0.5


def test_an_end_after_the_last_text_belongs_to_the_whole_and_to_no_gap() -> None:
    outcome = done(0, 0.0, (1.0, 2.0), ended=4.0, num_output=3)
    assert (outcome.itls, outcome.e2el, outcome.tpot) == ([1.0], 4.0, 1.5)


def test_one_token_and_no_text() -> None:
    assert done(0, 1.0, (1.5,)).tpot == 0.0
    silent = RequestOutcome(0, COMPLETED, 0.0, 0.0, (), ended=2.0, num_prompt=1, num_output=1)
    assert (silent.ttft, silent.itls, silent.e2el) == (2.0, [], 2.0)


def test_percentiles_lie_on_lines_between_ranks() -> None:
    assert [percentile([1.0, 2.0, 4.0], percent) for percent in (0, 25, 50, 75, 100)] == [1.0, 1.5, 2.0, 3.0, 4.0]
    assert percentile([7.0], 99) == 7.0
    assert percentile([], 50) == 0.0


@given(values)
def test_percentiles_agree_with_the_standard_library(found: list[float]) -> None:
    ordered = sorted(found)
    assert percentile(ordered, 50) == pytest.approx(statistics.median(ordered))
    if len(ordered) > 1:
        hundredths = statistics.quantiles(ordered, n=100, method="inclusive")
        assert percentile(ordered, 90) == pytest.approx(hundredths[89])
        assert percentile(ordered, 99) == pytest.approx(hundredths[98])


def test_a_summary_of_some_and_of_none() -> None:
    assert summary([3.0, 1.0, 2.0]) == pytest.approx({"mean": 2.0, "p50": 2.0, "p90": 2.8, "p99": 2.98, "max": 3.0})
    assert set(summary([]).values()) == {0.0}


def test_latencies_are_milliseconds_under_their_fields_names() -> None:
    assert latencies("ttft", [0.1, 0.3]) == pytest.approx({
        "mean_ttft_ms": 200, "std_ttft_ms": 100, "median_ttft_ms": 200, "p90_ttft_ms": 280, "p99_ttft_ms": 298})


RUN = [
    done(0, 0.0, (0.5, 1.0, 1.5)),
    done(1, 0.5, (1.5, 1.75, 4.0), num_prompt=30),
    RequestOutcome(2, REJECTED, 1.0, 1.0, ended=1.1, error="429: busy"),
    RequestOutcome(3, FAILED, 1.0, 1.25, (2.0,), ended=2.0, error="the stream ended"),
    RequestOutcome(4, UNFINISHED, 3.0, 3.0, (3.5,)),
]


def test_the_figures_of_a_run() -> None:
    figures = serving_metrics(RUN, 4.0, NOTHING_ASKED)
    assert [figures[name] for name in ("completed", "rejected", "failed", "unfinished")] == [2, 1, 1, 1]
    assert (figures["total_input_tokens"], figures["total_output_tokens"]) == (40, 6)
    assert figures["request_throughput"] == 0.5
    assert figures["output_throughput"] == 1.5
    assert figures["total_token_throughput"] == 11.5
    assert figures["max_concurrent_requests"] == 2
    assert figures["request_goodput"] is None
    assert figures["mean_ttft_ms"] == 750
    assert figures["mean_itl_ms"] == pytest.approx((500 + 500 + 250 + 2250) / 4)
    assert figures["mean_max_itl_ms"] == (500 + 2250) / 2
    assert figures["mean_tpot_ms"] == (500 + 1250) / 2
    assert figures["mean_e2el_ms"] == (1500 + 3500) / 2
    assert figures["max_late_ms"] == 0


def test_lateness_is_that_of_the_latest() -> None:
    late = RequestOutcome(0, COMPLETED, due=1.0, sent=1.25, token_times=(2.0,), ended=2.0, num_output=1)
    assert serving_metrics([*RUN[:2], late], 4.0, NOTHING_ASKED)["max_late_ms"] == 250


@pytest.mark.parametrize(("words", "good"), [
    (["ttft:500"], 1), (["ttft:499"], 0), (["ttft:1000"], 2), (["ttft:1000", "tpot:600"], 1), (["e2el:1400"], 0),
])
def test_goodput_counts_completed_requests_within_every_objective(words: list[str], good: int) -> None:
    assert serving_metrics(RUN, 4.0, GoodputLimits.parse(words))["request_goodput"] == good / 4


@pytest.mark.parametrize("word", ["ttft", "ttft:", "ttft:fast", "itl:5", "ttft:0", "ttft:-1", "ttft:nan", "tpot:inf"])
def test_objectives_that_are_none_are_refused(word: str) -> None:
    with pytest.raises(ValueError, match="ttft:MS, tpot:MS, e2el:MS"):
        GoodputLimits.parse([word])
    with pytest.raises(ValueError, match="twice"):
        GoodputLimits.parse(["ttft:5", "ttft:6"])


def test_a_run_that_brought_nothing_has_no_figures_but_counts() -> None:
    figures = serving_metrics(RUN[2:], 0.0, GoodputLimits.parse(["ttft:1"]))
    assert figures["completed"] == 0
    assert {value for name, value in figures.items() if name.endswith(("_ms", "put"))} == {0.0}


def test_samples_stand_in_the_workloads_order() -> None:
    found = samples(reversed(RUN))
    assert found["statuses"] == [outcome.status for outcome in RUN]
    assert found["input_lens"] == [10, 30, 0, 0, 0]
    assert found["ttfts"] == [0.5, 1.0, 0.0, 0.0, 0.0]
    assert found["itls"][1] == [0.25, 2.25]
    assert found["errors"][2] == "429: busy"


def test_spans_that_touch_do_not_overlap() -> None:
    assert most_at_once([(0, 1), (1, 2), (2, 3)]) == 1
    assert most_at_once([(0, 3), (1, 2), (1.5, 4)]) == 3
    assert most_at_once([]) == 0
