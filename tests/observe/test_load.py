from __future__ import annotations

import asyncio
import logging

import pytest
from support.measured import Measured
from support.records import record_of
from support.toy_engine import MS, engine

from slotwise.core.record import Decision, RequestEnd, Stop
from slotwise.observe.metrics import LoadLine, report, sentence


@pytest.fixture
def measured() -> Measured:
    return Measured(engine())


def busy(measured: Measured) -> None:
    """Two come at 0; one has slot and tokens and the other waits for a second, until the first ends."""
    for name in "ab":
        measured.arrive(name, 8, 0)
    blocked = {"refused": (Decision("b", "no_slot"),), "stop": Stop("no_slot", "b", 0), "num_waiting": 1}
    for at in range(10):
        joins = {"admitted": ("a",), "cached": (2,), "taken": (1, 1)} if at == 0 else {}
        measured.stepped(record_of(
            at, at * 100 * MS + 2, (at + 1) * 100 * MS, ("a",), (0,), (at,), (1,), tokens=((5,),), num_running=1,
            num_free_blocks=4, **joins, **blocked))
    measured.stepped(record_of(-1, 1000 * MS, 1000 * MS, ended=(RequestEnd("a", "stop", 10),), num_waiting=1,
                               num_free_blocks=10))


def test_a_line_tells_what_happened_since_the_last(measured: Measured) -> None:
    line = LoadLine(measured.metrics, 100.0)
    assert line.fields(110.0) == {}
    busy(measured)
    fields = line.fields(115.0)
    assert fields == {
        "running": 0, "waiting": 1, "prompt_tokens_per_s": 1.6, "generation_tokens_per_s": 2.0, "requests_per_s": 0.2,
        "kv_cache_usage": 0.0, "prefix_cache_hit_rate": 0.25, "preemptions": 0, "waited_s": {"no_slot": 1.0}}
    assert sentence(fields) == ("0 running, 1 waiting; 2.0 tokens/s out, 1.6 in, 0.20 requests/s; cache 0% in use; "
                                "25% of tokens found in it; waited for no_slot 100%")
    still = line.fields(120.0)
    assert still["waiting"] == 1 and still["generation_tokens_per_s"] == 0 and still["waited_s"] == {}
    measured.stepped(record_of(-1, 1100 * MS, 1100 * MS, ended=(RequestEnd("b", "abort", 0),), num_free_blocks=10))
    assert line.fields(130.0)["requests_per_s"] == 0.1
    assert line.fields(140.0) == {}, "nothing runs and nothing has: nothing is said"


def test_lines_come_under_load_and_then_no_more(measured: Measured, caplog: pytest.LogCaptureFixture) -> None:
    async def a_while() -> list[int]:
        reporting = asyncio.create_task(report(measured.metrics, 0.01))
        numbers = []
        for work in (lambda: None, lambda: busy(measured)):
            work()
            await asyncio.sleep(0.1)
            numbers.append(len(caplog.records))
        measured.stepped(record_of(-1, 1100 * MS, 1100 * MS, ended=(RequestEnd("b", "abort", 0),), num_free_blocks=10))
        await asyncio.sleep(0.1)
        numbers.append(len(caplog.records))
        await asyncio.sleep(0.1)
        reporting.cancel()
        return [*numbers, len(caplog.records)]

    with caplog.at_level(logging.INFO):
        before, under_load, ended, after = asyncio.run(a_while())
    assert before == 0 and under_load > 0 and ended == after
    assert caplog.records[0].fields["waiting"] == 1
