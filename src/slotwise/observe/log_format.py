"""The format of an event log: its version, and how a log of another one is refused."""

from __future__ import annotations

from typing import Literal

import msgspec

from slotwise.errors import printable
from slotwise.version import __version__

FORMAT = 2  # to be raised with every change that an older reader would misunderstand
MAX_VERSION = 32  # characters of a version that an error repeats


class LogError(ValueError):
    """Invalid content of an event log; the message is one line for a person."""


class FormatError(LogError):
    """An event log of another format."""


class _Head(msgspec.Struct):
    """What every format keeps of its first line."""

    kind: Literal["run"]
    format: int | None = None
    version: str = ""


_head_decoder = msgspec.json.Decoder(_Head)


def check_format(line: bytes | str) -> None:
    """Raises FormatError if a line begins a log of another format."""
    try:
        head = _head_decoder.decode(line)
    except msgspec.MsgspecError:
        return
    if head.format == FORMAT or (head.format is None and not head.version):
        return
    named = "no format" if head.format is None else f"format {head.format}"
    writer = f", written by slotwise {printable(head.version[:MAX_VERSION])}" if head.version else ""
    raise FormatError(f"this is an event log of {named}{writer}; slotwise {__version__} reads format {FORMAT}")
