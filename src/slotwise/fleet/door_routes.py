"""The routes of the front door.

What generates goes to the replica that the router chooses.  A response, a history or a queue position by its id is
asked of every replica, for one of them has it; an abort is sent to all.

Routes about one replica go to the one that `?replica=NAME` names, or to all; the router's pages show which there are.

    GET /events?replica=1    ─► replica 1 alone
    GET /admin/scheduling    ─► every replica: {"replicas": {"0": its answer, "1": its answer}}
    GET /events              ─► the only replica; of several, 400 that lists them
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Mapping, Sequence
from html import escape
from http import HTTPStatus
from typing import Any
from urllib.parse import quote, urlencode

import msgspec

from slotwise.api.admin import pages
from slotwise.api.admin.admin import MAX_SETTINGS, PROMETHEUS
from slotwise.api.admin.event_stream import MAX_UNSENT, NDJSON, UNREAD
from slotwise.api.admin.html import link_page, reference_page
from slotwise.api.admin.lifecycle import LOAD, MAX_ADAPTER_BODY, UNLOAD, LoadAdapterRequest, UnloadAdapterRequest
from slotwise.api.admin.openapi import document
from slotwise.api.admin.pages import respond_timeline
from slotwise.api.generate.request_log import POOLING
from slotwise.api.http.api_errors import ApiError, ClientGone, ErrorBody, bad_request
from slotwise.api.http.http_exchange import Endpoint, HttpExchange
from slotwise.api.openai.responses import RESPONSES
from slotwise.api.protocol.decoding import decode
from slotwise.fleet.door import MAX_REPLICAS, Door, merged
from slotwise.fleet.forward import Forwarding
from slotwise.fleet.replica_adapters import AdapterChange
from slotwise.fleet.upstream import (
    Answer,
    ReplicaLost,
    Upstream,
    answer_of,
    ask,
    ask_all,
    end,
    headers_of,
    no_replica,
    prompt_of,
    returned,
    send,
    target_of,
)
from slotwise.observe.timeline import page_builder as timeline_page

PARAMETER = "replica"
logger = logging.getLogger(__name__)
RESPONSE_ID = re.compile(r"[\w-]{1,200}", re.ASCII)


# -- one replica, or each ----------------------------------------------------------------------------------------------


def named_in(exchange: HttpExchange) -> tuple[str, str]:
    """Returns the replica that the query names, "" for none, and the target without that."""
    given = exchange.query()
    names = [value for name, value in given if name == PARAMETER]
    if len(names) > 1 or names == [""]:
        raise bad_request(f"{PARAMETER}: name one replica", PARAMETER)
    rest = urlencode([one for one in given if one[0] != PARAMETER])
    path = quote(exchange.scope["path"])
    return names[0] if names else "", path + (f"?{rest}" if rest else "")


def replica_of(door: Door, name: str, path: str) -> Upstream:
    """Returns the replica of that name; of "" the only one.  Raises ApiError."""
    found = {one.name: one for one in door.replicas.upstreams}
    if not found:
        raise no_replica()
    if not name and len(found) == 1:
        return next(iter(found.values()))
    if name not in found:
        wrong = f"no replica {name!r:.80} answers" if name else f"{path} is of one replica"
        raise bad_request(f"{wrong}: ask for {path}?{PARAMETER}=NAME, where NAME is one of {', '.join(found)}",
                          PARAMETER)
    return found[name]


async def of_one(door: Door, exchange: HttpExchange) -> None:
    """The answer of the replica that `?replica=NAME` names, or of the only one."""
    name, target = named_in(exchange)
    upstream = replica_of(door, name, exchange.scope["path"])
    async with door.clients.bodies.reading(exchange, MAX_SETTINGS) as body:
        try:
            await send(exchange, await ask(upstream, exchange, exchange.scope["method"], target, body))
        except ReplicaLost as error:
            raise _lost(upstream) from error


async def of_each(door: Door, exchange: HttpExchange) -> None:
    """The answer of the replica that `?replica=NAME` names; without one, of every replica by its name."""
    name, target = named_in(exchange)
    if name:
        await of_one(door, exchange)
        return
    method, asked = exchange.scope["method"], list(door.replicas.upstreams)
    async with door.clients.bodies.reading(exchange, MAX_SETTINGS) as body:
        answers = await ask_all(asked, exchange, method, target, body)
    if not answers:
        raise no_replica()
    obeyed = [one.name for one, answer in answers if answer.status == HTTPStatus.OK]
    for one, answer in answers:
        if answer.status != HTTPStatus.OK:
            raise _refusal(one.name, answer, obeyed)
    answered = [one for one, _ in answers]
    for one in asked:
        if method != "GET" and one not in answered:  # what was to change may not have
            raise _lost(one, obeyed)
    await exchange.respond_json({"replicas": {one.name: msgspec.Raw(answer.body) for one, answer in answers}})


def _refusal(name: str, answer: Answer, obeyed: Sequence[str]) -> ApiError:
    try:
        error = msgspec.json.decode(answer.body, type=ErrorBody).error
    except msgspec.DecodeError:
        return ApiError(HTTPStatus.BAD_GATEWAY, f"replica {name} answered with {answer.status}")
    return ApiError(answer.status, f"replica {name}: {error.message}{_done_by(obeyed)}", error.param, error.code)


def _lost(upstream: Upstream, obeyed: Sequence[str] = ()) -> ApiError:
    return ApiError(HTTPStatus.SERVICE_UNAVAILABLE, f"replica {upstream.name} was lost{_done_by(obeyed)}",
                    code="replica_lost")


def _done_by(obeyed: Sequence[str]) -> str:
    return f" (done by replica {', '.join(obeyed)})" if obeyed else ""


async def events(door: Door, exchange: HttpExchange) -> None:
    """Stream the event log of the replica that `?replica=NAME` names, or of the only one."""
    name, target = named_in(exchange)
    upstream = replica_of(door, name, exchange.scope["path"])
    exchange.limit_unsent(MAX_UNSENT)
    exchange.end_at_eof()
    try:
        async with upstream.until_lost() as scope, exchange.watched(lambda: end(scope)), upstream.sending(
                exchange.scope["method"], target, headers_of(exchange), b"") as response:
            if response.content_type.encode() != NDJSON:
                await send(exchange, answer_of(response, await response.read()))
                return
            exchange.more += returned(response.headers)
            door.subscriptions.add(scope)
            try:
                await _send_in_time(exchange, exchange.event(b"", NDJSON))
                async for part in response.content.iter_any():
                    await _send_in_time(exchange, exchange.event(part, NDJSON))
            finally:
                door.subscriptions.discard(scope)
    except ReplicaLost as error:
        if not exchange.status:
            raise _lost(upstream) from error
    await _send_in_time(exchange, exchange.close())


async def _send_in_time(exchange: HttpExchange, sending: Awaitable[None]) -> None:
    """Sends a part of a stream; disconnects a client that leaves it unread as long as a replica would.

    Raises:
        ClientGone: it was.
    """
    try:
        async with asyncio.timeout(UNREAD):
            await sending
    except TimeoutError as error:
        exchange.abort()
        raise ClientGone from error


# -- pages -------------------------------------------------------------------------------------------------------------


async def timeline(door: Door, exchange: HttpExchange) -> None:
    """The live timeline of one replica, as an HTML page, which offers the others."""
    await respond_timeline(exchange, timeline_page.of_router())


LINKS: tuple[link_page.Link, ...] = (
    ("/docs", "every route and field, with a form to try each"), ("/timeline", "the batch of a replica, live"),
    ("/replicas", "every replica: its address, its state and its load"), ("/health", "whether requests are accepted"),
    ("/v1/models", "the model"), ("/metrics", "of the router and of all replicas, for Prometheus"))


async def index(door: Door, exchange: HttpExchange) -> None:
    """The chat page; with `--no-ui` the page of `/links`."""
    if door.settings.ui:
        await pages.respond_chat(exchange, door.settings.root_path, is_router=True)
    else:
        await links(door, exchange)


async def links(door: Door, exchange: HttpExchange) -> None:
    """A page with the replicas and links to their timelines; where a key is needed it names neither."""
    needs_key, root_path = door.clients.keys.needed, door.settings.root_path
    told = "This router asks for a key." if needs_key else _replicas_in_words(door)
    example = link_page.Example(link_page.address_of(exchange, root_path), link_page.CHATS, "", needs_key)
    await pages.respond_links(exchange, told, LINKS, door.settings, example)


def _replicas_in_words(door: Door) -> str:
    """Returns the replicas as HTML, each with its state and a link to its timeline."""
    page = f"{door.settings.root_path}/timeline?{PARAMETER}="
    rows = "".join(
        f'<tr><td><a href="{page}{quote(one.name)}">{escape(one.name)}</a></td>'
        f"<td>{'draining' if one.is_draining else 'up' if one.is_up else 'down'}</td>"
        f"<td>{one.report.num_running} running, {one.report.num_waiting} waiting</td></tr>"
        for one in door.fleet.replicas)
    return ("This is a router. Each of its replicas has a timeline of its own:"
            f"<table><tr><th>replica</th><th>state</th><th>requests</th></tr>{rows}</table>")


async def openapi(door: Door, exchange: HttpExchange) -> None:
    """The OpenAPI document: the routes of a replica, as this router answers them, and the router's own."""
    await exchange.respond(await _document(door, door.settings.root_path))


