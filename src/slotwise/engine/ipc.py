"""Inter-process communication: messages over a Unix socket pair, four bytes of length, then MessagePack.

    API process    EngineConnection (asyncio)  ──commands──►  BlockingChannel    engine process
                                               ◄──reports───

The socket buffer is the bound: the engine blocks when the API process is that far behind, so unsent tokens do not
accumulate in memory.  Nothing received can run code.  A thread of the engine process sends heartbeats during
steps, by which the API process tells a long step from an engine that has stopped.  The offline API, which needs no
msgspec, does not import this.
"""

from __future__ import annotations

import asyncio
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, cast

import msgspec

from slotwise.core.record import StepRecord, TokenLogprobs
from slotwise.engine.messages import Command, EngineFailed, Heartbeat, Query, Report, StepOutputs
from slotwise.engine.record_codec import StepReport, packed

HEADER = struct.Struct("<I")
MAX_MESSAGE = 64 << 20  # bytes; a prompt of a million tokens takes about 5 MB
BUFFER = 4 << 20  # bytes requested from the kernel for each direction

encode = msgspec.msgpack.Encoder().encode
decode_command = msgspec.msgpack.Decoder(Command | Query).decode
decode_report = msgspec.msgpack.Decoder(Report | StepReport).decode


class ChannelClosed(Exception):
    """The process at the other end is gone."""


def pair() -> tuple[socket.socket, socket.socket]:
    """Returns two connected ends, one for each process."""
    ends = socket.socketpair()
    for end in ends:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER)
    return ends


def frame(message: bytes) -> bytes:
    """Returns the bytes of one message as sent: its length, then the message.

    Raises:
        ValueError: it is larger than `MAX_MESSAGE`; the other end would refuse it, and all that follows.
    """
    if len(message) > MAX_MESSAGE:
        raise ValueError(f"a message of {len(message)} bytes is too large to be sent: at most {MAX_MESSAGE} are")
    return HEADER.pack(len(message)) + message


class Unframer:
    """Splits a byte stream into messages."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Returns the messages completed by `data`.

        Raises:
            ChannelClosed: the other end announces a message larger than `MAX_MESSAGE`.
        """
        self._bytes += data
        messages, at = [], 0
        while len(self._bytes) - at >= HEADER.size:
            (length,) = HEADER.unpack_from(self._bytes, at)
            if length > MAX_MESSAGE:
                raise ChannelClosed(f"a message of {length} bytes")
            end = at + HEADER.size + length
            if len(self._bytes) < end:
                break
            messages.append(bytes(self._bytes[at + HEADER.size : end]))
            at = end
        del self._bytes[:at]
        return messages


