"""Slow and silent clients: connections that send nothing or too slowly, and readers that do not read."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import struct
from collections.abc import Awaitable, Callable
from urllib.parse import urlsplit

from attacks.hostile import HOST, head, post

LONG = '{"prompt":[2],"max_tokens":900,"stream":true,"ignore_eos":true}'
SOURCES = 8  # client addresses, different from those of legitimate clients
HELD = (2.0, 30.0)  # seconds of one connection
SMALL = 4096  # bytes of a receive buffer that is never read

Client = Callable[[socket.socket, str, random.Random], Awaitable[None]]


async def silent(one: socket.socket, host: str, rng: random.Random) -> None:
    """Sends nothing."""
    await asyncio.sleep(HELD[1])


async def slow_head(one: socket.socket, host: str, rng: random.Random) -> None:
    """Sends one header a second, without end."""
    await _send(one, f"GET /health HTTP/1.1\r\nHost: {host}\r\n")
    while True:
        await _send(one, f"X-{rng.getrandbits(32):x}: y\r\n")
        await asyncio.sleep(1.0)


async def slow_body(one: socket.socket, host: str, rng: random.Random) -> None:
    """Sends one token id a second, of a million announced."""
    await _send(one, head("POST", "/v1/completions", "Content-Type: application/json\r\nContent-Length: 3000000\r\n")
                .replace(HOST, host) + '{"prompt":[5')
    while True:
        await _send(one, ",5")
        await asyncio.sleep(1.0)


async def deaf_to_a_stream(one: socket.socket, host: str, rng: random.Random) -> None:
    """Requests a long response and reads none of it."""
    await _send(one, post(LONG).replace(HOST, host))
    await asyncio.sleep(HELD[1])


async def deaf_to_events(one: socket.socket, host: str, rng: random.Random) -> None:
    """Requests all events and reads none of them."""
    await _send(one, head(path="/events").replace(HOST, host))
    await asyncio.sleep(HELD[1])


KINDS: dict[Client, int] = {silent: 20, slow_head: 10, slow_body: 10, deaf_to_a_stream: 3, deaf_to_events: 3}
"""How many there are of each at a time."""


async def crowd(url: str, rng: random.Random, times: int = 1) -> None:
    """Runs all kinds without end: each closed connection is replaced by one of its kind.

    Args:
        times: factor of the usual number of each.
    """
    await asyncio.gather(*(_again(kind, url, random.Random(f"{rng.random()}-{number}"), number)
                           for kind, count in KINDS.items() for number in range(count * times)))


async def _again(kind: Client, url: str, rng: random.Random, number: int) -> None:
    await asyncio.sleep(rng.uniform(0, 3))
    while True:
        with contextlib.suppress(OSError, TimeoutError):
            await _once(kind, url, rng, number)
        await asyncio.sleep(rng.uniform(0.2, 2.0))


async def _once(kind: Client, url: str, rng: random.Random, number: int) -> None:
    place, loop = urlsplit(url), asyncio.get_running_loop()
    with socket.socket() as one:
        one.setblocking(False)
        one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL)
        with contextlib.suppress(OSError):
            one.bind((f"127.0.3.{1 + number % SOURCES}", 0))
        await asyncio.wait_for(loop.sock_connect(one, (place.hostname or "", place.port or 0)), 5.0)
        if rng.random() < 0.5:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        await asyncio.wait_for(kind(one, place.netloc, rng), rng.uniform(*HELD))


async def _send(one: socket.socket, text: str) -> None:
    await asyncio.get_running_loop().sock_sendall(one, text.encode("latin-1"))