async def docs(door: Door, exchange: HttpExchange) -> None:
    """The routes, their bodies, and a form to try each, from the OpenAPI document, as an HTML page."""
    root_path = door.settings.root_path
    await pages.respond_reference(exchange, reference_page.page(await _document(door, root_path), root_path))


async def _document(door: Door, root_path: str) -> bytes:
    """Returns a replica's description with the routes of this router.  Raises ApiError: none answers."""
    for upstream in door.replicas.upstreams:
        try:
            status, content = await upstream.get("/openapi.json")
        except ReplicaLost:
            continue
        if status == HTTPStatus.OK:
            found: dict[str, Any] = msgspec.json.decode(content)
            found["servers"] = [{"url": root_path or "/"}]
            for path, methods in found["paths"].items():
                for method, operation in methods.items():
                    if (method.upper(), path) in OF_ONE_OR_EACH:
                        operation["summary"] += f" Of the replica that {PARAMETER} names."
                        operation.setdefault("parameters", []).append(
                            {"name": PARAMETER, "in": "query", "schema": {"type": "string"}})
            own = msgspec.json.decode(document(OWN_ROUTES, ()))["paths"]
            own["/admin/replicas"]["put"]["requestBody"]["content"]["application/json"]["schema"] = {
                "type": "object", "properties": {"replicas": {"type": "integer", "minimum": 1}},
                "required": ["replicas"]}
            found["paths"] |= own
            return msgspec.json.encode(found)
    raise no_replica()


