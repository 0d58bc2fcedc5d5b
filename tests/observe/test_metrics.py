from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families
from support.measured import Measured
from support.records import record_of
from support.toy_engine import LIMITS, MS, Rehearsal, engine

from slotwise.core.cache_causes import FOUND, FOUND_IN_HOST, FOUND_ON_DISK, NEW, RECEIVED
from slotwise.core.disciplines.batching_settings import Batching
from slotwise.core.params import SamplingSpec
from slotwise.core.record import (
    CacheLookup,
    Copy,
    Decision,
    PromptSpan,
    RankSpan,
    RequestEnd,
    RowKind,
    StepRecord,
    Stop,
)
from slotwise.core.request import RequestSpec
from slotwise.core.scheduler_limits import SchedulerLimits
from slotwise.core.step_time import Machine, Roofline
from slotwise.engine.messages import Add, Configure, MemoryUse, Timing
from slotwise.engine.scheduling import Scheduling
from slotwise.observe.metrics import ITL, SOURCES, Histogram
from slotwise.observe.step_view import KINDS


def samples(measured: Measured) -> dict[str, float]:
    """Everything shown of the server, by name and by labels other than the model's."""
    found = {}
    for family in text_string_to_metric_families(measured.metrics.exposition().decode()):
        for sample in family.samples if not family.name.startswith("process_") else ():
            assert sample.name.startswith("slotwise:") and sample.labels.pop("model_name") == "toy"
            labels = ",".join(f"{key}={value}" for key, value in sample.labels.items())
            found[sample.name.removeprefix("slotwise:") + (f"[{labels}]" if labels else "")] = sample.value
    return found


def step(at_ms: int, ids: str, sampled: str = "", **rest: object) -> StepRecord:
    """A step of ten milliseconds that computes two tokens for each of `ids`."""
    return record_of(
        0, at_ms * MS, (at_ms + 10) * MS, request_ids=tuple(ids), slots=tuple(range(len(ids))),
        starts=(0,) * len(ids), counts=(2,) * len(ids), kinds=(RowKind.PREFILL,) * len(ids),
        tokens=tuple((7,) if name in sampled else () for name in ids), num_running=len(ids), **rest)


def test_steps_are_held_against_the_machine() -> None:
    info = engine()
    info.roofline = Roofline(Machine(1e6, 1e6), 2000, 10, 100, 300, 0)  # by hand: bytes are 2000 + 10 a position
    measured = Measured(info)
    assert samples(measured)["roofline_fraction"] == 0
    measured.arrive_all("ab")
    measured.stepped(step(100, "ab", "a"))  # 2 * (4 * 100 + 300) operations, 2,040 bytes: 2.04 of 10 ms
    seen = samples(measured)
    assert seen["roofline_fraction"] == pytest.approx(0.204)
    assert seen["roofline_seconds_total[kind=prefill]"] == pytest.approx(2.04e-3)
    assert seen["roofline_seconds_total[kind=decode]"] == 0


def test_hits_are_told_apart_by_tier_and_copies_are_counted() -> None:
    info = engine(limits=replace(LIMITS, enable_prefix_caching=True, num_host_blocks=6))
    info.memory = MemoryUse(host=6000)
    measured = Measured(info)
    measured.arrive("a", 20, 100 * MS)
    spans = (PromptSpan(8, FOUND), PromptSpan(12, FOUND_IN_HOST), PromptSpan(20, NEW))
    measured.stepped(step(
        150, "a", admitted=("a",), cached=(12,), saves=(Copy(1, 0), Copy(2, 1), Copy(5, 4)), lookups=(
            CacheLookup("a", spans),), loads=(Copy(3, 1), Copy(4, 2))))  # of a block in two cache groups
    measured.stepped(step(160, "a", saves=(Copy(6, 2),)))
    seen = samples(measured)
    assert seen["prefix_cache_queries_total"] == 20
    assert seen["prefix_cache_hits_total"] == 8 and seen["external_prefix_cache_hits_total"] == 4
    assert seen["external_prefix_cache_queries_total"] == 20 - 8, "what the device does not have is looked for there"
    assert [seen[f"prompt_tokens_by_source_total[source={source}]"] for source in SOURCES] == [8, 8, 4]
    assert seen["kv_offload_total_bytes_total[transfer_type=GPU_to_CPU]"] == 4000
    assert seen["kv_offload_total_bytes_total[transfer_type=CPU_to_GPU]"] == 2000


