"""Figures over clocks that many requests share are those of each request's own times."""

from __future__ import annotations

from array import array
from itertools import accumulate, pairwise
from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slotwise.measure.simulate.figures import Distribution, SimulatedRequest, WeightedValues, gaps_of

seconds_st = st.sampled_from([0.25, 0.5, 1.0, 2.0, 3.5])
clocks_st = st.lists(st.lists(seconds_st, min_size=1, max_size=12), min_size=1, max_size=3)


def of(values: list[float], share: float) -> float:
    return sorted(values)[max(0, ceil(share * len(values)) - 1)] if values else 0.0


@given(clocks_st, st.data())
def test_gaps_of_shared_clocks_are_those_between_the_tokens(steps: list[list[float]], data: st.DataObject):
    requests = []
    for gaps in steps:
        clock = array("d", accumulate(gaps))
        for _ in range(3):
            request = SimulatedRequest(0.0, clock)
            for step in data.draw(st.lists(st.integers(0, len(clock) - 1), max_size=9).map(sorted)):
                request.add_tokens(step, step)
            requests.append(request)
    found = gaps_of(requests)
    naive = [later - earlier for one in requests for earlier, later in pairwise(one.token_times)]
    assert found.total == len(naive)
    shares = 0.01, 0.5, 0.99, 1.0
    assert found.quantiles(*shares) == [of(naive, share) for share in shares]
    assert [one.num_tokens for one in requests] == [len(one.token_times) for one in requests]


@given(st.lists(st.lists(st.tuples(seconds_st, st.integers(1, 4)), max_size=8), max_size=4), st.floats(0.01, 1))
def test_quantiles_over_parts_are_those_of_all_values(parts: list[list[tuple[float, int]]], share: float):
    found = Distribution()
    for part in parts:
        found.add(WeightedValues(
            lambda part=part: [value for value, _ in part], lambda part=part: [one for _, one in part]))
    values = [value for part in parts for value, weight in part for _ in range(weight)]
    assert found.quantiles(share) == [of(values, share)]


def test_times_of_a_request_follow_from_its_spans():
    request = SimulatedRequest(1.0, array("d", [1.5, 2.0, 2.5, 4.0]))
    assert (request.token_times, request.ttft, request.tpot, request.num_tokens) == ([], None, 0.0, 0)
    request.add_tokens(0, 1)
    request.add_tokens(2, 2)
    request.add_tokens(2, 2)
    assert request.spans == [0, 2, 2, 2] and request.token_times == [1.5, 2.0, 2.5, 2.5]
    assert request.ttft == 0.5 and request.tpot == pytest.approx(1 / 3)
