"""Least squares without negative shares."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slotwise.core.step_time import non_negative

FEW = (1e-6, 1e-6)


def test_whoever_would_be_negative_is_left_out() -> None:
    """The second column would have to be, so the first does what it can alone."""
    assert non_negative([[2.0, 1.0], [1.0, 2.0]], [4.0, 1.0], FEW) == pytest.approx([2.0, 0.0], rel=0.01)
    assert non_negative([[2.0, 1.0], [1.0, 2.0]], [3.0, 3.0], FEW) == pytest.approx([1.0, 1.0], rel=0.01)
    assert non_negative([[0.0, 0.0], [0.0, 4.0]], [0.0, 2.0], FEW) == pytest.approx([0.0, 0.5], rel=0.01)


def test_of_columns_that_were_always_alike_the_cheaper_one_gets_the_most() -> None:
    cheap, dear = non_negative([[4.0, 4.0], [4.0, 4.0]], [8.0, 8.0], (1e-6, 1e-3))
    assert cheap + dear == pytest.approx(2.0, rel=0.01)
    assert cheap > 100 * dear > 0


@given(st.lists(st.tuples(st.floats(0, 100), st.floats(0, 1), st.floats(0, 1e6)), min_size=6, max_size=12),
       st.tuples(st.floats(0, 5), st.floats(0, 5), st.floats(0, 5)))
def test_shares_that_made_a_sum_make_it_again(rows, shares):
    """Whatever the columns' sizes, and even where they are too alike to tell who had which share."""
    sums = [sum(x * share for x, share in zip(row, shares, strict=True)) for row in rows]
    matrix = [[sum(row[i] * row[j] for row in rows) for j in range(3)] for i in range(3)]
    target = [sum(row[i] * total for row, total in zip(rows, sums, strict=True)) for i in range(3)]
    found = non_negative(matrix, target, (1e-9,) * 3)
    assert min(found) >= 0
    for row, total in zip(rows, sums, strict=True):
        assert sum(x * share for x, share in zip(row, found, strict=True)) == pytest.approx(
            total, rel=0.02, abs=0.02 * max(sums) + 1e-9)
