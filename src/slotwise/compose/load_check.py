"""Checks that an engine could load a model, without reading its weights: in a process of its own, for it needs torch.

    python -m slotwise.compose.load_check LOG_FORMAT FD        started by `check` alone
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys

import msgspec

from slotwise.compose.launch import ChildProcess, absolute_paths
from slotwise.engine.config import EngineConfig
from slotwise.engine.ipc import BlockingChannel, ChannelClosed, frame
from slotwise.errors import OneLineError, one_line
from slotwise.observe import lines
from slotwise.platform import child

SECONDS = 120.0  # for imports and headers of files, on a busy machine


class _Asked(msgspec.Struct):
    config: EngineConfig
    freed: int  # bytes that will be free, in addition to those that are


async def check(config: EngineConfig, freed: int) -> None:
    """Checks the model of `config`: its files' headers and shapes, settings, and whether its weights fit.

    Args:
        freed: bytes that will be free in addition to those that are.

    Raises:
        ValueError: it cannot be served, in one line.
    """
    process = ChildProcess(child.python("slotwise.compose.load_check", lines.chosen()), env=child.environment())
    try:
        process.channel.sendall(frame(msgspec.msgpack.encode(_Asked(absolute_paths(config), freed))))
        messages = await asyncio.to_thread(_first, BlockingChannel(process.channel))
    finally:
        process.kill()
        await asyncio.to_thread(process.process.wait)
        process.channel.close()
    if objection := messages[0].decode() if messages else f"it could not be checked within {SECONDS:g} seconds":
        raise ValueError(f"model: {objection}")


def _first(channel: BlockingChannel) -> list[bytes]:
    """The answer; [] if there is none in time.  Whatever ends the process is no answer."""
    with contextlib.suppress(ChannelClosed):
        return channel.receive(SECONDS)
    return [b"the process that checks it ended"]


def objection(config: EngineConfig, freed: int) -> str:
    """Why the model of `config` cannot be loaded; "" where nothing is wrong with what can be seen."""
    from slotwise.compose.engine_builder import check_loadable  # torch

    try:
        check_loadable(config, freed)
    except (OneLineError, ValueError, OSError, MemoryError, RuntimeError) as error:
        return one_line(str(error))
    return ""


def main(log_format: str, descriptor: int) -> None:
    lines.set_up(log_format)
    channel = BlockingChannel(socket.socket(fileno=descriptor))
    with contextlib.suppress(ChannelClosed):
        while not (messages := channel.receive(None)):
            pass
        asked = msgspec.msgpack.decode(messages[0], type=_Asked)
        channel.send(objection(asked.config, asked.freed).encode())


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
