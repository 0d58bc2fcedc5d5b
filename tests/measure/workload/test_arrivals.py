"""Arrivals: rates, bursts, order, and the same for ever."""

from __future__ import annotations

from itertools import pairwise
from statistics import fmean, pstdev

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slotwise.measure.workload.distributions import (
    Arrivals,
    AtOnce,
    Closed,
    Gamma,
    Poisson,
    TraceTimes,
    gamma,
    parse_arrivals,
    stream,
)

rates = st.floats(0.001, 1000)
anything = st.one_of(
    st.just(AtOnce()), st.just(TraceTimes()), st.builds(Poisson, rates), st.builds(Gamma, rates, st.floats(0.01, 100)),
    st.builds(Closed, st.integers(1, 1000)))


def gaps(text: str, count: int = 20_000) -> list[float]:
    return [later - earlier for earlier, later in pairwise(parse_arrivals(text).times(stream(1, "a test"), count))]


@given(anything)
def test_any_arrivals_come_back_from_their_text(some: Arrivals) -> None:
    assert parse_arrivals(str(some)) == some


@given(st.builds(Poisson, rates) | st.builds(Gamma, rates, st.floats(0.01, 100)), st.integers(1, 40))
def test_times_begin_at_zero_and_never_fall(some: Arrivals, count: int) -> None:
    times = some.times(stream(0, "any"), count)
    assert len(times) == count and times[0] == 0.0
    assert times == sorted(times)


def test_everyone_at_once_and_users_of_a_closed_loop() -> None:
    assert parse_arrivals("at-once").times(stream(0, "any"), 3) == [0.0, 0.0, 0.0]
    assert parse_arrivals("closed:7").users == 7
    assert parse_arrivals("closed:7").times(stream(0, "any"), 3) == []
    assert parse_arrivals("poisson:2").users == 0


@pytest.mark.parametrize(("text", "cv"), [
    ("poisson:4", 1.0), ("gamma:4:1", 1.0), ("gamma:4:0.5", 0.5), ("gamma:4:3", 3.0), ("gamma:4:0.01", 0.01)])
def test_gaps_have_the_rate_and_the_burstiness(text: str, cv: float) -> None:
    found = gaps(text)
    assert fmean(found) == pytest.approx(1 / 4, rel=0.02 + 0.04 * (cv > 1))
    assert pstdev(found) / fmean(found) == pytest.approx(cv, rel=0.05)


@pytest.mark.parametrize("shape", [0.2, 1.0, 4.0])
def test_gamma_draws_have_their_moments(shape: float) -> None:
    """Mean and variance both are the shape; the third central moment is twice it."""
    rng = stream(2, "gamma")
    found = [gamma(rng, shape) for _ in range(40_000)]
    mean = fmean(found)
    assert mean == pytest.approx(shape, rel=0.03)
    assert fmean((x - mean) ** 2 for x in found) == pytest.approx(shape, rel=0.06)
    assert fmean((x - mean) ** 3 for x in found) == pytest.approx(2 * shape, rel=0.2)


def test_a_seed_means_the_same_times_for_ever() -> None:
    assert parse_arrivals("poisson:2").times(stream(0, "test"), 4) == pytest.approx(
        [0.0, 0.03266557949422919, 1.0506417829988821, 1.7935822311085237], rel=1e-12)
    assert parse_arrivals("gamma:2:3").times(stream(0, "test"), 3) == pytest.approx(
        [0.0, 2.1391719030637398e-05, 0.3708179274772237], rel=1e-12)


@pytest.mark.parametrize("text", ["sometimes", "poisson", "poisson:0", "poisson:nan", "poisson:-1", "gamma:1",
                                  "gamma:1:0", "closed:0", "closed:1.5", "at-once:1"])
def test_what_makes_no_arrivals_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(ValueError, match=r"there are|must be between") as told:
        parse_arrivals(text)
    assert "\n" not in str(told.value)


def test_times_of_a_trace_need_one() -> None:
    with pytest.raises(ValueError, match="needs a trace"):
        parse_arrivals("trace").times(stream(0, "any"), 3)
