"""The waiting room against a list that is sorted anew each time."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from support.crowds import Comer, crowd

from slotwise.core.request import Request
from slotwise.core.waiting_queue import SubQueue, WaitingQueue

LANES = st.builds(SubQueue, st.sampled_from(("", "gold")), st.sampled_from("abc"))
ENTRIES = st.lists(st.tuples(LANES, st.integers(0, 3), st.integers(0, 9)), max_size=20)


def filled(entries) -> tuple[WaitingQueue, dict[str, int], list[tuple[SubQueue, int, Request]]]:
    counters = {"a": 0, "b": 1, "c": 0}
    queue = WaitingQueue(lambda lane, now: (counters[lane],))
    listed = []
    for number, (lane, key, moment) in enumerate(entries):
        request = crowd([Comer(0, 1, 1)])[0][1]
        request.request_id, request.arrival = f"r{number}", number
        queue.add(request, lane, (key,), moment)
        listed.append((lane, key, request))
    return queue, counters, listed


@settings(max_examples=100, deadline=None)
@given(ENTRIES, st.lists(st.sampled_from(("take", "pass", "close")), max_size=25))
def test_next_is_the_first_of_all_whoever_was_taken_and_whatever_that_changed(entries, moves):
    """A walk asks for a lane's key again after somebody was admitted from one of that name, in whatever tier."""
    queue, counters, left = filled(entries)
    walk, shown, closed = queue.walk(0.0), [], set()
    for move in moves:
        request = walk.next()
        candidates = [entry for entry in left if entry[2] not in shown and entry[0].group not in closed]
        expected = min(candidates, key=lambda entry: (counters[entry[0].lane], entry[1], entry[2].arrival),
                       default=(None, None, None))
        assert request is expected[2]
        if request is None:
            return
        if move == "take":
            queue.remove(request)
            left.remove(expected)
            counters[expected[0].lane] += 2
        elif move == "close":
            walk.close(expected[0].group)
            closed.add(expected[0].group)
        else:
            shown.append(request)
    assert len(queue) == len(left)


@given(ENTRIES, st.integers(0, 10), st.sets(st.integers(0, 19)))
def test_who_has_waited_long_enough_is_due_once_unless_it_left(entries, now, gone):
    queue, _, listed = filled(entries)
    left = [entry for number, entry in enumerate(listed) if number not in gone]
    for number, (_, _, request) in enumerate(listed):
        if number in gone:
            queue.remove(request)
    due = [request.request_id for request in queue.due(float(now))]
    assert sorted(due) == sorted(request.request_id for (_, _, request), (_, _, moment) in zip(
        listed, entries, strict=True) if moment <= now and any(request is one for _, _, one in left))
    assert list(queue.due(float(now))) == []
    assert queue.next_moment > now


def test_requests_that_left_are_forgotten_long_before_their_moment():
    queue = WaitingQueue(lambda lane, now: ())
    for number in range(1000):
        request = crowd([Comer(0, 1, 1)])[0][1]
        request.request_id, request.arrival = f"r{number}", number
        queue.add(request, SubQueue("", "a"), (0,), 86_400.0)
        if number:
            queue.remove(request)
    assert len(queue._moments) < 100
    assert [request.request_id for request in queue.due(86_400.0)] == ["r0"]


def test_a_request_that_left_and_came_back_is_due_once():
    """As one whose prompt was read from disk: its deadline is the same."""
    queue = WaitingQueue(lambda lane, now: ())
    request = crowd([Comer(0, 1, 1)])[0][1]
    for _ in range(3):
        queue.add(request, SubQueue("", "a"), (0,), 5.0)
        queue.remove(request)
    queue.add(request, SubQueue("", "a"), (0,), 5.0)
    assert list(queue.due(5.0)) == [request]


@given(ENTRIES, st.lists(st.integers(0, 19), max_size=8))
def test_a_request_that_comes_back_stands_where_its_new_key_says(entries, again):
    queue, counters, listed = filled(entries)
    for number in again:
        if number < len(listed):
            lane, _, request = listed[number]
            queue.remove(request)
            queue.add(request, lane, (9 - number,))
            listed[number] = (lane, 9 - number, request)
    walk = queue.walk(0.0)
    order = sorted(listed, key=lambda entry: (counters[entry[0].lane], entry[1], entry[2].arrival))
    assert [walk.next() for _ in listed] == [request for _, _, request in order]
    assert walk.next() is None
    assert {one.request_id for one in queue} == {request.request_id for _, _, request in listed}