def test_tokens_that_another_engine_computed_come_from_there() -> None:
    measured = Measured(engine(limits=replace(LIMITS, enable_prefix_caching=True)))
    measured.arrive("a", 20, 100 * MS)
    spans = (PromptSpan(4, FOUND), PromptSpan(19, RECEIVED), PromptSpan(20, NEW))
    measured.stepped(step(150, "a", "a", admitted=("a",), cached=(4,), lookups=(CacheLookup("a", spans),)))
    measured.stepped(step(160, "a", "a", ended=(RequestEnd("a", "stop", 2),)))
    seen = samples(measured)
    assert [seen[f"prompt_tokens_by_source_total[source={source}]"] for source in SOURCES] == [1, 4, 15]
    assert seen["request_prefill_kv_computed_tokens_sum"] == 1


def test_prompts_that_are_not_on_disk_were_looked_up_there() -> None:
    info = engine(limits=replace(LIMITS, enable_prefix_caching=True))
    info.has_disk = True
    measured = Measured(info)
    for name, spans in (("a", (PromptSpan(20, NEW),)), ("b", (PromptSpan(16, FOUND_ON_DISK), PromptSpan(20, NEW)))):
        measured.arrive(name, 20, 100 * MS)
        measured.stepped(step(150, name, name, admitted=(name,), cached=(16 * (name == "b"),),
                              lookups=(CacheLookup(name, spans),)))
    seen = samples(measured)
    assert (seen["external_prefix_cache_queries_total"], seen["external_prefix_cache_hits_total"]) == (40, 16)
    assert seen["prefix_cache_hits_total"] == 0


def test_two_lives() -> None:
    measured = Measured(engine())
    measured.arrive("a", 3, 100 * MS)
    measured.arrive("b", 5, 100 * MS)
    measured.stepped(step(150, "ab", "a", admitted=("a", "b"), cached=(2, 0), num_free_blocks=4, num_waiting=7))
    assert samples(measured)["kv_cache_usage_perc"] == 0.6 and samples(measured)["num_requests_waiting"] == 7
    measured.stepped(step(160, "ab", "ab", preempted=(Decision("b", "no_blocks"),), lost=(6,)))
    measured.stepped(step(170, "a", "a", ended=(RequestEnd("a", "stop", 3),)))
    measured.stepped(step(270, "b", "b", admitted=("b",), cached=(4,), ended=(RequestEnd("b", "length", 2),)))
    measured.stepped(record_of(-1, 280 * MS, 280 * MS, num_free_blocks=7))
    seen = samples(measured)
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
    assert round(seen["request_inference_time_seconds_sum"], 9) == 0.03 + 0.13
    assert seen["request_prefill_kv_computed_tokens_sum"] == 1 + 5
    assert [seen[f"prompt_tokens_by_source_total[source={source}]"] for source in SOURCES] == [6, 2, 0]
    assert round(seen["request_time_per_output_token_seconds_sum"], 9) == 0.12
    assert seen["iteration_tokens_total_sum"] == 2 + 2 + 4 + 4 and seen["iteration_tokens_total_count"] == 4
    assert seen["num_requests_running"] == 0 and round(seen["kv_cache_usage_perc"], 9) == 0.3, "told as it is"


def test_latencies_count_from_when_the_request_was_read() -> None:
    """Not from its first bytes, whose body may be slow to come, and not from when the engine gets it."""
    measured = Measured(engine())
    timing = Timing(received_ns=10 * MS, read_ns=60 * MS)
    measured.commanded(Add("a", RequestSpec([1, 2, 3], SamplingSpec()), timing), 100 * MS)
    measured.stepped(step(150, "a", "a", admitted=("a",), cached=(0,)))
    measured.stepped(step(160, "a", "a", ended=(RequestEnd("a", "length", 2),)))
    seen = samples(measured)
    assert seen["time_to_first_token_seconds_sum"] == 0.1 and seen["e2e_request_latency_seconds_sum"] == 0.11
    assert seen["request_queue_time_seconds_sum"] == 0.05, "that begins on the way to the engine"


def test_requests_that_never_ran() -> None:
    measured = Measured(engine())
    measured.arrive("a", 3, 0)
    measured.arrive("b", 3, 0)
    measured.stepped(record_of(-1, MS, MS, ended=(RequestEnd("a", "rejected", 0, "too long"), RequestEnd("b", "abort",
                                                                                                         0))))
    measured.refused("queue_full")
    seen = samples(measured)
    assert seen["admission_rejections_total[reason=rejected]"] == 1 == seen[
        "admission_rejections_total[reason=queue_full]"]
    assert seen["request_success_total[finished_reason=abort]"] == 1 and seen["time_to_first_token_seconds_count"] == 0
    assert seen["prompt_tokens_total"] == 0


