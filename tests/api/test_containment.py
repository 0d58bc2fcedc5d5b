"""What one request brings upon itself in the API process ends that request alone, with an error.

The application is called without a socket, over the real engine loop in a thread; the faults are put in by the tests.
"""

from __future__ import annotations

import asyncio
import gc
import json
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from engine.test_client import INFO, LIMITS
from support.toy import EOS, next_token, scheduler

from slotwise.api import app as served
from slotwise.api.asgi import App
from slotwise.api.generate.checkpoint_workers import Template
from slotwise.api.http.http_exchange import HttpExchange
from slotwise.api.limits.server_settings import ServerSettings
from slotwise.compose.engine_process import serve
from slotwise.core.record import StepResult
from slotwise.engine.client import EngineClient
from slotwise.engine.engine import Engine
from slotwise.engine.executor import FakeExecutor
from slotwise.engine.ipc import BlockingChannel, ChannelClosed, HeartbeatMonitor, HeartbeatSender, encode, pair
from slotwise.text.chat_source import find_chat_template
from slotwise.text.stop_strings import Continuation
from slotwise.text.tokenizer import Tokenizer

FAULTY = 13  # a prompt that begins with it
COMPLETIONS = "/v1/completions"
LONG = {"max_tokens": 40, "ignore_eos": True}


class Panic(BaseException):
    """As the tokenizer's library raises it: no Exception."""


class Paced(FakeExecutor):
    """Slow enough for its tokens to be read one by one."""

    def collect(self) -> StepResult:
        time.sleep(0.01)
        return super().collect()


def engine(channel: BlockingChannel, executor: FakeExecutor) -> None:
    channel.send(encode(INFO))
    try:
        serve(Engine(scheduler(LIMITS), executor, time.monotonic_ns, (EOS,)), channel, HeartbeatSender(channel))
    except ChannelClosed:
        return


def scenario(folder: Path, play: Callable[[App, httpx.AsyncClient], Awaitable[None]],
             executor: type[FakeExecutor] = FakeExecutor) -> None:
    async def whole() -> None:
        ours, theirs = pair()
        thread = threading.Thread(target=engine, args=(
            BlockingChannel(theirs), executor(LIMITS.block_size, next_token)))
        thread.start()
        engine_client = EngineClient()
        try:
            await engine_client.attach(ours, HeartbeatMonitor(60))
            tokenizer = Tokenizer.load(folder)
            template = Template(find_chat_template(folder) or "", tokenizer.special_tokens)
            app = App(served.build_api(engine_client, tokenizer, template, ServerSettings("toy")), served.ROUTES)
            async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://toy") as client:
                await play(app, client)
        finally:
            app.api.close()
            engine_client.give_up("enough")
            await asyncio.sleep(0.01)
            thread.join(120)
            theirs.close()

    asyncio.run(whole())


class Failing(Continuation):
    """A detokenizer that a prompt beginning with FAULTY breaks at its third token."""

    error: BaseException = ArithmeticError("no such character")

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Any, *rest: Any) -> None:
        super().__init__(tokenizer, prompt_ids, *rest)
        self.faulty = prompt_ids[0] == FAULTY

    def feed(self, token_ids: Any) -> str:
        if self.faulty and self.num_tokens + len(token_ids) >= 3:
            raise self.error
        return super().feed(token_ids)


async def neighbors(client: httpx.AsyncClient, besides: Awaitable[Any]) -> Any:
    """What `besides` answers; two others beside it get what they get alone."""
    bodies = [LONG | {"prompt": [1, 2, at]} for at in range(2)]
    alone = [(await client.post(COMPLETIONS, json=body)).json()["choices"] for body in bodies]
    *others, answer = await asyncio.gather(*[client.post(COMPLETIONS, json=body) for body in bodies], besides)
    assert [other.json()["choices"] for other in others] == alone
    return answer


