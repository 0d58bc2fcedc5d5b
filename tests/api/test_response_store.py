"""Stored responses: bounded, forgotten in time, and never another tenant's."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slotwise.api.generate.response_store import SECONDS, ResponseStore, StoredResponse, StoreFull


def entry(size: int) -> StoredResponse:
    return StoredResponse(b"r" * (size // 2), b"m" * (size - size // 2))


def kept(store: ResponseStore, tenant: str, name: str, size: int, now: float = 0.0) -> None:
    store.begin(tenant, name, entry(1), now)
    store.complete(tenant, name, entry(size), now)


def test_a_response_is_its_tenants_and_is_forgotten_in_time() -> None:
    store = ResponseStore()
    kept(store, "a", "one", 10)
    assert store.find("b", "one", 1.0) is None and not store.drop("b", "one")
    found = store.find("a", "one", SECONDS - 1)
    assert found is not None and found.size == 10
    assert store.find("a", "one", SECONDS) is None
    assert (len(store), store.num_bytes) == (0, 0)


def test_a_response_in_progress_may_be_deleted() -> None:
    store = ResponseStore()
    store.begin("a", "one", entry(4), 0.0)
    assert store.find("a", "one", 10 * SECONDS) is not None, "it does not expire"
    assert store.drop("a", "one")
    store.complete("a", "one", entry(8), 1.0)
    assert store.find("a", "one", 1.0) is None


def test_the_largest_tenant_makes_room() -> None:
    store = ResponseStore(max_bytes=800)
    kept(store, "light", "old", 20)
    for number in range(12):
        kept(store, "heavy", f"h{number}", 70)
    assert store.find("light", "old", 0.0) is not None
    assert store.find("heavy", "h0", 0.0) is None and store.find("heavy", "h11", 0.0) is not None


def test_what_can_never_be_kept_is_told() -> None:
    store = ResponseStore(max_bytes=800)
    with pytest.raises(StoreFull, match="store: false") as error:
        store.begin("a", "large", entry(101), 0.0)
    assert error.value.is_too_large
    for number in range(8):
        store.begin("", f"p{number}", entry(100 if number < 7 else 12), 0.0)
    with pytest.raises(StoreFull, match="in progress") as error:
        store.begin("", "one", entry(100), 0.0)
    assert not error.value.is_too_large


def test_responses_in_progress_of_one_tenant_leave_room_to_others() -> None:
    store = ResponseStore(max_bytes=800, max_entries=20)

    def begun(tenant: str, size: int) -> int:
        for number in range(21):
            try:
                store.begin(tenant, f"p{number}", entry(size), 0.0)
            except StoreFull as full:
                assert not full.is_too_large
                return number
        raise AssertionError("nothing bounds them")

    for size, most in ((100, 6), (2, 16)):
        assert begun("heavy", size) == most
        store.begin("light", "one", entry(size), 0.0)
        for number in range(most):
            store.drop("heavy", f"p{number}")
        kept(store, "light", "one", size)
    assert store.num_bytes == 2


@given(st.lists(st.tuples(st.sampled_from(("begin", "complete", "drop", "find")), st.sampled_from("ab"),
                          st.integers(0, 9), st.integers(1, 120), st.floats(0, SECONDS / 3))))
def test_bytes_and_number_are_bounded_and_counted(operations: list[tuple[str, str, int, int, float]]) -> None:
    store, now = ResponseStore(max_bytes=400, max_entries=5), 0.0
    for kind, tenant, number, size, seconds in operations:
        now, name = now + seconds, f"n{number}"
        try:
            if kind == "begin":
                store.begin(tenant, name, entry(size), now)
                assert store.find(tenant, name, now) is not None
            elif kind == "complete":
                store.complete(tenant, name, entry(size), now)
            elif kind == "drop":
                store.drop(tenant, name)
                assert store.find(tenant, name, now) is None
            else:
                store.find(tenant, name, now)
        except StoreFull:
            pass
        found = [store.find(one, f"n{each}", now) for one in "ab" for each in range(10)]
        sizes = [one.size for one in found if one is not None]
        assert store.num_bytes == sum(sizes) <= 400 and len(store) == len(sizes) <= 5
