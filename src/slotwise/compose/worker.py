"""The engine process: `python -m slotwise.compose.worker LOG_FORMAT FD`, started by `compose.launch` alone.

It reads its config from the channel, loads, says it is ready, and then steps for as long as there is work, looking for
commands between steps.  It ends when the API process does.
"""

from __future__ import annotations

import signal
import socket
import sys
import time
from collections import deque
from typing import NoReturn

import msgspec

from slotwise.compose.garbage import hold_off, settle
from slotwise.engine.channel import BlockingChannel, ChannelClosed
from slotwise.engine.config import EngineConfig
from slotwise.engine.engine import Engine
from slotwise.engine.heartbeat import HeartbeatSender
from slotwise.engine.messages import Add, EngineFailed, Loading, QueuePositionQuery
from slotwise.engine.wire import decode_command, encode
from slotwise.errors import OneLineError, one_line
from slotwise.kernels.compile_worker import call_early
from slotwise.kernels.lazy_imports import spare_torch
from slotwise.observe import lines

MAX_ARRIVALS = 64  # taken in between two steps, so that a flood of them cannot hold up who runs


def main(log_format: str, descriptor: int) -> int:
    hold_off()
    lines.set_up(log_format)
    for number in (signal.SIGINT, signal.SIGTERM):  # they reach the whole group; the API process decides when to end
        signal.signal(number, signal.SIG_IGN)
    channel = BlockingChannel(socket.socket(fileno=descriptor))
    heartbeat_sender = HeartbeatSender(channel)
    heartbeat_sender.start()
    try:
        engine = _load(channel)
        if engine is None:
            return 1
        _guarded(engine, channel, heartbeat_sender)
    except ChannelClosed:
        return 0


def _guarded(engine: Engine, channel: BlockingChannel, heartbeat_sender: HeartbeatSender) -> NoReturn:
    """Serve; a fault of the engine itself is told to the API process before it ends this one."""
    try:
        serve(engine, channel, heartbeat_sender)
    except ChannelClosed:
        raise
    except Exception as error:
        channel.send(encode(EngineFailed(one_line(f"{type(error).__name__}: {error}"))))
        raise


def _load(channel: BlockingChannel) -> Engine | None:
    """The engine, once the API process was told about it; None when it could not be built, and why was told."""
    while not (messages := channel.receive(None)):
        pass
    config = msgspec.msgpack.decode(messages[0], type=EngineConfig)
    try:
        call_early(config.device)
        spare_torch()
        from slotwise.compose.engine import build_engine  # takes two seconds: torch

        engine, info = build_engine(config, lambda *progress: channel.send(encode(Loading(*progress))))
    except ChannelClosed:
        raise
    except Exception as error:  # whatever it was, the person who started the server must hear of it
        channel.send(encode(EngineFailed(_told(error))))
        return None
    settle()
    channel.send(encode(info))
    return engine


def _told(error: Exception) -> str:
    """One line; errors that are not about what was asked, or what there is, are named by their type."""
    named = isinstance(error, (OneLineError, ValueError, OSError, MemoryError, RuntimeError)) and str(error)
    return one_line(str(error) if named else f"{type(error).__name__}: {error}")


def serve(engine: Engine, channel: BlockingChannel, heartbeat_sender: HeartbeatSender) -> NoReturn:
    """Until the channel closes: commands, a step, its record."""
    waiting: deque[bytes] = deque()
    while True:
        if len(waiting) < MAX_ARRIVALS:
            waiting += channel.receive(engine.wait() if engine.has_work or waiting else None)
        _take_in(engine, waiting, channel)
        heartbeat_sender.step_began = time.monotonic_ns()
        report = engine.step() if engine.has_work else engine.idle_record()
        heartbeat_sender.step_began = 0
        if report is not None:
            channel.send(encode(report))


def _take_in(engine: Engine, waiting: deque[bytes], channel: BlockingChannel) -> None:
    """Hand over commands in their order, as many as one step may bring: who leaves costs nothing and is not counted."""
    num_arrived = 0
    while waiting and num_arrived < MAX_ARRIVALS:
        command = decode_command(waiting.popleft())
        num_arrived += isinstance(command, Add)
        if isinstance(command, QueuePositionQuery):
            channel.send(encode(engine.queue_positions(command)))
        else:
            engine.handle(command)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2])))
