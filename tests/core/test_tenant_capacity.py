"""A room that tenants share: who is let in, whoever asks for how much."""

from __future__ import annotations

from fractions import Fraction

from hypothesis import example, given
from hypothesis import strategies as st

from slotwise.core.tenant_capacity import SHARE, TenantCapacity, reserve_of

TENANTS = st.sampled_from("abcdefgh")
MOVES = st.lists(st.tuples(TENANTS, st.integers(-9, 9)), max_size=200)


def ask(capacity: TenantCapacity, tenant: str, bound: int, places: int = 1) -> bool:
    """Whether it came in."""
    capacity.set_bound(bound)
    if capacity.objection(tenant, places):
        return False
    capacity.acquire(tenant, places)
    return True


def flood(capacity: TenantCapacity, tenant: str, bound: int) -> int:
    """Places that it comes to when it asks for one after another."""
    while ask(capacity, tenant, bound):
        pass
    return capacity.held(tenant)


@given(MOVES, st.integers(1, 60))
def test_nobody_is_let_in_beyond_the_bound_nor_leaves_nothing_to_others(
        moves: list[tuple[str, int]], bound: int) -> None:
    capacity, held = TenantCapacity("wait"), dict.fromkeys("abcdefgh", 0)
    for tenant, places in moves:
        before = held[tenant], capacity.total
        if places <= 0:
            capacity.release(tenant, given := min(-places, held[tenant]))
            held[tenant] -= given
        elif ask(capacity, tenant, bound, places):
            held[tenant] += places
            assert capacity.total <= bound or not before[0]  # above the bound only a tenant that held nothing
            assert not before[0] or held[tenant] <= SHARE * (bound - capacity.total)  # so a place is left, at least
        else:
            assert before[1] + places > bound or before[0], "who holds nothing is stopped by bound and reserve alone"
        assert capacity.total == sum(held.values()) and all(capacity.held(name) == count for name,
                                                            count in held.items())


@given(st.integers(1, 5000))
def test_one_alone_has_nearly_all_of_it(bound: int) -> None:
    assert flood(TenantCapacity("wait"), "a", bound) == max(1, bound * SHARE // (SHARE + 1))


@given(st.integers(1, 5000))
def test_who_cannot_be_told_from_others_has_the_whole(bound: int) -> None:
    assert flood(TenantCapacity("wait"), "", bound) == bound


@given(st.integers(1, 6), st.integers(1000, 5000))
def test_floods_come_to_equal_parts_and_leave_one_to_whoever_comes_next(count: int, bound: int) -> None:
    capacity, floods = TenantCapacity("wait"), "abcdef"[:count]
    for _ in range(bound):
        for tenant in floods:
            ask(capacity, tenant, bound)
    part = Fraction(SHARE * bound, count * SHARE + 1)
    assert all(abs(capacity.held(tenant) - part) <= SHARE + 1 for tenant in floods)
    assert flood(capacity, "newcomer", bound) >= (bound - count * part) * SHARE / (SHARE + 1) - SHARE * count


@given(st.integers(100, 5000))
def test_a_flood_gives_way_as_it_drains_until_a_second_one_has_as_much(bound: int) -> None:
    capacity = TenantCapacity("wait")
    flood(capacity, "first", bound)
    for _ in range(3 * bound):  # whoever has waited longest goes, and both ask for its place: the first one first
        capacity.release("first" if capacity.held("first") >= capacity.held("second") else "second", 1)
        ask(capacity, "first", bound)
        ask(capacity, "second", bound)
    assert abs(capacity.held("first") - capacity.held("second")) <= SHARE + 1


def test_an_empty_room_takes_anybody() -> None:
    capacity = TenantCapacity("wait", 10)
    assert not capacity.objection("a", 100) and not capacity.objection("", 100)
    capacity.acquire("b", 1)
    assert capacity.objection("b", 10) and not capacity.objection("a", 10)


@given(st.dictionaries(st.sampled_from("abc"), st.integers(1, 500), min_size=1), st.integers(1, 400),
       st.integers(1, 600))
def test_a_bound_that_falls_below_what_is_held_shuts_out_only_the_holders(
        held: dict[str, int], bound: int, places: int) -> None:
    capacity = TenantCapacity("wait")
    for tenant, count in held.items():
        capacity.acquire(tenant, count)
    assert ask(capacity, "newcomer", bound, places), "whatever the others hold"
    if capacity.total > bound:
        assert all(capacity.objection(tenant, 1) for tenant in (*held, "newcomer", ""))


@given(st.lists(st.tuples(st.integers(0, 300), st.integers(-5, 5), st.integers(1, 60)), max_size=200),
       st.integers(0, 200))
@example([(1, 5, 1), (0, 1, 33), (0, 0, 1), (0, 4, 1)], 28)
def test_many_newcomers_share_one_bounded_reserve_whatever_the_bound_does(
        moves: list[tuple[int, int, int]], before: int) -> None:
    capacity = TenantCapacity("wait")
    capacity.acquire("holder", before)
    highest = before
    for number, places, bound in moves:
        tenant = str(number)
        if places <= 0:
            capacity.release(tenant, min(-places, capacity.held(tenant)))
            continue
        highest = max(highest, bound)  # places within any bound that was set may stay when it falls
        if ask(capacity, tenant, bound, places):
            assert capacity.total <= highest + reserve_of(highest) + 5


def test_a_reserve_serves_one_small_newcomer_after_another() -> None:
    capacity, bound = TenantCapacity("wait"), 80
    capacity.acquire("holder", 800)
    inside = sum(ask(capacity, str(number), bound) for number in range(50))
    assert inside == reserve_of(bound) == 10
    capacity.release("0", 1)
    assert ask(capacity, "other", bound) and not ask(capacity, "another", bound)
    capacity.release("holder", 800)
    assert ask(capacity, "another", bound) and ask(capacity, "other", bound)


@given(MOVES, st.integers(1, 60))
def test_a_fixed_bound_is_kept_with_its_reserve(moves: list[tuple[str, int]], most: int) -> None:
    capacity = TenantCapacity("wait", most, includes_reserve=True)
    for tenant, places in moves:
        if places <= 0:
            capacity.release(tenant, min(-places, capacity.held(tenant)))
        elif not capacity.objection(tenant, 1):
            capacity.acquire(tenant, 1)
        assert capacity.total <= most


def test_idle_places_are_no_part_of_a_share() -> None:
    capacity = TenantCapacity("wait")
    capacity.acquire("a", 3)
    capacity.set_bound(0, idle=4)
    assert not capacity.objection("a", 1) and capacity.objection("a", 2)


def test_who_has_left_is_forgotten() -> None:
    capacity = TenantCapacity("wait")
    for number in range(100):
        capacity.acquire(str(number), 2)
        capacity.release(str(number), 2)
    assert not capacity._held and capacity.total == 0