OF_ONE = (("GET", "/replica"), ("GET", "/experts"), ("GET", "/cache/report"), ("POST", "/what_if"),
          ("POST", "/v1/load_model"))
OF_EACH = (("GET", "/admin/scheduling"), ("PUT", "/admin/scheduling"), ("POST", "/sleep"), ("POST", "/wake_up"),
           ("GET", "/is_sleeping"), ("POST", "/reset_prefix_cache"))
OF_ONE_OR_EACH = frozenset((*OF_ONE, *OF_EACH, ("GET", "/events"), ("GET", "/timeline")))
REPLICA_ROUTES = (
    *[(method, path, of_one) for method, path in OF_ONE], *[(method, path, of_each) for method, path in OF_EACH],
    ("GET", "/events", events), ("GET", "/timeline", timeline), ("GET", "/", index), ("GET", "/links", links),
    ("GET", "/docs", docs), ("GET", "/openapi.json", openapi))


# -- adapters ----------------------------------------------------------------------------------------------------------


async def load_adapter(door: Door, exchange: HttpExchange) -> None:
    """Load an adapter on all replicas, or on none; a replica that starts later loads it, too."""
    async with door.clients.bodies.reading(exchange, MAX_ADAPTER_BODY) as body:
        change = AdapterChange(decode(LoadAdapterRequest, body).lora_name, LOAD, body)
        found = await door.adapters.change(door.replicas.upstreams, exchange, change)
    await send(exchange, found[0])


async def unload_adapter(door: Door, exchange: HttpExchange) -> None:
    """Unload an adapter on all replicas; requests that have it go on to their end."""
    async with door.clients.bodies.reading(exchange, MAX_ADAPTER_BODY) as body:
        change = AdapterChange(decode(UnloadAdapterRequest, body).lora_name, UNLOAD, body)
        found = await door.adapters.change(door.replicas.upstreams, exchange, change)
    told = [msgspec.json.decode(answer.body) for answer in found]
    await exchange.respond_json(told[0] | {
        "num_unfinished_exchanges": sum(one["num_unfinished_exchanges"] for one in told)})


# -- the router's own --------------------------------------------------------------------------------------------------


class ReplicasRequest(msgspec.Struct):
    """The body of PUT /admin/replicas."""

    replicas: int


# -- requests ----------------------------------------------------------------------------------------------------------


async def forward(door: Door, exchange: HttpExchange) -> None:
    """Send a request to the replica that the router chooses, or that `?replica=NAME` names."""
    door.check_open()
    async with door.clients.bodies.reading(exchange) as body:
        headers: Mapping[bytes, bytes] = dict(exchange.scope["headers"])
        prompt = prompt_of(body, door.salt(headers), headers)
        others: frozenset[str] = frozenset()
        if name := named_in(exchange)[0]:
            wanted = replica_of(door, name, exchange.scope["path"]).name
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
    """Exchanges in progress, not counting this one; all replicas' slots and requests; the least wait predicted."""
    reports = [one.report for one in door.fleet.usable()]
    await exchange.respond_json({
        "server_load": door.num_exchanges - 1, "num_requests_running": sum(one.num_running for one in reports),
        "num_requests_waiting": sum(one.num_waiting for one in reports),
        "max_num_seqs": sum(one.slots for one in reports),
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
        *POOLING, "/tokenize", "/detokenize")],
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
    *REPLICA_ROUTES,
)