def test_what_steps_computed_for_nothing_and_left_empty() -> None:
    measured = Measured(engine())
    measured.arrive_all("abcz")
    measured.stepped(step(0, "ab", padding=(0, 7), num_free_blocks=4, admitted=tuple("abc"), cached=(0, 0, 0)))
    measured.stepped(step(10, "abc", held=(1, 2)))
    full = Scheduling(Batching(), max_num_seqs=2, max_num_batched_tokens=64)
    measured.stepped(step(20, "ab", refused=(Decision("c", "ending"), Decision("z", "no_slot")),
                         stop=Stop("no_slot", "z", 3), configured=full))
    measured.stepped(step(30, "a", refused=(Decision("b", "token_budget"), Decision("z", "token_budget")),
                         stop=Stop("token_budget", "z", 3)))
    seen = samples(measured)
    assert seen["padded_tokens_total"] == 7 and seen["held_tokens_total"] == 4
    assert seen["iteration_tokens_total_sum"] == 16, "held tokens are in it, padding is not"
    assert seen["slot_steps_total"] == 4 + 4 + 4 + 2 and seen["max_num_seqs"] == 2
    assert seen["empty_slot_steps_total"] == 2 + 1 + 2 + 1 and seen["empty_slot_steps_waiting_total"] == 2 + 1
    assert seen["stalled_row_steps_total[reason=ending]"] == 1 == seen["stalled_row_steps_total[reason=token_budget]"]
    assert seen["engine_healthy"] == 1 == seen["engine_starts_total"]


def test_the_work_of_each_rank_is_added_up() -> None:
    measured = Measured(engine())
    measured.arrive_all("a")
    assert not [name for name in samples(measured) if name.startswith("rank_busy_seconds_total")]
    for at in (0, 10):
        measured.stepped(step(at, "a", ranks=(RankSpan(0, 10**9, 2 * 10**9), RankSpan(1, 0, 5 * 10**8),
                                              RankSpan(0, 3 * 10**9, 4 * 10**9))))
    seen = samples(measured)
    assert seen["rank_busy_seconds_total[rank=0]"] == 4 and seen["rank_busy_seconds_total[rank=1]"] == 1


@pytest.mark.parametrize(("counts", "kind"), [((1, 1), "decode"), ((5, 2), "prefill"), ((1, 9), "mixed")])
def test_the_time_of_a_step_begins_when_the_one_before_has_ended(counts: tuple[int, ...], kind: str) -> None:
    measured = Measured(engine())
    ids = tuple("abc"[:len(counts)])
    measured.arrive_all(ids)
    for started in (0, 5):  # the second is planned while the first runs
        measured.stepped(record_of(0, started * MS, (started * 2 + 10) * MS, request_ids=ids, counts=counts,
                                    slots=counts, starts=counts, kinds=tuple(
                                        RowKind.PREFILL if count > 1 else RowKind.DECODE for count in counts)))
    seen = samples(measured)
    assert seen[f"iteration_time_seconds_sum[kind={kind}]"] == 0.02
    assert seen[f"iteration_time_seconds_count[kind={kind}]"] == 2


def test_waiting_is_told_by_reason_until_the_plan_that_ends_it() -> None:
    measured = Measured(engine())
    measured.commanded(Configure(engine().scheduling), 94 * MS)
    for name, at in (("a", 95), ("b", 96), ("c", 97)):
        measured.arrive(name, 3, at * MS)
    behind = Stop("no_slot", "b", 0)
    measured.stepped(step(100, "a", admitted=("a",), cached=(0,), refused=(Decision("b", "no_slot"),), stop=behind,
                         num_waiting=1, taken=(98 * MS, 98 * MS, 99 * MS, 104 * MS)))
    now = samples(measured)
    assert now["num_requests_waiting_by_reason[reason=no_slot]"] == 1 == now["num_requests_waiting"]
    passed = (Decision("b", "no_blocks"), Decision("c", "no_slot"))
    measured.stepped(step(110, "a", refused=passed, stop=Stop("no_blocks", "b", 1), num_waiting=2))
    measured.stepped(step(150, "ab", admitted=("b",), cached=(0,), refused=(Decision("c", "no_blocks"),),
                         stop=Stop("no_blocks", "c", 0), num_waiting=1))
    measured.stepped(record_of(-1, 170 * MS, 170 * MS, ended=(RequestEnd("c", "abort", 0),)))
    measured.stepped(step(900, "ab"))
    shown = samples(measured).items()
    waited = {key: round(value, 9) for key, value in shown if value and key.startswith("request_wait_seconds")}
    assert waited == {
        "request_wait_seconds_total[reason=step_under_way]": 0.005 + 0.004 + 0.013,  # the last was taken in too late
        "request_wait_seconds_total[reason=no_slot]": 0.01 + 0.04,
        "request_wait_seconds_total[reason=no_blocks]": 0.04 + 0.02}
    assert samples(measured)["num_requests_waiting_by_reason[reason=no_blocks]"] == 0


