"""Equal beginnings are computed once; nobody ever reads what is not theirs."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.beginnings import FORGES, SYSTEM, Watching, ask, check_against_each_alone, limits, use_digest
from support.toy import alone


def test_a_beginning_is_computed_once():
    driver = Watching(limits())
    for name in "ab":
        driver.add(ask(name, [*SYSTEM, 20]))
        driver.run()
    assert driver.cached == {"a": [0], "b": [12]}
    assert driver.plans[-3].starts == (12,) and driver.plans[-3].counts == (1,)
    assert driver.output["a"] == driver.output["b"] == alone(ask("c", [*SYSTEM, 20]), driver.limits)


def test_one_token_is_always_left_to_compute():
    driver = Watching(limits())
    for name in "ab":
        driver.add(ask(name, SYSTEM))
        driver.run()
    assert driver.cached["b"] == [8], "the last block holds the token that yields the next"


def test_what_a_request_said_is_found_by_the_next_turn():
    driver = Watching(limits())
    first = ask("turn1", SYSTEM, max_tokens=6)
    driver.add(first)
    driver.run()
    driver.add(ask("turn2", [*first.tokens, 9, 9]))
    driver.run()
    assert driver.cached["turn2"] == [16], "all full blocks but the token never computed"


def test_running_requests_share_blocks_and_the_first_to_end_takes_nothing_away():
    driver = Watching(limits())
    driver.add(ask("a", [*SYSTEM, 20], max_tokens=20))
    driver.plan()
    driver.commit()
    driver.add(ask("b", [*SYSTEM, 21], max_tokens=2))
    driver.plan()
    driver.commit()
    a, b = driver.scheduler.requests()
    assert a.blocks[:3] == b.blocks[:3] and a.blocks[3] != b.blocks[3]
    driver.run()
    for name, last, length in (("a", 20, 20), ("b", 21, 2)):
        assert driver.output[name] == alone(ask("x", [*SYSTEM, last], length), driver.limits)


def test_equal_prompts_of_one_step_are_both_computed_and_published_once():
    driver = Watching(limits())
    for name in "ab":
        driver.add(ask(name, [*SYSTEM, 20]))
    driver.run()
    assert driver.cached == {"a": [0], "b": [0]}
    driver.add(ask("c", [*SYSTEM, 20]))
    driver.run()
    assert driver.cached["c"] == [12] and driver.scheduler.num_free_blocks == 32


def test_tenants_never_share():
    driver = Watching(limits())
    for name, salt in (("a", "one"), ("b", "two"), ("c", "one"), ("d", "")):
        driver.add(ask(name, [*SYSTEM, 20], salt=salt))
        driver.run()
    assert driver.cached == {"a": [0], "b": [0], "c": [12], "d": [0]}


@pytest.mark.parametrize(("token", "found"), [(1, 4), (2, 12)])
def test_the_least_recently_used_is_evicted_first_and_ends_before_beginnings(token, found):
    driver = Watching(limits(num_blocks=8, max_model_len=33))
    for name in (1, 2):
        driver.add(ask(f"r{name}", [name] * 13, max_tokens=1))
        driver.run()
    driver.add(ask("big", [3] * 16, max_tokens=1))  # four blocks, and two are free: two of the oldest three must go
    driver.run()
    driver.add(ask("again", [token] * 13, max_tokens=1))
    driver.run()
    assert driver.cached["again"] == [found]


def test_a_preempted_request_finds_what_it_computed():
    driver = Watching(limits(num_blocks=9, max_model_len=30))
    for name, token in (("a", 1), ("b", 2)):
        driver.add(ask(name, [token] * 12, max_tokens=14))
    driver.run()
    assert driver.preempted and driver.cached["b"][-1] >= 4
    for name, token in (("a", 1), ("b", 2)):
        assert driver.output[name] == alone(ask("x", [token] * 12, 14), driver.limits)


@FORGES
def test_a_forged_collision_never_gives_what_is_not_there(forge, monkeypatch):
    """Digests that say nothing: hits are lost, answers stay right (the fake cache holds the tokens themselves)."""
    use_digest(forge, monkeypatch)
    check_against_each_alone(limits(num_blocks=14, max_model_len=48), [
        ([t] * length + [t2], salt) for t in range(3) for length in (4, 8, 12) for t2 in (5, 6) for salt in ("", "x")])


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.lists(st.integers(0, 1), min_size=1, max_size=14), st.sampled_from(["", "x"])),
                min_size=1, max_size=12), st.integers(5, 20))
def test_a_hit_never_changes_tokens(prompts, num_blocks):
    check_against_each_alone(limits(num_blocks=num_blocks, max_model_len=17), prompts)
