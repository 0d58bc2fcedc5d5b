"""The engine process: `python -m slotwise.compose.worker FD`, started by `compose.launch` and by nobody else.

It reads its config from the channel, loads, says it is ready, and then steps for as long as there is work, looking for
commands between steps.  It ends when the API process does.
"""

from __future__ import annotations

import signal
import socket
import sys
from typing import NoReturn

import msgspec

from slotwise.engine.channel import BlockingChannel, ChannelClosed
from slotwise.engine.config import EngineConfig
from slotwise.engine.loop import Engine
from slotwise.engine.messages import EngineFailed, Loading, decode_command, encode

MAX_COMMANDS = 64  # taken in between two steps, so that a flood of arrivals cannot hold up who runs


def main(descriptor: int) -> int:
    for number in (signal.SIGINT, signal.SIGTERM):  # they reach the whole group; the API process decides when to end
        signal.signal(number, signal.SIG_IGN)
    channel = BlockingChannel(socket.socket(fileno=descriptor))
    try:
        engine = _load(channel)
        if engine is None:
            return 1
        _guarded(engine, channel)
    except ChannelClosed:
        return 0


def _guarded(engine: Engine, channel: BlockingChannel) -> NoReturn:
    """Serve; a fault of the engine itself is told to the API process before it ends this one."""
    try:
        _serve(engine, channel)
    except ChannelClosed:
        raise
    except Exception as error:
        channel.send(encode(EngineFailed(f"{type(error).__name__}: {error}")))
        raise


def _load(channel: BlockingChannel) -> Engine | None:
    """The engine, once the API process was told about it; None when it could not be built, and why was told."""
    while not (messages := channel.receive(None)):
        pass
    config = msgspec.msgpack.decode(messages[0], type=EngineConfig)
    try:
        from slotwise.compose.engine import build_engine  # takes a second: torch

        engine, info = build_engine(config, lambda *progress: channel.send(encode(Loading(*progress))))
    except ChannelClosed:
        raise
    except Exception as error:  # whatever it was, the person who started the server must hear of it
        channel.send(encode(EngineFailed(f"{error}" or type(error).__name__)))
        return None
    channel.send(encode(info))
    return engine


def _serve(engine: Engine, channel: BlockingChannel) -> NoReturn:
    """Until the channel closes: commands, a step, its record."""
    waiting: list[bytes] = []
    while True:
        if len(waiting) < MAX_COMMANDS:
            waiting += channel.receive(engine.wait() if engine.has_work or waiting else None)
        for message in waiting[:MAX_COMMANDS]:
            engine.handle(decode_command(message))
        del waiting[:MAX_COMMANDS]
        record = engine.step() if engine.has_work else engine.idle_record()
        if record is not None:
            channel.send(encode(record))


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
