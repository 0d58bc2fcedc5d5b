"""What carries blocks from one engine to another: TCP between hosts, shared memory on one host.

Over TCP both ends prove that they have the transfer secret before any block is requested.

    producer ── MAGIC, nonce p ──────────────────────► consumer
             ◄── nonce c, HMAC(secret, "consumer" p c) ──
             ── HMAC(secret, "producer" p c) ──────────►     then frames

The secret itself is never sent, and a recorded proof is of no use with other nonces.  Frames are neither encrypted nor
authenticated: who can change packets on their way can still change blocks.

Blocks in memory that two processes of one host share; the frames about them go over a local socket.

    consumer   makes the memory, and passes it on ──► producer
               reads place 0 ◄── BLOCK, place 0 ───── writes a block to place 0
               TAKEN 0 ─────────────────────────────► place 0 is free again

Only processes of the same user join.  The socket lies in a folder that no other user can enter, and each end asks the
kernel for the user of the other one before anything is sent.  The memory has no name (memfd_create).  A socket that a
killed process has left is removed by the next producer.  Linux only.
"""

from __future__ import annotations

import contextlib
import fcntl
import hmac
import mmap
import os
import secrets
import socket
import stat
import struct
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path

from slotwise.core.transfer.kv_transfer_config import SHARED_MEMORY, KVTransferConfig
from slotwise.core.transfer.wire import Connector, Frame, Kind, StreamWire, TransferError

# -- TCP ---------------------------------------------------------------------------------------------------------------


BACKLOG = 128
MAGIC = b"SWKV-1\r\n"
NONCE = PROOF = 32  # bytes
GREETING = 5.0  # seconds for all of it, however slowly its bytes arrive
PRODUCER, CONSUMER = b"producer", b"consumer"


class TCPConnector:
    """Args:
        block_bytes: of every block.
        timeout: seconds for which a send or receive may wait.
        secret: that both ends have.
    """

    def __init__(self, block_bytes: int, timeout: float, secret: str) -> None:
        self._block_bytes = block_bytes
        self._timeout = timeout
        self._secret = secret.encode()

    def listen(self, host: str, port: int) -> TCPListener:
        return TCPListener(host, port, self._block_bytes, self._timeout, self._secret)

    def connect(self, host: str, port: int, timeout: float) -> TCPWire:
        stream = socket.create_connection((host, port), timeout)
        try:
            wire = TCPWire(stream, self._block_bytes, self._timeout, self._secret)
            wire.greet()
        except BaseException:
            stream.close()
            raise
        return wire


class TCPListener:
    def __init__(self, host: str, port: int, block_bytes: int, timeout: float, secret: bytes) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, port), family=family, backlog=BACKLOG)
        self._block_bytes = block_bytes
        self._timeout = timeout
        self._secret = secret

    @property
    def port(self) -> int:
        return int(self._listener.getsockname()[1])

    @property
    def is_closed(self) -> bool:
        return self._listener.fileno() < 0

    def accept(self) -> TCPWire:
        stream, _ = self._listener.accept()
        return TCPWire(stream, self._block_bytes, self._timeout, self._secret)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes `accept`
        self._listener.close()


class TCPWire(StreamWire):
    """Args: secret: that the other end has to prove, and this one proves."""

    def __init__(self, stream: socket.socket, block_bytes: int, timeout: float, secret: bytes) -> None:
        super().__init__(stream, block_bytes, timeout)
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._secret = secret

    def admit(self) -> None:
        mine = secrets.token_bytes(NONCE)
        self._stream.sendall(MAGIC + mine)
        answer = self._read(NONCE + PROOF, "a consumer")
        nonces = mine + answer[:NONCE]
        self._check(answer[NONCE:], CONSUMER, nonces, "a consumer")
        self._stream.sendall(self._proof(PRODUCER, nonces))

    def greet(self) -> None:
        """Prove the secret to a producer, which proves it, too.  Raises OSError: it does not."""
        greeting = self._read(len(MAGIC) + NONCE, "the producer")
        if not greeting.startswith(MAGIC):
            raise TransferError("what listens there is not a producer of this version")
        nonces = greeting[len(MAGIC):] + secrets.token_bytes(NONCE)
        self._stream.sendall(nonces[NONCE:] + self._proof(CONSUMER, nonces))
        self._check(self._read(PROOF, "the producer"), PRODUCER, nonces, "the producer")

    def _proof(self, role: bytes, nonces: bytes) -> bytes:
        return hmac.digest(self._secret, role + nonces, "sha256")

    def _check(self, proof: bytes, role: bytes, nonces: bytes, who: str) -> None:
        if not hmac.compare_digest(proof, self._proof(role, nonces)):
            raise TransferError(f"{who} has another transfer secret")

    def _read(self, length: int, who: str) -> bytes:
        """Returns the next `length` bytes of a greeting."""
        read, end = b"", time.monotonic() + min(GREETING, self._timeout)
        try:
            while len(read) < length:
                self._stream.settimeout(max(1e-3, end - time.monotonic()))
                part = self._stream.recv(length - len(read))
                if not part:
                    raise TransferError(f"{who} has closed the connection: has it the same transfer secret?")
                read += part
        except TimeoutError:
            raise TransferError(f"{who} has not proved that it has the transfer secret") from None
        finally:
            self._stream.settimeout(self._timeout)
        return read


