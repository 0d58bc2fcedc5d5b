"""Many clients that connect at once are accepted a few at a time."""

from __future__ import annotations

import asyncio
import os
import resource
import socket
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager

import pytest
import uvloop

from slotwise.api.http.listener import AT_ONCE, Acceptor, plain

CLIENTS = 5 * AT_ONCE + 3


class Passes:
    """Counts the passes of an event loop."""

    def __init__(self) -> None:
        self.count = 0
        self._loop = asyncio.get_running_loop()
        self._next()

    def _next(self) -> None:
        self.count += 1
        self._handle = self._loop.call_later(0, self._next)


class Noted(asyncio.Protocol):
    """Notes in which pass its connection was made."""

    def __init__(self, passes: Passes, made: list[int]) -> None:
        self._passes, self._made = passes, made

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._made.append(self._passes.count)
        transport.close()


def connected(stack: ExitStack, listener: socket.socket, number: int) -> None:
    for _ in range(number):
        stack.enter_context(socket.create_connection(listener.getsockname()))


@contextmanager
def no_more_files() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))), hard))
    held: list[int] = []
    try:
        while True:
            try:
                held.append(os.dup(0))
            except OSError:
                break
        yield
    finally:
        for one in held:
            os.close(one)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def all_accepted(listener: socket.socket) -> list[int]:
    passes, made = Passes(), list[int]()
    accepting = Acceptor(listener, plain(lambda: Noted(passes, made)))
    while len(made) < CLIENTS:
        await asyncio.sleep(0)
    accepting.close()
    await accepting.wait_closed()
    return made


@pytest.mark.parametrize("loop", [uvloop.new_event_loop, asyncio.new_event_loop])
def test_a_pass_accepts_a_few(loop: type[asyncio.AbstractEventLoop]) -> None:
    with ExitStack() as stack, asyncio.Runner(loop_factory=loop) as runner:
        listener = stack.enter_context(closing(socket.create_server(("127.0.0.1", 0), backlog=1000)))
        connected(stack, listener, CLIENTS)
        made = runner.run(all_accepted(listener))
    assert len(made) == CLIENTS
    assert max(Counter(made).values()) <= AT_ONCE


def test_accepting_goes_on_once_there_are_files_again(monkeypatch: pytest.MonkeyPatch,
                                                      caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr("slotwise.api.http.listener.RETRY_AFTER", 0.05)

    async def accepted(listener: socket.socket) -> None:
        passes, made = Passes(), list[int]()
        accepting = Acceptor(listener, plain(lambda: Noted(passes, made)))
        with no_more_files():
            while not caplog.records:
                await asyncio.sleep(0.01)
            assert not made
        while not made:
            await asyncio.sleep(0.01)
        accepting.close()

    with ExitStack() as stack, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        listener = stack.enter_context(closing(socket.create_server(("127.0.0.1", 0))))
        connected(stack, listener, 1)
        runner.run(accepted(listener))
    assert "no connection can be accepted" in caplog.text