ROOMY = SchedulerLimits(max_model_len=100, num_blocks=200, block_size=4, max_num_seqs=4, max_num_batched_tokens=64)
TIGHT = SchedulerLimits(max_model_len=100, num_blocks=12, block_size=4, max_num_seqs=4, max_num_batched_tokens=64,
                        enable_prefix_caching=True)


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("batching", [
    Batching(), Batching(prefill="alone"), Batching("static", batch_size=3), Batching("one_at_a_time"),
    Batching("dynamic", batch_size=3, max_wait_ms=40.0)], ids=lambda batching: f"{batching.kind}-{batching.prefill}")
def test_reasons_and_queue_times_are_two_views_of_the_same(batching: Batching, depth: int) -> None:
    info = engine(limits=ROOMY, batching=batching)
    measured = Measured(info)
    rehearsal = Rehearsal(info, [measured], depth=depth, seed=5)
    rehearsal.play(60)
    seen = samples(measured)
    waited = {key: value for key, value in seen.items() if key.startswith("request_wait_seconds_total")}
    assert seen["request_queue_time_seconds_count"] == 60 and sum(value > 0 for value in waited.values()) >= 2
    assert sum(waited.values()) == pytest.approx(seen["request_queue_time_seconds_sum"], abs=1e-9)


def gaps(records: Sequence[StepRecord]) -> list[float]:
    """Seconds between the tokens of each request, looked at one by one."""
    last: dict[str, int] = {}
    found = []
    for record in records:
        for request_id, tokens in zip(record.plan.request_ids, record.tokens, strict=True):
            if tokens:
                if request_id in last:
                    found.append((record.ended_ns - last[request_id]) / 1e9)
                last[request_id] = record.ended_ns
    return found


@pytest.mark.parametrize("depth", [0, 1])
def test_every_token_of_a_rehearsal_is_counted(depth: int) -> None:
    """Under pressure, so that some are computed again."""
    info = engine(limits=TIGHT)
    measured = Measured(info)
    rehearsal = Rehearsal(info, [measured], depth=depth, seed=6)
    records = rehearsal.play(60)
    seen = samples(measured)
    steps = [record for record in records if record.plan.counts]
    assert seen["num_preemptions_total"] > 0 and seen["prefix_cache_hits_total"] > 0
    assert seen["generation_tokens_total"] == sum(rehearsal.num_outputs.values())
    assert seen["generation_tokens_total"] == seen["request_generation_tokens_sum"]
    # Whatever is known but for the last token is computed once, found, or computed again.
    known = seen["request_prompt_tokens_sum"] + seen["request_generation_tokens_sum"] - 60
    again = seen["recomputed_tokens_total"]
    assert seen["iteration_tokens_total_sum"] == known + again - seen["prompt_tokens_cached_total"]
    assert sum(seen[f"iteration_time_seconds_count[kind={kind}]"] for kind in KINDS) == len(steps)
    assert seen["slot_steps_total"] - seen["empty_slot_steps_total"] == sum(len(record.plan.counts) for record in steps)
    apart = gaps(records)
    assert seen["inter_token_latency_seconds_count"] == len(apart)
    assert seen["inter_token_latency_seconds_sum"] == pytest.approx(sum(apart))
    assert seen["request_decode_time_seconds_sum"] == pytest.approx(sum(apart))
    assert seen["kv_cache_usage_perc"] == 0 == seen["num_requests_running"]


def test_with_the_engine_goes_what_waited_for_it() -> None:
    measured = Measured(engine(), lambda: False)
    measured.arrive("a", 3, 0)
    measured.lost("it fell", 5 * MS)
    measured.stepped(record_of(-1, 5 * MS, 5 * MS, ended=(RequestEnd("a", "error", 0),), num_free_blocks=10))
    measured.restarted(engine())
    measured.arrive("b", 3, 100 * MS)
    measured.stepped(step(100, "b"))
    seen = samples(measured)
    assert not any(seen[key] for key in seen if key.startswith("request_wait_seconds"))
    assert seen["engine_healthy"] == 0 and seen["engine_starts_total"] == 2


@given(st.lists(st.floats(0, 100), max_size=50))
def test_a_histogram_counts_what_lies_below_each_bound(values: list[float]) -> None:
    histogram = Histogram(ITL)
    for value in values:
        histogram.observe(value)
    below = dict(histogram.cumulative())
    for bound in ITL:
        assert below[str(float(bound))] == bisect.bisect_right(sorted(values), bound)
    assert below["+Inf"] == len(values)
