"""The door over HTTP: what can never fit, what has to wait too long, and who comes when the queue is full."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.live_server import ENDLESS, ENDLESS_CONTEXT, POSTED, Server, counted, eventually, running

from slotwise.text.tokenizer import Tokenizer

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
SLOW = ("seconds_per_step=0.02", ENDLESS_CONTEXT)


def metric(server: Server, name: str) -> float:
    for line in server.get("/metrics").text.splitlines():
        if line.startswith(f"slotwise:{name}"):
            return float(line.rpartition(" ")[2])
    return 0.0


@contextmanager
def crowded(server: Server, count: int) -> Iterator[None]:
    """`count` requests beyond the one that holds the only slot."""
    with ThreadPoolExecutor(count + 1) as pool:
        stop = threading.Event()

        def occupy() -> None:
            with server.client.stream("POST", server.url + COMPLETIONS, json=ENDLESS | {"stream": True}) as response:
                for _ in response.iter_lines():
                    if stop.is_set():
                        return

        def wait_in_line() -> None:
            server.post(COMPLETIONS, ENDLESS | {"max_tokens": 1})

        pool.submit(occupy)
        eventually(lambda: metric(server, "num_requests_running") == 1)
        for _ in range(count):
            pool.submit(wait_in_line)
        eventually(lambda: metric(server, "num_requests_waiting") == count)
        try:
            yield
        finally:
            stop.set()


@pytest.fixture(scope="module")
def cramped(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with room for 64 tokens of a model that would take 512."""
    with running(folder, tmp_path_factory.mktemp("log") / "engine", "num_blocks=4") as server:
        yield server


@pytest.mark.parametrize(("path", "prompt"), [
    (COMPLETIONS, {"prompt": [2] * 10}), (CHAT, {"messages": [{"role": "user", "content": "x"}]})])
def test_what_the_whole_cache_cannot_hold_never_reaches_the_engine(
        cramped: Server, path: str, prompt: dict[str, Any]) -> None:
    rejections = 'admission_rejections_total{model_name="toy",reason="context_length_exceeded"}'
    rejected, served = metric(cramped, rejections), metric(cramped, "request_success_total")
    refused = cramped.post(path, prompt | {"max_tokens": 100})
    error = refused.json()["error"]
    assert refused.status_code == 400 and error["param"] == "max_tokens", error
    assert error["code"] == "context_length_exceeded"
    assert "context length is 65 tokens" in error["message"] and "start with a larger --kv" in error["message"]
    assert metric(cramped, rejections) == rejected + 1
    assert metric(cramped, "request_success_total") == served
    whole = cramped.post(path, prompt | {"ignore_eos": True} | ({} if path == CHAT else {"max_tokens": 55}))
    assert whole.status_code == 200, whole.text  # an absent max_tokens is what fits
    assert whole.json()["usage"]["total_tokens"] == 65  # the last token needs no place


def test_a_prompt_that_the_whole_cache_cannot_hold(cramped: Server) -> None:
    for body in ({"prompt": [2] * 70}, {"prompt": [[2], [2] * 70]}, {"prompt": [2] * 70, "stream": True}):
        refused = cramped.post(COMPLETIONS, body)
        assert refused.status_code == 400 and "context length is 65 tokens" in refused.json()["error"]["message"]


def test_a_full_queue_refuses_before_it_reads(folder: Path, tmp_path: Path, tokenizer: Tokenizer) -> None:
    with running(folder, tmp_path / "engine", *SLOW, "max_num_seqs=1", "max_num_queued_reqs=3") as server:
        with crowded(server, 3):
            refused = server.post(COMPLETIONS, {"prompt": [2]})
            error = refused.json()["error"]
            assert refused.status_code == 503 and error["code"] == "queue_full"
            assert error["type"] == "service_unavailable_error" and "3 requests wait" in error["message"]
            assert 1 <= int(refused.headers["retry-after"]) <= 60
            assert server.post(CHAT, b"{").status_code == 503
            assert server.post("/tokenize", {"prompt": "x"}).status_code == 200
            host, port = server.url.removeprefix("http://").split(":")
            with socket.create_connection((host, int(port)), timeout=120) as connection:
                connection.sendall(POSTED + b"1000000\r\n\r\n")
                assert connection.recv(100).startswith(b"HTTP/1.1 503")  # of the body not a byte was sent
            assert 'rejections_total{model_name="toy",reason="queue_full"} 3.0' in server.get("/metrics").text
        eventually(lambda: metric(server, "num_requests_running") == 0)
        (choice,) = server.post(COMPLETIONS, {"prompt": [40], "max_tokens": 9}).json()["choices"]
        assert choice["text"] == tokenizer.decode(counted(40, 9))


def test_a_queue_is_bounded_by_tokens_too(folder: Path, tmp_path: Path) -> None:
    with running(folder, tmp_path / "engine", *SLOW, "max_num_seqs=1", "max_num_queued_tokens=100") as server, \
            crowded(server, 2):
        refused = server.post(COMPLETIONS, {"prompt": [2] * 99})
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "queue_full"
        assert "(99 tokens)" in refused.json()["error"]["message"]
        several = server.post(COMPLETIONS, {"prompt": [2] * 30, "n": 4})
        assert several.status_code == 503 and "adds 4 (120 tokens)" in several.json()["error"]["message"]
        assert metric(server, "num_requests_waiting") == 2


