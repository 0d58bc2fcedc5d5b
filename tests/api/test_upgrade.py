"""Requests that offer another protocol: the server serves them as HTTP/1.1 (RFC 9110, 7.8)."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest
from support.live_server import Server, running

BODY = json.dumps({"prompt": [2], "max_tokens": 1}).encode()
LENGTH = b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY
CHUNKED = b"Transfer-Encoding: chunked\r\n\r\n5\r\n%b\r\n%x\r\n%b\r\n0\r\n\r\n" % (BODY[:5], len(BODY) - 5, BODY[5:])
POST = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
VERSION = b"GET /version HTTP/1.1\r\nHost: localhost\r\n%b\r\n"
OFFERS = {
    "h2c": b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n",
    "websocket": b"Connection: keep-alive, Upgrade\r\nUPGRADE: websocket\r\nSec-WebSocket-Version: 13\r\n",
    "empty": b"Connection: upgrade\r\nUpgrade: \r\n",
    "two": b"Upgrade: a\r\nConnection: upgrade\r\nUpgrade: b/1, c\r\n",
}


def exchanged(server: Server, *segments: bytes) -> list[tuple[bytes, bytes]]:
    """The status and the body of each answer until the server closes the connection."""
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=120) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for segment in segments[:-1]:
            connection.sendall(segment)
            server.get("/ping")  # the server has read the segment before this answer
        connection.sendall(segments[-1])
        received = b"".join(iter(lambda: connection.recv(1 << 16), b""))
    answers = []
    while received:
        head, _, received = received.partition(b"\r\n\r\n")
        lines = head.lower().split(b"\r\n")
        size = next(int(line.split(b":")[1]) for line in lines if line.startswith(b"content-length"))
        answers.append((lines[0].split(b" ")[1], received[:size]))
        received = received[size:]
    return answers


LAST = VERSION % b"Connection: close\r\n"


@pytest.mark.parametrize("offer", OFFERS)
@pytest.mark.parametrize("body", [LENGTH, CHUNKED], ids=["length", "chunked"])
@pytest.mark.parametrize("apart", [True, False], ids=["segments", "one segment"])
def test_a_body_behind_an_offer_is_read(server: Server, offer: str, body: bytes, apart: bool) -> None:
    rest, _, data = body.partition(b"\r\n\r\n")
    head = POST + OFFERS[offer] + rest + b"\r\n\r\n"
    segments = [head[:70], head[70:], data[:9], data[9:], LAST] if apart else [head + data + LAST]
    (status, completion), (last, version) = exchanged(server, *segments)
    assert status == last == b"200" and b"version" in version
    assert json.loads(completion)["usage"]["completion_tokens"] == 1


@pytest.mark.parametrize("offer", OFFERS)
def test_requests_behind_offers_are_answered_in_order(server: Server, offer: str) -> None:
    asks = VERSION % OFFERS[offer]
    both = POST + OFFERS[offer] + LENGTH
    answers = exchanged(server, asks + asks + both + both + asks + LAST)
    assert [status for status, _ in answers] == [b"200"] * 6
    assert [b"choices" in body for _, body in answers] == [False, False, True, True, False, False]


@pytest.mark.parametrize("apart", [True, False], ids=["segments", "one segment"])
def test_a_body_that_reads_like_a_request_is_none(server: Server, apart: bool) -> None:
    smuggled = VERSION % b""
    head = POST + OFFERS["h2c"] + b"Content-Length: %d\r\n\r\n" % len(smuggled)
    answers = exchanged(server, *([head, smuggled, LAST] if apart else [head + smuggled + LAST]))
    assert [status for status, _ in answers] == [b"400", b"200"] and b"version" not in answers[0][1]


def test_a_tunnel_is_refused_and_what_follows_is_not_read(server: Server) -> None:
    for target in (b"localhost:80", b"example.com:443"):
        ((status, answer),) = exchanged(server, b"CONNECT %b HTTP/1.1\r\nHost: x\r\n\r\n" % target + VERSION % b"")
        assert status == b"400" and b"CONNECT" in answer
    answers = exchanged(server, VERSION % b"" + b"CONNECT a:1 HTTP/1.1\r\nHost: x\r\n\r\n" + VERSION % b"")
    assert [status for status, _ in answers] == [b"200", b"400"]


def test_offers_are_not_logged(folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with running(folder, tmp_path / "engine") as server:
        for offer in OFFERS.values():
            assert len(exchanged(server, VERSION % offer + POST + offer + LENGTH + LAST)) == 3
    assert "pgrade" not in capfd.readouterr().err
