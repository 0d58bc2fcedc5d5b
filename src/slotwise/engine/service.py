"""The engine as the API process sees it: submit, stream, finish, drain.  asyncio, one thread, no torch.

One message arrives per step; it is decoded once and its tokens are handed to the generations they belong to.  Every
generation ends exactly once, also when the engine dies.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol, cast

import msgspec

from slotwise.engine.channel import ChannelClosed, Unframer, frame
from slotwise.engine.generation import Generation
from slotwise.engine.messages import (
    Add,
    Command,
    Configure,
    EngineFailed,
    EngineInfo,
    Finish,
    Loading,
    RowEnd,
    StepRecord,
    decode_report,
    encode,
)
from slotwise.engine.scheduling import Scheduling

MAX_LIVE = 4096  # generations submitted and not yet ended by the engine
MAX_UNSENT = 64 << 20  # bytes of commands that the engine has not taken yet

logger = logging.getLogger(__name__)


class EngineError(RuntimeError):
    """The engine could not start; the message is one line for a person."""


class Refused(Exception):
    """A generation that was not started.  `kind` is one of the constants below."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message


DRAINING = "draining"
ENGINE_DEAD = "engine_dead"
QUEUE_FULL = "queue_full"
DUPLICATE_ID = "duplicate_id"


class Observer(Protocol):
    """Who listens to requests and steps.  Times are monotonic nanoseconds, on one clock with the engine's."""

    def arrived(self, request_id: str, num_prompt: int, now_ns: int) -> None: ...

    def refused(self, kind: str) -> None: ...

    def stepped(self, record: StepRecord) -> None: ...