class BlockingChannel:
    """The engine's end: polled for commands between steps, waited on only when nothing runs.

    Any thread may send; one receives.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._unframer = Unframer()
        self._sending = threading.Lock()
        self._readable = select.poll()  # select() knows no descriptor beyond 1,023, which a busy server may give out
        self._readable.register(sock, select.POLLIN)

    def send(self, message: bytes) -> None:
        """Raises ChannelClosed when the other end is gone, and ValueError for a message beyond `MAX_MESSAGE`."""
        data = frame(message)
        try:
            with self._sending:
                self._sock.sendall(data)
        except OSError as error:
            raise ChannelClosed(str(error)) from error

    def receive(self, timeout: float | None) -> list[bytes]:
        """Returns the messages that arrived, after up to `timeout` seconds for the first (None: without limit).

        Raises ChannelClosed when the other end is gone.
        """
        if not self._readable.poll(None if timeout is None else 1000 * timeout):
            return []
        try:
            data = self._sock.recv(1 << 20)
        except OSError as error:
            raise ChannelClosed(str(error)) from error
        if not data:
            raise ChannelClosed("end of stream")
        return self._unframer.feed(data)


class EngineConnection(asyncio.Protocol):
    """The API process' end: commands out, reports in, closed once.  `connect` opens it.

    Args:
        heartbeat: notified of all data, heartbeats and steps.
        on_report: receives every report except heartbeats and `EngineFailed`.
        on_lost: called once with the reason when the engine is lost; no report follows.
    """

    def __init__(
        self, heartbeat: HeartbeatMonitor, on_report: Callable[[Any], None], on_lost: Callable[[str], None],
    ) -> None:
        self.heartbeat = heartbeat
        self.lost = False
        self._on_report = on_report
        self._on_lost = on_lost
        self._unframer = Unframer()
        self._transport: asyncio.Transport | None = None

    async def connect(self, sock: socket.socket) -> None:
        """Take `sock`, one end of `pair()`, which this connection then owns and closes."""
        sock.setblocking(False)
        await asyncio.get_running_loop().create_unix_connection(lambda: self, sock=sock)

    @property
    def num_unsent(self) -> int:
        """Bytes of commands that the engine has not read yet."""
        return self._transport.get_write_buffer_size() if self._transport is not None else 0

    def send(self, command: Command | Query) -> int:
        """Never waits: unread commands stay in the transport's buffer.  Returns the bytes written."""
        if self._transport is None or self.lost:
            return 0
        data = frame(encode(command))
        self._transport.write(data)
        return len(data)

    def cut(self, message: str) -> None:
        """Closes the connection for the reason `message`; drops unsent commands.  The engine process then ends."""
        if self.lost:
            return
        self.lost = True
        if self._transport is not None:
            self._transport.abort()
        self._on_lost(message)

    # -- called by the event loop --------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's has the interface, not the class

    def data_received(self, data: bytes) -> None:
        self.heartbeat.heard()
        try:
            for message in self._unframer.feed(data):
                if not self.lost:
                    self._dispatch(decode_report(message))
        except (ChannelClosed, ValueError) as error:  # msgspec's are ValueErrors, as are columns of unequal length
            self.cut(f"the engine sent what cannot be read ({error})")

    def connection_lost(self, exc: Exception | None) -> None:
        self.cut("the engine process ended" + (f" ({exc})" if exc else ""))

    def _dispatch(self, report: Any) -> None:
        if isinstance(report, Heartbeat):
            self.heartbeat.on_heartbeat(report.step_ns)
        elif isinstance(report, EngineFailed):
            self.cut(report.message)
        else:
            if isinstance(report, StepReport):
                self.heartbeat.stepped()
            self._on_report(report)


# A discipline that holds outputs publishes a whole batch in one step: with 20 log-probabilities a token takes about 260
# bytes, and the batch more than one message may have.  The outputs are sent in parts before the record: the API process
# decodes each part in a pass of its own loop, and no message exceeds `MAX_MESSAGE`.  The record keeps the tokens, which
# the event log needs; ten million of them fit.
MAX_ENTRIES = 1 << 15  # log-probabilities of a message: about 0.4 MB, and five milliseconds to decode
MAX_POOLED = 4 << 20  # bytes of vectors in a message


def messages_of(record: StepRecord) -> Iterator[Any]:
    """Yields the outputs of `record` in parts, if they are many, and then its StepReport."""
    result, num_parts = record.result, 0
    if sum(map(_num_entries, result.prompt_logprobs)) > MAX_ENTRIES:
        yield from _prompt_parts(record)
        result = result._replace(prompt_logprobs=())
    if sum(map(len, result.pooled)) > MAX_POOLED:
        for request_id, vector in zip(record.plan.request_ids, result.pooled, strict=True):
            if vector:
                yield StepOutputs((request_id,), pooled=(vector,))
        result = result._replace(pooled=())
    outcome = record.outcome
    if sum(map(_num_entries, record.logprobs)) > MAX_ENTRIES:
        for part in _parts(record):
            num_parts += 1
            yield part
        result, outcome = result._replace(logprobs=()), outcome._replace(logprobs=())
    if outcome.tokens is not None and result.logprobs:  # what is held is sent with the outcome that releases it
        result = result._replace(logprobs=())
    report = packed(record._replace(result=result, outcome=outcome), StepReport)
    report.num_parts = num_parts
    yield report