def test_more_choices_than_may_wait_are_taken_where_nobody_waits(folder: Path, tmp_path: Path) -> None:
    with running(folder, tmp_path / "engine", "max_num_seqs=1", "max_num_queued_reqs=1") as server:
        assert len(server.post(COMPLETIONS, {"prompt": [2], "n": 9}).json()["choices"]) == 9


@pytest.mark.parametrize("bound", ["max_num_queued_reqs=9", "max_num_queued_tokens=90", "max_live=9"])
def test_a_flood_of_one_key_closes_the_door_to_itself_alone(folder: Path, tmp_path: Path, bound: str) -> None:
    asked = ENDLESS | {"prompt": [2] * 10, "max_tokens": 5}
    with running(folder, tmp_path / "engine", *SLOW, "max_num_seqs=1", "api_keys=flood,light", bound) as server, \
            ThreadPoolExecutor(20) as pool:
        over = threading.Event()

        def flood() -> list[httpx.Response]:
            answers = []
            with httpx.Client(timeout=120, headers={"Authorization": "Bearer flood"}) as client:
                while not over.is_set():
                    answers.append(client.post(server.url + COMPLETIONS, json=asked))
                    over.wait(0.2 if answers[-1].is_error else 0)  # sooner than it is told
            return answers

        light: list[httpx.Response] = []

        def served() -> bool:
            light.append(server.post(COMPLETIONS, asked, Authorization="Bearer light"))
            return light[-1].status_code == 200

        floods = [pool.submit(flood) for _ in range(20)]
        try:
            eventually(lambda: 'reason="queue_full"' in server.get("/metrics", Authorization="Bearer light").text)
            # The flood came at once, while all slots were free: what was let in then may be more than the bound.
            eventually(served)
            light.clear()
            for _ in range(4):
                eventually(served)
        finally:
            over.set()
        answers = [answer for one in floods for answer in one.result()]
    # Slots that are about to become free count as places, and the flood may have the last of them for a moment.
    assert len(light) <= 12, "a third of all attempts: of the flood's it is one in twenty"
    assert not any("this client's" in answer.text for answer in light)
    assert {answer.status_code for answer in answers} == {200, 503}
    refused = [answer for answer in answers if answer.is_error]
    assert any("this client's" in answer.json()["error"]["message"] for answer in refused)
    assert all(1 <= int(answer.headers["retry-after"]) <= 60 for answer in refused)


@pytest.mark.parametrize("by", ["the server", "the client"])
def test_who_waited_too_long_is_told(folder: Path, tmp_path: Path, by: str) -> None:
    settings = ["queue_timeout=0.3"] if by == "the server" else []
    asked = {"queue_timeout": 0.3} if by == "the client" else {}
    with running(folder, tmp_path / "engine", *SLOW, "max_num_seqs=1", *settings) as server:
        with crowded(server, 0):
            for stream in (False, True):
                late = server.post(COMPLETIONS, ENDLESS | asked | {"stream": stream})
                error = late.json()["error"]
                assert late.status_code == 504 and error["code"] == "timeout" and error["type"] == "timeout_error"
                waited = float(error["message"].removeprefix("no slot came free in ").split()[0])  # rounded to tenths
                assert waited >= 0.3, error
        eventually(lambda: metric(server, "num_requests_running") == 0)
        text = server.get("/metrics").text
        assert 'request_success_total{finished_reason="timeout",model_name="toy"} 2.0' in text
        assert 'prompt_tokens_total{model_name="toy"} 1.0' in text  # theirs were never computed
        assert server.post(COMPLETIONS, {"prompt": [2]} | asked).status_code == 200


def test_a_choice_that_is_too_late_ends_a_stream_under_way_with_an_error(folder: Path, tmp_path: Path) -> None:
    with running(folder, tmp_path / "engine", *SLOW, "max_num_seqs=1") as server:
        events = server.events(COMPLETIONS, ENDLESS | {"n": 2, "queue_timeout": 1.0})
        assert events[-1]["error"]["code"] == "timeout" and events[0]["choices"][0]["text"]
        eventually(lambda: metric(server, "num_requests_running") == 0)


def test_a_client_cannot_wait_longer_than_the_server_lets_it(folder: Path, tmp_path: Path) -> None:
    with running(folder, tmp_path / "engine", *SLOW, "max_num_seqs=1", "queue_timeout=0.3") as server, \
            crowded(server, 0):
        assert server.post(COMPLETIONS, ENDLESS | {"queue_timeout": 1000}).status_code == 504


@pytest.mark.parametrize("value", [0, -1, "soon", 1e9, True, [1]])
def test_a_bad_deadline_is_named(server: Server, value: Any) -> None:
    refused = server.post(COMPLETIONS, {"prompt": [2], "queue_timeout": value})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "queue_timeout"
