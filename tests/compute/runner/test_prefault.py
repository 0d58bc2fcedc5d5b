"""Blocks have memory before they are handed out, as far as somebody is quick enough."""

from __future__ import annotations

import time

from slotwise.compute.runner.prefault import Prefault
from slotwise.core.record import NewBlocks, StepPlan, StepResult


class Layer:
    def __init__(self, can: bool = True) -> None:
        self.can, self.asked, self.num_given_back = can, [], 0

    def touch(self, first: int, end: int) -> bool:
        self.asked.append((first, end))
        return self.can

    def give_back(self) -> None:
        self.num_given_back += 1


class Nothing:
    """An executor that notes what it is given."""

    def __init__(self) -> None:
        self.given = []

    def submit(self, plan: StepPlan) -> None:
        self.given.append(plan)

    def collect(self) -> StepResult:
        return StepResult(len(self.given), ())


def granting(*blocks: tuple[int, ...]) -> StepPlan:
    new_blocks = tuple(NewBlocks(slot, 0, some) for slot, some in enumerate(blocks))
    return StepPlan(0, 0.0, (), (), (), new_blocks, *[()] * 11, None)


def settled(ahead: Prefault) -> None:
    while ahead._thread is not None and ahead._thread.is_alive():
        time.sleep(0.001)


def test_memory_stays_ahead_of_the_blocks_that_are_handed_out():
    layers, executor = [Layer(), Layer()], Nothing()
    ahead = Prefault(executor, layers, num_blocks=100, distance=20)
    for plan in (granting((0, 1), ()), granting((9,)), granting((12, 11), (3,)), granting(), granting((95,)),
                 granting((99,)), granting((5,))):
        settled(ahead)
        ahead.submit(plan)
        assert executor.given[-1] is plan
    settled(ahead)
    assert layers[0].asked == layers[1].asked == [(0, 20), (20, 32), (32, 100)]
    assert ahead.collect().step == 7


def test_all_of_it_has_memory_where_requests_take_many_blocks_at_once():
    layer = Layer()
    ahead = Prefault(Nothing(), [layer], num_blocks=100, distance=20)
    ahead.touch_all()
    settled(ahead)
    ahead.submit(granting((0,)))  # the thread of the first 20 may still have been at work
    settled(ahead)
    assert layer.asked in ([(0, 20), (20, 100)], [(0, 100)])


def test_who_cannot_be_asked_is_not_asked_again():
    layers = [Layer(), Layer(can=False)]
    ahead = Prefault(Nothing(), layers, num_blocks=100, distance=20)
    for block in range(0, 100, 7):
        settled(ahead)
        ahead.submit(granting((block,)))
    assert layers[1].asked == [(0, 20)]


def test_after_memory_was_given_back_it_is_asked_for_from_the_first_block_on():
    """Also when the thread was at work: it ends before, and touches nothing afterwards."""
    layers = [Layer() for _ in range(50)]
    ahead = Prefault(Nothing(), layers, num_blocks=100, distance=20)
    ahead.give_back()
    assert [layer.num_given_back for layer in layers] == [1] * 50
    touched = [len(layer.asked) for layer in layers]
    time.sleep(0.01)
    assert touched == [len(layer.asked) for layer in layers] and max(touched) <= 1
    ahead.submit(granting((30,)))
    settled(ahead)
    assert all(layer.asked[-1] == (0, 50) for layer in layers)
