"""News that are passed on late are passed on whole, in order, and by the time they are asked for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from support.records import record_of

from slotwise.core.params import SamplingSpec
from slotwise.core.record import StepRecord
from slotwise.core.request import RequestSpec
from slotwise.engine.messages import Add, Observer
from slotwise.observe import batched_observer
from slotwise.observe.batched_observer import BatchedObserver


class Notes(Observer):
    def __init__(self) -> None:
        self.heard: list[str] = []

    def arrived(self, request_id: str, num_prompt: int, now_ns: int) -> None:
        self.heard.append(f"arrived {request_id} {num_prompt}")

    def commanded(self, command: object, now_ns: int) -> None:
        self.heard.append("commanded")

    def stepped(self, record: StepRecord) -> None:
        self.heard.append(f"stepped {record.step}")

    def sent(self, request_id: str, first_ns: int, last_ns: int, num_events: int) -> None:
        self.heard.append(f"sent {request_id} {num_events}")

    def refused(self, kind: str) -> None:
        self.heard.append(f"refused {kind}")

    def lost(self, message: str, now_ns: int) -> None:
        self.heard.append(f"lost {message}")


class Broken(Observer):
    def stepped(self, record: StepRecord) -> None:
        raise ArithmeticError


def during(play: Callable[[BatchedObserver], None], seconds: float, *before: Observer) -> list[str]:
    """What an observer behind those `before` it has heard `seconds` after `play`."""
    notes = Notes()

    async def whole() -> None:
        play(BatchedObserver([*before, notes]))
        await asyncio.sleep(seconds)

    asyncio.run(whole())
    return notes.heard


def some(subject: BatchedObserver) -> None:
    subject.arrived("a", 3, 1)
    subject.commanded(Add("a", RequestSpec([1], SamplingSpec())), 1)
    subject.stepped(record_of(0, 2, 3))
    subject.stepped(record_of(1, 3, 4))
    subject.sent("a", 4, 5, 2)


SOME = ["arrived a 3", "commanded", "stepped 0", "stepped 1", "sent a 2"]


@pytest.fixture
def long_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batched_observer, "DELAY", 100.0)


def test_all_is_told_in_order() -> None:
    assert during(some, batched_observer.DELAY * 4) == SOME == during(some, batched_observer.DELAY * 4, Broken())


@pytest.mark.usefixtures("long_delay")
def test_it_is_told_at_once_only_when_asked_for_or_seldom() -> None:
    assert during(some, 0.0) == []
    for tell, heard in ((BatchedObserver.flush, []), (lambda subject: subject.lost("why", 9), ["lost why"])):
        def play(subject: BatchedObserver, tell: Callable[[BatchedObserver], None] = tell) -> None:
            some(subject)
            tell(subject)

        assert during(play, 0.0) == SOME + heard


def test_one_who_reads_again_and_again_does_not_have_it_told_more_often_later() -> None:
    class Counting(BatchedObserver):
        flushes = 0

        def flush(self) -> None:
            self.flushes += 1
            super().flush()

    async def whole() -> int:
        subject = Counting([])
        for _ in range(50):
            subject.refused("queue_full")
            subject.flush()
        subject.refused("queue_full")
        await asyncio.sleep(batched_observer.DELAY * 4)
        return subject.flushes

    assert asyncio.run(whole()) == 51


@pytest.mark.usefixtures("long_delay")
def test_what_is_kept_is_bounded() -> None:
    def flood(subject: BatchedObserver) -> None:
        for step in range(batched_observer.MOST + 5):
            subject.stepped(record_of(step, 1, 2))

    assert len(during(flood, 0.0)) == batched_observer.MOST
