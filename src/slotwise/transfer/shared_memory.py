"""Blocks in memory that two processes of one host share; the frames about them go over a local socket.

    consumer   makes the memory, and passes it on ──► producer
               reads place 0 ◄── BLOCK, place 0 ───── writes a block to place 0
               TAKEN 0 ─────────────────────────────► place 0 is free again

The memory has no name (memfd_create), and a socket in the abstract namespace has no file: nothing is left behind when
a process is killed.  Only processes of the same user are accepted.  Linux only.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import socket
import struct
from collections import deque

from slotwise.transfer.frames import StreamWire
from slotwise.transfer.interface import Frame, Kind, TransferError

PLACES = 4  # blocks in the memory of a transfer: one is copied out while others are written
BACKLOG = 128
SEALS = getattr(fcntl, "F_SEAL_SHRINK", 0) | getattr(fcntl, "F_SEAL_GROW", 0)
CREDENTIALS = struct.Struct("3i")  # process, user, group


def _address(port: int) -> str:
    """The name of a producer's socket."""
    return f"\0slotwise-kv-{os.getuid()}-{port}"


class SharedMemoryConnector:
    """Args: block_bytes: of every block; timeout: seconds for which a send or receive may wait."""

    def __init__(self, block_bytes: int, timeout: float) -> None:
        if not hasattr(os, "memfd_create"):
            raise TransferError("memory can be shared on Linux only: use the TCPConnector")
        self._block_bytes = block_bytes
        self._timeout = timeout

    def listen(self, host: str, port: int) -> SharedMemoryListener:
        return SharedMemoryListener(port, self._block_bytes, self._timeout)

    def connect(self, host: str, port: int, timeout: float) -> SharedMemoryWire:
        stream = socket.socket(socket.AF_UNIX)
        try:
            stream.settimeout(timeout)
            stream.connect(_address(port))
            descriptor = os.memfd_create("slotwise-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            try:
                os.ftruncate(descriptor, PLACES * self._block_bytes)
                fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SEALS)
                socket.send_fds(stream, [b"M"], [descriptor])
                return SharedMemoryWire(stream, descriptor, self._block_bytes, self._timeout)
            finally:
                os.close(descriptor)
        except BaseException:
            stream.close()
            raise


class SharedMemoryListener:
    def __init__(self, port: int, block_bytes: int, timeout: float) -> None:
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(_address(port))
        self._listener.listen(BACKLOG)
        self.port = port
        self._block_bytes = block_bytes
        self._timeout = timeout

    @property
    def is_closed(self) -> bool:
        return self._listener.fileno() < 0

    def accept(self) -> SharedMemoryWire:
        stream, _ = self._listener.accept()
        try:
            return self._wire(stream)
        except BaseException:
            stream.close()
            raise

    def _wire(self, stream: socket.socket) -> SharedMemoryWire:
        given = stream.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
        if CREDENTIALS.unpack(given)[1] != os.getuid():
            raise TransferError("another user's process has connected")
        stream.settimeout(1.0)  # the memory comes with the connection
        _, descriptors, _, _ = socket.recv_fds(stream, 1, 1)
        try:
            if len(descriptors) != 1 or os.fstat(descriptors[0]).st_size != PLACES * self._block_bytes:
                raise TransferError("a consumer has blocks of another size")
            if fcntl.fcntl(descriptors[0], fcntl.F_GET_SEALS) & SEALS != SEALS:
                raise TransferError("a consumer's memory might shrink")
            return SharedMemoryWire(stream, descriptors[0], self._block_bytes, self._timeout)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes `accept`
        self._listener.close()


class SharedMemoryWire(StreamWire):
    """Frames on a local socket, whose blocks lie in shared memory.

    Args:
        descriptor: of the memory, `PLACES` blocks long; it is not needed any more afterwards.
    """

    def __init__(self, stream: socket.socket, descriptor: int, block_bytes: int, timeout: float) -> None:
        super().__init__(stream, block_bytes, timeout)
        memory = memoryview(mmap.mmap(descriptor, PLACES * block_bytes))  # unmapped with the last view of it
        self._places = [memory[place * block_bytes : (place + 1) * block_bytes] for place in range(PLACES)]
        self._free = deque(range(PLACES))  # of the sender
        self._early: deque[Frame] = deque()  # received while it waited for a place
        self._read = -1  # place of the block received last, which its reader may still use

    def buffer(self) -> memoryview:
        while not self._free:
            frame = self._next()
            if not self._has_freed(frame):
                self._early.append(frame)
        return self._places[self._free[0]]

    def send_block(self, index: int) -> None:
        place = self._free.popleft()
        self._send(Kind.BLOCK, index, place, self._places[place], inline=False)

    def receive(self) -> Frame:
        if self._early:
            return self._early.popleft()
        if self._read >= 0:
            read, self._read = self._read, -1
            self.send(Frame(Kind.TAKEN, read))
        while self._has_freed(frame := self._next()):
            pass
        return frame

    def poll(self) -> Frame | None:
        while not self._early and self._is_readable:
            if not self._has_freed(frame := self._next()):
                return frame
        return self._early.popleft() if self._early else None

    def _has_freed(self, frame: Frame) -> bool:
        if frame.kind is not Kind.TAKEN:
            return False
        if not 0 <= frame.number < PLACES or frame.number in self._free:
            raise TransferError(f"place {frame.number} was not in use")
        self._free.append(frame.number)
        return True

    def _payload(self, kind: Kind, place: int, length: int) -> memoryview:
        if kind is not Kind.BLOCK:
            return super()._payload(kind, place, length)
        if not 0 <= place < PLACES:
            raise TransferError(f"there is no place {place}")
        self._read = place
        return self._places[place]
