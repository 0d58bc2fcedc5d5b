"""Peers that are not to be trusted, or fail in the middle: they get and give nothing, and delay no other request."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.apart import HOST, LIMITS, SECRET, Pair, ToyBlocks
from support.live_server import eventually
from support.toy import alone, next_token, request

from slotwise.core.transfer import connectors
from slotwise.core.transfer.connectors import MAGIC, NONCE, PROOF, SharedMemoryConnector, TCPConnector
from slotwise.core.transfer.kv_transfer_config import TCP
from slotwise.core.transfer.receiver import Receiver
from slotwise.core.transfer.sender import MAX_CONSUMERS, MAX_STRANGERS
from slotwise.core.transfer.wire import HEADER_BYTES, Frame, Kind, TransferError, Want, Wire, prompt_digest
from slotwise.engine.executor import FakeExecutor

PROMPT = [(5 * index) % 23 for index in range(50)]
EXPECTED = alone(request("alone", PROMPT, 8), LIMITS)
ANOTHER = "the secret of another service"


@pytest.fixture
def pair() -> Iterator[Pair]:
    pair = Pair(TCP, timeout=60.0)
    yield pair
    pair.close()


def connector(pair: Pair, secret: str = SECRET) -> TCPConnector:
    return TCPConnector(pair.producer.blocks.block_bytes, pair.timeout, secret)


def received(pair: Pair) -> list[str]:
    """Why the transfers of the consumer ended; "" for one that is complete."""
    return [arrival.failure for record in pair.consumer.records for arrival in record.inputs.arrivals
            if arrival.is_last]


# -- TCP -------------------------------------------------------------------------------------------------------------


def test_a_consumer_with_another_secret_gets_nothing(pair: Pair) -> None:
    pair.prefill("a", PROMPT)
    pair.run(lambda: "a" in pair.producer.ended)
    with pytest.raises(TransferError, match="same transfer secret"):
        connector(pair, ANOTHER).connect(HOST, pair.port, 1.0)
    assert pair.producer.scheduler.transfers.num_pinned_blocks == 13  # it is not released either
    pair.consumer.receives(Receiver(pair.consumer.blocks, connector(pair, ANOTHER), pair.timeout))
    pair.decode("a", PROMPT)
    pair.run(lambda: "a" in pair.consumer.ended)
    assert pair.consumer.tokens["a"] == EXPECTED and "same transfer secret" in received(pair)[0]


def test_a_producer_without_the_secret_is_told_nothing(pair: Pair) -> None:
    heard: list[bytes] = []

    def serve(stream: socket.socket) -> None:
        stream.sendall(MAGIC + bytes(NONCE))
        heard.append(_all(stream, NONCE + PROOF))
        stream.sendall(heard[0][NONCE:])  # the consumer's own proof
        heard.append(stream.recv(1))

    with listening(serve) as port:
        pair.port = port
        pair.decode("a", PROMPT)
        pair.run(lambda: "a" in pair.consumer.ended)
    assert pair.consumer.tokens["a"] == EXPECTED
    assert received(pair) == ["the producer has another transfer secret"]
    assert SECRET.encode() not in heard[0] and heard[1] == b""


def test_a_recorded_greeting_opens_nothing(pair: Pair) -> None:
    spoken: list[bytes] = []
    with socket.create_server((HOST, 0)) as between:
        thread = threading.Thread(target=_record, args=(between, (HOST, pair.port), spoken))
        thread.start()
        connector(pair).connect(HOST, between.getsockname()[1], 5.0).close()
        thread.join()
    (proof,) = spoken
    with socket.create_connection((HOST, pair.port), 60.0) as stream:
        greeting = _all(stream, len(MAGIC) + NONCE)
        assert greeting.startswith(MAGIC)
        stream.sendall(proof)
        assert stream.recv(1) == b""


def _record(between: socket.socket, target: tuple[str, int], spoken: list[bytes]) -> None:
    """Pass a greeting on, and keep what the consumer says."""
    consumer, _ = between.accept()
    with consumer, socket.create_connection(target, 60.0) as producer:
        consumer.sendall(_all(producer, len(MAGIC) + NONCE))
        spoken.append(_all(consumer, NONCE + PROOF))
        producer.sendall(spoken[0])
        consumer.sendall(_all(producer, PROOF))


def test_silent_connections_keep_no_consumer_out_and_few_threads_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connectors, "GREETING", 600.0)
    pair = Pair(TCP, timeout=600.0)
    strangers = [socket.create_connection((HOST, pair.port), 60.0) for _ in range(MAX_CONSUMERS + 10)]
    pair.prefill("a", PROMPT)
    pair.decode("a", PROMPT)
    pair.run()
    assert pair.consumer.tokens["a"] == EXPECTED and received(pair) == [""]
    eventually(lambda: sum(map(_has_ended, strangers)) >= len(strangers) - MAX_STRANGERS)
    for stranger in strangers:
        stranger.close()
    pair.check_nothing_is_left()
    pair.close()


@pytest.mark.parametrize("sent", [b"", b"x" * (NONCE + PROOF)])
def test_connections_without_the_secret_do_not_fill_the_log(
        pair: Pair, sent: bytes, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(30):
        with socket.create_connection((HOST, pair.port), 60.0) as stream:
            stream.sendall(sent)
            stream.shutdown(socket.SHUT_WR)
            while stream.recv(100):
                pass
    assert ["refused" in record.message for record in caplog.records] == [True]


@pytest.mark.parametrize("name", ["kv-send", "kv-receive"])
def test_a_transfer_without_a_thread_costs_the_computed_prompt_alone(
        pair: Pair, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    start, left = threading.Thread.start, [1]

    def limited(thread: threading.Thread) -> None:
        if thread.name == name and left:
            left.pop()
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
    for request_id, prompt, timeout in (("a", PROMPT, 1.0), ("b", PROMPT[::-1], 60.0)):
        pair.timeout = timeout  # the first transfer has nobody to carry it, and is given up by then
        pair.prefill(request_id, prompt)
        pair.decode(request_id, prompt)
        pair.run()
        assert pair.consumer.tokens[request_id] == alone(request("alone", prompt, 8), LIMITS)
    assert not left and [bool(failure) for failure in received(pair)] == [True, False]


def _has_ended(stream: socket.socket) -> bool:
    """Whether the other end has closed a connection, behind its greeting at most."""
    stream.setblocking(False)
    try:
        while stream.recv(100):
            pass
        return True
    except OSError as error:
        return not isinstance(error, BlockingIOError)


def test_a_greeting_that_trickles_has_an_end(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connectors, "GREETING", 0.5)
    began = time.monotonic()
    with socket.create_connection((HOST, pair.port), 60.0) as stream, contextlib.suppress(OSError):
        while time.monotonic() < began + 60.0:
            stream.sendall(b"x")
            time.sleep(0.05)  # each read ends in time
    assert time.monotonic() < began + 60.0


def test_what_a_producer_does_not_say_is_computed() -> None:
    pair = Pair(TCP, timeout=0.3)
    with listening(lambda stream: stream.recv(1)) as port:
        pair.port = port
        pair.decode("a", PROMPT)
        pair.run()
        assert pair.consumer.tokens["a"] == EXPECTED
    pair.check_nothing_is_left()
    pair.close()


class Cut:
    """The socket of a producer that is cut within its fourth block.

    Args:
        left: bytes that it sends of this one.
    """

    def __init__(self, wire: Wire, block_bytes: int, left: int) -> None:
        self._stream = wire._stream
        self._left = len(MAGIC) + NONCE + PROOF + 3 * (HEADER_BYTES + block_bytes) + left
        self._sends_blocks = False
        wire._stream = self

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)

    def sendall(self, data: bytes | memoryview) -> None:
        self._sends_blocks |= bytes(data[: len(MAGIC)]) == MAGIC
        if not self._sends_blocks or len(data) <= self._left:
            self._left -= len(data)
            self._stream.sendall(data)
            return
        self._stream.sendall(data[: self._left])
        self._stream.shutdown(socket.SHUT_RDWR)
        raise ConnectionResetError


@pytest.mark.parametrize("left", [0, 7, HEADER_BYTES, HEADER_BYTES + 7])
def test_a_connection_that_is_cut_within_a_block_costs_what_has_not_arrived(left: int) -> None:
    size = ToyBlocks(FakeExecutor(LIMITS.block_size, next_token), LIMITS.block_size).block_bytes
    pair = Pair(TCP, timeout=60.0, change=lambda wire: Cut(wire, size, left))
    pair.prefill("a", PROMPT)
    pair.run(lambda: "a" in pair.producer.ended)
    pair.decode("a", PROMPT)
    pair.run()
    assert pair.consumer.tokens["a"] == EXPECTED and received(pair) == ["the connection was closed"]
    assert pair.consumer.num_computed == len(PROMPT) - 3 * LIMITS.block_size
    pair.check_nothing_is_left()
    pair.close()


def test_an_id_with_another_prompt_releases_and_reads_nothing(pair: Pair) -> None:
    pair.prefill("of another tenant", PROMPT)
    pair.run(lambda: "of another tenant" in pair.producer.ended)
    wire = connector(pair).connect(HOST, pair.port, 5.0)
    want = Want("of another tenant", prompt_digest([1, 2, 3]), pair.producer.blocks.layout, 0)
    wire.send(Frame(Kind.WANT, data=want.encoded()))
    assert bytes(wire.receive().data) == b"the prompt is another one"
    with contextlib.suppress(OSError):  # it has closed the connection
        wire.send(Frame(Kind.DONE))
    wire.close()
    pair.decode("of another tenant", PROMPT)
    pair.run()
    assert received(pair) == [""] and pair.consumer.num_computed == 1


# -- shared memory ---------------------------------------------------------------------------------------------------

BLOCK = 64  # bytes
root = pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    found = tmp_path / "sockets"
    monkeypatch.setattr(connectors, "folder", lambda: found)
    return found


@pytest.mark.parametrize("spoil", [
    lambda folder: folder.mkdir() or folder.chmod(0o755), lambda folder: folder.mkdir() or folder.chmod(0o720),
    lambda folder: folder.write_text(""), lambda folder: folder.symlink_to(folder.parent)],
    ids=["seen", "written", "a file", "a link"])
def test_a_folder_that_others_can_enter_is_not_used(folder: Path, spoil: Callable[[Path], object]) -> None:
    spoil(folder)
    made = SharedMemoryConnector(BLOCK, 1.0)
    for use in (lambda: made.listen(HOST, 1), lambda: made.connect(HOST, 1, 1.0)):
        with pytest.raises(TransferError, match="must be a folder of this user that no other user can enter"):
            use()


@root
def test_a_folder_of_another_user_is_not_used(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    os.chown(folder, 65534, -1)
    with pytest.raises(TransferError, match="must be a folder of this user"):
        SharedMemoryConnector(BLOCK, 1.0).listen(HOST, 1)


def test_the_folder_is_private_and_a_socket_that_was_left_is_replaced(folder: Path) -> None:
    made = SharedMemoryConnector(BLOCK, 1.0)
    left = made.listen(HOST, 1)
    left._listener.close()  # as when its process is killed
    assert folder.stat().st_mode & 0o777 == 0o700 and [path.name for path in folder.iterdir()] == ["1.sock"]
    first, second = made.listen(HOST, 2), made.listen(HOST, 1)
    with pytest.raises(OSError, match="in use"):
        made.listen(HOST, 1)
    assert sorted(path.name for path in folder.iterdir()) == ["1.sock", "2.sock"]
    made.connect(HOST, 1, 5.0).close()
    for listener in (first, second):
        listener.close()
    assert list(folder.iterdir()) == []


OTHER_USER = """
import os, socket, sys
stream = socket.socket(socket.AF_UNIX)
stream.bind(sys.argv[1])
os.setuid(65534)
stream.listen()
print("ready", flush=True)
peer, _ = stream.accept()
data, descriptors, _, _ = socket.recv_fds(peer, 100, 4)
print(len(data), len(descriptors))
"""


@root
def test_another_users_producer_receives_no_memory(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    with subprocess.Popen([sys.executable, "-c", OTHER_USER, str(folder / "1.sock")], stdout=subprocess.PIPE,
                          text=True) as other:
        assert other.stdout is not None and other.stdout.readline() == "ready\n"
        with pytest.raises(TransferError, match=r"another user's process \(uid 65534\)"):
            SharedMemoryConnector(BLOCK, 1.0).connect(HOST, 1, 5.0)
        assert other.stdout.readline() == "0 0\n"


def test_a_connection_without_its_memory_is_refused(folder: Path) -> None:
    listener = SharedMemoryConnector(BLOCK, 1.0).listen(HOST, 1)
    for sends in (lambda stream: stream.close(), lambda stream: stream.sendall(b"M"),
                  lambda stream: socket.send_fds(stream, [b"M"], [0]), lambda stream: None):
        with socket.socket(socket.AF_UNIX) as stream:
            stream.connect(str(folder / "1.sock"))
            wire = listener.accept()
            sends(stream)
            with pytest.raises(OSError):
                wire.admit()
            wire.close()
    listener.close()


def _all(stream: socket.socket, length: int) -> bytes:
    """The next bytes of a stream."""
    read = b""
    while len(read) < length and (part := stream.recv(length - len(read))):
        read += part
    return read


@contextlib.contextmanager
def listening(serve: Callable[[socket.socket], object]) -> Iterator[int]:
    """The port of a program that is not a producer, which serves one connection."""

    def run() -> None:
        with contextlib.suppress(OSError):
            stream, _ = listener.accept()
            with stream:
                serve(stream)

    with socket.create_server((HOST, 0)) as listener:
        thread = threading.Thread(target=run)
        thread.start()
        yield int(listener.getsockname()[1])
        with contextlib.suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
    thread.join(60)
    assert not thread.is_alive()
