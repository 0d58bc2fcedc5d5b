"""Adapters of all replicas: loaded and unloaded together through the door, and again where a replica is restarted.

    POST ─► every replica ─┬► all obey ─────► kept as wanted
                           └► one refuses ──► undone, and its words are the answer
    a report differs ──► what is wanted, to that replica alone ──► or refused, and not sent again

Requests for an adapter are sent to replicas that have it as it is wanted: one whose files have changed since is
unloaded where it was loaded again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import NamedTuple

import msgspec

from slotwise.api.admin.lifecycle import LOAD, UNLOAD
from slotwise.api.admin.replica_state import AdapterState
from slotwise.api.http.api_errors import ApiError, ErrorBody
from slotwise.api.http.http_exchange import HttpExchange
from slotwise.core.routing.fleet import Fleet
from slotwise.errors import printable
from slotwise.fleet.upstream import Answer, ReplicaLost, Upstream, ask_all, no_replica

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _WantedAdapter:
    """The last word on a name."""

    path: str  # "": it is unloaded
    parent: str = ""
    digest: str = ""  # of its files, by the first report; "": there was none

    def state(self, name: str) -> AdapterState | None:
        return AdapterState(name, self.path, self.parent, self.digest) if self.path else None


class AdapterChange(NamedTuple):
    """A request to every replica."""

    name: str
    target: str
    body: bytes


class ReplicaAdapters:
    """What the door was asked to load and unload, and what each replica has of it."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._wanted: dict[str, _WantedAdapter] = {}
        self._one_at_a_time = asyncio.Lock()
        self._settled: dict[str, float] = {}  # by replica: reports requested before are out of date
        self._refused: dict[str, dict[str, str]] = {}  # by replica and adapter: why it is not loaded there
        self._tasks: dict[str, asyncio.Task[None]] = {}  # by replica: what changes its adapters

    @property
    def wanted(self) -> frozenset[str]:
        """Names of adapters that every replica is to have."""
        return frozenset([name for name, wanted in self._wanted.items() if wanted.path])

    def refused(self, replica: str) -> Mapping[str, str]:
        """Adapters that are wanted and that a replica has not loaded, and why."""
        return self._refused.get(replica, {})

    # -- all replicas --------------------------------------------------------------------------------------------

    async def change(
        self, upstreams: Sequence[Upstream], exchange: HttpExchange, change: AdapterChange,
    ) -> list[Answer]:
        """Sends a change to every replica.  Returns their answers, all 200; the change is wanted from now on.

        Raises:
            ApiError: no replica answers, or one refuses, in its words; those that had obeyed are as before.
        """
        name, is_load = change.name, change.target == LOAD
        async with self._one_at_a_time:
            before = {one.name: one.adapters.get(name) for one in upstreams}
            answers = await ask_all(upstreams, exchange, "POST", change.target, change.body)
            obeyed = [(one, answer) for one, answer in answers if answer.status == HTTPStatus.OK]
            refusals = [(one, answer) for one, answer in answers if answer.status != HTTPStatus.OK
                        and (is_load or not obeyed or answer.status != HTTPStatus.NOT_FOUND)]
            if refusals or not obeyed:
                for one, _ in obeyed:
                    await self._settle(one, {name: before[one.name]})
                raise _refusal(refusals)
            self._wanted[name] = _loaded(obeyed[0][1]) if is_load else _WantedAdapter("")
            for refused in self._refused.values():
                refused.pop(name, None)
            for one, _ in obeyed:
                self._changed(one, [name] if is_load else [], [] if is_load else [name])
            return [answer for _, answer in obeyed]

    def _changed(self, upstream: Upstream, loaded: Collection[str], unloaded: Collection[str]) -> None:
        """A replica has changed; reports requested before now are ignored."""
        now = self._settled[upstream.name] = asyncio.get_running_loop().time()
        known = {name for one in self._fleet.replicas if one.name == upstream.name for name in one.adapters}
        self._fleet.set_adapters(upstream.name, (known | {*loaded}) - {*unloaded}, now)

    # -- one replica ---------------------------------------------------------------------------------------------

    def on_report(self, upstream: Upstream, asked_at: float) -> tuple[str, ...]:
        """Returns the adapters that requests may name on a replica that has reported which it has.

        What is wanted otherwise is sent to it, unless that is under way or it was asked before a change.
        """
        if asked_at < self._settled.get(upstream.name, 0.0):
            return ()  # the fleet knows better
        wrong, refused = self._wrong(upstream), self._refused.get(upstream.name, {})
        for name in refused.keys() - wrong:
            del refused[name]  # its operator has seen to it
        if wrong.keys() - refused and upstream.name not in self._tasks:
            task = self._tasks[upstream.name] = asyncio.create_task(self._mend(upstream, asked_at))
            task.add_done_callback(lambda _: self._tasks.pop(upstream.name))
        return tuple([name for name in upstream.adapters if name not in wrong])

    def lost(self, name: str) -> None:
        """A replica is gone, with its adapters: the next one under its name receives them again."""
        self._refused.pop(name, None)
        self._settled.pop(name, None)

    def end(self) -> None:
        for task in self._tasks.values():
            task.cancel()

    def _wrong(self, upstream: Upstream) -> dict[str, _WantedAdapter]:
        """What is wanted and differs on a replica, by name.  The first that agrees provides the files' digest."""
        found = {}
        for name, wanted in self._wanted.items():
            told = upstream.adapters.get(name)
            if told is not None and told.path == wanted.path:
                wanted.digest = wanted.digest or told.digest
            if (told.path, told.digest) != (wanted.path, wanted.digest) if told is not None else wanted.path:
                found[name] = wanted
        return found

    async def _mend(self, upstream: Upstream, asked_at: float) -> None:
        async with self._one_at_a_time:
            if asked_at < self._settled.get(upstream.name, 0.0):
                return  # a change came first
            asked: dict[str, AdapterState | None] = {}
            for name, wanted in self._wrong(upstream).items():
                told = upstream.adapters.get(name)
                if told is not None and told.path == wanted.path:
                    self._refuse(upstream, name, "its files have changed")
                asked[name] = wanted.state(name) if name not in self.refused(upstream.name) else None
            await self._settle(upstream, asked)

    async def _settle(self, upstream: Upstream, asked: Mapping[str, AdapterState | None]) -> None:
        """Loads adapters on one replica, or unloads them: None.  Does nothing if it is lost."""
        loaded, unloaded = list[str](), list[str]()
        try:
            for name, state in asked.items():
                if objection := await self._send(upstream, name, state):
                    self._refuse(upstream, name, objection)
                else:
                    (unloaded if state is None else loaded).append(name)
        except ReplicaLost:
            return
        self._changed(upstream, loaded, unloaded)

    def _refuse(self, upstream: Upstream, name: str, objection: str) -> None:
        self._refused.setdefault(upstream.name, {})[name] = objection
        logger.error("replica %s does not serve the adapter %s: %s", upstream.name, printable(name),
                     printable(objection))

    async def _send(self, upstream: Upstream, name: str, wanted: AdapterState | None) -> str:
        """Loads an adapter on one replica, or unloads it: None.  Returns why it refuses; "" if it does not.

        Raises:
            ReplicaLost: the replica failed.
        """
        if wanted is None:
            status, content = await upstream.post(UNLOAD, msgspec.json.encode({"lora_name": name}))
            return "" if status in (HTTPStatus.OK, HTTPStatus.NOT_FOUND) else _words(content)
        parent = {"base_model_name": wanted.parent} if wanted.parent else {}
        status, content = await upstream.post(LOAD, msgspec.json.encode(
            {"lora_name": name, "lora_path": wanted.path, "load_inplace": True} | parent))
        return "" if status == HTTPStatus.OK else _words(content)


def _refusal(refusals: Sequence[tuple[Upstream, Answer]]) -> ApiError:
    if not refusals:
        return no_replica()
    upstream, answer = refusals[0]
    try:
        error = msgspec.json.decode(answer.body, type=ErrorBody).error
    except msgspec.DecodeError:
        return ApiError(HTTPStatus.BAD_GATEWAY, f"replica {upstream.name} answered with {answer.status}")
    return ApiError(answer.status, f"replica {upstream.name}: {error.message}", error.param, error.code)


def _words(content: bytes) -> str:
    try:
        return msgspec.json.decode(content, type=ErrorBody).error.message
    except msgspec.DecodeError:
        return content[:200].decode(errors="replace")


class _Card(msgspec.Struct):
    """What a replica answers that has loaded an adapter."""

    root: str
    parent: str = ""


def _loaded(answer: Answer) -> _WantedAdapter:
    card = msgspec.json.decode(answer.body, type=_Card)
    return _WantedAdapter(card.root, card.parent)
