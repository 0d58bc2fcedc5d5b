"""The metrics under vLLM's names: all that its dashboards read is there, with its labels and buckets."""

from __future__ import annotations

import re
from dataclasses import replace
from fnmatch import fnmatch

import pytest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample
from support import vllm_names
from support.measured import Measured
from support.records import record_of
from support.toy_engine import LIMITS, MS, Rehearsal, engine

from slotwise.core import reasons
from slotwise.core.params import SamplingSpec
from slotwise.core.record import Decision, RequestEnd, Stop
from slotwise.core.request import RequestSpec
from slotwise.engine.messages import Add, EngineInfo, Timing
from slotwise.observe.metrics import ABSENT, CAPACITY, NAMES, OLDER, VLLM_PREFIX, WAITING

SUFFIX = re.compile(r"_(bucket|sum|count)$")


def measured(info: EngineInfo | None = None, *, has_vllm_names: bool = True) -> Measured:
    return Measured(info or engine(), has_vllm_names=has_vllm_names)


def shown(one: Measured) -> list[Sample]:
    return [sample for family in text_string_to_metric_families(one.metrics.exposition().decode())
            for sample in family.samples]


def rehearsed() -> Measured:
    info = engine(limits=replace(LIMITS, enable_prefix_caching=True))
    info.max_adapters = 1
    one = measured(info)
    Rehearsal(engine(), [one], seed=6).play(30)
    return one


@pytest.fixture(scope="module")
def samples() -> list[Sample]:
    return shown(rehearsed())


@pytest.mark.parametrize("names", [vllm_names.DASHBOARD, vllm_names.OLD_DASHBOARD, vllm_names.STATISTICS],
                         ids=["dashboard", "older", "statistics"])
def test_all_that_a_dashboard_reads_is_served(samples: list[Sample], names: str) -> None:
    assert set(names.split()) <= {sample.name for sample in samples}


def test_every_metric_of_vllms_is_served_or_told_to_be_absent(samples: list[Sample]) -> None:
    served = {SUFFIX.sub("", sample.name) for sample in samples}
    for name in vllm_names.ALL.split():
        is_absent = any(fnmatch(name.removeprefix(VLLM_PREFIX), pattern) for pattern in ABSENT)
        assert (name in served) or is_absent, name
    assert {name.removeprefix(VLLM_PREFIX) for name in served if name.startswith(VLLM_PREFIX)} == {
        *NAMES, *OLDER.values()}
    assert {VLLM_PREFIX + name for name in NAMES} <= set(vllm_names.ALL.split()), "no name is ours"


def test_samples_have_vllms_labels(samples: list[Sample]) -> None:
    theirs = [sample for sample in samples if sample.name.startswith(VLLM_PREFIX)]
    assert theirs and all(sample.labels["model_name"] == "toy" and sample.labels["engine"] == "0" for sample in theirs)
    (cache,) = [sample for sample in theirs if sample.name == "vllm:cache_config_info"]
    assert {"block_size": "4", "num_gpu_blocks": "10", "num_cpu_blocks": "0"}.items() <= cache.labels.items()
    reasons_of_ends = {sample.labels["finished_reason"] for sample in theirs
                       if sample.name == "vllm:request_success_total"}
    assert {"stop", "length", "abort", "error"} <= reasons_of_ends


@pytest.mark.parametrize("name", vllm_names.BOUNDS)
def test_histograms_have_vllms_buckets(samples: list[Sample], name: str) -> None:
    bounds = {sample.labels["le"] for sample in samples if sample.name == f"{name}_bucket"}
    assert set(vllm_names.BOUNDS[name].split()) | {"+Inf"} <= bounds


def test_values_are_those_under_our_own_names(samples: list[Sample]) -> None:
    ours = {(sample.name.removeprefix("slotwise:"), tuple(sorted(sample.labels.items()))): sample.value
            for sample in samples if sample.name.startswith("slotwise:")}
    compared = 0
    for sample in samples:
        if sample.name.startswith(VLLM_PREFIX):
            labels = tuple(sorted((name, value) for name, value in sample.labels.items() if name != "engine"))
            if (same := ours.get((sample.name.removeprefix(VLLM_PREFIX), labels))) is not None:
                assert sample.value == same, sample.name
                compared += 1
    assert compared > 300
    by_name = {sample.name: sample.value for sample in samples}
    assert by_name["vllm:gpu_cache_usage_perc"] == by_name["slotwise:kv_cache_usage_perc"]
    count = "time_per_output_token_seconds_count"
    assert by_name[f"vllm:{count}"] == by_name["slotwise:inter_token_latency_seconds_count"] > 0


