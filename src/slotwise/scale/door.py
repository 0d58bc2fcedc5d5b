"""The front door: the routes of several replicas behind one address.

What generates goes to the replica that the router chooses.  A response, a history or a queue position by its id is
asked of every replica, for one of them has it; an abort is sent to all.  `one_replica.py` has the other routes of a
replica, and the pages.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import re
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from http import HTTPStatus
from typing import Any

import msgspec

from slotwise.engine.refusals import ADAPTER_LOADING
from slotwise.errors import printable
from slotwise.routing.fleet import Fleet, Shed
from slotwise.routing.prompt import RoutedRequest
from slotwise.routing.replica import Report
from slotwise.scale import one_replica
from slotwise.scale.adapters import Adapters, load_adapter, unload_adapter
from slotwise.scale.door_metrics import DoorMetrics, merged
from slotwise.scale.forward import Answer, Forwarding, ask_all, no_replica, send, target_of
from slotwise.scale.prefill import Prompts
from slotwise.scale.replicas import Replicas
from slotwise.scale.routed import Prompt, prompt_of
from slotwise.scale.upstream import end
from slotwise.server.admin import MAX_SETTINGS, PROMETHEUS
from slotwise.server.api_errors import ApiError, bad_request
from slotwise.server.asgi import Endpoint
from slotwise.server.context import Clients
from slotwise.server.decoding import decode
from slotwise.server.http_exchange import HttpExchange
from slotwise.server.lifecycle import LOAD, UNLOAD
from slotwise.server.request_log import RequestLog
from slotwise.server.responses import RESPONSES
from slotwise.server.settings import ServerSettings
from slotwise.transfer.settings import BOTH, CONSUMER, HOW, PRODUCER

MAX_REPLICAS = 256
DRAINED = 0.05  # seconds between two looks whether all requests have ended
logger = logging.getLogger(__name__)
RESPONSE_ID = re.compile(r"[\w-]{1,200}", re.ASCII)


class ReplicasRequest(msgspec.Struct):
    """The body of PUT /admin/replicas."""

    replicas: int


class Door:
    """Args: settings: of the service in front; replicas have their own."""

    def __init__(self, settings: ServerSettings, fleet: Fleet) -> None:
        self.settings, self.fleet = settings, fleet
        self.clients = Clients(settings)
        self.request_log = RequestLog(settings)
        self.metrics = DoorMetrics()
        self.adapters = Adapters(fleet)
        self.num_exchanges = 0
        self.replicas: Replicas  # set before anything is served
        self.is_draining = False
        self.prompts = Prompts()
        self.subscriptions: set[asyncio.Timeout] = set()  # to events of replicas, which have no end of their own
        self.is_fixed = False  # the number of replicas stays as it is
        self._has_warned = False
        self._ids = itertools.count()
        self._secret = blake2b("\0".join(sorted({*settings.all_keys, settings.admin_api_key})).encode()).digest()
        self._leaving: set[asyncio.Task[None]] = set()

    @property
    def hopeless(self) -> asyncio.Event:
        """Set when no replica can be started."""
        return self.replicas.hopeless

    def request_of(self, prompt: Prompt, request_id: str) -> RoutedRequest:
        """What the router knows of a request."""
        told = [one.report.piece_tokens for one in self.fleet.replicas if one.report.piece_tokens]
        return prompt.request(request_id, sum(told) / len(told) if told else 0.0,
                              self.fleet.adapters | self.adapters.wanted)

    @property
    def may_transfer(self) -> bool:
        """Whether prompts may travel between replicas; warns once where only the secret is missing."""
        if not self.settings.kv_transfer_secret and not self._has_warned:
            self._has_warned = True
            logger.warning("replicas have roles, and this router no transfer secret, so each computes its own prompts: "
                           "%s", HOW)
        return bool(self.settings.kv_transfer_secret)

    def next_id(self) -> str:
        return str(next(self._ids))

    def salt(self, headers: Mapping[bytes, bytes]) -> str:
        """What the prompts of one key begin with: the same at every door with the same keys; "" without keys."""
        if not self.clients.keys.needed:
            return ""
        given = headers.get(b"authorization") or headers.get(b"x-api-key", b"")
        return blake2b(given.rpartition(b" ")[2], key=self._secret, digest_size=16).hexdigest()

    def refused(self, kind: str) -> None:
        self.metrics.shed += kind == "shed"

    def shed(self, shed: Shed, adapter: str = "") -> ApiError:
        """The error of a request that no replica serves in time, which is counted."""
        if not shed.wait and adapter and self.fleet.usable():
            return ApiError(HTTPStatus.SERVICE_UNAVAILABLE, f"no replica has the adapter {printable(adapter)!r} now; "
                            "try again later", "model", ADAPTER_LOADING)
        if not shed.wait:
            return no_replica()
        self.refused("shed")
        return ApiError(HTTPStatus.SERVICE_UNAVAILABLE, "every replica is busy: the first output is predicted after "
                        f"{shed.wait:.0f} s", code="queue_full", retry_after=shed.retry_after)

    def check_open(self) -> None:
        """Raises ApiError while the door is being closed."""
        if self.is_draining:
            raise ApiError(HTTPStatus.SERVICE_UNAVAILABLE, "the server is shutting down", code="draining")

    async def drain(self) -> None:
        """Refuses new requests, waits for unfinished ones until the shutdown timeout, and ends streams of events."""
        self.is_draining = True
        ends = asyncio.get_running_loop().time() + self.settings.shutdown_timeout
        while self.num_unfinished and asyncio.get_running_loop().time() < ends:
            await asyncio.sleep(DRAINED)
        for scope in list(self.subscriptions):
            end(scope)

    @property
    def own_routes(self) -> Sequence[tuple[str, str, Endpoint]]:
        """Routes that no replica has."""
        return OWN_ROUTES

    @property
    def num_unfinished(self) -> int:
        return sum(one.num_sent for one in self.fleet.replicas)

    def resize(self, number: int) -> None:
        """Starts replicas, or drains the last ones, so that there are `number`."""
        names = self.replicas.names
        for name in names[number:]:
            task = asyncio.create_task(self.replicas.leave(name, self.settings.shutdown_timeout))
            self._leaving.add(task)
            task.add_done_callback(self._leaving.discard)
        used = {one.name for one in self.fleet.replicas}
        unused = (str(index) for index in itertools.count() if str(index) not in used)
        for _ in range(number - len(names)):
            self.replicas.add(next(unused))

    def described(self) -> list[dict[str, Any]]:
        """All replicas, for GET /replicas."""
        return [{
            "name": one.name, "url": self.replicas.url_of(one.name), "is_up": one.is_up,
            "is_draining": one.is_draining, "role": _role(one.report), "num_sent": one.num_sent,
            "num_running": one.report.num_running,
            "num_waiting": one.report.num_waiting, "num_cached_pieces": one.num_pieces,
            "adapters": sorted(one.adapters), "refused_adapters": self.adapters.refused(one.name),
            "prefill_tokens_per_second": round(one.report.prefill_rate, 1)} for one in self.fleet.replicas]


def _role(report: Report) -> str:
    """What a replica does for others, in vLLM's words; "" for one that works alone."""
    roles = {(True, False): PRODUCER, (False, True): CONSUMER, (True, True): BOTH}
    return roles.get((report.sends_prompts, report.receives_prompts), "")


