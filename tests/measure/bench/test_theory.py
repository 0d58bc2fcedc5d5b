"""Decode steps by arithmetic: against small cases by hand, the published table, and laws that any draw obeys."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.lengths import FIXED, SLOTS, TABLE, drawn, expected_step_ratio, longest_over_mean

from slotwise.measure.bench import theory

REQUESTS = 1000  # of a draw; what the table was published for
TRIALS = 40

LENGTHS = st.lists(st.integers(1, 50), min_size=1, max_size=60)


def test_steps_counted_by_hand() -> None:
    lengths = [4, 1, 2, 2]
    assert theory.one_at_a_time_steps(lengths) == 9
    assert theory.static_steps(lengths, 2) == 4 + 2
    assert theory.continuous_steps(lengths, 2) == 5
    assert theory.step_ratio(lengths, 2) == 6 / 5


@pytest.mark.parametrize("name", TABLE)
def test_the_published_table(name: str) -> None:
    """Each published ratio is one draw: it lies within three standard deviations of a draw, and its own rounding."""
    draw, variation, published = TABLE[name]
    for slots, ratio in zip(SLOTS, published, strict=True):
        expected = expected_step_ratio(draw, slots, REQUESTS, TRIALS, seed=1)
        assert abs(expected.mean - ratio) <= 3 * expected.deviation + 0.005, (slots, expected)
    rng = random.Random(2)
    assert theory.coefficient_of_variation([draw(rng) for _ in range(20_000)]) == pytest.approx(variation, abs=0.05)


@pytest.mark.parametrize("slots", SLOTS)
def test_fixed_lengths_gain_exactly_nothing(slots: int) -> None:
    assert theory.step_ratio(drawn(FIXED, 512), slots) == 1.0
    assert longest_over_mean([128] * 10, slots) == pytest.approx(1.0)


@pytest.mark.parametrize("name", TABLE)
def test_a_long_queue_comes_near_the_longest_over_the_mean(name: str) -> None:
    lengths = drawn(name, 20_000)
    limit = longest_over_mean(lengths, 8)
    assert theory.step_ratio(lengths, 8) == pytest.approx(limit, rel=0.03)


def test_longest_of_a_uniform_group() -> None:
    """E[max of n uniform on 0..1] = n / (n + 1), against a mean of a half."""
    lengths = list(range(1, 100_001))
    for slots in SLOTS:
        assert longest_over_mean(lengths, slots) == pytest.approx(2 * slots / (slots + 1), rel=1e-3)


@given(LENGTHS, st.integers(1, 12))
def test_no_discipline_beats_its_slots_nor_loses_to_a_coarser_one(lengths: list[int], slots: int) -> None:
    static, continuous = theory.static_steps(lengths, slots), theory.continuous_steps(lengths, slots)
    assert max(max(lengths), -(-sum(lengths) // slots)) <= continuous <= static
    assert static <= theory.one_at_a_time_steps(lengths)
    assert theory.static_steps(lengths, 1) == theory.continuous_steps(lengths, 1) == sum(lengths)
