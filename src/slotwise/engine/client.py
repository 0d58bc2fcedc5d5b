"""The engine as the API process sees it: submit, stream, finish, drain.  asyncio, one thread, no torch.

One message arrives per step; it is decoded once and its tokens are handed to the generations they belong to.  Every
generation ends exactly once, also when the engine dies.  Engines may come and go behind one service: each is attached
when the last is gone, and finds the scheduling that was last asked for.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from slotwise.engine.generation import Generation
from slotwise.engine.heartbeat import HeartbeatMonitor
from slotwise.engine.link import Link, linked
from slotwise.engine.messages import (
    Add,
    Command,
    Configure,
    EngineInfo,
    Finish,
    Loading,
    QueuePositionAnswer,
    QueuePositionQuery,
    Report,
    RequestPosition,
    RowEnd,
    StepRecord,
)
from slotwise.engine.observer import Observer
from slotwise.engine.queue_position import QueuePositionQueries, TooManyQueries
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
TOO_MANY_QUERIES = "too_many_questions"
DUPLICATE_ID = "duplicate_id"


class EngineClient:
    """The engine, whichever is attached.

    Args:
        on_loading: told how far an engine is, until it is ready.
        max_live: generations that may be alive at once.
    """

    def __init__(self, on_loading: Callable[[Loading], None] = lambda progress: None, max_live: int = MAX_LIVE) -> None:
        self.observers: list[Observer] = []
        self.failure = ""  # why there is no engine, when it was not asked to go
        self.draining = False
        self.hopeless = asyncio.Event()  # there will be no engine any more
        self._on_loading = on_loading
        self.max_live = max_live
        self._link: Link | None = None
        self._starting: asyncio.Future[EngineInfo] | None = None
        self._info: EngineInfo | None = None  # of the engine attached last
        self._scheduling: Scheduling | None = None  # as changed since the first start
        self._live: dict[str, Generation] = {}
        self._leaving: dict[str, str] = {}  # finished from this side, why; the engine has not said so yet
        self._idle = asyncio.Event()
        self._idle.set()
        self._lost = asyncio.Event()
        self._queries = QueuePositionQueries()

    # -- engines come and go -------------------------------------------------------------------------------------

    async def attach(self, sock: socket.socket, heartbeat: HeartbeatMonitor) -> EngineInfo:
        """Take the engine behind `sock`, one end of `channel.pair()`, and wait until it can take requests.

        Its end, `give_up` included, ends every generation.

        Raises:
            EngineError: it could not start, with the reason.
        """
        assert self._link is None or self._link.lost, "one engine at a time"
        self._lost.clear()
        self._starting = asyncio.get_running_loop().create_future()
        self._link = Link(heartbeat, self._receive, self._on_lost)
        await linked(sock, self._link)
        self._info = await asyncio.shield(self._starting)
        self.failure = ""
        info = self._info
        self._notify(lambda observer: observer.started(info))
        if self._scheduling is not None:
            self._send(Configure(self._scheduling))
        return info

    async def lost(self) -> str:
        """Wait until the engine is gone: why."""
        await self._lost.wait()
        return self.failure

    def give_up(self, why: str) -> None:
        """Have nothing to do with the engine any more; it may not even notice."""
        if self._link is not None:
            self._link.cut(why)

    @property
    def info(self) -> EngineInfo:
        """What the engine said when it was ready; the last one, when there is none."""
        assert self._info is not None
        return self._info

    @property
    def state(self) -> str:
        """The engine's: `idle`, `busy` and, when it takes no requests, `down`, `loading` or `frozen`."""
        if self._link is None or self._link.lost:
            return "down"
        if self._starting is None or not self._starting.done():
            return "loading"
        if self._link.heartbeat.frozen:
            return "frozen"
        return "busy" if self._live or self._leaving else "idle"

    @property
    def healthy(self) -> bool:
        """There is an engine, and it lives."""
        return self.state in ("idle", "busy")

    @property
    def trouble(self) -> str:
        """Why no request can be taken, for a person."""
        if self.state == "frozen":
            return "the engine shows no sign of life"
        return f"the engine is not running: {self.failure or 'it has not started'}"

    @property
    def last_step_age(self) -> float | None:
        """Seconds since this engine's last step was heard of; None: never."""
        return self._link.heartbeat.last_step_age if self._link is not None and not self._link.lost else None

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
            self._refuse(ENGINE_DEAD, self.trouble)
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
        self._notify(lambda observer: observer.arrived(request_id, len(request.prompt), now))
        self._send(request)
        return generation

    async def queue_positions(self, request_ids: Sequence[str]) -> tuple[RequestPosition, ...]:
        """Where those of these requests stand that live, as the engine knows it once the step under way has ended.

        Raises:
            Refused: the engine is gone, or too many ask.
        """
        try:
            return await self._queries.ask(request_ids, self._ask)
        except TooManyQueries:
            raise Refused(TOO_MANY_QUERIES, "too many ask where their requests are; try again later") from None

    def _ask(self, query: QueuePositionQuery) -> None:
        if self._link is None or not self.healthy:
            raise Refused(ENGINE_DEAD, self.trouble)
        self._link.send(query)

    def check_open(self) -> None:
        """Raises Refused while nobody at all is let in: known before a request is read."""
        if not self.healthy:
            self._refuse(ENGINE_DEAD, self.trouble)
        if self.draining:
            self._refuse(DRAINING, "the server is shutting down and takes no new requests")

    def _admit(self, request_id: str) -> None:
        self.check_open()
        if request_id in self._live or request_id in self._leaving:
            self._refuse(DUPLICATE_ID, f"a request named {request_id!r} is still alive")
        assert self._link is not None
        if len(self._live) + len(self._leaving) >= self.max_live or self._link.num_unsent > MAX_UNSENT:
            self._refuse(QUEUE_FULL, f"{len(self._live)} requests are waiting or running; try again later")

    def _refuse(self, kind: str, message: str) -> None:
        self._notify(lambda observer: observer.refused(kind))
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
        """Never waits; what may pile up unsent is bounded by `_admit`."""
        if self._link is not None and not self._link.lost:
            now = time.monotonic_ns()
            self._notify(lambda observer: observer.commanded(command, now))
            self._link.send(command)

    # -- reports -------------------------------------------------------------------------------------------------

    def _receive(self, report: Report) -> None:
        if isinstance(report, StepRecord):
            self._publish(report)
        elif isinstance(report, QueuePositionAnswer):
            self._queries.answered(report)
        elif isinstance(report, Loading):
            self._on_loading(report)
        elif isinstance(report, EngineInfo) and self._starting is not None and not self._starting.done():
            self._starting.set_result(report)

    def _publish(self, record: StepRecord) -> None:
        live = self._live
        logprobs = record.logprobs or ((),) * len(record.token_ids)
        for request_id, tokens, row_logprobs in zip(record.request_ids, record.token_ids, logprobs, strict=False):
            if tokens:
                generation = live.get(request_id)
                if generation is not None:
                    generation.push(tokens, row_logprobs)
        for request_id, num_cached in zip(record.admitted, record.cached, strict=True):
            generation = live.get(request_id)
            if generation is not None:
                generation.moved_ns = record.started_ns
                if generation.num_cached < 0:
                    generation.num_cached = num_cached
        for request_id, _ in record.preempted:
            generation = live.get(request_id)
            if generation is not None:
                generation.moved_ns = record.started_ns
        for row in record.ended:
            generation = live.get(row.request_id)
            if generation is not None:
                self._forget(row.request_id)
                generation.end(row.reason, row.message)
            else:
                self._leaving.pop(row.request_id, None)
        self._notify(lambda observer: observer.stepped(record))

    def _notify(self, news: Callable[[Observer], None]) -> None:
        for observer in self.observers:
            try:
                news(observer)
            except Exception:  # who only listens must not end what it listens to
                logger.exception("an observer failed")

    def _on_lost(self, message: str) -> None:
        """The engine is gone: end everyone, once."""
        self.failure = message
        self._lost.set()
        if self._starting is not None and not self._starting.done():
            self._starting.set_exception(EngineError(message))
        self._queries.give_up(Refused(ENGINE_DEAD, self.trouble))
        lost = dict.fromkeys(self._live, "error") | self._leaving
        for generation in self._live.values():
            generation.end("error", message)
        self._live.clear()
        self._leaving.clear()
        self._idle.set()
        now = time.monotonic_ns()
        self._notify(lambda observer: observer.lost(message, now))
        ended = tuple(RowEnd(request_id, reason, 0, message) for request_id, reason in lost.items())
        free = self._info.limits.num_blocks if self._info is not None else 0
        self._notify(lambda observer: observer.stepped(StepRecord(-1, now, now, ended=ended, num_free_blocks=free)))
