"""Runs functions in a process of its own, with bounds on time and memory, so that nothing else waits for them.

The first call starts a worker, and so does the first after one that was killed: for a call that took too long or too
much memory.  A worker that another process killed or stopped is replaced, and its call made once more.  Calls run one
at a time; clients take turns (`turns.py`).

    call ──► turn ──► [function, arguments], pieces, an end ──socket pair──► main ──► [outcome, value] ──► result

usage: python -m slotwise.api.http.worker_process MODULE LIMITS LOG_FORMAT FD

MODULE has `CALLS`, functions by name; LIMITS are `CallLimits` as JSON; FD is a socket.  On Linux the process is killed
when its parent ends.  Elsewhere it ends when the parent's end of the socket is closed, and an alarm ends a call that
never returns.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from slotwise.api.http.turns import Turns
from slotwise.engine.ipc import BlockingChannel, ChannelClosed, Unframer, frame, pair
from slotwise.engine.refusals import DRAINING, SHUTTING_DOWN, Refused
from slotwise.observe import lines
from slotwise.platform import child, spawn

READY, DONE, REFUSED, FAILED, OUT_OF_MEMORY, TOO_LARGE = "ready", "done", "refused", "failed", "memory", "large"
END = b""  # the message behind a call and its pieces
START = 60.0  # seconds for the imports of a worker, on a busy machine
RECEIVE = 1 << 18  # bytes
STRETCH = 6  # times the seconds of computing that a call may take where the processors have other work
LOOK = 0.05  # seconds between two looks at a call that is about to have computed for too long
TICKS = os.sysconf("SC_CLK_TCK")  # in a second of the time that a process has computed
STOPPED = ("T", "t")  # states of a process: by a signal, by a debugger

logger = logging.getLogger(__name__)


# -- the worker's side -------------------------------------------------------------------------------------------------


class CallLimits(msgspec.Struct, frozen=True):
    """Limits of a worker."""

    seconds: float  # of computing in one call, which on a busy machine may take `STRETCH` times as long
    memory: int  # bytes of data, its interpreter included
    answer: int  # bytes of one answer
    niceness: int = 0


def confine(limits: CallLimits) -> None:
    """Set limits for the rest of this process."""
    for what, most in ((resource.RLIMIT_DATA, limits.memory), (resource.RLIMIT_FSIZE, 0), (resource.RLIMIT_CORE, 0)):
        resource.setrlimit(what, (most, most))
    for number in (signal.SIGINT, signal.SIGTERM):  # also sent to a process group: the parent decides
        signal.signal(number, signal.SIG_IGN)


def answer(calls: Mapping[str, Callable[..., Any]], call: list[bytes], most: int) -> bytes:
    """The answer to a call, which is a message and its pieces: [outcome, value or reason]."""
    try:
        name, arguments = msgspec.msgpack.decode(call[0])
        joined = [b"".join(call[1:])] if call[1:] else []
        call.clear()  # half of the memory
        encoded = msgspec.msgpack.encode((DONE, calls[name](*joined, *arguments)))
    except MemoryError:
        encoded = msgspec.msgpack.encode((OUT_OF_MEMORY, ""))
    except ValueError as error:
        encoded = msgspec.msgpack.encode((REFUSED, str(error)[:most // 8]))
    except Exception as error:  # a call can fail in any way that Python can
        encoded = msgspec.msgpack.encode((FAILED, repr(error)[:most // 8]))
    return encoded if len(encoded) <= most else msgspec.msgpack.encode((TOO_LARGE, ""))


def received(channel: BlockingChannel) -> Iterator[list[bytes]]:
    """Yields calls: a message, and the pieces that follow it."""
    call: list[bytes] = []
    while True:
        for message in channel.receive(None):
            if message != END:
                call.append(message)
            else:
                yield call
                call = []


def main(module: str, limits: CallLimits, descriptor: int) -> None:
    spawn.end_with_parent()
    channel = BlockingChannel(socket.socket(fileno=descriptor))
    os.nice(limits.niceness)  # before its imports, which run while streams are served
    calls = importlib.import_module(module).CALLS
    confine(limits)
    channel.send(msgspec.msgpack.encode((READY, "")))
    for call in received(channel):
        signal.setitimer(signal.ITIMER_REAL, 2 * STRETCH * limits.seconds)  # the parent ends it earlier
        answered = answer(calls, call, limits.answer)
        signal.setitimer(signal.ITIMER_REAL, 0)
        channel.send(answered)


# -- the parent's side -------------------------------------------------------------------------------------------------


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

    def __init__(self, module: str, limits: CallLimits, turns: Turns) -> None:
        self.turns = turns
        self._module = module
        self._limits = limits
        self.tells = True  # log why a process is ended; False: the caller tells all there is
        self._child: _Child | None = None
        self._starting: asyncio.Task[_Child] | None = None
        self._is_closed = False
        self._is_read = False  # a task waits for what the process sends

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
            Refused: the worker was closed.
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
        self._is_read = True
        try:
            async with asyncio.timeout(None) as clock, _watched(ready, clock, self._limits.seconds):
                for part in _parts(message, pieces):
                    await ready.send(part)
                outcome, value = msgspec.msgpack.decode(await ready.receive())
        except TimeoutError:
            was_stopped = ready.is_stopped
            self._end("it was stopped" if was_stopped else f"a call took more than {self._limits.seconds:g} seconds")
            if was_stopped:
                raise self._failure("was stopped by another process") from None
            raise CallError(f"took more than {self._limits.seconds:g} seconds") from None
        except (OSError, ChannelClosed) as error:
            self._end("it crashed")
            raise self._failure("crashed") from error
        except BaseException:  # its answer would be taken for that of the next call
            self._end("its call was cancelled")
            raise
        finally:
            self._is_read = False
        return outcome, value

    def close(self) -> None:
        """Kill the process.  Calls that have no result yet raise Refused, and so do later ones."""
        self._is_closed, self.tells = True, False
        if self._child is None:
            return
        self._child.kill()
        if not self._is_read:  # else its reader sees that the socket has ended, and closes it
            self._end("it is closed")

    async def _ready(self) -> _Child:
        if self._is_closed:
            raise Refused(DRAINING, SHUTTING_DOWN)
        if self._starting is None:
            if self._child is not None:
                return self._child
            self._starting = asyncio.create_task(self._start())
        started = await asyncio.shield(self._starting)  # it goes on for the next call where this one is cancelled
        if self._is_closed:
            raise Refused(DRAINING, SHUTTING_DOWN)
        return started

    async def _start(self) -> _Child:
        try:
            if self._is_closed:
                raise Refused(DRAINING, SHUTTING_DOWN)
            started = self._child = _Child(self._module, self._limits)
            self._is_read = True
            async with asyncio.timeout(START):
                await started.receive()
        except (OSError, ChannelClosed, TimeoutError) as error:
            self._end("it did not start")
            raise self._failure("could not be started") from error
        finally:
            self._starting, self._is_read = None, False
        return started

    def _failure(self, why: str) -> Exception:
        """The error of a call whose worker has ended: `close` has ended it, or the worker has failed."""
        return Refused(DRAINING, SHUTTING_DOWN) if self._is_closed else WorkerError(why)

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

    def __init__(self, module: str, limits: CallLimits) -> None:
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
        fields = self._stat()
        return bool(fields) and fields[0] in STOPPED

    @property
    def seconds(self) -> float:
        """Seconds that the process has computed; where the system does not tell (Linux does), that have passed."""
        fields = self._stat()
        return sum(map(int, fields[11:13])) / TICKS if fields else time.monotonic()

    def _stat(self) -> list[str]:
        try:
            stat = Path(f"/proc/{self._process.pid}/stat").read_text(encoding="latin-1")
        except OSError:
            return []
        return stat.rpartition(")")[2].split()  # its name, which is before these, may have spaces

    def kill(self) -> None:
        self._process.kill()

    def end(self) -> None:
        self.kill()  # first: it could otherwise say that its socket was closed
        self._socket.close()
        # A killed process ends when it next gets a processor, which may take a while at low priority.
        threading.Thread(target=self._process.wait, name="worker-end").start()


@contextlib.asynccontextmanager
async def _watched(child: _Child, clock: asyncio.Timeout, seconds: float) -> AsyncIterator[None]:
    """Within it `clock` ends when `child` has computed for so long, was stopped, or had many times as long."""
    loop = asyncio.get_running_loop()
    begun, last = child.seconds, loop.time() + STRETCH * seconds

    handle = loop.call_later(seconds, lambda: look())

    def look() -> None:
        nonlocal handle
        left = min(seconds - (child.seconds - begun), last - loop.time())
        if left > 0 and not child.is_stopped:
            handle = loop.call_later(max(left, LOOK), look)
        else:
            clock.reschedule(loop.time())

    try:
        yield
    finally:
        handle.cancel()


def _parts(message: bytes, pieces: Iterable[bytes]) -> Iterator[bytes]:
    yield message
    yield from filter(None, pieces)
    yield END


def _begin(module: str, limits: CallLimits, theirs: socket.socket) -> subprocess.Popen[bytes]:
    """Start a Python process that inherits only `theirs`, standard error and the environment."""
    descriptor = theirs.fileno()
    command = child.python(
        "slotwise.api.http.worker_process", module, msgspec.json.encode(limits).decode(), lines.chosen(),
        str(descriptor))
    return spawn.start(command, pass_fds=[descriptor], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    with contextlib.suppress(ChannelClosed):
        lines.set_up(sys.argv[3])
        main(sys.argv[1], msgspec.json.decode(sys.argv[2], type=CallLimits), int(sys.argv[4]))