# -- shared memory -----------------------------------------------------------------------------------------------------


PLACES = 4  # blocks in the memory of a transfer: one is copied out while others are written
SEALS = getattr(fcntl, "F_SEAL_SHRINK", 0) | getattr(fcntl, "F_SEAL_GROW", 0)
CREDENTIALS = struct.Struct("3i")  # process, user, group
ATTACH = 1.0  # seconds for the memory, which comes with the connection


def folder() -> Path:
    """The folder of this user's sockets: the same for all of its processes, whatever their environments say."""
    return Path(f"/tmp/slotwise-kv-{os.getuid()}")


def _address(port: int) -> str:
    """The path of a producer's socket.  Raises TransferError: the folder of sockets is not this user's alone."""
    found = folder()
    info = found.lstat()
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid() or stat.S_IMODE(info.st_mode) & 0o077:
        raise TransferError(f"{found} must be a folder of this user that no other user can enter: remove it")
    return str(found / f"{port}.sock")


def _check_user(stream: socket.socket) -> None:
    """Raises TransferError: another user's process is at the other end."""
    given = stream.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
    if (user := CREDENTIALS.unpack(given)[1]) != os.getuid():
        raise TransferError(f"another user's process (uid {user}) is at the other end")


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
            _check_user(stream)
            descriptor = os.memfd_create("slotwise-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            try:
                os.ftruncate(descriptor, PLACES * self._block_bytes)
                fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SEALS)
                socket.send_fds(stream, [b"M"], [descriptor])
                wire = SharedMemoryWire(stream, self._block_bytes, self._timeout)
                wire.attach(descriptor)
                return wire
            finally:
                os.close(descriptor)
        except BaseException:
            stream.close()
            raise


class SharedMemoryListener:
    def __init__(self, port: int, block_bytes: int, timeout: float) -> None:
        self._listener = socket.socket(socket.AF_UNIX)
        self.port = port
        with contextlib.suppress(FileExistsError):
            folder().mkdir(mode=0o700)
        self._path = Path(_address(port))
        try:
            with _alone():
                _remove_unused()
                self._listener.bind(str(self._path))
                self._listener.listen(BACKLOG)
        except OSError:
            self._listener.close()
            raise
        self._block_bytes = block_bytes
        self._timeout = timeout

    @property
    def is_closed(self) -> bool:
        return self._listener.fileno() < 0

    def accept(self) -> SharedMemoryWire:
        stream, _ = self._listener.accept()
        return SharedMemoryWire(stream, self._block_bytes, self._timeout)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes `accept`
        if not self.is_closed:
            self._path.unlink(missing_ok=True)  # first: afterwards the path may be another producer's
            self._listener.close()


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Only one process at a time looks for unused sockets and makes its own."""
    descriptor = os.open(folder(), os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _remove_unused() -> None:
    """Remove the sockets of producers that have ended."""
    for path in folder().glob("*.sock"):
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(ATTACH)
            try:
                probe.connect(str(path))
            except ConnectionRefusedError:
                path.unlink(missing_ok=True)
            except OSError:  # it is busy, or has gone
                continue


class SharedMemoryWire(StreamWire):
    """Frames on a local socket, whose blocks lie in shared memory."""

    def __init__(self, stream: socket.socket, block_bytes: int, timeout: float) -> None:
        super().__init__(stream, block_bytes, timeout)
        self._places: list[memoryview] = []  # until `attach`
        self._free = deque(range(PLACES))  # of the sender
        self._early: deque[Frame] = deque()  # received while it waited for a place
        self._read = -1  # place of the block received last, which its reader may still use

    def admit(self) -> None:
        _check_user(self._stream)
        self._stream.settimeout(ATTACH)
        byte, descriptors, _, _ = socket.recv_fds(self._stream, 1, 1)
        self._stream.settimeout(self._timeout)
        try:
            if not byte:  # another producer looks whether the socket is in use, say
                raise TransferError("it was closed before it asked for anything")
            if len(descriptors) != 1 or os.fstat(descriptors[0]).st_size != PLACES * self._block_bytes:
                raise TransferError("a consumer has blocks of another size")
            if fcntl.fcntl(descriptors[0], fcntl.F_GET_SEALS) & SEALS != SEALS:
                raise TransferError("a consumer's memory might shrink")
            self.attach(descriptors[0])
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def attach(self, descriptor: int) -> None:
        """Use a memory of `PLACES` blocks; its descriptor is not needed afterwards."""
        size = self._block_bytes
        memory = memoryview(mmap.mmap(descriptor, PLACES * size))  # unmapped with the last view of it
        self._places = [memory[place * size : (place + 1) * size] for place in range(PLACES)]

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


# -- the connectors by name --------------------------------------------------------------------------------------------


def connector_of(config: KVTransferConfig, block_bytes: int) -> Connector:
    """Returns the connector that `config` names.  Raises TransferError: this system has no such connector."""
    if config.kv_connector == SHARED_MEMORY:
        return SharedMemoryConnector(block_bytes, config.timeout)
    return TCPConnector(block_bytes, config.timeout, config.secret)