def test_without_the_option_no_name_is_vllms() -> None:
    one = measured(has_vllm_names=False)
    assert not [sample for sample in shown(one) if sample.name.startswith(VLLM_PREFIX)]


def test_waiting_requests_have_vllms_two_reasons() -> None:
    one = measured()
    one.arrive_all("abcd")
    record = record_of(
        0, 10 * MS, 20 * MS, request_ids=("a",), slots=(0,), starts=(0,), counts=(1,), tokens=((7,),),
        admitted=("a",), cached=(0,), refused=(Decision("b", reasons.TIER_CAP), Decision("c", reasons.NO_BLOCKS)),
        stop=Stop(reasons.NO_BLOCKS, "c", 1), num_running=1, num_waiting=3, taken=(1, 1, 1, 1))
    one.stepped(record)
    waiting = {sample.labels["reason"]: sample.value for sample in shown(one)
               if sample.name == "vllm:num_requests_waiting_by_reason"}
    assert waiting == {"capacity": 2, "deferred": 1}
    assert set(CAPACITY) < set(WAITING.values)


def asked(one: Measured, name: str, n: int, received_ns: int, max_tokens: int = 9) -> None:
    one.commanded(Add(name, RequestSpec([1, 2, 3], SamplingSpec(n=n, max_tokens=max_tokens)),
                      Timing(received_ns=received_ns)), MS)


def ended(one: Measured, tokens: dict[str, int]) -> None:
    """The choices end, each with some tokens."""
    names = tuple(tokens)
    columns = {"request_ids": names, "slots": tuple(range(len(names))), "starts": (0,) * len(names),
               "counts": (3,) * len(names)}
    one.stepped(record_of(0, 2 * MS, 3 * MS, **columns, tokens=tuple((7,) * tokens[name] for name in names),
                           ended=tuple(RequestEnd(name, "length", tokens[name]) for name in names)))


def values(one: Measured, metric: str) -> tuple[float, float]:
    """The count and the sum of a histogram."""
    found = {sample.name: sample.value for sample in shown(one)}
    return found[f"vllm:{metric}_count"], found[f"vllm:{metric}_sum"]


def test_the_choices_of_a_prompt_are_counted_once_when_all_have_ended() -> None:
    """Two prompts with two choices each in a response, another response with three that come in between, and one."""
    one = measured()
    for name, n, received in (("cmpl-x-0", 2, 5), ("cmpl-x-1", 2, 5), ("cmpl-y-2", 3, 6), ("cmpl-x-3", 2, 5),
                              ("cmpl-y-4", 3, 6), ("cmpl-x-5", 2, 5), ("cmpl-y-6", 3, 6), ("cmpl-z-7", 1, 7)):
        asked(one, name, n, received)
    ended(one, {"cmpl-x-0": 4, "cmpl-x-3": 5, "cmpl-y-2": 9, "cmpl-y-4": 1})
    assert values(one, "request_params_n") == values(one, "request_max_num_generation_tokens") == (0, 0)
    ended(one, {"cmpl-x-1": 3, "cmpl-z-7": 2})
    assert values(one, "request_max_num_generation_tokens") == (2, 4 + 2)
    ended(one, {"cmpl-x-5": 1, "cmpl-y-6": 1})
    assert values(one, "request_params_n") == (4, 2 + 2 + 3 + 1)
    assert values(one, "request_max_num_generation_tokens") == (4, 4 + 5 + 9 + 2)
    assert values(one, "request_params_max_tokens") == (8, 8 * 9)


def test_choices_that_never_come_leave_nothing_behind() -> None:
    one = measured()
    for serial in range(50):
        asked(one, f"cmpl-{serial}-{serial}", 3, serial)  # the engine is full then
        ended(one, {f"cmpl-{serial}-{serial}": 1})
    choices = one.metrics._choices
    assert not choices._arriving and not choices._prompts
    assert values(one, "request_params_n") == (0, 0)
