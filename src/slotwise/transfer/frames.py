"""Frames on a stream: a header with a checksum of its own, then the payload.

    magic 4 | kind 1 | index 4 | place 4 | length 4 | checksum of the payload 4 | checksum of the header 4

Checksums are CRC-32.  A wrong one of a payload costs that block; a wrong one of a header ends the connection, because
where the next frame begins is not known then.
"""

from __future__ import annotations

import contextlib
import select
import socket
import zlib
from struct import Struct

from slotwise.transfer.interface import Frame, Kind, TransferError

MAGIC = b"SWKV"
HEADER = Struct("!4sBIIII")
CHECKSUM = Struct("!I")
HEADER_BYTES = HEADER.size + CHECKSUM.size
MAX_TEXT = 64 << 10  # bytes of a payload that is no block


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
