"""One client's HTTP connection over uvicorn's protocol, with bounds that protect other connections.

A connection is always read, also while a response is under way: that is how a client that leaves is noticed.

    ├─ head ─┼─ body ─┼─────── response in progress ───────┼─ idle ─┤
     parsed   parsed   kept, up to MAX_PIPELINED              closed after the keep-alive time

A client that sends nothing, or a head without an end, is disconnected, and so is one that does not read what it was
sent: each state has a deadline, which `listener.Connections` checks.

A client that ends its sending side may have left, or may wait for its answer (RFC 9112, 9.5); TCP shows which
only when something is sent.  So the connection sends an interim response, which HTTP/1.1 allows at any time: a client
that has left answers it with a reset.

The server speaks HTTP/1.1 alone, so it ignores the Upgrade header (RFC 9110, 7.8).  The parser does not: it ends such a
request at its head and hands back the rest.  The connection then gives the same head without that header to a new
parser, and the rest of what was received after it.
"""

from __future__ import annotations

import select
from asyncio import Transport
from collections.abc import Callable
from typing import Any, cast

from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from slotwise.api.http.listener import RESERVE_TIMEOUT, Connections

INTERIM = b"HTTP/1.1 1"  # how an interim response begins
FINAL = b"HTTP/1.1 "
MAX_HEAD = 512 << 10  # bytes; the socket is read in parts of up to half of it
MAX_HEADERS = 128  # of a request; each costs many times its bytes
MAX_HEADER_BYTES = 64 << 10  # of their names and values
MAX_FRAMING = 64 << 10  # bytes of a body's chunk sizes and trailers, in addition to as many as its content has
MAX_PIPELINED = 64 << 10  # bytes kept of requests behind one that is being answered; then reading pauses
PATIENCE = 1.0  # seconds after which a connection whose reading is paused is closed: its client might have left
MAX_REQUESTS = 64  # behind one that is being answered, of one read of the socket; those before are answered
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"  # the only interim response that Python's http.client accepts
CHECKS = (0.001, 0.01, 0.1, 1.0)  # seconds until a half-closed client is checked; the delay doubles after these
ENDS_AT_EOF = "ends_at_eof"  # key of a scope: a client that sends no more counts as gone
LONGEST_CHECK = 30.0  # seconds
NEVER = float("inf")
LATE = b"HTTP/1.1 408 Request Timeout\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
INVALID = "Invalid HTTP request received."
HEADERS = "The request has too many headers, or too long ones."
TUNNEL = "CONNECT is not supported."
FRAMING = "The body has too many chunks or trailers."
TOO_MANY = f"At most {MAX_REQUESTS} requests may follow one that is not answered."
OLD_PATIENCE = 1.0  # seconds that a half-closed HTTP/1.0 client counts as present: it knows no interim responses


