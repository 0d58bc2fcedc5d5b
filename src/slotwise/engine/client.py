"""The API process' client of the engine: submit, stream, finish, drain.  asyncio, one thread, no torch.

One message arrives per step; it is decoded once and its tokens go to their generations (`generation.py`).  A
service may outlive its engines: the next one is attached when the last is gone, and receives the scheduling settings
last requested.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

from slotwise.core.prompt_lookup import DivergedTokens
from slotwise.core.record import Counters, Outcome, RequestEnd, StepRecord
from slotwise.core.tenant_capacity import TenantCapacity
from slotwise.engine.generation import Generation, LiveGenerations
from slotwise.engine.ipc import EngineConnection, HeartbeatMonitor
from slotwise.engine.messages import (
    AdapterLoaded,
    Add,
    Command,
    Configure,
    DivergenceAnswer,
    DivergenceQuery,
    EngineInfo,
    Finish,
    GiveBack,
    GivenBack,
    LoadAdapter,
    Loading,
    Observer,
    Query,
    QueuePositionAnswer,
    QueuePositionQuery,
    RemoveStored,
    RequestPosition,
    StepOutputs,
    StoredRemoved,
    UnloadAdapter,
)
from slotwise.engine.record_codec import StepReport, unpacked
from slotwise.engine.refusals import (
    ADAPTER_LOADING,
    DRAINING,
    DUPLICATE_ID,
    ENGINE_DEAD,
    NOT_REMOVED,
    PAUSED,
    QUEUE_FULL,
    SHUTTING_DOWN,
    TOO_MANY_QUERIES,
    AdapterError,
    CheckpointChanged,
    EngineError,
    Refused,
)
from slotwise.engine.scheduling import Scheduling

MAX_UNSENT = 64 << 20  # bytes; a reserve and the last request accepted may exceed it


class UnsentCommands:
    """Bytes of commands that the engine has not read yet, shared by tenants.

        ├──── read by the kernel or the engine ────┤ Add of a │ Add of b │ Finish │ Add of a ┤
        0                             written - unsent                                 written

    The transport sends in order, so the commands that end before `written - unsent` have left it.
    """

    def __init__(self) -> None:
        self._capacity = TenantCapacity("bytes of requests have not reached the engine", MAX_UNSENT)
        self._written = 0
        self._unsent: deque[tuple[int, str, int]] = deque()  # end of a command, its tenant and size

    def objection(self, tenant: str, num_unsent: int) -> str:
        """Why a tenant may send no further request while `num_unsent` bytes are unsent; empty when it may."""
        self._release(num_unsent)
        return self._capacity.objection(tenant, 1)

    def wrote(self, tenant: str, size: int, num_unsent: int) -> None:
        """Counts a command of `size` bytes; `num_unsent` bytes are unsent now.  The few queries are not counted."""
        self._written += size
        self._unsent.append((self._written, tenant, size))
        self._capacity.acquire(tenant, size)
        self._release(num_unsent)

    def clear(self) -> None:
        """Forgets all commands: the connection was lost."""
        self._release(0)

    def _release(self, num_unsent: int) -> None:
        while self._unsent and self._unsent[0][0] <= self._written - num_unsent:
            _, tenant, size = self._unsent.popleft()
            self._capacity.release(tenant, size)


MAX_WAITING = 64
Answer = TypeVar("Answer")


class Queries(Generic[Answer]):
    """Matches answers to queries of one kind, and fails the pending query when the engine is lost.

    One query is in progress at a time, because its answer may have to visit the whole queue; a few more may wait.
    """

    def __init__(self) -> None:
        self._turn = asyncio.Lock()
        self._num_waiting = 0
        self._number = 0  # of the latest query
        self._answer: asyncio.Future[tuple[Answer, ...]] | None = None  # to that one

    async def ask(self, send: Callable[[int], None]) -> tuple[Answer, ...]:
        """Returns the answer to a query.

        Args:
            send: sends the query of this number when it is its turn; may raise.

        Raises:
            Refused: `MAX_WAITING` queries wait already.
            Exception: the one given to `give_up`.
        """
        if self._num_waiting >= MAX_WAITING:
            raise Refused(TOO_MANY_QUERIES, "too many ask about their requests; try again later")
        self._num_waiting += 1
        try:
            async with self._turn:
                send(self._number + 1)
                self._number += 1
                self._answer = asyncio.get_running_loop().create_future()
                return await self._answer
        finally:
            self._num_waiting -= 1

    def answered(self, number: int, answer: tuple[Answer, ...]) -> None:
        """Completes the pending query; ignores the answer to a cancelled one."""
        if number == self._number and self._answer is not None and not self._answer.done():
            self._answer.set_result(answer)

    def give_up(self, why: Exception) -> None:
        """Fails the pending query with `why`."""
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(why)


class GiveBackAnswer:
    """The answer to a `GiveBack`: one at a time."""

    def __init__(self) -> None:
        self._objection: asyncio.Future[str] | None = None

    async def wait(self) -> str:
        """Waits for the next answer; returns why the memory was kept, or ""."""
        self._objection = asyncio.get_running_loop().create_future()
        return await self._objection

    def answered(self, answer: GivenBack) -> None:
        if self._objection is not None and not self._objection.done():
            self._objection.set_result(answer.objection)

    def give_up(self, why: Exception) -> None:
        """The engine is lost."""
        self.answered(GivenBack(str(why)))


class AdapterLoads:
    """Which adapters the attached engine has, and which it loads.

        LoadAdapter(number, path)   ─►  a thread reads and packs it  ─►  AdapterLoaded(number, objection)
        UnloadAdapter(number)       ─►  forgotten when no request has it

    Numbers are never used again, so no cached prefix of another adapter is found under one.
    """

    def __init__(self) -> None:
        self._loaded: set[int] = set()
        self._pending: dict[int, asyncio.Future[str]] = {}

    def __contains__(self, number: int) -> bool:
        return number in self._loaded

    async def load(self, number: int, path: str, send: Callable[[LoadAdapter], None]) -> str:
        """Returns a digest of the loaded adapter's factors.

        Raises:
            AdapterError: it cannot be loaded.
            Exception: that of `send`, or the one given to `give_up`.
        """
        send(LoadAdapter(number, path))
        answer = self._pending[number] = asyncio.get_running_loop().create_future()
        return await asyncio.shield(answer)

    def answered(self, report: AdapterLoaded) -> None:
        """Completes a load, which its caller may have left."""
        answer = self._pending.pop(report.number)
        if not report.objection:
            self._loaded.add(report.number)
            answer.set_result(report.digest)
        else:
            answer.set_exception(AdapterError(report.objection))
            answer.exception()  # or asyncio logs it where its caller has left

    def forget(self, number: int) -> None:
        """The engine is told to forget an adapter: requests may no longer name it."""
        self._loaded.discard(number)

    def give_up(self, why: Exception) -> None:
        """The engine is lost, with its adapters."""
        self._loaded.clear()
        for answer in self._pending.values():
            answer.set_exception(why)
            answer.exception()
        self._pending.clear()


MAX_LIVE = 4096  # generations submitted and not yet ended by the engine

logger = logging.getLogger(__name__)


class EngineClient:
    """Client of the attached engine.

    Args:
        on_loading: receives the loading progress of an engine until it is ready.
        max_live: most unfinished generations.
    """

    def __init__(self, on_loading: Callable[[Loading], None] = lambda progress: None, max_live: int = MAX_LIVE) -> None:
        self.observers: list[Observer] = []
        self.failure = ""  # why the engine was lost, unless it was stopped on purpose
        self.draining = False
        self.pause = ""  # why no request is taken for a while
        self.hopeless = asyncio.Event()  # no further engine will be started
        self._on_loading = on_loading
        self.max_live = max_live
        self._connection: EngineConnection | None = None
        self._starting: asyncio.Future[EngineInfo] | None = None
        self._info: EngineInfo | None = None  # of the engine attached last
        self._scheduling: Scheduling | None = None  # as changed since the first start
        self._generations = LiveGenerations()
        self._ids = itertools.count()  # of requests
        self._lost = asyncio.Event()
        self._positions = Queries[RequestPosition]()
        self._divergences = Queries[DivergedTokens]()
        self._removals = Queries[StoredRemoved]()
        self._given_back = GiveBackAnswer()
        self._adapters = AdapterLoads()
        self._unsent = UnsentCommands()

    # -- attaching engines ---------------------------------------------------------------------------------------

    async def attach(self, sock: socket.socket, heartbeat: HeartbeatMonitor) -> EngineInfo:
        """Attaches the engine behind `sock`, one end of `ipc.pair()`, and waits until it is ready.

        The loss of the engine, `give_up` included, ends every generation.

        Raises:
            EngineError: the engine could not start; the message says why.
            CheckpointChanged: its model is not that of the engine before.
        """
        assert self._connection is None or self._connection.lost, "one engine at a time"
        self._lost.clear()
        self._starting = asyncio.get_running_loop().create_future()
        self._connection = EngineConnection(heartbeat, self._receive, self._on_lost)
        await self._connection.connect(sock)
        return await asyncio.shield(self._starting)

    async def lost(self) -> str:
        """Waits until the engine is lost and returns why."""
        await self._lost.wait()
        return self.failure

    def give_up(self, why: str) -> None:
        """Closes the connection to the engine and ends every generation."""
        if self._connection is not None:
            self._connection.cut(why)

    @property
    def info(self) -> EngineInfo:
        """What the engine reported when it became ready; of the last engine when there is none."""
        assert self._info is not None
        return self._info

    @property
    def state(self) -> str:
        """The engine's state: `idle` or `busy`; `down`, `loading` or `frozen` when it takes no requests."""
        if self._connection is None or self._connection.lost:
            return "down"
        if self._starting is None or not self._starting.done():
            return "loading"
        if self._connection.heartbeat.frozen:
            return "frozen"
        return "busy" if self._generations else "idle"

    @property
    def healthy(self) -> bool:
        """True if an engine is attached, ready and responsive."""
        return self.state in ("idle", "busy")

    @property
    def trouble(self) -> str:
        """Why no request can be taken, as an error message."""
        if self.state == "frozen":
            return "the engine shows no sign of life"
        return f"the engine is not running: {self.failure or 'it has not started'}"

    @property
    def last_step_age(self) -> float | None:
        """Seconds since the attached engine's last step record arrived; None: none has."""
        connection = self._connection
        return None if connection is None or connection.lost else connection.heartbeat.last_step_age

    @property
    def num_live(self) -> int:
        return self._generations.num_live

    async def drain(self, timeout: float) -> None:
        """Refuses new requests for good, waits up to `timeout` seconds for the unfinished ones, then aborts them."""
        self.draining = True
        await self._generations.end_within(timeout)

    async def pause_for(self, why: str, timeout: float) -> None:
        """Refuses new requests with the message `why` until `pause` is ""; else like `drain`."""
        self.pause = why
        await self._generations.end_within(timeout)

    async def give_back(self) -> None:
        """Has the engine give the memory of its cache back; only while no request is unfinished.

        Raises:
            EngineError: it could not, or is lost.
        """
        if self._connection is None or not self.healthy:
            raise EngineError(self.trouble)
        self._connection.send(GiveBack())
        if objection := await self._given_back.wait():
            raise EngineError(objection)

    # -- scheduling and adapters ---------------------------------------------------------------------------------

    @property
    def scheduling(self) -> Scheduling:
        """The settings last requested; those of the start if none were."""
        return self._scheduling or self.info.scheduling

    def reschedule(self, changes: Mapping[str, Any]) -> Scheduling:
        """Changes discipline and limits from the next plan on: every setting in `changes`, or none.

        Raises:
            ValueError: one line that says what is wrong.
            Refused: there is no engine.
        """
        scheduling = self.scheduling.changed(changes, self.info.limits)
        if not self.healthy:
            self._refuse(ENGINE_DEAD, self.trouble)
        self._scheduling = scheduling
        self._send(Configure(scheduling))
        return scheduling

    async def load_adapter(self, number: int, path: str) -> str:
        """Loads an adapter while steps run, under a new number.  Returns a digest of its factors.

        Raises:
            AdapterError: it cannot be loaded.
            Refused: there is no engine, or it was lost.
        """
        return await self._adapters.load(number, path, self._ask)

    def unload_adapter(self, number: int) -> None:
        """Forgets an adapter when the requests that have it end; requests may no longer name it."""
        if number in self._adapters and self._connection is not None:
            self._adapters.forget(number)
            self._connection.send(UnloadAdapter(number))

    # -- requests ------------------------------------------------------------------------------------------------

    def submit(self, request: Add) -> Generation:
        """Starts a generation, and gives its request an id.

        Raises:
            Refused: the engine takes no requests, the queue is full, or the name is in use.
        """
        self._admit(request)
        request.request_id = request_id = next(self._ids)
        generation = Generation(request_id, request.name, self._finish_here)
        self._generations.add(generation)
        now = time.monotonic_ns()
        self._notify(lambda observer: observer.arrived(request_id, len(request.spec.prompt), now))
        self._send(request)
        return generation

    async def queue_positions(self, request_ids: Sequence[int]) -> tuple[RequestPosition, ...]:
        """Queue positions of those of these requests that are unfinished, after the current step of the engine.

        Raises:
            Refused: there is no engine, or too many queries wait.
        """
        return await self._positions.ask(lambda number: self._ask(QueuePositionQuery(number, tuple(request_ids))))

    async def divergences(self, request_ids: Sequence[int]) -> tuple[DivergedTokens, ...]:
        """The cached tokens around the divergences of these requests' prompts, after the current step of the engine.

        Raises:
            Refused: there is no engine, or too many queries wait.
        """
        return await self._divergences.ask(lambda number: self._ask(DivergenceQuery(number, tuple(request_ids))))

    async def remove_stored(self, tenant: str | None = None) -> int:
        """Removes the blocks on disk of a tenant, or all.  Returns their number.

        Raises:
            Refused: there is no engine, too many queries wait, or blocks could not be removed.
        """
        (removed,) = await self._removals.ask(lambda number: self._ask(RemoveStored(number, tenant)))
        if removed.failure:
            raise Refused(NOT_REMOVED, removed.failure)
        return removed.num_blocks

    def _ask(self, query: Query) -> None:
        if self._connection is None or not self.healthy:
            raise Refused(ENGINE_DEAD, self.trouble)
        self._connection.send(query)

    @property
    def refusal(self) -> Refused | None:
        """Why no request is taken now; None while requests are."""
        if self.draining:
            return Refused(DRAINING, SHUTTING_DOWN)
        if self.pause:
            return Refused(PAUSED, self.pause)
        return None if self.healthy else Refused(ENGINE_DEAD, self.trouble)

    def check_open(self) -> None:
        """Raises Refused while no request is taken; called before a request is read."""
        if (refusal := self.refusal) is not None:
            self._refuse(refusal.kind, refusal.message)

    def _admit(self, request: Add) -> None:
        self.check_open()
        if self._generations.has_name(request.name):
            self._refuse(DUPLICATE_ID, f"request id {request.name!r} is already in use")
        if request.spec.adapter and request.spec.adapter not in self._adapters:  # the next engine loads it again
            self._refuse(ADAPTER_LOADING, "the adapter is being loaded; try again later")
        assert self._connection is not None
        if len(self._generations) >= self.max_live:
            self._refuse(QUEUE_FULL, f"{self.num_live} requests are waiting or running; try again later")
        if objection := self._unsent.objection(request.spec.slo.tenant, self._connection.num_unsent):
            self._refuse(QUEUE_FULL, f"{objection}; try again later")

    def _refuse(self, kind: str, message: str) -> None:
        self._notify(lambda observer: observer.refused(kind))
        raise Refused(kind, message)

    def _finish_here(self, generation: Generation, reason: str) -> None:
        """Called by an unfinished generation."""
        self._generations.finish(generation, reason)
        self._send(Finish(generation.request_id, reason))

    def _send(self, command: Command) -> None:
        """Never waits; `_admit` bounds the bytes left unsent."""
        if self._connection is not None and not self._connection.lost:
            now = time.monotonic_ns()
            self._notify(lambda observer: observer.commanded(command, now))
            size = self._connection.send(command)
            tenant = command.spec.slo.tenant if isinstance(command, Add) else ""
            self._unsent.wrote(tenant, size, self._connection.num_unsent)

    # -- reports -------------------------------------------------------------------------------------------------

    def _receive(self, report: Any) -> None:
        if isinstance(report, StepReport):
            record = unpacked(report)
            self._generations.stepped(record, report.num_parts)
            self._notify(lambda observer: observer.stepped(record))
        elif isinstance(report, StepOutputs):
            self._generations.deliver(report)
        elif isinstance(report, QueuePositionAnswer):
            self._positions.answered(report.number, report.positions)
        elif isinstance(report, DivergenceAnswer):
            self._divergences.answered(report.number, report.divergences)
        elif isinstance(report, StoredRemoved):
            self._removals.answered(report.number, (report,))
        elif isinstance(report, GivenBack):
            self._given_back.answered(report)
        elif isinstance(report, AdapterLoaded):
            self._adapters.answered(report)
        elif isinstance(report, Loading):
            self._on_loading(report)
        elif isinstance(report, EngineInfo) and self._starting is not None and not self._starting.done():
            if self._info is None or report.identity == self._info.identity:
                self._started(report, self._starting)
            else:  # refused here, before any request can reach it
                changed = CheckpointChanged()
                self._starting.set_exception(changed)
                self.give_up(str(changed))

    def _started(self, info: EngineInfo, starting: asyncio.Future[EngineInfo]) -> None:
        """Records that an engine is ready: observers and the engine get all state before any request arrives."""
        self._info, self.failure = info, ""
        self._notify(lambda observer: observer.started(info))
        if self._scheduling is not None:
            self._send(Configure(self._scheduling))
        starting.set_result(info)

    def _notify(self, news: Callable[[Observer], None]) -> None:
        for observer in self.observers:
            try:
                news(observer)
            except Exception:  # an observer's failure must not end the service
                logger.exception("an observer failed")

    def _on_lost(self, message: str) -> None:
        """Ends every generation, once, after the engine was lost."""
        self.failure = message
        self._lost.set()
        self._unsent.clear()
        if self._starting is not None and not self._starting.done():
            self._starting.set_exception(EngineError(message))
        for waiting in (self._positions, self._divergences, self._removals, self._given_back, self._adapters):
            waiting.give_up(Refused(ENGINE_DEAD, self.trouble))
        lost = self._generations.lost(message)
        now = time.monotonic_ns()
        self._notify(lambda observer: observer.lost(message, now))
        ended = tuple([RequestEnd(request_id, reason, 0, message) for request_id, reason in lost.items()])
        free = self._info.limits.num_blocks if self._info is not None else 0
        record = StepRecord(now, now, outcome=Outcome(ended=ended), counters=Counters(num_free_blocks=free))
        self._notify(lambda observer: observer.stepped(record))
