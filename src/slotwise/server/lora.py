"""`/v1/load_lora_adapter` and `/v1/unload_lora_adapter`: adapters of a server that runs, with vLLM's fields."""

from __future__ import annotations

import os
from typing import Any

import msgspec

from slotwise.server.admin import model_card
from slotwise.server.context import ServedEngine, ServerClients
from slotwise.server.http_exchange import HttpExchange
from slotwise.server.protocol import decode
from slotwise.server.settings import LoraModule, ServerSettings
from slotwise.server.unknown_fields import warn_of_unknown_fields
from slotwise.server.unsupported import refuse

MAX_BODY = 64 << 10  # bytes
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


class LoadAdapterRequest(msgspec.Struct, kw_only=True):
    lora_name: str  # by which requests name it, as their `model`
    lora_path: str  # a folder of the server's machine, in the format of PEFT
    load_inplace: bool | None = None  # it replaces the adapter of this name; requests that have that one keep it
    base_model_name: str | None = None  # what /v1/models tells as its parent; by default the served model
    is_3d_lora_weight: Any = None  # refused: factors of experts are not supported


class UnloadAdapterRequest(msgspec.Struct, kw_only=True):
    lora_name: str  # of a loaded adapter
    lora_int_id: Any = None  # refused: the name says which


async def load_adapter(clients: ServerClients, engine: ServedEngine, settings: ServerSettings,
                       exchange: HttpExchange) -> None:
    """Load an adapter beside the running requests; the answer comes when requests may name it."""
    async with clients.bodies.reading(exchange, MAX_BODY) as body:
        request = decode(LoadAdapterRequest, body)
        warn_of_unknown_fields(exchange, LoadAdapterRequest, body)
    refuse(request)
    module = LoraModule(request.lora_name, os.path.abspath(request.lora_path), request.base_model_name or "")
    adapter = await engine.models.load(module, in_place=bool(request.load_inplace))
    await exchange.respond_json(model_card(engine, settings, adapter.name))


async def unload_adapter(clients: ServerClients, engine: ServedEngine, exchange: HttpExchange) -> None:
    """Unload an adapter: no new request may name it, and its memory is free when those that have it have ended."""
    async with clients.bodies.reading(exchange, MAX_BODY) as body:
        request = decode(UnloadAdapterRequest, body)
        warn_of_unknown_fields(exchange, UnloadAdapterRequest, body)
    refuse(request)
    adapter = engine.models.unload(request.lora_name)
    await exchange.respond_json({"id": adapter.name, "object": "model", "deleted": True,
                                 "num_unfinished_exchanges": adapter.num_users})
