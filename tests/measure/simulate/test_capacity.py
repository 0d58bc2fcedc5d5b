"""The fewest replicas that meet an objective, and resampled traffic."""

from __future__ import annotations

from dataclasses import replace

import pytest
from measure.simulate.test_servers import SMALL

from slotwise.engine.config import EngineConfig
from slotwise.measure.simulate.capacity_search import CapacityTarget, at_load, fewest, interval, resampled
from slotwise.measure.simulate.machines import setup_of
from slotwise.measure.workload.distributions import Gamma, Uniform
from slotwise.measure.workload.workloads import Recipe, generate

SETUP = setup_of("epyc", SMALL, EngineConfig.of(model="", max_num_seqs=4))
BUSY = generate(Recipe(80, Uniform(50, 400), Uniform(5, 40), Gamma(120, 2)), 3)
GOAL = CapacityTarget(ttft=0.1, tpot=0.05, share=0.95)


def test_the_replicas_found_meet_the_objective_and_one_fewer_do_not():
    replicas = fewest(BUSY, SETUP, GOAL)
    assert replicas > 1 and replicas == fewest(BUSY, SETUP, GOAL, start=replicas + 3)
    fewer, enough = (at_load(BUSY, SETUP, GOAL, number) for number in (replicas - 1, replicas))
    assert enough.met and not fewer.met
    assert at_load(BUSY, SETUP, GOAL, replicas, 20.0).figures.ttft_p99 > enough.figures.ttft_p99


def test_an_objective_that_no_number_meets_is_said():
    with pytest.raises(ValueError, match="run alone miss it"):
        fewest(BUSY, SETUP, CapacityTarget(ttft=1e-6))


def test_where_other_traffic_is_out_of_reach_no_number_is_told():
    """One request of 16 misses the objective alone: some samples have it twice."""
    few = replace(BUSY, requests=tuple([replace(one, num_prompt=5000 if one.number == 7 else one.num_prompt)
                                        for one in BUSY.requests[:16]]))
    goal = CapacityTarget(ttft=0.1, share=1 - 1.5 / 16)
    replicas = fewest(few, SETUP, goal)
    low, high = interval(few, SETUP, goal, replicas, 12)
    assert replicas >= 1 and low is not None and high is None


def test_resampled_traffic_is_of_the_same_requests_in_other_places():
    other = resampled(BUSY, 1)
    shapes = {(one.num_prompt, one.num_output) for one in BUSY.requests}
    assert len(other.requests) == len(BUSY.requests) and other != BUSY and other == resampled(BUSY, 1)
    assert {(one.num_prompt, one.num_output) for one in other.requests} <= shapes
    low, high = interval(BUSY, SETUP, GOAL, 2, 4)
    assert 1 <= low <= high
