"""Frames on a stream: what is sent is received, and anything else is an error or a damaged block."""

from __future__ import annotations

import os
import socket
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.apart import HOST, LIMITS, Pair
from support.toy import alone, request

from slotwise.core.transfer.connectors import folder
from slotwise.core.transfer.kv_transfer_config import SHARED_MEMORY, TCP
from slotwise.core.transfer.wire import (
    CHECKSUM,
    HEADER,
    MAGIC,
    MAX_TEXT,
    Frame,
    Kind,
    StreamWire,
    TransferError,
    Want,
    prompt_digest,
)

BLOCK = 40  # bytes


@pytest.fixture
def ends():
    one, other = socket.socketpair()
    yield StreamWire(one, BLOCK, 1.0), other
    one.close()
    other.close()


def header(kind: int, length: int, checksum: int = 0, magic: bytes = MAGIC) -> bytes:
    packed = HEADER.pack(magic, kind, 0, 0, length, checksum)
    return packed + CHECKSUM.pack(zlib.crc32(packed))


def test_what_is_sent_is_received(ends):
    wire, other = ends
    peer = StreamWire(other, BLOCK, 1.0)
    wire.send(Frame(Kind.GONE, 7, b"why"))
    wire.buffer()[:] = os.urandom(BLOCK)
    wire.send_block(3)
    assert peer.poll() == Frame(Kind.GONE, 7, memoryview(b"why"))
    assert peer.receive() == Frame(Kind.BLOCK, 3, wire.buffer())
    assert peer.poll() is None


@pytest.mark.parametrize(("sent", "why"), [
    (b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", "header is damaged"), (header(99, 0), "unknown kind 99"),
    (header(Kind.BLOCK, BLOCK - 1), f"{BLOCK - 1} bytes, not {BLOCK}"),
    (header(Kind.WANT, MAX_TEXT + 1), f"{MAX_TEXT + 1} bytes"), (header(Kind.WANT, 5) + b"abc", "closed"),
    (header(Kind.DONE, 0)[:9], "closed"), (header(Kind.DONE, 0, magic=b"SWKX"), "header is damaged")])
def test_anything_else_ends_the_connection(ends, sent, why):
    wire, other = ends
    other.sendall(sent)
    other.shutdown(socket.SHUT_WR)
    with pytest.raises(TransferError, match=why):
        wire.receive()


def test_a_damaged_block_is_told_and_the_next_frame_is_found(ends):
    wire, other = ends
    other.sendall(header(Kind.BLOCK, BLOCK, 1) + bytes(BLOCK) + header(Kind.DONE, 0))
    assert not wire.receive().is_intact
    assert wire.receive().kind is Kind.DONE


@given(st.binary(max_size=200))
def test_what_no_consumer_says_is_refused(data: bytes):
    with pytest.raises(TransferError):
        Want.decoded(data)


def test_a_want_is_read_as_it_was_written():
    want = Want("t", prompt_digest([1, 2, 3]), "a layout", 4)
    assert Want.decoded(want.encoded()) == want
    assert prompt_digest([1, 2, 3]) == prompt_digest((1, 2, 3)) != prompt_digest([1, 2, 4])
    for wrong in (b'{"transfer_id": "t"}', want.encoded().replace(b"4", b"-4"), want.encoded().replace(b"4", b'"4"')):
        with pytest.raises(TransferError):
            Want.decoded(wrong)


@pytest.mark.parametrize("connector", [TCP, SHARED_MEMORY])
def test_a_producer_outlives_connections_that_are_no_consumers(connector):
    pair, prompt = Pair(connector, timeout=1.0), list(range(1, 20))
    connections = []
    for sent in (b"", b"x" * 100, header(Kind.WANT, 4, zlib.crc32(b"null")) + b"null", header(Kind.DONE, 0)):
        address = (HOST, pair.port) if connector == TCP else str(folder() / f"{pair.port}.sock")
        connection = socket.socket(socket.AF_INET if connector == TCP else socket.AF_UNIX)
        connection.connect(address)
        connection.sendall(sent)
        connections.append(connection)
    for connection in connections[1:]:
        connection.close()
    pair.prefill("a", prompt)
    pair.decode("a", prompt)
    pair.run()
    connections[0].close()
    assert pair.consumer.tokens["a"] == alone(request("a", prompt, 8), LIMITS)
    pair.check_nothing_is_left()
    pair.close()
