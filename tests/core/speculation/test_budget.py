"""How many drafts a step verifies."""

from __future__ import annotations

from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slotwise.core.speculation.budget import GRID, GROUPS, LEAST_GAIN, Acceptance, Costs, best, may_gain
from slotwise.core.step_time import StepTimeModel, Work

PROBABILITIES = st.lists(st.floats(0, 1), max_size=40).map(lambda found: sorted(found, reverse=True))
COSTS = st.lists(st.floats(0, 1), min_size=len(GRID) - 1, max_size=len(GRID) - 1).map(
    lambda steps: list(accumulate([1.0, *steps])))


@given(COSTS, st.integers(1, 64), PROBABILITIES)
def test_no_number_of_the_grid_promises_more_tokens_per_second(costs, num_rows, probabilities):
    chosen = best(costs, num_rows, probabilities).num_drafts
    rates = {number: (num_rows + sum(probabilities[:number])) / cost
             for number, cost in zip(GRID, costs, strict=True) if number <= len(probabilities)}
    if chosen in rates and chosen:
        assert rates[chosen] >= max(rates.values()) - 1e-9
    if not chosen:
        assert all(rate <= LEAST_GAIN * num_rows + 1e-9 for number, rate in rates.items() if number)
    assert chosen <= len(probabilities)


@given(st.integers(1, 64), PROBABILITIES)
def test_a_draft_that_costs_what_a_row_costs_is_never_worth_it(num_rows, probabilities):
    """A full batch that computes: twice the tokens take twice as long."""
    costs = [1 + number / num_rows for number in GRID]
    assert not best(costs, num_rows, probabilities).num_drafts and not may_gain(costs, num_rows, 16)


@given(COSTS, st.integers(1, 64), PROBABILITIES)
def test_where_nothing_may_be_gained_nothing_is_chosen(costs, num_rows, probabilities):
    if not may_gain(costs, num_rows, len(probabilities)):
        assert not best(costs, num_rows, probabilities).num_drafts


def test_drafts_that_cost_nothing_are_all_taken():
    assert best([1.0] * len(GRID), 4, [0.5] * 21) == (16, True)


def model(weights: float, token: float) -> StepTimeModel:
    """Steps take `weights` seconds and `token` more for each token."""
    times = StepTimeModel()
    for _ in range(30):
        for rows in (1, 2, 4, 8, 16, 32, 64):
            times.learn(Work(rows, rows, 100 * rows, 0.0, longest=100), weights + token * rows)
            times.learn(Work(rows + 8, rows + 8, 100 * rows, 0.0, drafts=8), weights + token * (rows + 8))
    return times


def test_one_stream_has_drafts_and_a_full_batch_has_none():
    costs = Costs(model(weights=1.0, token=0.1))
    one, full = (costs.curve(Work(rows, rows, 100 * rows, 0.0), rows, 100 * rows) for rows in (1, 64))
    sure, half = [0.9**number for number in range(1, 17)], [0.5] * 64
    assert best(one, 1, sure).num_drafts >= 4
    assert best(full, 64, half).num_drafts == 0


def test_beside_a_prompt_a_draft_is_worth_the_time_of_a_token():
    """A step of seconds does not make drafts free, and each pays for its own tokens."""
    times = model(weights=1.0, token=0.1)
    for _ in range(50):
        times.learn(Work(500, 8, 0, 50_000.0), 51.0)
        times.learn(Work(250, 8, 0, 25_000.0), 26.0)
    work = Work(508, 9, 800, 50_000.0)
    costs = Costs(times).curve(work, 8, 800)
    assert best(costs, 8, [0.05] * 16).num_drafts == 0 and best(costs, 8, [0.95] * 16).num_drafts > 0


def test_shares_are_learned_by_position_and_from_all_requests():
    shared = Acceptance((0.5,) * GROUPS)
    first = Acceptance(shared)
    for _ in range(200):
        first.observe(4, 4, diverged=True)  # right at 4 to 7, wrong at 8
    survival = first.survival(4, 6)
    assert survival == sorted(survival, reverse=True)
    assert survival[3] > 0.8 and survival[4] < 0.2
    assert Acceptance(shared).survival(4, 1)[0] > 0.9, "the next request starts from what this one has shown"


@pytest.mark.parametrize("num_right", [0, 3])
def test_a_share_stays_between_0_and_1(num_right):
    one = Acceptance((0.3,) * GROUPS)
    for _ in range(5000):
        one.observe(0, num_right, diverged=True)
    assert all(0 <= one.share(group) <= 1 for group in range(GROUPS))
