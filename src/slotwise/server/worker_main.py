"""A worker process: runs the functions of one module, a call at a time, under limits that the system enforces.

usage: python -m slotwise.server.worker_main MODULE LIMITS LOG_FORMAT FD

MODULE has `CALLS`, functions by name; LIMITS are `Limits` as JSON; FD is a socket.  Ends with its parent,
whose end of the socket is closed then; a call that never returns is ended by an alarm.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec

from slotwise.engine.ipc import BlockingChannel, ChannelClosed
from slotwise.observe import lines

READY, DONE, REFUSED, FAILED, OUT_OF_MEMORY, TOO_LARGE = "ready", "done", "refused", "failed", "memory", "large"
END = b""  # the message behind a call and its pieces


class Limits(msgspec.Struct, frozen=True):
    """Limits of a worker."""

    seconds: float  # of one call
    memory: int  # bytes of data, its interpreter included
    answer: int  # bytes of one answer
    niceness: int = 0


def confine(limits: Limits) -> None:
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


def main(module: str, limits: Limits, descriptor: int) -> None:
    channel = BlockingChannel(socket.socket(fileno=descriptor))
    os.nice(limits.niceness)  # its imports, too, run beside streams
    calls = importlib.import_module(module).CALLS
    confine(limits)
    channel.send(msgspec.msgpack.encode((READY, "")))
    for call in received(channel):
        signal.setitimer(signal.ITIMER_REAL, 2 * limits.seconds)  # the parent ends it earlier, if it still runs
        answered = answer(calls, call, limits.answer)
        signal.setitimer(signal.ITIMER_REAL, 0)
        channel.send(answered)


if __name__ == "__main__":
    with contextlib.suppress(ChannelClosed):
        lines.set_up(sys.argv[3])
        main(sys.argv[1], msgspec.json.decode(sys.argv[2], type=Limits), int(sys.argv[4]))