# -- requests ----------------------------------------------------------------------------------------------------------


async def forward(door: Door, exchange: HttpExchange) -> None:
    """Send a request to the replica that the router chooses, or that `?replica=NAME` names."""
    door.check_open()
    async with door.clients.bodies.reading(exchange) as body:
        headers: Mapping[bytes, bytes] = dict(exchange.scope["headers"])
        prompt = prompt_of(body, door.salt(headers), headers)
        others: frozenset[str] = frozenset()
        if name := one_replica.named_in(exchange)[0]:
            wanted = one_replica.replica_of(door, name, exchange.scope["path"]).name
            others = frozenset(one.name for one in door.fleet.replicas) - {wanted}
        elif prompt.previous_response_id:
            others = await _without_response(door, exchange, prompt.previous_response_id)
        await Forwarding(door, exchange, body, prompt, others).run()


async def _without_response(door: Door, exchange: HttpExchange, response_id: str) -> frozenset[str]:
    """The replicas without a stored response, where one has it; else none, and any may say that it is missing."""
    target = f"{RESPONSES}/{response_id}"
    names = [upstream.name for upstream in door.replicas.upstreams]
    answers = await _of_all(door, exchange, "GET", target) if RESPONSE_ID.fullmatch(response_id) else []
    have = [name for name, answer in answers if answer.status == HTTPStatus.OK]
    return frozenset(names) - frozenset(have) if have else frozenset()


async def _of_all(door: Door, exchange: HttpExchange, method: str, target: str, body: bytes = b"",
                  ) -> list[tuple[str, Answer]]:
    """The answers of all replicas, each with its name."""
    return [(one.name, answer) for one, answer in await ask_all(
        door.replicas.upstreams, exchange, method, target, body)]


async def by_id(door: Door, exchange: HttpExchange) -> None:
    """The answer of the replica that knows this id."""
    answers = [answer for _, answer in await _of_all(door, exchange, exchange.scope["method"], target_of(exchange))]
    if not answers:
        raise no_replica()
    await send(exchange, next((one for one in answers if one.status != HTTPStatus.NOT_FOUND), answers[0]))