def _prompt_parts(record: StepRecord) -> Iterator[StepOutputs]:
    plan = record.plan
    for request_id, start, logprobs in zip(plan.request_ids, plan.starts, record.result.prompt_logprobs, strict=True):
        size = max(1, MAX_ENTRIES // max(1, _num_entries(logprobs[:1])))
        for first in range(0, len(logprobs), size):
            yield StepOutputs((request_id,), starts=(start + first,),
                              prompt_logprobs=(logprobs[first : first + size],))


def _parts(record: StepRecord) -> Iterator[StepOutputs]:
    part = StepOutputs()
    capacity = MAX_ENTRIES
    for request_id, tokens, logprobs in zip(record.plan.request_ids, record.tokens, record.logprobs, strict=True):
        start = 0
        while start < len(tokens):
            width = max(1, _num_entries(logprobs[start : start + 1]))
            end = min(len(tokens), start + max(1, capacity // width))
            part.request_ids += (request_id,)
            part.token_ids += (tokens[start:end],)
            part.logprobs += (logprobs[start:end],)
            capacity -= (end - start) * width
            start = end
            if capacity < width:
                yield part
                part, capacity = StepOutputs(), MAX_ENTRIES
    if part.request_ids:
        yield part


def _num_entries(logprobs: tuple[TokenLogprobs, ...]) -> int:
    """Log-probabilities of one row: its tokens have the same number each."""
    return len(logprobs) * (1 + len(logprobs[0].top_logprobs)) if logprobs else 0


HEARTBEAT_SECONDS = 0.5
ENGINE_TIMEOUT = 60.0  # seconds of silence after which an engine is given up
SHORTEST_TIMEOUT = 4.0  # seconds; a few heartbeats may be late on a busy machine
STUCK = 10  # timeouts that one step may take while heartbeats arrive
SUSPECT = 0.5  # share of the timeout after which an engine counts as frozen
STARTING = 60.0  # seconds of silence that a process may need to load, on a busy machine, where the timeout is shorter
LAST_WORDS = 5.0  # seconds that the engine's thread gets to notice by itself that the channel is closed

Clock = Callable[[], float]
"""Monotonic seconds."""


def exit_process() -> None:
    """Ends this process after a grace period: the API process is gone and the engine's thread is stuck in a step."""
    time.sleep(LAST_WORDS)
    os._exit(1)


class HeartbeatSender:
    """The engine's side; the loop that runs the steps sets `step_began`.

    Args:
        deserted: called by the heartbeat thread when the channel has closed.
    """

    def __init__(self, channel: BlockingChannel, deserted: Callable[[], None] = exit_process) -> None:
        self.step_began = 0  # monotonic nanoseconds; 0: no step in progress
        self._channel = channel
        self._deserted = deserted

    def start(self) -> None:
        threading.Thread(target=self._send_heartbeats, name="heartbeat", daemon=True).start()

    def _send_heartbeats(self) -> None:
        try:
            while True:
                began = self.step_began
                self._channel.send(encode(Heartbeat(time.monotonic_ns() - began if began else 0)))
                time.sleep(HEARTBEAT_SECONDS)
        except ChannelClosed:
            self._deserted()


class HeartbeatMonitor:
    """The API process' side: measures one engine's silence and the time of its current step.

    A tick adds at most two heartbeat intervals of silence, so a stall of this process does not count.

    Args:
        timeout: seconds of silence after which an engine is given up; `STARTING` at least until it is ready.
    """

    def __init__(self, timeout: float, clock: Clock = time.monotonic) -> None:
        self._timeout = timeout
        self._allowed = max(timeout, STARTING)  # seconds of silence now
        self._clock = clock
        self._ticked_at = clock()
        self._silence = 0.0
        self._step = 0.0  # seconds that the current step has taken, by the last heartbeat
        self._last_step: float | None = None

    def heard(self) -> None:
        """Resets the silence: called for all data from the engine."""
        self._silence = 0.0

    def ready(self) -> None:
        """Called when the engine has loaded: an import of a large library may have kept it from its heartbeats."""
        self._allowed = self._timeout

    def on_heartbeat(self, step_ns: int) -> None:
        self._step = step_ns * 1e-9

    def stepped(self) -> None:
        """Called for each step record."""
        self._step = 0.0
        self._last_step = self._clock()

    def tick(self) -> None:
        """Updates the silence; called every `HEARTBEAT_SECONDS`."""
        now = self._clock()
        self._silence += min(now - self._ticked_at, 2 * HEARTBEAT_SECONDS)
        self._ticked_at = now

    @property
    def last_step_age(self) -> float | None:
        """Seconds since the last step record; None: there was none."""
        return None if self._last_step is None else self._clock() - self._last_step

    @property
    def frozen(self) -> bool:
        """True after `SUSPECT` of the timeout: the engine should get no further requests."""
        return self._doubt >= SUSPECT * self._allowed

    @property
    def verdict(self) -> str:
        """Why the engine must be given up; empty if it need not be."""
        if self._doubt < self._allowed:
            return ""
        if self._silence >= self._allowed:
            return f"the engine has been frozen for {self._silence:.0f} s"
        return f"the engine has been in one step for {self._step:.0f} s"

    @property
    def _doubt(self) -> float:
        return max(self._silence, self._step / STUCK)
