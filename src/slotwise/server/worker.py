"""Runs functions in a process of its own, with bounds on time and memory, so that nothing else waits for them.

The first call starts a worker, and so does the first after one that was killed: for a call that took too long or too
much memory.  A worker that another process killed or stopped is replaced, and its call made once more.  Calls run one
at a time; clients take turns (see `server.turns`).

    call ──► turn ──► [function, arguments], pieces, an end ──socket pair──► worker_main ──► [outcome, value] ──► result
"""

from __future__ import annotations

import asyncio
import logging
import socket
import subprocess
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from slotwise import child, spawn
from slotwise.engine.ipc import ChannelClosed, Unframer, frame, pair
from slotwise.observe import lines
from slotwise.server.turns import Turns
from slotwise.server.worker_main import DONE, END, FAILED, OUT_OF_MEMORY, REFUSED, TOO_LARGE, Limits

START = 60.0  # seconds for the imports of a worker, on a busy machine
RECEIVE = 1 << 18  # bytes
STOPPED = ("T", "t")  # states of a process: by a signal, by a debugger

logger = logging.getLogger(__name__)


class CallError(Exception):
    """A call has no result; the message completes "the function ..."."""


class WorkerError(CallError):
    """The worker has failed, whatever it was asked."""


class CallRefused(CallError):
    """The function raised ValueError; the message is that error's."""


class Worker:
    """A child process and the queue of its calls.

    Args:
        module: its `CALLS` are the functions; imported in the child, not here.
        limits: of each call.
        turns: of its clients.
    """

    def __init__(self, module: str, limits: Limits, turns: Turns) -> None:
        self.turns = turns
        self._module = module
        self._limits = limits
        self.tells = True  # log why a process is ended; False: the caller tells all there is
        self._child: _Child | None = None
        self._starting: asyncio.Task[_Child] | None = None
        self._is_closed = False

    async def call(
        self, holder: str, function: str, arguments: Callable[[], tuple[Any, ...]],
        pieces: Callable[[], Iterable[bytes]] = tuple,
    ) -> Any:
        """The result of `function`.

        Args:
            holder: the client; clients take turns.
            arguments: called when it is its turn.
            pieces: called then, too: of what is too large to be sent at once; this process does other work between two.
                The function gets them joined, before its arguments, if there are any.

        Raises:
            QueueFull: too many are waiting.
            CallError: there is no result.
            WorkerError: because the worker failed, twice.
        """
        async with self.turns.turn(holder):
            message = msgspec.msgpack.encode((function, arguments()))
            try:
                outcome, value = await self._ask(message, pieces())
            except WorkerError:  # another process may have ended it, perhaps long ago
                outcome, value = await self._ask(message, pieces())
            return self._result(outcome, value)

    async def _ask(self, message: bytes, pieces: Iterable[bytes]) -> tuple[str, Any]:
        ready = await self._ready()
        try:
            async with asyncio.timeout(self._limits.seconds):
                for part in _parts(message, pieces):
                    await ready.send(part)
                outcome, value = msgspec.msgpack.decode(await ready.receive())
        except TimeoutError:
            was_stopped = ready.is_stopped
            self._end("it was stopped" if was_stopped else f"a call took more than {self._limits.seconds:g} seconds")
            if was_stopped:
                raise WorkerError("was stopped by another process") from None
            raise CallError(f"took more than {self._limits.seconds:g} seconds") from None
        except (OSError, ChannelClosed) as error:
            self._end("it crashed")
            raise WorkerError("crashed") from error
        except BaseException:  # its answer would be taken for that of the next call
            self._end("its call was cancelled")
            raise
        return outcome, value

    def close(self) -> None:
        """Kill the process."""
        self._is_closed = True
        if self._child is not None:
            self._child.end()
            self._child = None

    async def _ready(self) -> _Child:
        if self._is_closed:
            raise WorkerError("cannot run: the server is closing")
        if self._starting is None:
            if self._child is not None:
                return self._child
            self._starting = asyncio.create_task(self._start())
        return await asyncio.shield(self._starting)  # it goes on for the next call where this one is cancelled

    async def _start(self) -> _Child:
        try:
            started = self._child = _Child(self._module, self._limits)
            async with asyncio.timeout(START):
                await started.receive()
        except (OSError, ChannelClosed, TimeoutError) as error:
            self._end("it did not start")
            raise WorkerError("could not be started") from error
        finally:
            self._starting = None
        return started

    def _result(self, outcome: str, value: Any) -> Any:
        if outcome == DONE:
            return value
        if outcome == REFUSED:
            raise CallRefused(value)
        if outcome == OUT_OF_MEMORY:
            self._end("a call took too much memory")  # a new process has all of its memory again
            raise CallError(f"took more than {self._limits.memory >> 20} MiB of memory")
        if outcome == TOO_LARGE:
            raise CallError(f"gave more than {self._limits.answer >> 20} MiB")
        assert outcome == FAILED
        raise CallError(f"failed: {value}")

    def _end(self, why: str) -> None:
        if self._child is not None:
            if self.tells:
                logger.warning("the worker of %s is ended: %s", self._module, why)
            self._child.end()
            self._child = None


class _Child:
    """A process and the parent's end of its socket."""

    def __init__(self, module: str, limits: Limits) -> None:
        self._unframer = Unframer()
        self._messages: list[bytes] = []
        self._socket, theirs = pair()
        self._socket.setblocking(False)
        with theirs:
            self._process = _begin(module, limits, theirs)

    async def send(self, message: bytes) -> None:
        await asyncio.get_running_loop().sock_sendall(self._socket, frame(message))
        await asyncio.sleep(0)  # a socket that accepts all at once would starve other tasks

    async def receive(self) -> bytes:
        """The next message.  Raises OSError or ChannelClosed when the process has ended."""
        loop = asyncio.get_running_loop()
        while not self._messages:
            data = await loop.sock_recv(self._socket, RECEIVE)
            if not data:
                raise ChannelClosed("end of stream")
            self._messages += self._unframer.feed(data)
        return self._messages.pop(0)

    @property
    def is_stopped(self) -> bool:
        """Whether a signal has stopped the process (Linux)."""
        try:
            stat = Path(f"/proc/{self._process.pid}/stat").read_text(encoding="latin-1")
        except OSError:
            return False
        return stat.rpartition(")")[2].split()[0] in STOPPED

    def end(self) -> None:
        self._process.kill()  # first: it could otherwise say that its socket was closed
        self._socket.close()
        # A killed process ends when it next gets a processor, which may take a while at low priority.
        threading.Thread(target=self._process.wait, name="worker-end").start()


def _parts(message: bytes, pieces: Iterable[bytes]) -> Iterator[bytes]:
    yield message
    yield from filter(None, pieces)
    yield END


def _begin(module: str, limits: Limits, theirs: socket.socket) -> subprocess.Popen[bytes]:
    """Start a Python process that inherits only `theirs`, standard error and the environment."""
    descriptor = theirs.fileno()
    command = child.python(
        "slotwise.server.worker_main", module, msgspec.json.encode(limits).decode(), lines.chosen(), str(descriptor))
    return spawn.start(command, pass_fds=[descriptor], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
