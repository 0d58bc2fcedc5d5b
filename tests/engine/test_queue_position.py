"""Questions to an engine: one at a time, answered to whoever asked, and never for ever."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from slotwise.engine.client import MAX_WAITING, QueuePositionQueries
from slotwise.engine.messages import QueuePositionAnswer, QueuePositionQuery, RequestPosition
from slotwise.engine.refusals import Refused


def play(scenario: Callable[[QueuePositionQueries, list[QueuePositionQuery]], Awaitable[None]]) -> None:
    async def whole() -> None:
        await asyncio.wait_for(scenario(QueuePositionQueries(), []), 120)

    asyncio.run(whole())


def answer(question: QueuePositionQuery) -> QueuePositionAnswer:
    return QueuePositionAnswer(question.number,
                               tuple(RequestPosition(name, "running", 1) for name in question.request_ids))


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def test_each_waits_for_the_one_before() -> None:
    async def scenario(queries: QueuePositionQueries, sent: list[QueuePositionQuery]) -> None:
        asking = [asyncio.create_task(queries.ask([name], sent.append)) for name in "abc"]
        for number in range(3):
            await settle()
            assert len(sent) == number + 1
            queries.answered(answer(sent[-1]))
        assert [found[0].request_id for found in await asyncio.gather(*asking)] == ["a", "b", "c"]

    play(scenario)


def test_an_answer_to_somebody_who_has_gone_is_nobody_elses() -> None:
    async def scenario(queries: QueuePositionQueries, sent: list[QueuePositionQuery]) -> None:
        gone = asyncio.create_task(queries.ask(["a"], sent.append))
        await settle()
        gone.cancel()
        asking = asyncio.create_task(queries.ask(["b"], sent.append))
        await settle()
        queries.answered(answer(sent[0]))
        await settle()
        assert not asking.done()
        queries.answered(answer(sent[1]))
        assert (await asking)[0].request_id == "b"

    play(scenario)


def test_nobody_waits_for_an_engine_that_is_gone() -> None:
    async def scenario(queries: QueuePositionQueries, sent: list[QueuePositionQuery]) -> None:
        asking = asyncio.create_task(queries.ask(["a"], sent.append))
        await settle()
        queries.give_up(RuntimeError("it was killed"))
        with pytest.raises(RuntimeError):
            await asking

    play(scenario)


def test_more_than_may_wait_are_refused_at_once() -> None:
    async def scenario(queries: QueuePositionQueries, sent: list[QueuePositionQuery]) -> None:
        asking = [asyncio.create_task(queries.ask(["a"], sent.append)) for _ in range(MAX_WAITING)]
        await settle()
        with pytest.raises(Refused, match="too many"):
            await queries.ask(["b"], sent.append)
        for task in asking:
            task.cancel()
        await settle()
        asking = [asyncio.create_task(queries.ask(["c"], sent.append))]
        await settle()
        queries.answered(answer(sent[-1]))
        assert (await asking[0])[0].request_id == "c"

    play(scenario)
