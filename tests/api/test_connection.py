"""What goes out over a connection, and when."""

from __future__ import annotations

import asyncio

import pytest
from support.live_server import Server

from slotwise.api.http.connection import HeadJoiningTransport

HEAD, BODY = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n", b"ok"


class Written(asyncio.Transport):
    def __init__(self) -> None:
        super().__init__()
        self.writes: list[bytes] = []

    def write(self, data: bytes) -> None:
        self.writes.append(data)

    def close(self) -> None:
        self.writes.append(b"closed")


@pytest.mark.parametrize(("given", "sent"), [
    ([HEAD, BODY], [HEAD + BODY]),
    ([HEAD, b"2\r\nok\r\n", b"0\r\n\r\n"], [HEAD + b"2\r\nok\r\n", b"0\r\n\r\n"]),
    ([b"HTTP/1.1 100 Continue\r\n\r\n", HEAD, BODY], [b"HTTP/1.1 100 Continue\r\n\r\n", HEAD + BODY]),
    ([HEAD, b"", HEAD, BODY], [HEAD, HEAD + BODY]),
], ids=["whole", "stream", "a client that waits to go on", "no body"])
def test_a_head_goes_out_with_what_follows_it(given: list[bytes], sent: list[bytes]) -> None:
    written = Written()
    joined = HeadJoiningTransport(written)
    for data in given:
        joined.write(data)
    assert written.writes == sent


def test_a_head_that_nothing_follows_goes_out_before_the_end() -> None:
    written = Written()
    joined = HeadJoiningTransport(written)
    joined.write(HEAD)
    joined.close()
    assert written.writes == [HEAD, b"closed"]


@pytest.mark.parametrize("path", ["/health", "/nowhere", "/v1/models"])
def test_who_asks_for_the_head_alone_gets_it_over_a_connection_that_stays(server: Server, path: str) -> None:
    for _ in range(2):
        answer = server.client.head(server.url + path)
        assert answer.status_code in (200, 404, 405) and not answer.content
    assert server.get("/health").status_code == 200