async def models(door: Door, exchange: HttpExchange) -> None:
    """The served model by each of its names, and the adapters of all replicas."""
    answers = [answer for _, answer in await _of_all(door, exchange, "GET", "/v1/models")]
    listed = [msgspec.json.decode(answer.body)["data"] for answer in answers if answer.status == HTTPStatus.OK]
    if not listed:
        raise no_replica()
    cards = {card["id"]: card for data in reversed(listed) for card in data}
    order = dict.fromkeys(card["id"] for data in listed for card in data)
    await exchange.respond_json({"object": "list", "data": [cards[name] for name in order]})


async def abort_requests(door: Door, exchange: HttpExchange) -> None:
    """Abort requests by their ids, wherever they are."""
    async with door.clients.bodies.reading(exchange) as body:
        answers = [answer for _, answer in await _of_all(door, exchange, "POST", "/abort_requests", body)]
    refused = next((one for one in answers if one.status != HTTPStatus.OK), None)
    if refused is not None:
        await send(exchange, refused)
        return
    told = [msgspec.json.decode(answer.body) for answer in answers]
    aborted = list(dict.fromkeys(name for one in told for name in one["aborted"]))
    missing = dict.fromkeys(name for one in told for name in one["not_found"])
    await exchange.respond_json({"aborted": aborted, "not_found": [name for name in missing if name not in aborted]})


# -- the door itself ---------------------------------------------------------------------------------------------------


async def health(door: Door, exchange: HttpExchange) -> None:
    """200 while a replica takes requests."""
    usable, status = len(door.fleet.usable()), HTTPStatus.OK
    state: dict[str, Any] = {"status": "ok", "replicas": len(door.fleet.replicas), "usable": usable,
                             "num_live": door.num_unfinished}
    if door.is_draining or not usable:
        status = HTTPStatus.SERVICE_UNAVAILABLE
        state["status"] = "draining" if door.is_draining else "unavailable"
    await exchange.respond(msgspec.json.encode(state), status)


async def load(door: Door, exchange: HttpExchange) -> None:
    """Requests in progress, not counting this one, and the least predicted wait for a first output."""
    await exchange.respond_json({"server_load": door.num_exchanges - 1,
                                 "predicted_wait_s": round(door.fleet.predicted_wait(), 3)})


async def replicas(door: Door, exchange: HttpExchange) -> None:
    """Every replica: where it is, its state and its load."""
    await exchange.respond_json({"replicas": door.described()})


async def resize(door: Door, exchange: HttpExchange) -> None:
    """Change the number of replicas: new ones are started, the last ones drained."""
    async with door.clients.bodies.reading(exchange, MAX_SETTINGS) as body:
        number = decode(ReplicasRequest, body).replicas
    if not door.replicas.starts_processes:
        raise bad_request("replicas: those at addresses are started and stopped by others", "replicas")
    if door.is_fixed:
        raise bad_request("replicas: those for prefill and for decode are as many as at the start", "replicas")
    if not 1 <= number <= MAX_REPLICAS:
        raise bad_request(f"replicas: must be between 1 and {MAX_REPLICAS}", "replicas")
    door.check_open()
    door.resize(number)
    await exchange.respond_json({"replicas": door.described()})


async def metrics(door: Door, exchange: HttpExchange) -> None:
    """Metrics of the door, and of every replica with its label, in Prometheus' text format."""
    answers = await _of_all(door, exchange, "GET", "/metrics")
    told = merged([(name, one.body.decode()) for name, one in answers if one.status == HTTPStatus.OK])
    await exchange.respond((door.metrics.exposition(door.fleet) + told).encode(), content_type=PROMETHEUS)


OWN_ROUTES: tuple[tuple[str, str, Endpoint], ...] = (
    ("GET", "/replicas", replicas), ("PUT", "/admin/replicas", resize))
ROUTES: tuple[tuple[str, str, Endpoint], ...] = (
    *[("POST", path, forward) for path in (
        "/v1/completions", "/v1/chat/completions", RESPONSES, "/v1/messages", "/v1/messages/count_tokens",
        "/v1/embeddings", "/tokenize", "/detokenize")],
    ("GET", "/version", forward),
    ("GET", "/v1/models", models),
    ("GET", "/v1/models/{model:path}", by_id),
    ("POST", LOAD, load_adapter),
    ("POST", UNLOAD, unload_adapter),
    ("GET", RESPONSES + "/{response_id:path}", by_id),
    ("DELETE", RESPONSES + "/{response_id:path}", by_id),
    ("GET", "/explain/{request_id:path}", by_id),
    ("GET", "/requests/{request_id:path}", by_id),
    ("POST", "/abort_requests", abort_requests),
    ("GET", "/health", health),
    ("GET", "/ping", health),
    ("POST", "/ping", health),
    ("GET", "/metrics", metrics),
    ("GET", "/load", load),
    *OWN_ROUTES,
    *one_replica.ROUTES,
)
