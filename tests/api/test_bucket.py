"""Never more than a minute's worth and what flowed in since; and who was told when to return finds what it needs."""

from __future__ import annotations

from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from slotwise.api.limits.quotas import MINUTE_NS, Bucket

START = 5 * 10**12
CAPACITIES = st.integers(1, 10**6)
AMOUNTS = st.integers(1, 1000)
WAITS = st.integers(0, 2 * MINUTE_NS) | st.integers(0, 1000)
ARRIVALS = st.lists(st.tuples(WAITS, AMOUNTS), max_size=60)


@given(CAPACITIES | st.integers(1, 50), ARRIVALS)
def test_in_no_span_of_time_is_more_taken_than_the_rate_and_a_burst(
        capacity: int, arrivals: list[tuple[int, int]]) -> None:
    bucket, now = Bucket(capacity, START), START
    taken: list[tuple[int, int]] = []  # when, how much
    for wait, amount in arrivals:
        now += wait
        if bucket.take(amount, now):
            taken.append((now, amount))
    for first, (begin, _) in enumerate(taken):
        total = 0
        for end, amount in taken[first:]:
            total += amount
            assert total <= capacity + Fraction(capacity * (end - begin), MINUTE_NS)


@given(CAPACITIES | st.integers(1, 50), st.lists(st.tuples(WAITS, AMOUNTS, st.floats(0, 1)), max_size=60))
def test_what_was_not_used_counts_for_nothing(capacity: int, arrivals: list[tuple[int, int, float]]) -> None:
    """Net of what came back, the bound holds from the start to any moment; and nothing is refused that fits."""
    bucket, now, net = Bucket(capacity, START), START, 0
    held: list[int] = []
    for wait, amount, back in arrivals:
        now += wait
        if held and back < 0.5:
            unused = int(held.pop() * back)
            bucket.give(unused, now)
            net -= unused
        level = bucket.level(now)
        assert 0 <= level <= capacity
        assert bucket.take(amount, now) == (amount <= level)
        if amount <= level:
            held.append(amount)
            net += amount
        assert net <= capacity + Fraction(capacity * (now - START), MINUTE_NS)


@given(st.integers(1, 1000), ARRIVALS, st.integers(1, 1000))
def test_who_returns_when_told_to_is_in_time_and_not_a_moment_late(
        capacity: int, arrivals: list[tuple[int, int]], amount: int) -> None:
    bucket, now = Bucket(capacity, START), START
    amount = min(amount, capacity)
    for wait, other in arrivals:
        now += wait
        bucket.take(other, now)
    until = bucket.until(amount, now)
    assert 0 <= until <= MINUTE_NS, "a whole minute fills it"
    if until:
        assert not bucket.take(amount, now + until - 1)
    assert bucket.take(amount, now + until)


@given(st.integers(1, 1000), st.integers(1, 1000), st.integers(0, 1000), WAITS)
def test_another_size_keeps_what_is_there(before: int, after: int, taken: int, wait: int) -> None:
    bucket = Bucket(before, START)
    bucket.take(min(taken, before), START)
    level = bucket.level(START)
    bucket.change(after, START)
    assert bucket.level(START) == min(level, after)
    assert bucket.level(START + wait) == min(after, (min(level, after) * MINUTE_NS + after * wait) // MINUTE_NS)


def test_a_clock_that_goes_back_gives_nothing_away() -> None:
    bucket = Bucket(10, START)
    assert bucket.take(10, START) and not bucket.take(1, START - MINUTE_NS)
    bucket.give(1, START - MINUTE_NS)
    assert bucket.level(START) == 1
