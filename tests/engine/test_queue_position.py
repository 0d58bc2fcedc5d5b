"""Questions to an engine: one at a time, answered to whoever asked, and never for ever."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from slotwise.engine.client import MAX_WAITING, Queries
from slotwise.engine.messages import RequestPosition
from slotwise.engine.refusals import Refused


def play(scenario: Callable[[Queries[RequestPosition], list[int]], Awaitable[None]]) -> None:
    async def whole() -> None:
        await asyncio.wait_for(scenario(Queries(), []), 120)

    asyncio.run(whole())


def positions(name: int) -> tuple[RequestPosition, ...]:
    return (RequestPosition(name, "running", 1),)


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def test_each_waits_for_the_one_before() -> None:
    async def scenario(queries: Queries[RequestPosition], sent: list[int]) -> None:
        asking = [asyncio.create_task(queries.ask(sent.append)) for _ in range(3)]
        for number in range(3):
            await settle()
            assert len(sent) == number + 1
            queries.answered(sent[-1], positions(number))
        assert [found[0].request_id for found in await asyncio.gather(*asking)] == [0, 1, 2]

    play(scenario)


def test_an_answer_to_somebody_who_has_gone_is_nobody_elses() -> None:
    async def scenario(queries: Queries[RequestPosition], sent: list[int]) -> None:
        gone = asyncio.create_task(queries.ask(sent.append))
        await settle()
        gone.cancel()
        asking = asyncio.create_task(queries.ask(sent.append))
        await settle()
        queries.answered(sent[0], positions(7))
        await settle()
        assert not asking.done()
        queries.answered(sent[1], positions(8))
        assert (await asking)[0].request_id == 8

    play(scenario)


def test_nobody_waits_for_an_engine_that_is_gone() -> None:
    async def scenario(queries: Queries[RequestPosition], sent: list[int]) -> None:
        asking = asyncio.create_task(queries.ask(sent.append))
        await settle()
        queries.give_up(RuntimeError("it was killed"))
        with pytest.raises(RuntimeError):
            await asking

    play(scenario)


def test_more_than_may_wait_are_refused_at_once() -> None:
    async def scenario(queries: Queries[RequestPosition], sent: list[int]) -> None:
        asking = [asyncio.create_task(queries.ask(sent.append)) for _ in range(MAX_WAITING)]
        await settle()
        with pytest.raises(Refused, match="too many"):
            await queries.ask(sent.append)
        for task in asking:
            task.cancel()
        await settle()
        asking = [asyncio.create_task(queries.ask(sent.append))]
        await settle()
        queries.answered(sent[-1], positions(9))
        assert (await asking[0])[0].request_id == 9

    play(scenario)
