"""Who sends when: an open loop waits for nobody, a closed one never has more under way than users."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from slotwise.measure.bench import load_generator as load_module
from slotwise.measure.bench.load_generator import LoadRun, Send
from slotwise.measure.bench.measures import COMPLETED, UNFINISHED, RequestOutcome
from slotwise.measure.workload.workloads import Workload, WorkRequest

NEVER = 3600.0  # seconds


def arriving(*times: float) -> Workload:
    return Workload(tuple(WorkRequest(number, at, 3, 1) for number, at in enumerate(times)), 1)


def closed(count: int, users: int) -> Workload:
    return Workload(tuple(WorkRequest(number, None, 3, 1) for number in range(count)), 1, users)


class Server:
    """Answers after so many seconds, or the next time the event loop turns."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds
        self.bodies: list[bytes] = []
        self.running = self.most_at_once = 0

    async def __call__(self, body: bytes, outcome: RequestOutcome) -> None:
        self.bodies.append(body)
        self.running += 1
        self.most_at_once = max(self.most_at_once, self.running)
        await asyncio.sleep(self.seconds)
        self.running -= 1
        outcome.status = COMPLETED


def body(request: WorkRequest) -> bytes:
    return b"%d" % request.number


async def stopped_when(holds: Callable[[], bool], load: LoadRun, send: Send) -> None:
    """Run until `holds` and a little longer, then stop."""
    run = asyncio.create_task(load.run(send))
    while not holds():
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.1)  # for what must not come
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run


def test_an_open_loop_sends_whether_or_not_others_have_come_back() -> None:
    server, load = Server(NEVER), LoadRun(arriving(0.0, 0.0, 0.05, 0.1, 0.15), body)
    asyncio.run(stopped_when(lambda: len(server.bodies) >= 5, load, server))
    assert server.bodies == [b"0", b"1", b"2", b"3", b"4"]
    assert server.most_at_once == 5


def test_an_open_loop_sends_nothing_before_its_time() -> None:
    async def run() -> list[float]:
        sent: list[float] = []
        load = LoadRun(arriving(0.0, 0.1, 0.1, 0.25), body)

        async def send(body: bytes, outcome: RequestOutcome) -> None:
            sent.append(load.clock() - outcome.due)

        await load.run(send)
        return sent

    assert min(asyncio.run(run())) >= -0.001


@pytest.mark.parametrize(("users", "at_once"), [(1, 1), (3, 3), (50, 7)])
def test_a_closed_loop_never_has_more_under_way_than_users(users: int, at_once: int) -> None:
    server, load = Server(), LoadRun(closed(7, users), body)
    asyncio.run(load.run(server))
    assert server.most_at_once == at_once
    assert sorted(server.bodies) == [b"%d" % number for number in range(7)]
    assert [outcome.status for outcome in load.outcomes] == [COMPLETED] * 7


def test_users_who_wait_send_nothing_more() -> None:
    server, load = Server(NEVER), LoadRun(closed(7, 2), body)
    asyncio.run(stopped_when(lambda: len(server.bodies) >= 2, load, server))
    assert server.bodies == [b"0", b"1"]


def test_whoever_watches_is_told_each_outcome_once() -> None:
    told: list[RequestOutcome] = []
    load = LoadRun(closed(5, 2), body, told.append)
    asyncio.run(load.run(Server()))
    assert told == load.outcomes
    assert sorted(outcome.number for outcome in told) == [0, 1, 2, 3, 4]


def test_a_run_that_is_stopped_keeps_what_it_has() -> None:
    async def send(body: bytes, outcome: RequestOutcome) -> None:
        if body in (b"0", b"2"):
            outcome.status = COMPLETED
        else:
            await asyncio.sleep(NEVER)

    load = LoadRun(arriving(0.0, 0.0, 0.0, 50.0), body)
    asyncio.run(stopped_when(lambda: len(load.outcomes) >= 2, load, send))
    assert {outcome.number: outcome.status for outcome in load.outcomes} == {
        0: COMPLETED, 1: UNFINISHED, 2: COMPLETED}


def test_bodies_are_made_before_the_start_as_far_as_memory_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_module, "PREPARED_TOKENS", 7)
    made: list[int] = []

    def prepare(request: WorkRequest) -> bytes:
        made.append(request.number)
        return body(request)

    server, load = Server(), LoadRun(arriving(0.0, 0.0, 0.0, 0.0), prepare)
    assert made == [0, 1]
    asyncio.run(load.run(server))
    assert made == [0, 1, 2, 3]
    assert server.bodies == [b"0", b"1", b"2", b"3"]
