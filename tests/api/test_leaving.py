"""Clients that leave in every way, and those that only seem to: by real sockets."""

from __future__ import annotations

import http.client
import json
import re
import socket
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.live_server import ENDLESS, ENDLESS_CONTEXT, JSON, POSTED, Server, counted, eventually, running

from slotwise.api.http.connection import CONTINUE, MAX_PIPELINED, MAX_REQUESTS, TOO_MANY
from slotwise.text.tokenizer import Tokenizer

GET = b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n"
SHORT = {"prompt": [40], "max_tokens": 100}  # two seconds


def posted(body: dict[str, Any]) -> bytes:
    content = json.dumps(body).encode()
    return POSTED + b"%d\r\n\r\n" % len(content) + content


def reset(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def half_close(connection: socket.socket) -> None:
    connection.shutdown(socket.SHUT_WR)


def texts_in(told: bytes) -> list[str]:
    return [json.loads(text) for text in re.findall(rb'"text":("(?:[^"\\]|\\.)*")', told)]


def read_to_the_end(connection: socket.socket) -> bytes:
    return b"".join(iter(lambda: connection.recv(1 << 16), b""))


class Watched:
    """A server, and what its requests have ended as since this was made."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self._before = {reason: self._counted(reason) for reason in ("abort", "error", "length")}

    def connect(self) -> socket.socket:
        host, port = self.server.url.removeprefix("http://").split(":")
        return socket.create_connection((host, int(port)), timeout=120)

    def ends(self, reason: str) -> int:
        return self._counted(reason) - self._before[reason]

    def _counted(self, reason: str) -> int:
        told = self.server.get("/metrics").text
        found = re.search(rf'request_success_total{{finished_reason="{reason}".*}} (\d+)', told)
        return int(found[1]) if found else 0

    def live(self) -> int:
        return int(self.server.get("/health").json()["num_live"])


@pytest.fixture(scope="module")
def slow(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """All tests share it: what one client does must not show to the next."""
    logs = tmp_path_factory.mktemp("logs")
    with running(folder, logs / "engine", "seconds_per_step=0.02", ENDLESS_CONTEXT, stderr=logs / "stderr") as server:
        yield server
    logged = (logs / "stderr").read_text()
    assert "Traceback" not in logged and "ERROR" not in logged, logged


@pytest.fixture
def watched(slow: Server) -> Watched:
    eventually(lambda: Watched(slow).live() == 0)  # a client has its answer before the server has noted that it ended
    return Watched(slow)


BODIES = {"whole": ENDLESS, "stream": ENDLESS | {"stream": True}, "three": ENDLESS | {"stream": True, "n": 3}}
BEHIND = {"nothing": b"", "a get": GET, "a request": posted(ENDLESS), "a stream": posted(ENDLESS | {"stream": True}),
          "garbage": b"\0garbage\r\n\r\n"}
LEAVES = {"reset": reset, "closed": socket.socket.close}


@pytest.mark.parametrize(("body", "behind", "leave"), [
    pytest.param(body, behind, LEAVES[leave], id=f"{one}-{other}-{leave}")
    for i, (one, body) in enumerate(BODIES.items()) for j, (other, behind) in enumerate(BEHIND.items())
    for leave in [list(LEAVES)[(i + j) % 2]]])  # every pair of two of the three
def test_a_client_that_leaves_ends_its_request_as_aborted(
        watched: Watched, body: dict[str, Any], behind: bytes, leave: Callable[[socket.socket], None]) -> None:
    connection, choices = watched.connect(), body.get("n", 1)
    connection.sendall(posted(body) + behind)
    if "stream" in body:
        assert connection.recv(100).startswith(b"HTTP/1.1 200")
    eventually(lambda: watched.live() == choices)
    leave(connection)
    eventually(lambda: watched.live() == 0)
    eventually(lambda: watched.ends("abort") == choices)
    assert watched.ends("error") == watched.ends("length") == 0


def test_pipelined_requests_are_answered_in_order(watched: Watched, tokenizer: Tokenizer) -> None:
    texts = [tokenizer.decode(counted(prompt, 5)) for prompt in (40, 60, 80, 100)]
    sent = b"".join(posted({"prompt": [prompt], "max_tokens": 5}) for prompt in (40, 60, 80, 100))
    for size in (len(sent), 1000, 100, 37):
        with watched.connect() as connection:
            for start in range(0, len(sent), size):
                connection.sendall(sent[start : start + size])
            told = b""
            while told.count(b'"usage"') < 4:
                told += connection.recv(1 << 16)
            assert texts_in(told) == texts


def test_a_large_body_behind_a_request_is_read_when_it_is_due(watched: Watched) -> None:
    body = {"prompt": [40], "max_tokens": 2, "unknown": "x" * 1_000_000}
    with watched.connect() as connection:
        for _ in range(2):
            connection.sendall(GET + posted(body))
            told = b""
            while b'"usage"' not in told:
                told += connection.recv(1 << 16)
            assert told.count(b"HTTP/1.1 200") == 2


def test_who_sends_too_much_behind_a_request_is_cut_off(watched: Watched) -> None:
    with watched.connect() as connection:
        connection.sendall(posted(ENDLESS))
        eventually(lambda: watched.live() == 1)
        connection.sendall(b"x" * (MAX_PIPELINED + 1))
        eventually(lambda: watched.ends("abort") == 1)
        assert not connection.recv(100)


@pytest.mark.parametrize("more", [0, 1, 2, 40])
def test_of_too_many_requests_at_once_the_first_are_answered(watched: Watched, more: int) -> None:
    with watched.connect() as connection:
        connection.sendall(posted(SHORT) + GET * (MAX_REQUESTS + more))
        if not more:
            half_close(connection)
        told = read_to_the_end(connection)
    answers = told.replace(CONTINUE, b"").split(b"HTTP/1.1 ")[1:]
    answered, last = answers[:MAX_REQUESTS + 1], answers[MAX_REQUESTS + 1:]
    assert [answer[:6] for answer in answered] == [b"200 OK"] * (MAX_REQUESTS + 1)
    assert b'"usage"' in answered[0] and all(b'{"version":' in answer for answer in answered[1:])
    assert not last if not more else last[0].startswith(b"400") and last[0].endswith(TOO_MANY.encode()) and not last[1:]
    assert watched.ends("length") == 1


def test_what_is_malformed_behind_a_request_does_not_end_it(watched: Watched) -> None:
    with watched.connect() as connection:
        connection.sendall(posted(SHORT | {"stream": True}) + b"\0garbage\r\n\r\n")
        told = read_to_the_end(connection)
    stream, end, refused = told.partition(b"0\r\n\r\n")
    assert stream.count(b'"finish_reason":"length"') == 1 and stream.count(b"data: [DONE]") == 1
    assert end and refused.startswith(b"HTTP/1.1 400")


@pytest.mark.parametrize("stream", [True, False])
def test_a_half_closed_client_gets_its_answer(watched: Watched, tokenizer: Tokenizer, stream: bool) -> None:
    with watched.connect() as connection:
        connection.sendall(posted(SHORT | {"stream": stream}) + GET)
        half_close(connection)
        told = read_to_the_end(connection)
    interim, final = told.count(b"HTTP/1.1 100 Continue\r\n\r\n"), told.count(b"HTTP/1.1 200 OK\r\n")
    assert final == 2 and b'{"version":' in told.rpartition(b"HTTP/1.1 200")[2], "the one behind it is answered, too"
    assert told.startswith(b"HTTP/1.1 100 Continue\r\n\r\n" * interim + b"HTTP/1.1 200 OK")
    assert "".join(texts_in(told)) == tokenizer.decode(counted(40, 100))
    assert watched.ends("length") == 1 and watched.ends("abort") == 0


def test_python_s_client_reads_its_answer_half_closed(watched: Watched) -> None:
    client = http.client.HTTPConnection(watched.server.url.removeprefix("http://"), timeout=120)
    client.request("POST", "/v1/completions", json.dumps(ENDLESS | {"max_tokens": 200}), JSON)
    half_close(client.sock)
    answer = client.getresponse()
    assert answer.status == 200 and json.loads(answer.read())["usage"]["completion_tokens"] == 200


def test_a_client_that_is_half_closed_first_and_leaves_later(watched: Watched) -> None:
    for body in (ENDLESS, ENDLESS | {"stream": True}):
        with watched.connect() as connection:
            connection.sendall(posted(body))
            eventually(lambda: watched.live() == 1)
            half_close(connection)
            assert connection.recv(1000)
        eventually(lambda: watched.live() == 0)
    eventually(lambda: watched.ends("abort") == 2)
    assert watched.ends("length") == 0


def test_a_client_of_the_old_protocol(watched: Watched) -> None:
    """It knows no interim responses: what takes no time is answered, what does is given up after a second."""
    with watched.connect() as connection:
        connection.sendall(b"GET /version HTTP/1.0\r\n\r\n")
        half_close(connection)
        assert read_to_the_end(connection).startswith(b"HTTP/1.1 200")
    with watched.connect() as connection:
        connection.sendall(posted(ENDLESS).replace(b"HTTP/1.1", b"HTTP/1.0"))
        half_close(connection)
        assert read_to_the_end(connection) == b""
    eventually(lambda: watched.ends("abort") == 1)


@pytest.mark.parametrize("request_line", ["POST", "GET /events?follow=0"])
def test_the_old_protocol_has_no_streams(watched: Watched, request_line: str) -> None:
    """RFC 9112, 6.1: its clients would take the sizes of chunks for content."""
    sent = posted(SHORT | {"stream": True}) if request_line == "POST" else f"{request_line} HTTP/1.1\r\n\r\n".encode()
    with watched.connect() as connection:
        connection.sendall(sent.replace(b"HTTP/1.1", b"HTTP/1.0"))
        response = read_to_the_end(connection)
    assert response.startswith(b"HTTP/1.1 400") and b"needs HTTP/1.1" in response and b"chunked" not in response.lower()


def test_a_half_closed_client_that_asks_nothing_is_let_go(watched: Watched) -> None:
    for sent in (b"", GET, b"GET / HT", POSTED + b'50\r\n\r\n{"prompt"'):
        with watched.connect() as connection:
            connection.sendall(sent)
            if sent == GET:
                assert connection.recv(1000)
            half_close(connection)
            assert read_to_the_end(connection) == b""
    eventually(lambda: watched.server.get("/load").json()["server_load"] == 0)


def test_a_crowd_that_leaves_in_the_middle_of_writes(watched: Watched) -> None:
    """Of answers that are large, and read by none.  It is the last test: how many more end as aborted is not known."""
    connections = [watched.connect() for _ in range(16)]
    for number, connection in enumerate(connections):
        body = ENDLESS | {"stream": True, "n": 4, "logprobs": 20, "max_tokens": 1000}  # of more no entries are held
        connection.sendall(posted(body) + (posted(body) if number % 2 else b""))
    eventually(lambda: watched.live() == 64)
    for number, connection in enumerate(connections):
        if number % 4:
            connection.recv(5000)
        (reset if number % 3 else socket.socket.close)(connection)
    eventually(lambda: watched.live() == 0)
    eventually(lambda: watched.ends("abort") >= 64)
    assert watched.ends("error") == 0
