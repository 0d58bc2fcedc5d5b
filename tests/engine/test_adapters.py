"""Adapters of an engine: forgotten when no request has them, and named by no request before they are loaded."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from support.toy import EOS, next_token, scheduler

from slotwise.core.params import SamplingSpec
from slotwise.core.request import RequestSpec
from slotwise.core.scheduler_limits import SchedulerLimits
from slotwise.engine.client import AdapterLoads, EngineClient
from slotwise.engine.engine import Engine
from slotwise.engine.executor import FakeExecutor
from slotwise.engine.messages import AdapterLoaded, Add, Finish, LoadAdapter
from slotwise.engine.refusals import AdapterError, Refused

LIMITS = SchedulerLimits(max_model_len=64, num_blocks=64, block_size=4, max_num_seqs=8, max_num_batched_tokens=32,
                         max_loras=2)
FOREVER = SamplingSpec(max_tokens=50, ignore_eos=True)


class Store:
    def __init__(self) -> None:
        self.unloaded: list[int] = []

    def load(self, number: int, folder: Path) -> None:
        raise NotImplementedError

    def unload(self, number: int) -> None:
        self.unloaded.append(number)


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("is_aborted", [True, False])
def test_an_adapter_is_forgotten_when_the_last_request_with_it_has_ended(depth: int, is_aborted: bool) -> None:
    store, ticks = Store(), iter(range(1 << 30))
    engine = Engine(scheduler(LIMITS), FakeExecutor(4, next_token), lambda: next(ticks), (EOS,), depth=depth,
                    adapters=store)
    for name, adapter, length in (("a", 1, 5), ("b", 1, 50), ("c", 2, 50)):
        engine.handle(Add(name,
                          RequestSpec([3, 4], SamplingSpec(max_tokens=length, ignore_eos=True), adapter=adapter)))
    engine.step()
    engine.unload_adapter(1)
    engine.unload_adapter(3)
    assert store.unloaded == [3]
    ended: set[str] = set()
    while "b" not in ended:
        assert store.unloaded == [3]
        if is_aborted and "a" in ended:
            engine.handle(Finish("b", "abort"))
        ended |= {end.request_id for end in engine.step().ended}
    assert store.unloaded == [3, 1] and ("c" in ended) == (not is_aborted)
    while engine.has_work:
        engine.step()
    assert store.unloaded == [3, 1]


def test_a_request_may_name_only_what_the_engine_has() -> None:
    async def scenario() -> None:
        loads, sent = AdapterLoads(), []
        first, second = (asyncio.create_task(loads.load(number, f"/{number}", sent.append)) for number in (1, 2))
        await asyncio.sleep(0)
        assert sent == [LoadAdapter(1, "/1"), LoadAdapter(2, "/2")] and 1 not in loads
        loads.answered(AdapterLoaded(1, digest="files"))
        loads.answered(AdapterLoaded(2, "it does not fit"))
        assert await first == "files" and 1 in loads and 2 not in loads
        with pytest.raises(AdapterError, match="does not fit"):
            await second
        loads.forget(1)
        assert 1 not in loads

    asyncio.run(scenario())


def test_a_lost_engine_ends_loads_and_has_no_adapters() -> None:
    async def scenario() -> None:
        loads = AdapterLoads()
        loaded, pending = (asyncio.create_task(loads.load(number, "/", lambda _: None)) for number in (1, 2))
        left = asyncio.create_task(loads.load(3, "/", lambda _: None))
        await asyncio.sleep(0)
        loads.answered(AdapterLoaded(1))
        left.cancel()
        await loaded
        loads.give_up(Refused("engine_dead", "lost"))
        assert 1 not in loads
        with pytest.raises(Refused):
            await pending

    asyncio.run(scenario())


def test_without_an_engine_nothing_is_loaded() -> None:
    async def scenario() -> None:
        client = EngineClient()
        with pytest.raises(Refused, match="not running"):
            await client.load_adapter(1, "/")
        client.unload_adapter(1)

    asyncio.run(scenario())
