"""Routes that change which model is served, with vLLM's names: sleep, wake up, load another model or an adapter."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from http import HTTPStatus
from typing import Any

import msgspec

from slotwise.api.admin.admin import model_card
from slotwise.api.generate.context import Observers, ServedEngine, ServerClients, TextService
from slotwise.api.http.api_errors import ApiError, bad_request, from_refusal
from slotwise.api.http.http_exchange import HttpExchange, about
from slotwise.api.limits.bodies import warn_of_unknown_fields
from slotwise.api.limits.server_settings import LoraModule, ServerSettings
from slotwise.api.protocol.admin_protocol import LoadModelRequest
from slotwise.api.protocol.decoding import decode, decode_object
from slotwise.api.protocol.unsupported import refuse
from slotwise.engine.refusals import EngineError, Refused
from slotwise.engine.sleep import LEVELS, Busy, Sleep

SLEEP, WAKE_UP, RESET, LOAD_MODEL = "/sleep", "/wake_up", "/reset_prefix_cache", "/v1/load_model"
MAX_BODY = 16 << 10  # bytes
ELSEWHERE_OWNED = "this server does not start its engine, so it cannot end it"
ELSEWHERE = {  # parameters of vLLM's that have no meaning here
    "mode": "running requests finish within --shutdown-timeout, and are aborted then",
    "tags": "the whole model wakes up"}
MAX_ADAPTER_BODY = 64 << 10  # bytes
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


@about(takes_body=False, statuses=(HTTPStatus.CONFLICT,), query=(
    {"name": "level", "schema": {"enum": [str(level) for level in LEVELS], "default": "1"}},))
async def sleep(clients: ServerClients, engine: ServedEngine, settings: ServerSettings, exchange: HttpExchange) -> None:
    """Give memory back: the cache's at level 1, by default, and the weights' as well at level 2."""
    await _no_fields(clients, exchange)
    given = _query(exchange, "level").get("level", "1")
    if given not in map(str, LEVELS):
        raise bad_request(f"level: 1 or 2, not {given!r:.40}", "level")
    with _errors():
        await _sleep_of(engine).fall_asleep(int(given), settings.shutdown_timeout)
    await is_sleeping(engine, exchange)


@about(takes_body=False, statuses=(HTTPStatus.CONFLICT,))
async def wake_up(clients: ServerClients, engine: ServedEngine, exchange: HttpExchange) -> None:
    """Serve again after a sleep; the response comes when requests are taken."""
    await _no_fields(clients, exchange)
    _query(exchange)
    with _errors():
        await _sleep_of(engine).wake_up()
    await is_sleeping(engine, exchange)


@about(body=LoadModelRequest, statuses=(HTTPStatus.CONFLICT,))
async def load_model(clients: ServerClients, engine: ServedEngine, exchange: HttpExchange) -> None:
    """Serve another model in the place of this one, once running requests have finished."""
    async with clients.bodies.reading(exchange, MAX_BODY) as body:
        request = decode(LoadModelRequest, body)
        warn_of_unknown_fields(exchange, LoadModelRequest, body)
    if engine.load_model is None:
        raise bad_request(ELSEWHERE_OWNED, code="not_supported")
    with _errors():
        name = await engine.load_model(request.model, request.served_model_name or "")
    await exchange.respond_json({"model": name})


@about(takes_body=False)
async def reset_prefix_cache(clients: ServerClients, engine: ServedEngine, observers: Observers,
                             exchange: HttpExchange) -> None:
    """Forget the key's cached prompts, in memory and on disk; with the admin key, or without keys, all prompts."""
    await _no_fields(clients, exchange)
    _query(exchange)
    sleep, tenant = _sleep_of(engine), "" if clients.keys.is_admin(exchange.tenant) else exchange.tenant
    try:
        sleep.reset_cache(tenant or None)
        observers.batched_observer.flush()
        observers.prefix_index.forget(tenant)
        num_blocks = await engine.client.remove_stored(tenant or None)
    except Refused as refused:
        raise from_refusal(refused) from refused
    await exchange.respond_json({"tenant": "own" if tenant else "all", "num_stored_blocks_removed": num_blocks})


