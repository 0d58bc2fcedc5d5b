"""Streams that are silent for long: headers and signs of life, once the request can no longer end with a status."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import pytest
from support.live_server import Server, counted, eventually, running, unanswered

ONE_SLOT = ("max_num_seqs=1", "seconds_per_step=0.2", "silence_timeout=0.05")
BLOCKING = {"prompt": [40], "max_tokens": 400, "ignore_eos": True}
HELLO = [{"role": "user", "content": "hello"}]
SIGN = ": waiting"


@pytest.fixture(scope="module")
def slow(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with one slot, whose steps take longer than a stream may be silent."""
    with running(folder, tmp_path_factory.mktemp("slow") / "engine", *ONE_SLOT, "backoff=0.1") as server:
        yield server


@contextlib.contextmanager
def blocked(server: Server) -> Iterator[contextlib.ExitStack]:
    """All slots are taken, until the stack is closed."""
    eventually(lambda: (state := server.get("/health")).status_code == 200 and state.json()["num_live"] == 0)
    with contextlib.ExitStack() as stack:
        stack.enter_context(unanswered(server, "/v1/completions", BLOCKING))
        eventually(lambda: server.get("/health").json()["num_live"] == 1)
        yield stack


def lines_of(response: httpx.Response) -> Iterator[str]:
    assert response.status_code == 200, response.read()
    assert response.headers["content-type"].startswith("text/event-stream") and response.headers["x-request-id"]
    return (line for line in response.iter_lines() if line)


def test_a_stream_that_waits_has_headers_and_comments_until_its_tokens_come(slow: Server) -> None:
    body = {"prompt": [60], "max_tokens": 3, "ignore_eos": True, "return_token_ids": True, "stream": True}
    with blocked(slow) as others, slow.client.stream("POST", slow.url + "/v1/completions", json=body) as response:
        lines = lines_of(response)
        assert [next(lines) for _ in range(3)] == [SIGN] * 3
        others.close()
        rest = list(lines)
    events = [line.removeprefix("data: ") for line in rest if line != SIGN]
    assert events.pop() == "[DONE]"
    assert [token for event in events for token in json.loads(event)["choices"][0]["token_ids"]] == counted(60, 3)
    assert rest.count(SIGN) > 1  # between its tokens, too
    assert rest[-1] == "data: [DONE]"


def test_a_message_that_waits_has_pings(slow: Server) -> None:
    body = {"messages": HELLO, "max_tokens": 2, "stream": True}
    with blocked(slow) as others, slow.client.stream("POST", slow.url + "/v1/messages", json=body) as response:
        lines = lines_of(response)
        assert [next(lines) for _ in range(4)] == ["event: ping", 'data: {"type":"ping"}'] * 2
        others.close()
        events = [line.removeprefix("event: ") for line in lines if line.startswith("event: ")]
    others_than_pings = [event for event in events if event != "ping"]
    assert others_than_pings[0] == "message_start" and others_than_pings[-1] == "message_stop" == events[-1]


def test_what_a_queue_timeout_may_still_end_has_its_status(slow: Server) -> None:
    body = {"prompt": [60], "max_tokens": 3, "stream": True, "queue_timeout": 0.5}
    with blocked(slow):
        answer = slow.post("/v1/completions", body)
        assert answer.status_code == 504, answer.text


def test_once_it_is_admitted_a_queue_timeout_ends_nothing(slow: Server) -> None:
    """The first token takes steps of a chunked prompt, each longer than a stream may be silent."""
    body = {"prompt": [60, 61, 62], "max_tokens": 2, "ignore_eos": True, "stream": True, "queue_timeout": 60}
    eventually(lambda: slow.get("/health").json()["num_live"] == 0)
    with slow.client.stream("POST", slow.url + "/v1/completions", json=body) as response:
        assert SIGN in list(lines_of(response))


def test_a_whole_response_waits_without_headers(slow: Server) -> None:
    with blocked(slow) as others, unanswered(slow, "/v1/completions", {"prompt": [60], "max_tokens": 2}) as connection:
        eventually(lambda: slow.get("/health").json()["num_live"] == 2)
        connection.settimeout(0.5)
        with pytest.raises(TimeoutError):
            connection.recv(1)
        others.close()
        connection.settimeout(60)
        assert b"content-type: application/json" in connection.recv(1 << 16)


@pytest.fixture
def streams(slow: Server, openai: ModuleType, anthropic: ModuleType) -> dict[str, Any]:
    """What begins a stream of each route, by the real clients."""
    client = openai.OpenAI(base_url=slow.url + "/v1", api_key="x", max_retries=0)
    claude = anthropic.Anthropic(base_url=slow.url, api_key="x", max_retries=0)
    few = {"model": "toy", "max_tokens": 3, "stream": True}
    return {
        "completions": lambda: client.completions.create(prompt="hello", **few),
        "chats": lambda: client.chat.completions.create(messages=HELLO, **few),
        "responses": lambda: client.responses.create(model="toy", input="hello", max_output_tokens=3, stream=True),
        "messages": lambda: claude.messages.create(messages=HELLO, **few)}


def test_clients_read_streams_that_began_with_signs(slow: Server, streams: dict[str, Any]) -> None:
    for name, begin in streams.items():
        with blocked(slow) as others:
            stream = begin()  # returns at the headers: before any token
            others.close()
            events = list(stream)
        if name in ("completions", "chats"):
            assert events[-1].choices[0].finish_reason == "length"
        else:
            assert events[0].type == {"responses": "response.created", "messages": "message_start"}[name]
            assert events[-1].type == {"responses": "response.incomplete", "messages": "message_stop"}[name]


def test_clients_raise_what_fails_after_the_headers(slow: Server, streams: dict[str, Any], openai: ModuleType,
                                                    anthropic: ModuleType) -> None:
    with blocked(slow):
        begun = [begin() for begin in streams.values()]
        os.kill(slow.engine_pid, signal.SIGKILL)
        for stream in begun:
            with pytest.raises((openai.APIError, anthropic.APIError), match="engine"):
                list(stream)
