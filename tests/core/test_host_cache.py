"""What the device's pool gives up is kept in host memory, and copied back instead of computed again."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.beginnings import FORGES, SYSTEM, Watching, ask, check_against_each_alone, limits, use_digest
from support.toy import alone

from slotwise.core.block_pool import ConservationError
from slotwise.core.host_cache import NO_COPIES, HostCache
from slotwise.core.prefix_cache import NOWHERE, CachedBlock, Entry
from slotwise.core.reasons import LOAD_LIMIT
from slotwise.core.record import Copy
from slotwise.core.request import KVTransfer


def small(num_host_blocks: int, **changes: int):
    """A pool of eight blocks of four tokens."""
    return limits(**{"num_blocks": 8, "max_model_len": 33, "num_host_blocks": num_host_blocks} | changes)


def one_by_one(driver: Watching, *prompts: tuple[str, list[int]]) -> None:
    for name, prompt in prompts:
        driver.add(ask(name, prompt))
        driver.run()
        assert driver.output[name] == alone(ask("x", prompt), driver.limits)


def big(token: int) -> tuple[str, list[int]]:
    """A prompt that, with its answer, needs all of the eight blocks."""
    return f"big{token}", [token] * 29


def copied(driver: Watching) -> tuple[list[Copy], list[Copy]]:
    return ([copy for plan in driver.plans for copy in plan.saves],
            [copy for plan in driver.plans for copy in plan.loads])


@pytest.mark.parametrize(("num_host_blocks", "found"), [(0, 0), (20, 12)])
def test_what_was_evicted_is_loaded_and_not_computed(num_host_blocks, found):
    driver = Watching(small(num_host_blocks))
    one_by_one(driver, ("a", [*SYSTEM, 20]), big(1), ("b", [*SYSTEM, 21]))
    assert driver.cached["b"] == [found]
    saves, loads = copied(driver)
    assert len(loads) == found // 4
    assert {copy.source for copy in loads} <= {copy.target for copy in saves}


def test_without_a_host_nothing_is_copied():
    driver = Watching(small(0))
    one_by_one(driver, ("a", [*SYSTEM, 20]), big(1), ("b", [*SYSTEM, 21]))
    assert copied(driver) == ([], [])


def test_what_was_loaded_stays_and_is_saved_once():
    driver = Watching(small(20))
    one_by_one(driver, ("a", [*SYSTEM, 20]), big(1), ("b", [*SYSTEM, 21]), big(2), ("c", [*SYSTEM, 22]))
    saves, loads = copied(driver)
    places = [copy.target for copy in saves]
    assert len(places) == len(set(places)) and len(loads) == 6, "no place was written twice, three were read twice"
    assert driver.cached["c"] == [12]


def test_a_beginning_outlives_its_continuation_on_the_host_too():
    driver = Watching(small(2))
    one_by_one(driver, ("a", [*SYSTEM, 20]), big(1), ("b", [*SYSTEM, 21]))
    assert driver.cached["b"] == [8], "two of three blocks have a place: the first two"


def test_a_beginning_may_lie_on_both_tiers():
    """Somebody who shares its first blocks keeps them on the device, while those behind them go."""
    driver = Watching(small(20, max_num_seqs=2))
    driver.add(ask("a", [*SYSTEM, 20]))
    driver.run()
    driver.add(ask("keeps", SYSTEM[:5], max_tokens=12))
    driver.plan()
    driver.commit()
    driver.add(ask("filler", [6] * 24, max_tokens=1))
    driver.plan()
    driver.commit()
    driver.add(ask("b", [*SYSTEM, 21]))
    driver.run()
    assert driver.cached["b"] == [12]
    assert len(copied(driver)[1]) == 2
    assert driver.output["b"] == alone(ask("x", [*SYSTEM, 21]), driver.limits)


@pytest.mark.parametrize("num_host_blocks", [0, 20])
def test_a_preempted_request_loads_what_it_computed(num_host_blocks):
    driver = Watching(limits(num_blocks=9, max_model_len=30, num_host_blocks=num_host_blocks))
    for name, token in (("a", 1), ("b", 2)):
        driver.add(ask(name, [token] * 12, max_tokens=14))
    driver.run()
    assert driver.preempted
    assert bool(copied(driver)[1]) == bool(num_host_blocks)
    assert driver.cached["b"][-1] >= (16 if num_host_blocks else 4)
    for name, token in (("a", 1), ("b", 2)):
        assert driver.output[name] == alone(ask("x", [token] * 12, 14), driver.limits)


@pytest.mark.parametrize("num_host_blocks", range(1, 12))
def test_a_plan_never_saves_over_what_it_loads(num_host_blocks):
    """Those who come back push out, in the same plan, what then wants the places they are read from."""
    driver = Watching(small(num_host_blocks))
    one_by_one(driver, *((f"r{turn}", [turn % 2] * 29) for turn in range(6)))
    saves, loads = copied(driver)
    assert saves and loads
    for plan in driver.plans:
        assert not {copy.target for copy in plan.saves} & {copy.source for copy in plan.loads}
        assert len({copy.target for copy in plan.saves}) == len(plan.saves)


def test_one_who_would_load_too_much_beside_others_waits_a_step():
    driver = Watching(limits(num_blocks=40, num_host_blocks=80, max_num_batched_tokens=5, max_num_seqs=5))
    assert driver.limits.max_loads == 5
    prompts = {name: [*range(start, start + 13)] for name, start in (("a", 0), ("b", 7))}
    one_by_one(driver, *prompts.items())
    for token in (21, 22, 20):  # fill the pool with others
        one_by_one(driver, (f"filler{token}", [token] * 60))
    driver.plans.clear()
    for name, prompt in prompts.items():
        driver.add(ask(f"{name}2", prompt))
    driver.run()
    assert [(len(plan.new_requests), len(plan.loads)) for plan in driver.plans[:2]] == [(1, 3), (1, 3)]
    assert driver.plans[0].stop.reason == LOAD_LIMIT
    assert driver.output["a2"] == driver.output["a"] and driver.output["b2"] == driver.output["b"]


def test_a_step_without_rows_that_loaded_all_it_may_is_followed_at_once():
    """Blocks that go to a request which waits for another engine use up the loads of the plan."""
    driver = Watching(limits(num_blocks=40, num_host_blocks=80, max_num_batched_tokens=5, max_num_seqs=5))
    prompts = {name: [*range(start, start + 13)] for name, start in (("a", 0), ("b", 7))}
    one_by_one(driver, *prompts.items(), *((f"filler{token}", [token] * 60) for token in (21, 22, 20)))
    receives = ask("a2", [*prompts["a"], *range(8)])
    receives.kv = KVTransfer("a2", False, 60.0)
    driver.add(receives)
    driver.add(ask("b2", prompts["b"]))
    plan = driver.plan()
    assert (plan.num_rows, len(plan.loads)) == (0, 3)
    assert plan.stop == (LOAD_LIMIT, "b2", 1, plan.now)
    driver.commit()
    driver.run()
    assert driver.output["b2"] == driver.output["b"]


def test_what_a_plan_cannot_load_is_computed():
    driver = Watching(limits(num_blocks=20, num_host_blocks=80, max_num_batched_tokens=5, max_num_seqs=5))
    long = [*range(10), *range(10), *range(10)]
    one_by_one(driver, ("a", long), ("one", [21] * 60), ("two", [22] * 60), ("b", long))
    assert driver.cached["b"] == [20], "five blocks of seven"
    one_by_one(driver, ("c", long))
    assert driver.cached["c"] == [28] and len(copied(driver)[1]) == 5, "what was computed again is on the device again"


def test_tenants_do_not_share_on_the_host_either():
    driver = Watching(small(20))
    for name, salt in (("a", "one"), ("b", "two"), ("c", "one")):
        driver.add(ask(name, [*SYSTEM, 20], salt=salt))
        driver.run()
        one_by_one(driver, (f"filler {name}", [ord(name) % 20] * 25))
    assert driver.cached["b"] == [0] and driver.cached["c"] == [12]


@FORGES
def test_a_forged_collision_never_gives_what_is_not_there(forge, monkeypatch):
    use_digest(forge, monkeypatch)
    check_against_each_alone(limits(num_blocks=14, max_model_len=48, num_host_blocks=6), [
        ([t] * length + [t2], salt) for t in range(3) for length in (4, 8, 12) for t2 in (5, 6) for salt in ("", "x")])


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.lists(st.integers(0, 1), min_size=1, max_size=14), st.sampled_from(["", "x"])),
                min_size=1, max_size=12), st.integers(5, 12), st.integers(0, 12))
def test_what_comes_back_never_changes_tokens(prompts, num_blocks, num_host_blocks):
    check_against_each_alone(limits(num_blocks=num_blocks, max_model_len=17, num_host_blocks=num_host_blocks), prompts)


# -- the tier itself ---------------------------------------------------------------------------------------------


def entry(block: int) -> CachedBlock:
    return Entry(block, block, (block,), "", (NOWHERE,)).cached[0]


def test_the_least_recently_used_makes_room():
    tier = HostCache(2, max_loads=4)
    first, second, third = map(entry, range(3))
    assert tier.keep(first, 0) is None and tier.keep(second, 1) is None
    assert tier.pop_copies() == ((Copy(0, 0), Copy(1, 1)), ())
    assert tier.keep(first, 5) is None, "it has a place, which now was used last"
    assert tier.keep(third, 2) is second and second.host_block == NOWHERE
    assert tier.pop_copies().saves == (Copy(2, 1),)
    tier.check(lambda entry: True)


def test_a_place_given_out_twice_in_one_plan_is_written_once():
    tier = HostCache(1, max_loads=4)
    first, second = entry(3), entry(4)
    tier.keep(first, 3)
    assert tier.keep(second, 4) is first
    assert tier.pop_copies().saves == (Copy(4, 0),)


def test_with_no_place_everything_is_lost():
    tier = HostCache(0, max_loads=4)
    lost = entry(1)
    assert tier.keep(lost, 1) is lost and tier.pop_copies() is NO_COPIES


def test_a_place_that_is_read_is_not_given_out():
    tier = HostCache(1, max_loads=4)
    read, other = entry(1), entry(2)
    tier.keep(read, 1)
    tier.pop_copies()
    tier.hold([read])
    assert tier.keep(other, 2) is other
    tier.load(read, 7)
    assert tier.num_loads_left == 3
    assert tier.pop_copies() == ((), (Copy(0, 7),))
    assert tier.keep(other, 2) is read


def test_a_loaded_beginning_is_the_last_to_go():
    tier = HostCache(3, max_loads=4)
    chain = [entry(block) for block in range(3)]
    for one in chain:
        tier.keep(one, one.block)
    tier.hold(chain[:2])
    tier.pop_copies()
    assert [tier.keep(entry(block), block) for block in (7, 8, 9)] == [chain[2], chain[1], chain[0]]


@pytest.mark.parametrize("breaks", ["lost", "unknown"])
def test_what_is_wrong_is_found(breaks):
    tier = HostCache(2, max_loads=4)
    kept = entry(1)
    tier.keep(kept, 1)
    tier.pop_copies()
    tier.check(lambda entry: True)
    if breaks == "lost":
        tier._free.popleft()
    with pytest.raises(ConservationError, match="host blocks free" if breaks == "lost" else "never be found"):
        tier.check(lambda entry: breaks == "lost")
