from __future__ import annotations

import bisect

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families
from toy_engine import MS, engine

from slotwise.batching.settings import Batching
from slotwise.core.plan import Decision, Stop
from slotwise.engine.messages import RowEnd, StepRecord
from slotwise.engine.scheduling import Scheduling
from slotwise.observe.metrics import Metrics
from slotwise.observe.series import ITL, Histogram


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
    metrics = Metrics("toy", engine())
    metrics.arrived("a", 3, 100 * MS)
    metrics.arrived("b", 5, 100 * MS)
    metrics.stepped(step(150, "ab", "a", admitted=("a", "b"), cached=(2, 0), num_free_blocks=4, num_waiting=7))
    assert samples(metrics)["kv_cache_usage_perc"] == 0.6 and samples(metrics)["num_requests_waiting"] == 7
    metrics.stepped(step(160, "ab", "ab", preempted=(Decision("b", "no_blocks"),), lost=(6,)))
    metrics.stepped(step(170, "a", "a", ended=(RowEnd("a", "stop", 3),)))
    metrics.stepped(step(270, "b", "b", admitted=("b",), cached=(4,), ended=(RowEnd("b", "length", 2),)))
    metrics.stepped(StepRecord(-1, 280 * MS, 280 * MS, num_free_blocks=7))
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
    assert seen["num_requests_running"] == 0 and round(seen["kv_cache_usage_perc"], 9) == 0.3, "told as it is"


def test_requests_that_never_ran() -> None:
    metrics = Metrics("toy", engine())
    metrics.arrived("a", 3, 0)
    metrics.arrived("b", 3, 0)
    metrics.stepped(StepRecord(-1, MS, MS, ended=(RowEnd("a", "rejected", 0, "too long"), RowEnd("b", "abort", 0))))
    metrics.refused("queue_full")
    seen = samples(metrics)
    assert seen["admission_rejections_total[reason=rejected]"] == 1 == seen[
        "admission_rejections_total[reason=queue_full]"]
    assert seen["request_success_total[finished_reason=abort]"] == 1 and seen["time_to_first_token_seconds_count"] == 0
    assert seen["prompt_tokens_total"] == 0


def test_what_steps_computed_for_nothing_and_left_empty() -> None:
    metrics = Metrics("toy", engine())
    metrics.stepped(step(0, "ab", padding=(0, 7), num_free_blocks=4))
    metrics.stepped(step(10, "abc", held=(1, 2)))
    full = Scheduling(Batching(), 2, 64)
    metrics.stepped(step(20, "ab", refused=(Decision("c", "ending"), Decision("z", "no_slot")),
                         stop=Stop("no_slot", "z", 3), configured=full))
    metrics.stepped(step(30, "a", refused=(Decision("b", "token_budget"), Decision("z", "token_budget")),
                         stop=Stop("token_budget", "z", 3)))
    seen = samples(metrics)
    assert seen["padded_tokens_total"] == 7 and seen["held_tokens_total"] == 4
    assert seen["iteration_tokens_total_sum"] == 16, "held tokens are in it, padding is not"
    assert seen["slot_steps_total"] == 4 + 4 + 4 + 2 and seen["max_num_seqs"] == 2
    assert seen["empty_slot_steps_total"] == 2 + 1 + 2 + 1 and seen["empty_slot_steps_waiting_total"] == 2 + 1
    assert seen["stalled_row_steps_total[reason=ending]"] == 1 == seen["stalled_row_steps_total[reason=token_budget]"]
    assert seen["engine_healthy"] == 1 == seen["engine_starts_total"]


@pytest.mark.parametrize(("counts", "kind"), [((1, 1), "decode"), ((5, 2), "prefill"), ((1, 9), "mixed")])
def test_the_time_of_a_step_begins_when_the_one_before_has_ended(counts: tuple[int, ...], kind: str) -> None:
    metrics = Metrics("toy", engine())
    ids = tuple("abc"[:len(counts)])
    for started in (0, 5):  # the second is planned while the first runs
        metrics.stepped(StepRecord(0, started * MS, (started * 2 + 10) * MS, request_ids=ids, counts=counts))
    seen = samples(metrics)
    assert seen[f"iteration_time_seconds_sum[kind={kind}]"] == 0.02
    assert seen[f"iteration_time_seconds_count[kind={kind}]"] == 2


def test_waiting_is_told_by_reason_until_the_plan_that_ends_it() -> None:
    metrics = Metrics("toy", engine())
    for name, at in (("a", 95), ("b", 96), ("c", 97)):
        metrics.arrived(name, 3, at * MS)
    behind = Stop("no_slot", "b", 1)
    metrics.stepped(step(100, "a", admitted=("a",), cached=(0,), refused=(Decision("b", "no_slot"),), stop=behind,
                         num_waiting=2))
    now = samples(metrics)
    assert now["num_requests_waiting_by_reason[reason=no_slot]"] == 2 == now["num_requests_waiting"]
    passed = (Decision("b", "no_blocks"), Decision("c", "no_slot"))
    metrics.stepped(step(110, "a", refused=passed, stop=Stop("no_blocks", "b", 1), num_waiting=2))
    metrics.stepped(step(150, "ab", admitted=("b",), cached=(0,), refused=(Decision("c", "no_blocks"),),
                         stop=Stop("no_blocks", "c", 0), num_waiting=1))
    metrics.stepped(StepRecord(-1, 170 * MS, 170 * MS, ended=(RowEnd("c", "abort", 0),)))
    metrics.stepped(step(900, "ab"))
    shown = samples(metrics).items()
    waited = {key: round(value, 9) for key, value in shown if value and key.startswith("request_wait_seconds")}
    assert waited == {
        "request_wait_seconds_total[reason=step_under_way]": 0.012,
        "request_wait_seconds_total[reason=no_slot]": 0.02 + 0.04,
        "request_wait_seconds_total[reason=no_blocks]": 0.04 + 0.02}
    assert samples(metrics)["num_requests_waiting_by_reason[reason=no_blocks]"] == 0


@given(st.lists(st.floats(0, 100), max_size=50))
def test_a_histogram_counts_what_lies_below_each_bound(values: list[float]) -> None:
    histogram = Histogram(ITL)
    for value in values:
        histogram.observe(value)
    below = dict(histogram.cumulative())
    for bound in ITL:
        assert below[str(float(bound))] == bisect.bisect_right(sorted(values), bound)
    assert below["+Inf"] == len(values)
