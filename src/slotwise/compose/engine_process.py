"""The engine process: `python -m slotwise.compose.engine_process LOG_FORMAT FD`, started by `compose.launch` alone.

It reads its config from the channel, loads, reports that it is ready, and then runs steps while there is work, reading
commands between steps.  It ends when the API process does.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import NoReturn

import msgspec

from slotwise.compose.adapter_loading import AdapterLoading
from slotwise.compose.launch import hold_off, settle
from slotwise.compute.kernels.cpu.jit.workers import call_early
from slotwise.compute.kernels.lazy_imports import spare_torch
from slotwise.engine.config import EngineConfig
from slotwise.engine.engine import Engine
from slotwise.engine.ipc import BlockingChannel, ChannelClosed, HeartbeatSender, decode_command, encode, messages_of
from slotwise.engine.messages import (
    Add,
    DivergenceQuery,
    EngineFailed,
    GiveBack,
    GivenBack,
    LoadAdapter,
    Loading,
    QueuePositionQuery,
    RemoveStored,
    StoredRemoved,
    UnloadAdapter,
)
from slotwise.errors import OneLineError, described, one_line
from slotwise.observe import lines

MAX_ARRIVALS = 64  # handled between two steps, so that a flood of requests cannot delay running ones


def main(log_format: str, descriptor: int) -> int:
    hold_off()
    lines.set_up(log_format)
    for number in (signal.SIGINT, signal.SIGTERM):  # sent to the whole process group; the API process handles them
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
    """Serves; reports a fault of the engine itself to the API process before it ends this one."""
    try:
        serve(engine, channel, heartbeat_sender)
    except ChannelClosed:
        raise
    except Exception as error:
        channel.send(encode(EngineFailed(one_line(f"{type(error).__name__}: {error}"))))
        raise


def _load(channel: BlockingChannel) -> Engine | None:
    """Returns the engine after reporting it to the API process; None after reporting why it could not be built."""
    while not (messages := channel.receive(None)):
        pass
    config = msgspec.msgpack.decode(messages[0], type=EngineConfig)
    try:
        call_early(config.device)
        spare_torch()
        from slotwise.compose.engine_builder import build_engine  # takes two seconds: torch

        engine, info = build_engine(config, lambda *progress: channel.send(encode(Loading(*progress))),
                                    lambda why: _lose(channel, why))
    except ChannelClosed:
        raise
    except Exception as error:  # every failure must reach the operator
        channel.send(encode(EngineFailed(_message_of(error))))
        return None
    settle()
    channel.send(encode(info))
    return engine


def _lose(channel: BlockingChannel, why: str) -> NoReturn:
    """Reports a lost rank to the API process, and ends this one: all ranks start again."""
    with contextlib.suppress(ChannelClosed):
        channel.send(encode(EngineFailed(why)))
    os._exit(1)


def _message_of(error: Exception) -> str:
    """Returns one line; unexpected errors, those outside the listed types, are prefixed with their type."""
    named = isinstance(error, (OneLineError, ValueError, OSError, MemoryError, RuntimeError))
    return one_line(described(error) if named else f"{type(error).__name__}: {error}")


def serve(engine: Engine, channel: BlockingChannel, heartbeat_sender: HeartbeatSender) -> NoReturn:
    """Handles commands, runs a step and sends its record, until the channel closes."""
    waiting: deque[bytes] = deque()
    loading = AdapterLoading(engine.adapters, lambda loaded: channel.send(encode(loaded)))
    while True:
        if len(waiting) < MAX_ARRIVALS:
            waiting += channel.receive(engine.wait() if engine.has_work or waiting else None)
        _take_in(engine, waiting, channel, loading)
        if engine.has_work and engine.wait() > 0:
            continue
        heartbeat_sender.step_began = time.monotonic_ns()
        report = engine.step() if engine.has_work else engine.idle_record()
        heartbeat_sender.step_began = 0
        if report is not None:
            for message in messages_of(report):
                channel.send(encode(message))


def _take_in(engine: Engine, waiting: deque[bytes], channel: BlockingChannel, loading: AdapterLoading) -> None:
    """Handles commands in order, with at most `MAX_ARRIVALS` new requests; other commands are cheap and not counted."""
    num_arrived = 0
    while waiting and num_arrived < MAX_ARRIVALS:
        command = decode_command(waiting.popleft())
        num_arrived += isinstance(command, Add)
        if isinstance(command, QueuePositionQuery):
            channel.send(encode(engine.queue_positions(command)))
        elif isinstance(command, DivergenceQuery):
            channel.send(encode(engine.divergences(command)))
        elif isinstance(command, GiveBack):
            channel.send(encode(GivenBack(engine.give_back())))
        elif isinstance(command, RemoveStored):
            _remove(engine, channel, command)
        elif isinstance(command, LoadAdapter):
            loading.load(command)
        elif isinstance(command, UnloadAdapter):
            engine.unload_adapter(command.number)
        else:
            engine.handle(command)


def _remove(engine: Engine, channel: BlockingChannel, command: RemoveStored) -> None:
    """Removes files on a thread of its own, which reports when all are removed."""
    remove = engine.remove_stored(command.tenant)

    def run() -> None:
        try:
            answer = StoredRemoved(command.number, remove())
        except OSError as error:
            answer = StoredRemoved(command.number, 0, described(error))
        with contextlib.suppress(ChannelClosed):
            channel.send(encode(answer))

    threading.Thread(target=run, name="remove-stored", daemon=True).start()


def end(run: Callable[[], int]) -> NoReturn:
    """Ends this process with the status that `run` returns, or with the traceback of what it raises.

    It ends at once: a thread that still compiles would abort the teardown of libraries, with a message.
    """
    try:
        status = run()
    except Exception:
        traceback.print_exc()
        status = 1
    logging.shutdown()
    atexit._run_exitfuncs()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    end(partial(main, sys.argv[1], int(sys.argv[2])))