class EngineService(asyncio.Protocol):
    """The engine behind `sock`, one end of `channel.pair()`.  It takes the socket over and closes it.

    Args:
        on_loading: told how far the engine is, until it is ready.
        max_live: generations that may be alive at once.
    """

    def __init__(self, sock: socket.socket, on_loading: Callable[[Loading], None] = lambda progress: None,
                 max_live: int = MAX_LIVE) -> None:
        self.observers: list[Observer] = []
        self.failure = ""  # why the engine is gone, when it was not asked to go
        self.draining = False
        self._sock = sock
        self._on_loading = on_loading
        self._max_live = max_live
        self._unframer = Unframer()
        self._transport: asyncio.Transport | None = None
        self._info: asyncio.Future[EngineInfo] | None = None
        self._scheduling: Scheduling | None = None  # as changed since
        self._live: dict[str, Generation] = {}
        self._gone = False
        self._leaving: dict[str, str] = {}  # finished from this side, why; the engine has not said so yet
        self._idle = asyncio.Event()
        self._idle.set()

    # -- from start to end ---------------------------------------------------------------------------------------

    async def ready(self) -> EngineInfo:
        """Wait until the engine can take requests.

        Raises:
            EngineError: it could not start, with the reason.
        """
        if self._info is None:
            loop = asyncio.get_running_loop()
            self._info = loop.create_future()
            self._sock.setblocking(False)
            await loop.create_unix_connection(lambda: self, sock=self._sock)
        return await asyncio.shield(self._info)

    @property
    def info(self) -> EngineInfo:
        """What the engine said when it was ready."""
        assert self._info is not None
        return self._info.result()

    @property
    def healthy(self) -> bool:
        """The engine is there and has not failed."""
        return self._transport is not None and not self._gone

    @property
    def num_live(self) -> int:
        return len(self._live)

    async def drain(self, timeout: float) -> None:
        """Refuse newcomers, give those who run `timeout` seconds to end, then abort them."""
        self.draining = True
        try:
            await asyncio.wait_for(self._idle.wait(), timeout)
        except TimeoutError:
            for generation in list(self._live.values()):
                generation.finish("abort")

    def close(self) -> None:
        """Let the engine go: it ends when its channel does.  What still runs ends with an error."""
        self._let_go("the server is shutting down")

    # -- scheduling ----------------------------------------------------------------------------------------------

    @property
    def scheduling(self) -> Scheduling:
        """What was last asked for."""
        return self._scheduling or self.info.scheduling

    def reschedule(self, changes: Mapping[str, Any]) -> Scheduling:
        """Change discipline and limits from the next plan on: all that `changes` names, or nothing.

        Raises:
            ValueError: one line that says what is wrong.
            Refused: the engine is gone.
        """
        scheduling = self.scheduling.changed(changes, self.info.limits)
        if not self.healthy:
            self._refuse(ENGINE_DEAD, f"the engine is not running: {self.failure}")
        self._scheduling = scheduling
        self._send(Configure(scheduling))
        return scheduling

    # -- requests ------------------------------------------------------------------------------------------------

    def submit(self, request: Add) -> Generation:
        """Start a generation.

        Raises:
            Refused: not now, or not under this name.
        """
        request_id = request.request_id
        self._admit(request_id)
        generation = Generation(request_id, self._finish_here)
        self._live[request_id] = generation
        self._idle.clear()
        now = time.monotonic_ns()
        self._tell(lambda observer: observer.arrived(request_id, len(request.prompt), now))
        self._send(request)
        return generation

    def _admit(self, request_id: str) -> None:
        if not self.healthy:
            self._refuse(ENGINE_DEAD, f"the engine is not running: {self.failure or 'it has not started'}")
        if self.draining:
            self._refuse(DRAINING, "the server is shutting down and takes no new requests")
        if request_id in self._live or request_id in self._leaving:
            self._refuse(DUPLICATE_ID, f"a request named {request_id!r} is still alive")
        assert self._transport is not None
        if (len(self._live) + len(self._leaving) >= self._max_live
                or self._transport.get_write_buffer_size() > MAX_UNSENT):
            self._refuse(QUEUE_FULL, f"{len(self._live)} requests are waiting or running; try again later")

    def _refuse(self, kind: str, message: str) -> None:
        self._tell(lambda observer: observer.refused(kind))
        raise Refused(kind, message)

    def _finish_here(self, generation: Generation, reason: str) -> None:
        """Called by a living generation."""
        request_id = generation.request_id
        self._forget(request_id)
        self._leaving[request_id] = reason
        generation.end(reason)
        self._send(Finish(request_id, reason))

    def _forget(self, request_id: str) -> None:
        del self._live[request_id]
        if not self._live:
            self._idle.set()

    def _send(self, command: Command) -> None:
        """Never waits: what the engine has not read yet stays in the transport's buffer, bounded by `_admit`."""
        if self._transport is not None:
            self._transport.write(frame(encode(command)))

    # -- reports -------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one in all but its class

    def data_received(self, data: bytes) -> None:
        try:
            for message in self._unframer.feed(data):
                self._take(decode_report(message))
        except (ChannelClosed, msgspec.DecodeError) as error:
            self._fail(f"the engine sent what cannot be read ({error})")

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail("the engine process ended" + (f" ({exc})" if exc else ""))

    def _take(self, report: Loading | EngineInfo | StepRecord | EngineFailed) -> None:
        if isinstance(report, StepRecord):
            self._hand_out(report)
        elif isinstance(report, Loading):
            self._on_loading(report)
        elif isinstance(report, EngineFailed):
            self._fail(report.message)
        elif self._info is not None and not self._info.done():
            self._info.set_result(report)

    def _hand_out(self, record: StepRecord) -> None:
        live = self._live
        logprobs = record.logprobs or ((),) * len(record.token_ids)
        for request_id, tokens, row_logprobs in zip(record.request_ids, record.token_ids, logprobs, strict=False):
            if tokens:
                generation = live.get(request_id)
                if generation is not None:
                    generation.push(tokens, row_logprobs)
        for request_id, num_cached in zip(record.admitted, record.cached, strict=True):
            generation = live.get(request_id)
            if generation is not None and generation.num_cached < 0:
                generation.num_cached = num_cached
        for row in record.ended:
            generation = live.get(row.request_id)
            if generation is not None:
                self._forget(row.request_id)
                generation.end(row.reason, row.message)
            else:
                self._leaving.pop(row.request_id, None)
        self._tell(lambda observer: observer.stepped(record))

    def _tell(self, news: Callable[[Observer], None]) -> None:
        for observer in self.observers:
            try:
                news(observer)
            except Exception:  # who only listens must not end what it listens to
                logger.exception("an observer failed")

    def _fail(self, message: str) -> None:
        if not self._gone:
            if self._info is not None and self._info.done():  # else whoever waits for `ready` is told
                logger.error("the engine failed: %s", message)
            self.failure = message
            self._let_go(message)

    def _let_go(self, message: str) -> None:
        """The engine is gone: end everyone, once."""
        if self._gone:
            return
        self._gone = True
        if self._transport is not None:
            self._transport.close()
        if self._info is not None and not self._info.done():
            self._info.set_exception(EngineError(message))
        lost = dict.fromkeys(self._live, "error") | self._leaving
        for generation in self._live.values():
            generation.end("error", message)
        self._live.clear()
        self._leaving.clear()
        self._idle.set()
        now = time.monotonic_ns()
        ended = tuple(RowEnd(request_id, reason, 0, message) for request_id, reason in lost.items())
        self._tell(lambda observer: observer.stepped(StepRecord(-1, now, now, ended=ended)))
