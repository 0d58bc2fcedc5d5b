"""Lines through step times."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slotwise.measure.bench.accounting import StepSeconds, StepTimeLine, together

POINTS = st.lists(st.tuples(st.integers(1, 64), st.floats(0.001, 1.0)), min_size=2, max_size=50)


def steps_of(points: list[tuple[int, float]]) -> StepSeconds:
    steps = StepSeconds()
    for x, seconds in points:
        steps.add(x, seconds)
    return steps


@given(st.dictionaries(st.integers(1, 64), st.tuples(st.floats(0.001, 1.0), st.integers(1, 9)), min_size=2))
def test_the_same_line_as_numpy(medians: dict[int, tuple[float, int]]) -> None:
    """Each x as often as it was seen."""
    points = [(x, seconds) for x, (seconds, times) in medians.items() for _ in range(times)]
    b, a = np.polyfit([x for x, _ in points], [seconds for _, seconds in points], 1)
    assert steps_of(points).fitted() == pytest.approx((a, b), rel=1e-6, abs=1e-9)


def test_a_line_is_found_again_and_predicts() -> None:
    steps = steps_of([(x, 0.01 + 0.002 * x) for x in (1, 3, 16, 16, 2)])
    fitted = steps.fitted()
    assert fitted == pytest.approx((0.01, 0.002))
    assert fitted.total(steps) == pytest.approx(steps.total)
    assert fitted.total(steps_of([(8, 0.0), (4, 0.0)])) == pytest.approx(0.02 + 0.002 * 12)


def test_a_delayed_step_does_not_bend_the_line_and_is_not_hidden() -> None:
    steps = steps_of([(x, 0.01 + 0.002 * x) for x in (1, 16) for _ in range(5)] + [(1, 3.0)])
    fitted = steps.fitted()
    assert fitted == pytest.approx((0.01, 0.002))
    assert steps.total - fitted.total(steps) == pytest.approx(3.0 - 0.012)


def test_one_x_gives_a_flat_line_and_no_steps_none() -> None:
    assert steps_of([(4, 1.0), (4, 3.0)]).fitted() == StepTimeLine(2.0, 0.0)
    assert StepSeconds().fitted() == StepTimeLine(0.0, 0.0)


@given(POINTS, POINTS)
def test_steps_together_are_all_of_them(one: list[tuple[int, float]], two: list[tuple[int, float]]) -> None:
    both, whole = together([steps_of(one), steps_of(two)]), steps_of(one + two)
    assert sorted(both) == sorted(whole)
    assert both.fitted() == pytest.approx(whole.fitted())