async def is_sleeping(engine: ServedEngine, exchange: HttpExchange) -> None:
    """Whether the model sleeps, and at which level."""
    await exchange.respond_json({"is_sleeping": bool(engine.sleep_level), "level": engine.sleep_level})


def _sleep_of(engine: ServedEngine) -> Sleep:
    """Raises ApiError where the engine cannot sleep."""
    if engine.sleep is None:
        raise bad_request(ELSEWHERE_OWNED, code="not_supported")
    return engine.sleep


@contextlib.contextmanager
def _errors() -> Iterator[None]:
    """Turns errors of a change into responses."""
    try:
        yield
    except ValueError as error:
        raise bad_request(str(error), str(error).partition(":")[0]) from error
    except Busy as error:
        raise ApiError(HTTPStatus.CONFLICT, str(error), code="busy") from error
    except EngineError as error:
        raise ApiError(HTTPStatus.SERVICE_UNAVAILABLE, str(error), code="engine_error") from error


async def _no_fields(clients: ServerClients, exchange: HttpExchange) -> None:
    """Raises ApiError for a body with a field: parameters stand in the query."""
    async with clients.bodies.reading(exchange, MAX_BODY) as body:
        given = decode_object(body) if body.strip() else {}
    for name, value in given.items():
        if value is not None:
            raise bad_request(f"{name:.40}: the body takes no fields; parameters stand in the query", name[:40])


def _query(exchange: HttpExchange, *known: str) -> dict[str, str]:
    """The parameters of a request's query.  Raises ApiError for one that is not `known`."""
    found = dict(exchange.query())
    for name in found.keys() - set(known):
        raise bad_request(f"{name:.40}: not supported: {ELSEWHERE.get(name, 'there is no such parameter')}", name[:40])
    return found


# -- adapters ----------------------------------------------------------------------------------------------------------


class LoadAdapterRequest(msgspec.Struct, kw_only=True):
    lora_name: str  # by which requests name it, as their `model`
    lora_path: str  # a folder of the server's machine, in the format of PEFT
    load_inplace: bool | None = None  # it replaces the adapter of this name; requests that have that one keep it
    base_model_name: str | None = None  # its parent in /v1/models; by default the served model
    is_3d_lora_weight: Any = None  # refused: factors of experts are not supported


class UnloadAdapterRequest(msgspec.Struct, kw_only=True):
    lora_name: str  # of a loaded adapter
    lora_int_id: Any = None  # refused: the name says which


@about(body=LoadAdapterRequest)
async def load_adapter(clients: ServerClients, engine: ServedEngine, settings: ServerSettings, text: TextService,
                       exchange: HttpExchange) -> None:
    """Load an adapter while requests run; the response comes when requests may name it."""
    async with clients.bodies.reading(exchange, MAX_ADAPTER_BODY) as body:
        request = decode(LoadAdapterRequest, body)
        warn_of_unknown_fields(exchange, LoadAdapterRequest, body)
    refuse(request)
    module = LoraModule(request.lora_name, os.path.abspath(request.lora_path), request.base_model_name or "")
    adapter = await engine.models.load(module, in_place=bool(request.load_inplace))
    await exchange.respond_json(model_card(engine, settings, text, adapter.name))


@about(body=UnloadAdapterRequest)
async def unload_adapter(clients: ServerClients, engine: ServedEngine, exchange: HttpExchange) -> None:
    """Unload an adapter: no new request may name it, and its memory is free when those that have it have ended."""
    async with clients.bodies.reading(exchange, MAX_ADAPTER_BODY) as body:
        request = decode(UnloadAdapterRequest, body)
        warn_of_unknown_fields(exchange, UnloadAdapterRequest, body)
    refuse(request)
    adapter = engine.models.unload(request.lora_name)
    await exchange.respond_json({"id": adapter.name, "object": "model", "deleted": True,
                                 "num_unfinished_exchanges": adapter.num_users})
