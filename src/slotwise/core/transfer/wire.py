"""What producer and consumer of a transfer say to each other: frames, and the connections that carry them.

A frame on a stream is a header with a checksum of its own, then the payload.

    magic 4 | kind 1 | index 4 | place 4 | length 4 | checksum of the payload 4 | checksum of the header 4

Checksums are CRC-32.  A wrong one of a payload costs that block; a wrong one of a header ends the connection, because
where the next frame begins is not known then.
"""

from __future__ import annotations

import contextlib
import json
import select
import socket
import zlib
from array import array
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import IntEnum
from hashlib import blake2b
from struct import Struct
from typing import NamedTuple, Protocol

MAGIC = b"SWKV"
HEADER = Struct("!4sBIIII")
CHECKSUM = Struct("!I")
HEADER_BYTES = HEADER.size + CHECKSUM.size
MAX_TEXT = 64 << 10  # bytes of any payload other than a block


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
        """Send a frame other than a block."""
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
    """Makes connections of one kind, for blocks of one size.  Times are in seconds."""

    def listen(self, host: str, port: int) -> Listener:
        """Raises OSError: the address is taken."""
        ...

    def connect(self, host: str, port: int, timeout: float) -> Wire:
        """Raises OSError: there is no answer, or not that of a producer which this engine trusts."""
        ...


@dataclass(frozen=True, slots=True)
class Want:
    transfer_id: str
    prompt: str  # digest of its tokens
    layout: str  # of the consumer's blocks
    first: int  # block of the prompt

    def encoded(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decoded(cls, data: bytes) -> Want:
        """Raises TransferError: `data` does not describe one."""
        try:
            want = cls(**json.loads(data))
        except (ValueError, TypeError, RecursionError) as error:
            raise TransferError("a consumer has not said what it wants") from error
        texts = (want.transfer_id, want.prompt, want.layout)
        if not all(isinstance(text, str) for text in texts) or not isinstance(want.first, int) or want.first < 0:
            raise TransferError("a consumer has not said what it wants")
        return want


def prompt_digest(tokens: Sequence[int]) -> str:
    """The same for equal prompts, whatever their salts; 128 bits."""
    return blake2b(array("q", tokens).tobytes(), digest_size=16).hexdigest()


class StreamWire:
    """Frames on a connected socket; a block's bytes follow its header.

    Args:
        block_bytes: of every block.
        timeout: seconds for which a send or receive may wait.
    """

    def __init__(self, stream: socket.socket, block_bytes: int, timeout: float) -> None:
        stream.settimeout(timeout)
        self._stream = stream
        self._timeout = timeout
        self._block_bytes = block_bytes
        self._header = bytearray(HEADER_BYTES)
        self._block = memoryview(b"")  # one block, made when the first is sent or received

    def send(self, frame: Frame) -> None:
        self._send(frame.kind, frame.number, 0, memoryview(frame.data))

    def buffer(self) -> memoryview:
        return self._own_block()

    def send_block(self, index: int) -> None:
        self._send(Kind.BLOCK, index, 0, self._own_block())

    def receive(self) -> Frame:
        return self._next()

    def poll(self) -> Frame | None:
        return self._next() if self._is_readable else None

    @property
    def _is_readable(self) -> bool:
        return bool(select.select([self._stream], [], [], 0)[0])

    def _next(self) -> Frame:
        """Returns the next frame of the stream."""
        self._fill(memoryview(self._header))
        magic, kind, index, place, length, checksum = HEADER.unpack_from(self._header)
        (expected,) = CHECKSUM.unpack_from(self._header, HEADER.size)
        if magic != MAGIC or zlib.crc32(memoryview(self._header)[: HEADER.size]) != expected:
            raise TransferError("a frame's header is damaged")
        try:
            named = Kind(kind)
        except ValueError:
            raise TransferError(f"a frame has the unknown kind {kind}") from None
        most = self._block_bytes if named is Kind.BLOCK else MAX_TEXT
        if length > most or (named is Kind.BLOCK and length != most):
            raise TransferError(f"a frame of kind {named.name} has {length} bytes, not {most}")
        data = self._payload(named, place, length)
        return Frame(named, index, data, zlib.crc32(data) == checksum)

    def interrupt(self) -> None:
        with contextlib.suppress(OSError):
            self._stream.shutdown(socket.SHUT_RDWR)  # wakes a thread that waits

    def close(self) -> None:
        self.interrupt()
        self._stream.close()

    def _own_block(self) -> memoryview:
        if not len(self._block):
            self._block = memoryview(bytearray(self._block_bytes))
        return self._block

    def _payload(self, kind: Kind, place: int, length: int) -> memoryview:
        """The bytes of a frame, whose header was read."""
        data = self._own_block() if kind is Kind.BLOCK else memoryview(bytearray(length))
        self._fill(data)
        return data

    def _send(self, kind: Kind, index: int, place: int, data: memoryview, *, inline: bool = True) -> None:
        header = HEADER.pack(MAGIC, kind, index, place, len(data), zlib.crc32(data))
        self._stream.sendall(header + CHECKSUM.pack(zlib.crc32(header)))
        if inline:
            self._stream.sendall(data)

    def _fill(self, target: memoryview) -> None:
        while len(target):
            count = self._stream.recv_into(target)
            if not count:
                raise TransferError("the connection was closed")
            target = target[count:]
