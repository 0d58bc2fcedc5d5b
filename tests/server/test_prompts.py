"""Long texts of many clients at one thread, and the engine that prompts are checked against."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import msgspec
import pytest

from slotwise import builtin
from slotwise.batching.settings import Batching
from slotwise.core.limits import SchedulerLimits
from slotwise.engine.messages import EngineInfo
from slotwise.engine.scheduling import Scheduling
from slotwise.server.errors import ApiError
from slotwise.server.prompts import MAX_WAITING_OF_ONE, Prompts
from slotwise.text.tokenizer import SHORT, Tokenizer

LIMITS = SchedulerLimits(max_model_len=10_000, num_blocks=2500, block_size=4)
INFO = EngineInfo("toy", "cpu", "float32", 400, LIMITS, Scheduling(Batching(), 4, 32), (1,))
LONG = "the quick fox " * (SHORT // 10)


def test_a_client_with_many_long_texts_delays_no_other(tokenizer: Tokenizer) -> None:
    prompts, done = Prompts(tokenizer, None, lambda: INFO), list[str]()

    async def ask(holder: str, way: int) -> ApiError | None:
        try:
            if way == 0:
                assert await prompts.decode([40] * (SHORT + 1), holder)
            elif way == 1:
                assert await prompts.plain(LONG, holder, add_special_tokens=True)
            else:
                assert len(await prompts.of_completion([LONG, "x"], 2, holder)) == 2
        except ApiError as error:
            return error
        done.append(holder)
        return None

    async def crowd() -> list[ApiError | None]:
        greedy = [asyncio.create_task(ask("greedy", number % 3)) for number in range(MAX_WAITING_OF_ONE + 44)]
        await asyncio.sleep(0)
        others = [asyncio.create_task(ask("other", way)) for way in range(3)]
        assert [await task for task in others] == [None] * 3
        return await asyncio.gather(*greedy)

    refused = [error for error in asyncio.run(crowd()) if error is not None]
    assert [(error.status, error.code) for error in refused] == [(429, "tokenizer_busy")] * 43
    assert done.index("other") <= 2 and done.count("other") == 3
    last = len(done) - 1 - done[::-1].index("other")
    assert last <= 6, "clients take turns"


def test_a_replacement_engine_with_a_smaller_cache_bounds_prompts() -> None:
    engines = [INFO]
    prompts = Prompts(Tokenizer.load(builtin.path()), None, lambda: engines[-1])
    prompts.check([INFO.vocab_size - 1], "prompt")
    assert prompts.max_tokens(40, 10, None) == 40
    engines.append(msgspec.structs.replace(
        INFO, vocab_size=INFO.vocab_size - 1, limits=replace(INFO.limits, num_blocks=4)))
    with pytest.raises(ApiError):
        prompts.check([INFO.vocab_size - 1], "prompt")
    with pytest.raises(ApiError):
        prompts.max_tokens(40, 10, None)
