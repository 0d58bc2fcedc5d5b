"""Lines of least squares from running sums."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slotwise.bench.fit import Fitted, Line, together

POINTS = st.lists(st.tuples(st.integers(1, 64), st.floats(0.001, 1.0)), min_size=2, max_size=50)


def line_of(points: list[tuple[int, float]]) -> Line:
    line = Line()
    for x, y in points:
        line.add(x, y)
    return line


@given(POINTS.filter(lambda points: len({x for x, _ in points}) > 1))
def test_the_same_line_as_numpy(points: list[tuple[int, float]]) -> None:
    b, a = np.polyfit([x for x, _ in points], [y for _, y in points], 1)
    assert line_of(points).fitted() == pytest.approx((a, b), rel=1e-6, abs=1e-9)


def test_a_line_is_found_again_and_predicts() -> None:
    line = line_of([(x, 0.01 + 0.002 * x) for x in (1, 3, 16, 16, 2)])
    fitted = line.fitted()
    assert fitted == pytest.approx((0.01, 0.002))
    assert fitted.total(line) == pytest.approx(line.sum_y)
    assert fitted.total(line_of([(8, 0.0), (4, 0.0)])) == pytest.approx(0.02 + 0.002 * 12)


def test_one_x_gives_a_flat_line_and_no_points_none() -> None:
    assert line_of([(4, 1.0), (4, 3.0)]).fitted() == Fitted(2.0, 0.0)
    assert Line().fitted() == Fitted(0.0, 0.0)


@given(POINTS, POINTS)
def test_lines_together_are_the_line_of_all_points(one: list[tuple[int, float]], two: list[tuple[int, float]]) -> None:
    both, whole = together([line_of(one), line_of(two)]), line_of(one + two)
    assert all(getattr(both, name) == pytest.approx(getattr(whole, name)) for name in Line.__slots__)
