"""Adapters of requests: at most `max_loras` in a step, named as the reason to wait, and no request waits for ever."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.crowds import ROOMY, TIGHT, Comer, comers, crowd, play, running, slo, waiting
from support.toy import EOS, Driver, alone

from slotwise.core.disciplines.batching_settings import Batching
from slotwise.core.policies.fair import Fair
from slotwise.core.policies.fcfs import FirstComeFirstServed
from slotwise.core.policies.priority import Priority
from slotwise.core.reasons import NO_ADAPTER_SLOT
from slotwise.core.request import Request, RequestSpec

POLICIES = (FirstComeFirstServed, lambda: Priority(8.0, 1), lambda: Fair({}))
BATCHINGS = (Batching(), Batching("static"), Batching("continuous", "alone"))


def adapted(people: list[tuple[float, Request]], adapters: list[int]) -> list[tuple[float, Request]]:
    return [(at, Request(request.request_id, replace(request.spec, adapter=adapter), (EOS,)))
            for (at, request), adapter in zip(people, adapters, strict=False)]


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(POLICIES), st.sampled_from(BATCHINGS), st.sampled_from((ROOMY, TIGHT)), st.integers(1, 3),
       st.integers(0, 4), comers(slo(tenants=("a", "b"), priorities=(0, 0, 3))),
       st.lists(st.integers(0, 5), min_size=25, max_size=25))
def test_a_step_has_few_adapters_and_every_request_ends(
        policy, batching, limits, most, passes, coming, adapters):
    limits = replace(limits, max_loras=most, max_passes=passes)
    people = adapted(crowd(coming), adapters)
    by_id = {request.request_id: request.spec.adapter for _, request in people}

    def look(driver: Driver, plan) -> None:
        assert len({by_id[name] for name in plan.request_ids} - {0}) <= most
        assert all(join.spec.adapter == by_id[join.request_id] for join in plan.new_requests)
        used = {request.spec.adapter for request in running(driver)} - {0}
        refused = {one.request_id for one in plan.refused if one.reason == NO_ADAPTER_SLOT}
        for request in waiting(driver):
            if request.request_id in refused:
                assert request.spec.adapter and used

    driver = Driver(limits, batching.discipline(limits.max_num_seqs), policy=policy())
    play(driver, people, look)
    assert driver.output == {one.request_id: alone(one, limits) for _, one in people}


def test_a_full_cap_does_not_hold_up_requests_without_an_adapter():
    people = adapted(crowd([Comer(0, 2, 20), Comer(0, 2, 20), Comer(0, 2, 2)]), [1, 2, 0])
    driver = Driver(replace(ROOMY, max_loras=1, max_passes=4))
    play(driver, people, lambda driver, plan: None)
    assert driver.admitted == ["r0", "r2", "r1"]


@pytest.mark.parametrize("passes", [0, 3])
def test_a_flood_of_one_adapter_passes_another_only_so_often(passes):
    coming = [Comer(0, 2, 6), Comer(0, 2, 6), *[Comer(1, 2, 6)] * 30]
    people = adapted(crowd(coming), [1, 2, *[1] * 30])
    driver = Driver(replace(ROOMY, max_loras=1, max_passes=passes))
    play(driver, people, lambda driver, plan: None)
    assert driver.admitted.index("r1") <= passes + 1


def test_adapters_share_no_prefix():
    params = crowd([Comer(0, 1, 1)])[0][1].spec.params
    hashes = {Request("a", RequestSpec([1], params, salt=salt, adapter=adapter)).block_hashes.salt
              for salt in ("", "tenant", "tenant:1") for adapter in (0, 1, 2)}
    assert len(hashes) == 9
