"""Bytes that the engine has not read, by tenant."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from slotwise.core.tenant_capacity import reserve_of
from slotwise.engine.client import MAX_UNSENT, UnsentCommands

MB = 1 << 20


def test_a_flood_of_one_tenant_leaves_bytes_to_others() -> None:
    unsent, total = UnsentCommands(), 0
    while not unsent.objection("flood", total):
        total += MB
        unsent.wrote("flood", MB, total)
    assert MAX_UNSENT * 0.8 < total <= MAX_UNSENT * 8 // 9 + MB
    assert not unsent.objection("light", total)
    unsent.wrote("light", 1000, total + 1000)
    assert not unsent.objection("light", total + 1000), "it may send its other choices"
    assert not unsent.objection("flood", 10 * MB), "the engine has read the first of them"
    unsent.clear()
    assert not unsent.objection("flood", 0)


def test_unidentified_clients_share_the_whole() -> None:
    unsent, total = UnsentCommands(), 0
    while not unsent.objection("", total):
        total += MB
        unsent.wrote("", MB, total)
    assert total == MAX_UNSENT


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 9 * MB), st.integers(0, 9 * MB)), max_size=200))
def test_unsent_bytes_are_bounded_for_any_senders(moves: list[tuple[int, int, int]]) -> None:
    unsent, total = UnsentCommands(), 0
    for tenant, size, num_read in moves:
        if not unsent.objection(str(tenant), total):
            total += size
            unsent.wrote(str(tenant), size, total)
        assert total <= MAX_UNSENT + reserve_of(MAX_UNSENT) + 2 * 9 * MB
        total = max(0, total - num_read)
