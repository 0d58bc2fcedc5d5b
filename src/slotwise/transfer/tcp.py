"""Blocks over TCP, between hosts.  Both ends prove that they have the transfer secret before any block is requested.

    producer ── MAGIC, nonce p ──────────────────────► consumer
             ◄── nonce c, HMAC(secret, "consumer" p c) ──
             ── HMAC(secret, "producer" p c) ──────────►     then frames

The secret itself is never sent, and a recorded proof is of no use with other nonces.  Frames are neither encrypted nor
authenticated: who can change packets on their way can still change blocks.
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import socket
import time

from slotwise.transfer.frames import StreamWire
from slotwise.transfer.interface import TransferError

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
