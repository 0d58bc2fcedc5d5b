"""Pooled requests in the scheduler: they end with their prompt, and sample nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.toy import Driver, next_token, request

from slotwise.core.disciplines.disciplines import Chunked, Static
from slotwise.core.params import InvalidParams, PoolingSpec
from slotwise.core.record import StepResult
from slotwise.core.request import Output
from slotwise.core.scheduler_limits import SchedulerLimits

LAST, MEAN = PoolingSpec("last"), PoolingSpec("mean")
LIMITS = SchedulerLimits(
    max_model_len=32, num_blocks=12, block_size=4, max_num_seqs=4, max_num_batched_tokens=8,
    enable_prefix_caching=True)


@pytest.mark.parametrize("pooling", [LAST, MEAN])
def test_a_prompt_in_chunks_ends_with_its_last_token(pooling):
    driver, prompt = Driver(LIMITS), list(range(20))
    driver.add(request("a", prompt, pooling=pooling))
    driver.run()
    assert driver.plans[0].new_requests[0].spec.output is Output.POOLED
    counts = [plan.counts for plan in driver.plans]
    assert counts == [(8,), (8,), (4,)]
    wanted = counts if pooling is MEAN else [(0,), (0,), (1,)]
    assert [plan.num_logits for plan in driver.plans] == wanted
    assert driver.ended == {"a": "stop"}
    assert driver.output == {}
    assert driver.pooled == {"a": next_token(prompt)}


def test_a_prompt_may_be_as_long_as_the_model_takes():
    driver = Driver(LIMITS)
    driver.add(request("fits", [1] * 32, pooling=LAST))
    driver.add(request("sampled", [1] * 32))
    driver.add(request("longer", [1] * 33, pooling=LAST))
    driver.run()
    assert driver.ended == {"fits": "stop", "sampled": "rejected", "longer": "rejected"}


@pytest.mark.parametrize(("pooling", "computed"), [(LAST, 4), (MEAN, 16)])
def test_a_mean_reads_no_cached_prefix_and_leaves_one(pooling, computed):
    driver = Driver(LIMITS)
    driver.add(request("first", list(range(16)), pooling=MEAN))
    driver.run()
    before = len(driver.plans)
    driver.add(request("again", list(range(16)), pooling=pooling))
    driver.run()
    assert sum(plan.num_tokens for plan in driver.plans[before:]) == computed
    assert driver.pooled["again"] == driver.pooled["first"]


def test_a_static_batch_holds_a_pooled_row_until_its_end():
    driver = Driver(LIMITS, Static(2))
    driver.add(request("pooled", [1, 2, 3], pooling=MEAN))
    driver.add(request("sampled", [5, 6], max_tokens=4, ignore_eos=True))
    driver.run()
    assert any(plan.held for plan in driver.plans)
    assert driver.ended == {"pooled": "stop", "sampled": "length"}
    assert driver.pooled == {"pooled": next_token([1, 2, 3])}


def test_a_held_pooled_row_ends_when_batches_no_longer_leave_together():
    driver = Driver(LIMITS, Static(2))
    driver.add(request("pooled", [1, 2, 3], pooling=MEAN))
    driver.add(request("sampled", [5, 6], max_tokens=8, ignore_eos=True))
    driver.plan()
    driver.commit()
    driver.configure(Chunked(), 4, 4)
    driver.run(40)
    assert driver.ended == {"pooled": "stop", "sampled": "length"}


def test_a_row_without_a_vector_ends_in_error():
    driver = Driver(LIMITS)
    driver.add(request("a", [1, 2], pooling=LAST))
    plan = driver.scheduler.schedule(0.0)
    outcome = driver.scheduler.commit(plan, StepResult(plan.step, ((),), failed=(0,)), 1.0)
    assert [(end.request_id, end.reason) for end in outcome.ended] == [("a", "error")]


@pytest.mark.parametrize("wrong", [
    {"pooling_type": "first"}, {"dimensions": 0}, {"dimensions": 1.5}, {"task": "rank"}, {"activation": "relu"},
    {"task": "labels"}, {"label_ids": (1,)}, {"task": "labels", "label_ids": (-1,)}])
def test_parameters_out_of_range_are_refused(wrong):
    with pytest.raises(InvalidParams):
        PoolingSpec(**wrong)


def test_prompts_that_are_computed_whole_are_never_divided():
    driver = Driver(replace(LIMITS, whole_prompts=True, enable_prefix_caching=False, max_step_ms=1.0))
    lengths = {"a": 3, "b": 4, "c": 2, "long": 20, "d": 8, "e": 1}
    for name, length in lengths.items():
        driver.add(request(name, list(range(length)), pooling=MEAN))
    driver.run()
    assert [plan.counts for plan in driver.plans if plan.counts] == [(3, 4), (2,), (20,), (8,), (1,)]
    assert driver.plans[0].stop is not None and driver.plans[0].stop.reason == "token_budget"
    assert driver.ended == dict.fromkeys(lengths, "stop")
    assert driver.pooled == {name: next_token(list(range(length))) for name, length in lengths.items()}