class HeadJoiningTransport:
    """A transport that holds a response's head until its body, which the application always has at hand.

    A refused client then wakes once, not twice, and so does the processor that it shares with the engine.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._head = b""

    def write(self, data: bytes) -> None:
        if self._head:
            data, self._head = self._head + data, b""
        elif data.startswith(FINAL) and data.endswith(b"\r\n\r\n") and not data.startswith(INTERIM):
            self._head = data
            return
        self._transport.write(data)

    def flush(self) -> None:
        if self._head:
            self.write(b"")

    def close(self) -> None:
        self.flush()
        self._transport.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class Connection(HttpToolsProtocol):
    """Closes itself when its headers exceed MAX_HEAD: copying them would stall every stream.

    Args:
        among: all connections.
        header_timeout: seconds for a connection's first byte, and for the rest of each head.
        body_timeout: seconds for the rest of a body when its request has been answered.
        unread_timeout: seconds for which a client may read nothing of what was written.
    """

    def __init__(self, *arguments: Any, among: Connections, header_timeout: float, body_timeout: float,
                 unread_timeout: float, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.deadline = self.unread_deadline = NEVER  # see connections.Timed
        self._among = among
        self._header_timeout = header_timeout
        self._body_timeout = body_timeout
        self._unread_timeout = unread_timeout
        self._framing_left = 0  # bytes that chunk sizes and trailers of a body may still have
        self._reserved = False  # a connection of the reserve, see connections.ALWAYS
        self._head: int | None = 0  # bytes received of an unfinished head; None within a body
        self._active: RequestResponseCycle | None = None  # the request being answered, or the last one answered
        self._ahead = bytearray()  # received while it is answered
        self._header_bytes = 0  # of the head that is being read
        self._complaint = INVALID  # about what the parser does not accept
        self._malformed = ""  # why what follows it is not answered
        self._half_closed = False  # the client has ended its sending side
        self._is_entered = False  # among all connections
        self._give_up: Callable[[], object] | None = None  # ends a handshake in progress

    def begin_handshake(self, address: str, give_up: Callable[[], object]) -> None:
        """Count the connection before it is made, while TLS begins.  Args: give_up: ends that."""
        self._give_up = give_up
        self._enter(address)

    def end_handshake(self) -> None:
        """TLS has begun, and the connection is made, or it never will be."""
        if self._give_up is not None:
            self._give_up = None
            self._among.leave(self)

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]
        super().connection_made(cast(Transport, HeadJoiningTransport(transport)))
        self._give_up = None
        if not self._is_entered:
            self._enter(self.client[0] if self.client else "")
        self.deadline = self.loop.time() + self._header_timeout

    def _enter(self, address: str) -> None:
        self._is_entered = True
        self._reserved = not self._among.enter(self, address)
        if self._reserved:
            self._header_timeout = min(self._header_timeout, RESERVE_TIMEOUT)
        self.deadline = self.loop.time() + self._header_timeout

    def refuse(self) -> None:
        if self._give_up is not None:
            self._give_up()
        else:
            self.transport.abort()

    def time_out(self, now: float) -> None:
        """Close the connection if a deadline is before `now`; what was read meanwhile is not unread."""
        if self.unread_deadline < now:
            self.unread_deadline = NEVER
            if self.transport.get_write_buffer_size():
                self.refuse()
                return
        if self.deadline < now:
            self.deadline = NEVER
            if self._head and not self._is_answering:
                self.transport.write(LATE)
                self.transport.close()
            else:
                self.refuse()

    def connection_lost(self, exc: Exception | None) -> None:
        self._among.leave(self)
        # uvicorn notifies the last request that was read; the one being answered may be another.
        for cycle in (self._active, *[cycle for cycle, _ in self.pipeline]):
            if cycle is not None and not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
        self.pipeline.clear()
        self._ahead.clear()
        super().connection_lost(exc)

    # -- receiving -----------------------------------------------------------------------------------------------

    @property
    def _is_answering(self) -> bool:
        """Whether a request was read whole and its response is not complete."""
        active = self._active
        return bool(self.pipeline) or (
            active is not None and not active.response_complete and not active.more_body)

    def data_received(self, data: bytes) -> None:
        if self._is_answering:
            self._ahead += data
            if len(self._ahead) > MAX_PIPELINED and not self.flow.read_paused:
                self.flow.pause_reading()
                self.deadline = min(self.deadline, self.loop.time() + PATIENCE)
            return
        if self._head is not None:
            if not self._head:
                self.deadline = self.loop.time() + self._header_timeout
            self._head += len(data)
            if self._head > MAX_HEAD:
                self.transport.close()
                return
        else:
            self._framing_left -= len(data)
        self._unset_keepalive_if_required()
        self._parse(data)
        if self._head is None and self._framing_left < 0:
            self._refuse_framing()
        if self.pipeline:  # uvicorn pauses reading then, and would not notice that the client leaves
            self.flow.resume_reading()

    def _parse(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except HttpParserUpgrade as upgrade:
            self._ignore_upgrade(data[upgrade.args[0]:])
        except HttpParserError:
            if self._malformed:  # the parser was stopped
                return
            self._among.malformed(self._complaint)
            self.send_400_response(self._complaint)

    def _refuse_framing(self) -> None:
        if self._active is not None and self._active.response_started:
            self.transport.abort()
        else:
            super().send_400_response(FRAMING)

    def _ignore_upgrade(self, rest: bytes) -> None:
        """Parse the head that the parser has just ended again, without its Upgrade header, and what follows it."""
        if self.transport.is_closing():
            return
        method, version = self.parser.get_method(), self.parser.get_http_version().encode()
        if method == b"CONNECT":  # all that follows is meant for another server
            self.send_400_response(TUNNEL)
            return
        lines = [b"%b: %b" % header for header in self.headers if header[0] != b"upgrade"]
        head = b"\r\n".join([b"%b %b HTTP/%b" % (method, self.url, version), *lines, b"", b""])
        self.parser = HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does
        self._parse(head)
        if rest and not self.transport.is_closing():
            self.data_received(rest)

    def on_headers_complete(self) -> None:
        if self.transport.is_closing() or self.parser.should_upgrade():
            return
        # For the application, which has no other access to it.
        self.scope["transport"] = self.transport  # type: ignore[typeddict-unknown-key]
        super().on_headers_complete()
        self._head = None
        self._framing_left = MAX_FRAMING
        self.deadline = NEVER
        if self._reserved:
            self.scope["reserved"] = True  # type: ignore[typeddict-unknown-key]
            self.cycle.keep_alive = False
        if not self.pipeline:
            self._active = self.cycle
        elif len(self.pipeline) > MAX_REQUESTS:
            self._stop_parser()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._header_bytes = 0

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._head is None:  # a trailer, which is ignored (RFC 9110, 6.5.1)
            return
        super().on_header(name, value)
        self._header_bytes += len(name) + len(value)
        if len(self.headers) > MAX_HEADERS or self._header_bytes > MAX_HEADER_BYTES:
            self._complaint = HEADERS
            raise ValueError(HEADERS)

    def on_body(self, body: bytes) -> None:
        self._framing_left = min(MAX_FRAMING, self._framing_left + 2 * len(body))
        super().on_body(body)

    def _stop_parser(self) -> None:
        """Drop the request whose head was just read, and all behind it: the connection ends after those before it.

        Raises:
            ValueError: always; it ends the parser.
        """
        self.pipeline.popleft()
        self._head = 0
        self._malformed = TOO_MANY
        raise ValueError(TOO_MANY)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():  # only the head is complete
            return
        super().on_message_complete()
        self._head = 0
        # A body that ends after its response has ended uvicorn's keep-alive time.
        self.deadline = NEVER if self._is_answering else self.loop.time() + self.timeout_keep_alive

    def send_400_response(self, msg: str) -> None:
        if self._is_answering:
            self._malformed = msg  # what came before it is answered first
        else:
            super().send_400_response(msg)

    def eof_received(self) -> bool:  # type: ignore[override]
        """Returns whether the transport stays open.  TLS knows no half-closed connections, as event loops have it."""
        if self.scheme == "https" and self._is_answering:
            self.transport.abort()  # what it writes from here on would be dropped, and never end
            return False
        if not self._is_answering or self.transport.is_closing():
            return False
        if not self._half_closed:
            self._half_closed = True
            self._check_half_closed(0)
        return True

    # -- sending -------------------------------------------------------------------------------------------------

    def pause_writing(self) -> None:
        super().pause_writing()
        self.unread_deadline = self.loop.time() + self._unread_timeout

    def resume_writing(self) -> None:
        self.unread_deadline = NEVER
        super().resume_writing()

    def on_response_complete(self) -> None:
        cast(HeadJoiningTransport, self.transport).flush()  # a HEAD response has no body to join
        following = self.pipeline[-1][0] if self.pipeline else None
        self.deadline = NEVER
        if self.transport.get_write_buffer_size() and self.unread_deadline == NEVER:
            self.unread_deadline = self.loop.time() + self._unread_timeout
        super().on_response_complete()
        if self.transport.is_closing():
            return
        if self._head is None:  # the rest of a body that was not read
            self.deadline = self.loop.time() + self._body_timeout
        if following is not None:
            self._active = following
        if self._malformed and not self._is_answering:
            super().send_400_response(self._malformed)
        elif self._ahead and not self._is_answering:
            data, self._ahead = bytes(self._ahead), bytearray()
            self.data_received(data)
        if self._half_closed and not self._is_answering:
            self.transport.close()

    def _check_half_closed(self, count: int) -> None:
        """Check a half-closed client again and again while a response is in progress."""
        active = self._active
        if active is None or not self._is_answering or self.transport.is_closing():
            return
        if active.scope.get(ENDS_AT_EOF):
            self.transport.close()
            return
        delay = CHECKS[count] if count < len(CHECKS) else min(LONGEST_CHECK, 2.0 ** (count - len(CHECKS) + 1))
        if not active.response_started:
            if active.scope["http_version"] != "1.0":
                if count == 0 or count >= len(CHECKS):
                    self.transport.write(CONTINUE)
            elif sum(CHECKS[:count]) >= OLD_PATIENCE:
                self.transport.abort()
                return
        if _is_reset(self.transport):
            self.transport.abort()
        else:
            self.loop.call_later(delay, self._check_half_closed, count + 1)


def _is_reset(transport: Transport) -> bool:
    """Whether the peer has sent a reset, which no reader notices once the peer has ended its side."""
    poll = select.poll()
    poll.register(transport.get_extra_info("socket").fileno(), 0)
    return bool(poll.poll(0))
