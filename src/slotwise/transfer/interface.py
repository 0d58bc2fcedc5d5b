"""Interfaces of a transfer: the blocks it copies, the connection that carries them, and what makes connections."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple, Protocol


class Kind(IntEnum):
    """What a frame says.  The consumer sends WANT, AGAIN and DONE, and TAKEN where memory is shared."""

    WANT = 1  # a JSON object: which prompt, from which block on
    BLOCK = 2  # a block of the prompt, by its number
    ALIVE = 3  # the prompt is still being computed
    GONE = 4  # no more will come; the payload says why
    AGAIN = 5  # the block of that number was lost: go on from there
    DONE = 6  # all has arrived, or no more is wanted
    TAKEN = 7  # the place of that number of the shared memory is free again


class Frame(NamedTuple):
    """A message; `data` is valid until the next one is received."""

    kind: Kind
    number: int = 0  # of a block of the prompt, or of a place
    data: bytes | memoryview = b""
    is_intact: bool = True  # the checksum of `data` is right


class TransferError(ConnectionError):
    """A transfer cannot go on; the message is one line."""


class Blocks(Protocol):
    """Blocks of the cache as bytes, all layers of each."""

    block_bytes: int
    layout: str  # engines with equal texts understand each other's blocks

    def read(self, block: int, into: memoryview) -> None:
        """Copy a block to `into`, `block_bytes` long."""
        ...

    def write(self, block: int, data: memoryview) -> None:
        """Copy `data`, `block_bytes` long, to a block."""
        ...


class Wire(Protocol):
    """One connection between two engines, used by one thread, which closes it; any may interrupt it."""

    def admit(self) -> None:
        """Check a consumer that has connected, before anything else.  Raises OSError: it is not to be served."""
        ...

    def send(self, frame: Frame) -> None:
        """Send a frame that is no block."""
        ...

    def buffer(self) -> memoryview:
        """Returns where the next block is to be written, `block_bytes` long; waits until the peer has room."""
        ...

    def send_block(self, index: int) -> None:
        """Send what was written to `buffer`."""
        ...

    def receive(self) -> Frame:
        """Returns the next frame; waits for it.  Raises OSError: the connection is lost, or nothing came in time."""
        ...

    def poll(self) -> Frame | None:
        """Returns the next frame, if there is one."""
        ...

    def interrupt(self) -> None:
        """End the connection: its thread, if it waits for it, gets an OSError.

        The descriptor stays its own: a number that is free again may be another connection's before a wait begins.
        """
        ...

    def close(self) -> None:
        """End the connection, and free what it has; called by its thread."""
        ...


class Listener(Protocol):
    def accept(self) -> Wire:
        """Returns the next connection, which is still to be admitted; waits for it.  Raises OSError: this is closed."""
        ...

    @property
    def is_closed(self) -> bool: ...

    def close(self) -> None: ...


class Connector(Protocol):
    """Makes connections of one sort, for blocks of one size.  Times are in seconds."""

    def listen(self, host: str, port: int) -> Listener:
        """Raises OSError: the address is taken."""
        ...

    def connect(self, host: str, port: int, timeout: float) -> Wire:
        """Raises OSError: there is no answer, or not that of a producer which this engine trusts."""
        ...