async def nobody_is_left(app: App, client: httpx.AsyncClient) -> None:
    while app.api.engine.client.state != "idle":
        await asyncio.sleep(0.01)
    text = (await client.get("/metrics")).text
    assert 'num_requests_running{model_name="toy"} 0.0' in text
    assert (await client.get("/load")).json()["server_load"] == 0


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("error", [ArithmeticError("no such character"), RecursionError(), Panic("at src/lib.rs")])
def test_a_detokenizer_that_fails(error: BaseException, stream: bool, folder: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("slotwise.api.generate.generate.Continuation", Failing)
    monkeypatch.setattr(Failing, "error", error)

    async def play(app: App, client: httpx.AsyncClient) -> None:
        body = LONG | {"prompt": [FAULTY], "stream": stream, "n": 2}
        answer = await neighbors(client, client.post(COMPLETIONS, json=body))
        if answer.status_code == 200:
            *_, told, done = [line for line in answer.text.splitlines() if line]
            assert stream and done == "data: [DONE]"
            told = json.loads(told.removeprefix("data: "))
        else:
            assert answer.status_code == 500
            told = answer.json()
        assert told["error"]["type"] == "server_error" and "lib.rs" not in told["error"]["message"]
        await nobody_is_left(app, client)
        ends = 'request_success_total{finished_reason="error",model_name="toy"} 2.0'  # of a whole answer it is the text
        assert (ends in (await client.get("/metrics")).text) == stream  # that is made when the engine has ended

    scenario(folder, play, Paced)


def test_a_detokenizer_that_cannot_be_made(folder: Path, monkeypatch: Any) -> None:
    made: list[int] = []

    class Unmade(Continuation):
        def __init__(self, tokenizer: Tokenizer, prompt_ids: Any, *rest: Any) -> None:
            if prompt_ids[0] == FAULTY:
                made.append(0)
                if len(made) == 3:
                    raise ArithmeticError
            super().__init__(tokenizer, prompt_ids, *rest)

    monkeypatch.setattr("slotwise.api.generate.generate.Continuation", Unmade)

    async def play(app: App, client: httpx.AsyncClient) -> None:
        answer = await neighbors(client, client.post(COMPLETIONS, json=LONG | {"prompt": [FAULTY], "n": 4}))
        assert answer.status_code == 500
        await nobody_is_left(app, client)

    scenario(folder, play)


@pytest.mark.parametrize("error", [ArithmeticError(), MemoryError(), Panic("at src/lib.rs")])
@pytest.mark.parametrize("size", [1, 5000])  # at once, or in the thread for long texts
def test_a_tokenizer_that_fails(error: BaseException, size: int, folder: Path, monkeypatch: Any) -> None:
    encode_as_ever = Tokenizer.encode

    def encode(self: Tokenizer, text: str, **options: Any) -> list[int]:
        if text.startswith("x"):
            raise error
        return encode_as_ever(self, text, **options)

    monkeypatch.setattr(Tokenizer, "encode", encode)
    monkeypatch.setattr(Tokenizer, "check_length", lambda *_: None)  # a long text is refused before it is encoded

    async def play(app: App, client: httpx.AsyncClient) -> None:
        chat = {"messages": [{"role": "user", "content": "x" * size}], "max_tokens": 3}
        for path, body in ((COMPLETIONS, {"prompt": "x" * size}), ("/tokenize", {"prompt": "x" * size})):
            answer = await neighbors(client, client.post(path, json=body))
            assert answer.status_code == 500 and answer.json()["error"]["type"] == "server_error"
        assert (await client.post("/v1/chat/completions", json=chat)).status_code in (200, 400)
        await nobody_is_left(app, client)

    scenario(folder, play)


def test_a_chat_template_that_fails(folder: Path) -> None:
    async def play(app: App, client: httpx.AsyncClient) -> None:
        body = {"messages": [{"role": "user", "content": "bad"}]}
        answer = await neighbors(client, client.post("/v1/chat/completions", json=body))
        assert answer.status_code == 400 and "not this" in answer.json()["error"]["message"]
        await nobody_is_left(app, client)

    scenario(folder, play)


@pytest.mark.parametrize("stream", [False, True])
def test_nothing_of_an_answered_request_waits_for_the_garbage_collector(stream: bool, folder: Path) -> None:
    """It runs rarely, and takes a time that grows with what waits for it."""
    async def play(app: App, client: httpx.AsyncClient) -> None:
        def alive() -> list[HttpExchange]:
            return [one for one in gc.get_objects() if type(one) is HttpExchange]

        gc.collect()
        gc.disable()
        try:
            before = alive()
            for _ in range(10):
                await client.post(COMPLETIONS, json={"prompt": [1, 2, 3], "max_tokens": 2, "stream": stream})
            for _ in range(500):  # a task that was cancelled ends in a later pass of the loop
                left = sum(all(one is not old for old in before) for one in alive())
                if not left:
                    break
                await asyncio.sleep(0.01)
            assert not left
        finally:
            gc.enable()

    scenario(folder, play)
