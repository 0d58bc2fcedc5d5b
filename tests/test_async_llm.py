"""The offline API for asyncio, on an engine process with the built-in model."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Coroutine, Iterator
from typing import Any, TypeVar

import pytest

from slotwise import LLM, AsyncEngineArgs, AsyncLLM, AsyncLLMEngine, RequestOutput, RequestOutputKind, SamplingParams
from slotwise.core.record import StepRecord
from slotwise.engine.config import ConfigError
from slotwise.engine.messages import Observer
from slotwise.engine.refusals import EngineError

pytestmark = pytest.mark.slow

T = TypeVar("T")
PROMPTS = ["def is_empty(self):", "def add(a, b):", "def close(self):"]
SMALL: dict[str, Any] = {"dtype": "float32", "max_num_seqs": 4, "max_model_len": 512, "kv_cache_memory": 16 << 20}
CUMULATIVE, DELTA, FINAL = RequestOutputKind.CUMULATIVE, RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY


class Served(Observer):
    """An engine and its event loop; remembers the steps."""

    def __init__(self) -> None:
        self.runner = asyncio.Runner()
        self.engine = AsyncLLM.from_engine_args(AsyncEngineArgs(enforce_eager=True, **SMALL))
        self.engine._client.observers.append(self)
        self.records: list[StepRecord] = []

    def stepped(self, record: StepRecord) -> None:
        self.records.append(record)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(work)

    async def idle(self) -> None:
        """Waits until the engine has ended every request."""
        while self.engine._client._generations:
            await asyncio.sleep(0.01)


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    one = Served()
    yield one
    one.engine.shutdown()
    one.runner.close()


@pytest.fixture(scope="module")
def expected() -> dict[str, RequestOutput]:
    outputs = LLM(**SMALL).generate(PROMPTS, greedy(logprobs=1), use_tqdm=False)
    return dict(zip(PROMPTS, outputs, strict=True))


def greedy(kind: RequestOutputKind = CUMULATIVE, **more: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 24, "output_kind": kind} | more)


async def outputs_of(engine: AsyncLLM, prompt: Any, params: SamplingParams | None, name: str, **more: Any,
                     ) -> list[RequestOutput]:
    return [output async for output in engine.generate(prompt, params, name, **more)]


def test_each_kind_of_output_tells_the_same_text(served: Served, expected: dict[str, RequestOutput]) -> None:
    prompt, whole = PROMPTS[1], expected[PROMPTS[1]].outputs[0]
    growing: list[RequestOutput] = []
    while len(growing) < 2:  # a reader that comes late gets several tokens as one output
        growing = served.run(outputs_of(served.engine, prompt, greedy(logprobs=1), "a"))
    assert [output.finished for output in growing[-2:]] == [False, True]
    assert growing[-1].outputs[0] == whole and growing[-1].prompt == prompt
    for before, after in itertools.pairwise(growing):
        assert after.outputs[0].text.startswith(before.outputs[0].text)
        assert len(before.outputs[0].token_ids) < len(after.outputs[0].token_ids), "outputs do not change later"
    parts = served.run(outputs_of(served.engine, prompt, greedy(DELTA, logprobs=1), "a"))
    assert "".join(part.outputs[0].text for part in parts) == whole.text
    assert [token for part in parts for token in part.outputs[0].token_ids] == whole.token_ids
    assert [entry for part in parts for entry in part.outputs[0].logprobs or ()] == whole.logprobs
    assert parts[-1].outputs[0].cumulative_logprob == whole.cumulative_logprob
    (final,) = served.run(outputs_of(served.engine, prompt, greedy(FINAL, logprobs=1), "a"))
    assert final.outputs == [whole] and final.finished
    assert final.metrics.arrival_time <= final.metrics.scheduled_ts <= final.metrics.finished_time


def test_two_iterations_share_the_batch(served: Served, expected: dict[str, RequestOutput]) -> None:
    order: list[str] = []
    long = greedy(DELTA, ignore_eos=True, max_tokens=200)

    async def follow(prompt: str, name: str) -> str:
        text = ""
        async for output in served.engine.generate(prompt, long, name):
            order.append(name)
            text += output.outputs[0].text
        return text

    async def both() -> list[str]:
        return await asyncio.gather(follow(PROMPTS[0], "a"), follow(PROMPTS[1], "b"))

    served.run(outputs_of(served.engine, PROMPTS[0], greedy(), "warm"))
    served.records.clear()
    texts = served.run(both())
    assert all(text.startswith(expected[prompt].outputs[0].text) for text, prompt in zip(texts, PROMPTS, strict=False))
    assert order.index("b") < len(order) - order[::-1].index("a") - 1, "neither waits for the other's end"
    assert max(len(record.plan.request_ids) for record in served.records) == 2


@pytest.mark.parametrize("leave", ["break", "close", "cancel"])
def test_leaving_an_iteration_frees_its_slot_and_its_blocks(served: Served, leave: str) -> None:
    long = greedy(ignore_eos=True, max_tokens=400)

    async def left() -> None:
        stream = served.engine.generate(PROMPTS[0], long, "left")
        async for _ in stream:
            break
        assert served.engine._running
        await stream.aclose()

    async def dropped() -> None:
        async for _ in served.engine.generate(PROMPTS[0], long, "left"):
            break
        while served.engine._running:  # until the generator is collected
            await asyncio.sleep(0.01)

    async def cancelled() -> None:
        task = asyncio.create_task(outputs_of(served.engine, PROMPTS[0], long, "left"))
        while not served.records or not served.records[-1].plan.request_ids:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    served.run(served.idle())
    served.records.clear()
    served.run({"break": dropped, "close": left, "cancel": cancelled}[leave]())
    served.run(served.idle())
    last, info = served.records[-1], served.engine._client.info
    assert not served.engine._running and [end.reason for end in last.ended] == ["abort"]
    assert (last.counters.num_running, last.counters.num_waiting, last.counters.num_free_blocks) == (0, 0,
                                                                                                     info.limits.num_blocks)


def test_an_abort_ends_the_iteration(served: Served) -> None:
    async def aborted() -> RequestOutput:
        async for output in served.engine.generate(PROMPTS[0], greedy(ignore_eos=True, max_tokens=400, n=2), "x"):
            if output.metrics.num_generation_tokens >= 4:
                await served.engine.abort(["x", "unknown"])
        return output

    output = served.run(aborted())
    assert output.finished and {one.finish_reason for one in output.outputs} == {"abort"}
    served.run(served.engine.abort("x"))


def test_continuations_have_news_of_their_own(served: Served) -> None:
    params = SamplingParams(temperature=1.0, seed=3, n=3, max_tokens=12, stop=["\n"], output_kind=DELTA)
    parts = served.run(outputs_of(served.engine, PROMPTS[1], params, "n"))
    texts = ["".join(one.text for part in parts for one in part.outputs if one.index == index) for index in range(3)]
    (final,) = served.run(outputs_of(served.engine, PROMPTS[1], params.__class__(
        temperature=1.0, seed=3, n=3, max_tokens=12, stop=["\n"], output_kind=FINAL), "n"))
    assert [one.text for one in final.outputs] == texts and [one.index for one in final.outputs] == [0, 1, 2]
    assert all(one.stop_reason == "\n" for one in final.outputs if one.finish_reason == "stop")
    assert [part.finished for part in parts].count(True) == 1 and parts[-1].finished


def test_outputs_come_at_intervals(served: Served) -> None:
    params = greedy(DELTA, ignore_eos=True, max_tokens=20, stream_interval=8)
    sizes = [len(part.outputs[0].token_ids) for part in served.run(outputs_of(served.engine, PROMPTS[0], params, "i"))]
    assert sum(sizes) == 20 and len(sizes) <= 4 and all(size >= 8 for size in sizes[1:-1])


def test_prompts_have_forms_and_log_probabilities(served: Served, expected: dict[str, RequestOutput]) -> None:
    ids = expected[PROMPTS[0]].prompt_token_ids
    output = served.run(outputs_of(served.engine, {"prompt_token_ids": ids}, greedy(prompt_logprobs=0), "p",
                                   prompt_text=PROMPTS[0], priority=-3))[-1]
    assert output.prompt == PROMPTS[0] and output.outputs[0].token_ids == expected[PROMPTS[0]].outputs[0].token_ids
    first, *entries = output.prompt_logprobs or ()
    assert first is None and [next(iter(one or ())) for one in entries] == ids[1:]
    default = served.run(outputs_of(served.engine, PROMPTS[0], None, "p"))[-1]
    assert default.finished


def test_a_prefix_is_forgotten(served: Served) -> None:
    def cached() -> int | None:
        prompt = [5 + i % 40 for i in range(200)]
        return served.run(outputs_of(served.engine, prompt, greedy(FINAL, max_tokens=1), "c"))[0].num_cached_tokens

    assert [cached(), cached()][0] == 0 and (cached() or 0) >= 128
    assert served.run(served.engine.reset_prefix_cache()) and cached() == 0


@pytest.mark.parametrize(("prompt", "params", "more", "error", "says"), [
    ([5] * 600, None, {}, ValueError, "at most 512"), ({"image": 1}, None, {}, ValueError, "no 'image'"),
    ("a", {"n": 1}, {}, ValueError, "slotwise.SamplingParams"),
    ("a", SamplingParams(structured_outputs={"json": {
        "type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}}), {}, ValueError,
     "structured_outputs: .*contains itself"),
    ("a", None, {"lora_request": object()}, ValueError, "lora_request"),
    ("a", None, {"x": 1}, TypeError, "no argument"),
    ("a", None, {"priority": 5000}, ValueError, "priority must be")])
def test_what_cannot_run_is_refused(
        served: Served, prompt: Any, params: Any, more: dict[str, Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        served.run(outputs_of(served.engine, prompt, params, "bad", **more))
    assert not served.engine._running


def test_an_id_is_unique_while_its_request_is_unfinished(served: Served) -> None:
    async def twice() -> None:
        stream = served.engine.generate(PROMPTS[0], greedy(), "same")
        first = await anext(stream)
        with pytest.raises(ValueError, match="a request named 'same' is unfinished"):
            await anext(served.engine.generate(PROMPTS[0], greedy(), "same"))
        assert [first, *[output async for output in stream]][-1].finished

    served.run(twice())
    assert served.run(outputs_of(served.engine, PROMPTS[0], greedy(), "same"))[-1].finished


@pytest.mark.parametrize("level", [1, 2])
def test_it_sleeps_and_wakes_up(served: Served, expected: dict[str, RequestOutput], level: int) -> None:
    prompt = PROMPTS[2]

    async def play() -> None:
        unfinished = served.engine.generate(prompt, greedy(max_tokens=400, ignore_eos=True), "running")
        await anext(unfinished)
        with pytest.raises(ValueError, match="unfinished"):
            await served.engine.sleep(level)
        await unfinished.aclose()
        await served.idle()
        await served.engine.sleep(level)
        assert await served.engine.is_sleeping()
        with pytest.raises(EngineError, match="asleep"):
            await outputs_of(served.engine, prompt, greedy(), "refused")
        await served.engine.wake_up()
        assert not await served.engine.is_sleeping()
        outputs = await outputs_of(served.engine, prompt, greedy(FINAL), f"awake {level}")
        assert outputs[-1].outputs[0].text == expected[prompt].outputs[0].text
        assert not outputs[-1].num_cached_tokens, "its prefixes are forgotten"

    served.run(play())


@pytest.mark.parametrize("level", [1, 2])
def test_a_sleep_and_a_wake_up_that_are_cancelled_go_on(served: Served, level: int) -> None:
    """No prefix is found whose memory was lost, and there is one engine."""
    prompt = {"prompt_token_ids": [5 + token % 200 for token in range(300)]}

    async def answer(name: str) -> RequestOutput:
        return (await outputs_of(served.engine, prompt, greedy(FINAL), f"{name} {level}"))[-1]

    async def leave(change: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(change)
        while not served.engine._changing:
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    async def play() -> None:
        await served.idle()
        await answer("first")
        before = await answer("before")
        assert before.num_cached_tokens
        await leave(served.engine.sleep(level))
        while not await served.engine.is_sleeping():
            await asyncio.sleep(0.01)
        if level == 2:
            await leave(served.engine.wake_up())
            while await served.engine.is_sleeping():
                await asyncio.sleep(0.01)
        else:
            await served.engine.wake_up()
        after = await answer("after")
        assert after.outputs[0].token_ids == before.outputs[0].token_ids
        assert not after.num_cached_tokens

    served.run(play())


def test_no_prefix_is_found_after_a_sleep_that_failed(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt, client = {"prompt_token_ids": [5 + token % 200 for token in range(300)]}, served.engine._client
    give_back = client.give_back

    async def fail() -> None:
        await give_back()
        raise EngineError("its memory is lost all the same")

    async def play() -> None:
        await served.idle()
        before = (await outputs_of(served.engine, prompt, greedy(FINAL), "before"))[-1]
        with monkeypatch.context() as patched:
            patched.setattr(client, "give_back", fail)
            with pytest.raises(EngineError, match="all the same"):
                await served.engine.sleep(1)
        after = (await outputs_of(served.engine, prompt, greedy(FINAL), "after"))[-1]
        assert after.outputs[0].token_ids == before.outputs[0].token_ids

    served.run(play())


def test_an_engine_belongs_to_one_event_loop(served: Served) -> None:
    served.run(served.engine.check_health())
    with pytest.raises(EngineError, match="belongs to the event loop of its first request"):
        asyncio.run(outputs_of(served.engine, "a", None, "other"))


def test_a_lost_engine_is_an_error_and_the_next_one_answers() -> None:
    one = Served()
    try:
        async def lost() -> None:
            async for _ in one.engine.generate(PROMPTS[0], greedy(ignore_eos=True, max_tokens=400), "a"):
                if (process := one.engine._supervisor._process) is not None:
                    process.process.kill()  # type: ignore[attr-defined]

        with pytest.raises(EngineError, match="the engine process ended"):
            one.run(lost())
        with pytest.raises(EngineError, match="not running"):
            one.run(one.engine.check_health())

        async def again() -> None:
            while not one.engine._client.healthy:
                await asyncio.sleep(0.1)

        one.run(again())
        assert one.run(outputs_of(one.engine, PROMPTS[0], greedy(FINAL), "b"))[0].finished
    finally:
        one.engine.shutdown()
        one.runner.close()


def test_a_shutdown_ends_the_process_inside_and_outside_of_its_loop() -> None:
    for inside in (True, False):
        engine = AsyncLLMEngine(**SMALL, disable_log_stats=False)
        process = engine._supervisor._process

        async def ended(engine: AsyncLLM, inside: bool) -> None:
            assert (await outputs_of(engine, PROMPTS[0], greedy(FINAL), "a"))[0].finished
            if inside:
                engine.shutdown()
                with pytest.raises(EngineError):
                    await outputs_of(engine, PROMPTS[0], greedy(FINAL), "b")

        asyncio.run(ended(engine, inside))
        engine.shutdown()
        assert process is not None and process.process.wait(120) is not None  # type: ignore[attr-defined]


def test_arguments_are_checked_before_a_process_starts() -> None:
    with pytest.raises(ConfigError, match="data_parallel_size 2"):
        AsyncLLM(data_parallel_size=2)
    with pytest.raises(ConfigError, match="event_log is an argument of LLM"):
        AsyncLLM(event_log="file")
    with pytest.raises(NotImplementedError, match=r"AsyncLLM\.encode is not supported"):
        AsyncLLM.encode(AsyncLLM.__new__(AsyncLLM), "a")
