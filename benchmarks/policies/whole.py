"""Sends one request over a connection of its own, with as little work as possible.

The load generator shares the server's processors, and a flood is thousands of requests: a general client takes as long
for each as the server does.
"""

from __future__ import annotations

import asyncio
from urllib.parse import urlsplit

from slotwise.bench.load_generator import BenchTarget

MOST = 1 << 20  # bytes of a response


async def post(target: BenchTarget, body: bytes) -> tuple[int, bytes]:
    """Returns status and body of the response, read as a whole.

    Raises:
        OSError: the connection failed, or was closed before the response was whole.
    """
    url = urlsplit(target.base_url + target.endpoint)
    headers = target.headers | {
        "Host": url.netloc, "Content-Type": "application/json", "Content-Length": str(len(body)), "Connection": "close"}
    head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    loop = asyncio.get_running_loop()
    received: asyncio.Future[bytes] = loop.create_future()
    request = f"POST {url.path} HTTP/1.1\r\n{head}\r\n".encode() + body
    await loop.create_connection(lambda: _Exchange(request, received), url.hostname, url.port)
    head_bytes, _, answer = (await received).partition(b"\r\n\r\n")
    status = head_bytes[9:12]
    if not status.isdigit():
        raise ConnectionResetError("no response came")
    return int(status), answer


class _Exchange(asyncio.Protocol):
    """Writes a request, and stores the response until the server closes."""

    def __init__(self, request: bytes, received: asyncio.Future[bytes]) -> None:
        self._request = request
        self._received = received
        self._data = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        transport.write(self._request)  # type: ignore[attr-defined]

    def data_received(self, data: bytes) -> None:
        self._data += data
        if len(self._data) > MOST:
            self._transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        if self._received.done():
            return
        if error is None:
            self._received.set_result(bytes(self._data))
        else:
            self._received.set_exception(error)
