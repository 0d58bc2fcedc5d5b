from __future__ import annotations

import bisect

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from slotwise.core.plan import Decision
from slotwise.engine.messages import RowEnd, StepRecord
from slotwise.observe.metrics import ITL, Histogram, Metrics

MS = 1_000_000


def samples(metrics: Metrics) -> dict[str, float]:
    """Everything shown, by name and by labels other than the model's."""
    found = {}
    for family in text_string_to_metric_families(metrics.exposition().decode()):
        for sample in family.samples:
            assert sample.name.startswith("slotwise:") and sample.labels.pop("model_name") == "toy"
            labels = ",".join(f"{key}={value}" for key, value in sample.labels.items())
            found[sample.name.removeprefix("slotwise:") + (f"[{labels}]" if labels else "")] = sample.value
    return found


def step(at_ms: int, ids: str, sampled: str = "", **rest: object) -> StepRecord:
    """A step of ten milliseconds that computes two tokens for each of `ids`."""
    return StepRecord(
        0, at_ms * MS, (at_ms + 10) * MS, request_ids=tuple(ids), counts=(2,) * len(ids),
        token_ids=tuple((7,) if name in sampled else () for name in ids), num_running=len(ids), **rest)


def test_two_lives() -> None:
    metrics = Metrics("toy", num_blocks=10)
    metrics.arrived("a", 3, 100 * MS)
    metrics.arrived("b", 5, 100 * MS)
    metrics.stepped(step(150, "ab", "a", admitted=("a", "b"), cached=(2, 0), num_free_blocks=4, num_waiting=7))
    assert samples(metrics)["kv_cache_usage_perc"] == 0.6 and samples(metrics)["num_requests_waiting"] == 7
    metrics.stepped(step(160, "ab", "ab", preempted=(Decision("b", "no_blocks"),), lost=(6,)))
    metrics.stepped(step(170, "a", "a", ended=(RowEnd("a", "stop", 3),)))
    metrics.stepped(step(270, "b", "b", admitted=("b",), cached=(4,), ended=(RowEnd("b", "length", 2),)))
    metrics.stepped(StepRecord(-1, 0, 0))
    seen = samples(metrics)
    assert seen["prompt_tokens_total"] == 8 and seen["generation_tokens_total"] == 5
    assert seen["num_preemptions_total"] == 1 and seen["recomputed_tokens_total"] == 2
    assert seen["prefix_cache_queries_total"] == 3 + 5 + 6 and seen["prefix_cache_hits_total"] == 6
    assert seen["prompt_tokens_cached_total"] == 2, "what a preempted request finds of its own is no saving"
    assert seen["request_success_total[finished_reason=stop]"] == 1 == seen[
        "request_success_total[finished_reason=length]"]
    assert seen["time_to_first_token_seconds_sum"] == 0.06 + 0.07 and seen["time_to_first_token_seconds_count"] == 2
    assert seen["request_queue_time_seconds_sum"] == 0.1  # coming back after a preemption is no second arrival
    assert round(seen["inter_token_latency_seconds_sum"], 9) == 0.13 and seen["inter_token_latency_seconds_count"] == 3
    assert round(seen["e2e_request_latency_seconds_sum"], 9) == 0.08 + 0.18
    assert round(seen["request_decode_time_seconds_sum"], 9) == 0.02 + 0.11
    assert round(seen["request_time_per_output_token_seconds_sum"], 9) == 0.12
    assert seen["iteration_tokens_total_sum"] == 2 + 2 + 4 + 4 and seen["iteration_tokens_total_count"] == 4
    assert seen["num_requests_running"] == 0 == seen["kv_cache_usage_perc"]


def test_requests_that_never_ran() -> None:
    metrics = Metrics("toy", num_blocks=10)
    metrics.arrived("a", 3, 0)
    metrics.arrived("b", 3, 0)
    metrics.stepped(StepRecord(-1, MS, MS, ended=(RowEnd("a", "rejected", 0, "too long"), RowEnd("b", "abort", 0))))
    metrics.refused("queue_full")
    seen = samples(metrics)
    assert seen["admission_rejections_total[reason=rejected]"] == 1 == seen[
        "admission_rejections_total[reason=queue_full]"]
    assert seen["request_success_total[finished_reason=abort]"] == 1 and seen["time_to_first_token_seconds_count"] == 0
    assert seen["prompt_tokens_total"] == 0


@given(st.lists(st.floats(0, 100), max_size=50))
def test_a_histogram_counts_what_lies_below_each_bound(values: list[float]) -> None:
    histogram = Histogram(ITL)
    for value in values:
        histogram.observe(value)
    below = dict(histogram.cumulative())
    for bound in ITL:
        assert below[str(float(bound))] == bisect.bisect_right(sorted(values), bound)
    assert below["+Inf"] == len(values)
