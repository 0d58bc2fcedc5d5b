"""Routes about the server and its model: scheduling, models, tokens, aborts, health and metrics."""

from __future__ import annotations

import logging
import time
from http import HTTPStatus
from typing import Any

import msgspec

from slotwise.api.generate.context import Api, Observers, RequestLimits, ServedEngine, ServerClients, TextService
from slotwise.api.generate.output_constraints import allowed_tools
from slotwise.api.generate.prompts import Encoding
from slotwise.api.http.api_errors import bad_request, from_refusal
from slotwise.api.http.http_exchange import HttpExchange, about
from slotwise.api.limits.bodies import warn_of_unknown_fields, warn_of_unknown_keys
from slotwise.api.limits.server_settings import ServerSettings
from slotwise.api.limits.tiers import read_tiers
from slotwise.api.openai.completions import conversation_of
from slotwise.api.protocol.admin_protocol import DetokenizeRequest, TokenizeRequest, WhatIfRequest
from slotwise.api.protocol.decoding import decode, decode_object
from slotwise.engine.refusals import Refused
from slotwise.version import __version__

logger = logging.getLogger(__name__)

MAX_SETTINGS = 64 << 10  # bytes of a body that changes something
STARTED = int(time.time())
PROMETHEUS = b"text/plain; version=0.0.4; charset=utf-8"


@about(takes_body=False)
async def health(engine: ServedEngine, exchange: HttpExchange) -> None:
    """200 while requests are accepted.  An engine in a long step is busy; one without heartbeats is frozen."""
    engine_client = engine.client
    state: dict[str, Any] = {
        "status": "ok", "engine": engine_client.state, "last_step_age_s": engine_client.last_step_age,
        "num_live": engine_client.num_live}
    if (refusal := engine_client.refusal) is None:
        await exchange.respond_json(state)
        return
    error = from_refusal(refusal)
    state |= {"status": "asleep" if engine.sleep_level else "unavailable", "error": error.content()}
    await exchange.respond(msgspec.json.encode(state), error.status, headers=error.headers())


async def version(exchange: HttpExchange) -> None:
    """The version of Slotwise."""
    await exchange.respond_json({"version": __version__})


async def load(api: Api, exchange: HttpExchange) -> None:
    """Exchanges in progress in this server, not counting this one; its slots, and the requests in them and waiting."""
    api.observers.batched_observer.flush()
    timelines = api.observers.recorder.timelines
    await exchange.respond_json({
        "server_load": api.num_exchanges - 1, "num_requests_running": timelines.num_running,
        "num_requests_waiting": timelines.num_waiting, "max_num_seqs": api.engine.client.scheduling.max_num_seqs})


@about(media_type="text/plain")
async def metrics(observers: Observers, exchange: HttpExchange) -> None:
    """Metrics in Prometheus' text format."""
    observers.batched_observer.flush()
    await exchange.respond(observers.metrics.exposition(), content_type=PROMETHEUS)


async def experts(observers: Observers, exchange: HttpExchange) -> None:
    """Tokens of each expert of each layer, since the engine started and lately; no layers without experts."""
    observers.batched_observer.flush()
    await exchange.respond_json({"layers": observers.metrics.experts.table()})


def model_card(
        engine: ServedEngine, settings: ServerSettings, text: TextService, name: str) -> dict[str, object]:
    """The entry of one model in the list; `root` of an adapter is its folder.  Raises ApiError: there is none."""
    info, adapter = engine.client.info, engine.models.adapter(name)
    if name not in engine.models.names:
        name = settings.served_model_name  # it was asked for by an alias
    created, root, parent = (STARTED, info.model, None) if adapter is None else (
        adapter.created, adapter.module.path, adapter.module.base_model_name or settings.served_model_name)
    return {
        "id": name, "object": "model", "created": created, "owned_by": "slotwise", "root": root, "parent": parent,
        "max_model_len": info.limits.max_model_len,
        "default_sampling_params": settings.sampling_defaults.given,
        "capabilities": capabilities(engine, settings, text),
        "tool_call_parser": text.output_format.tools or None,
        "reasoning_parser": text.output_format.reasoning or None,
        "chat_template_kwargs": text.prompts.template_kwargs,
    }


def capabilities(engine: ServedEngine, settings: ServerSettings, text: TextService) -> list[str]:
    """What requests may ask of the model: `chat` where it has a template, `tools` where its calls can be read, ..."""
    form, generates = text.output_format, not engine.client.info.generation_objection
    chats, embeds = generates and text.prompts.has_template, not settings.pooling_defaults.objection
    num_labels = len(settings.pooling_defaults.labels)
    able = {"completion": generates, "chat": chats, "embedding": embeds,
            "score": num_labels == 1 or (not num_labels and (embeds or chats)), "classification": num_labels > 0,
            "decision": generates, "tools": chats and bool(form.tools), "reasoning": generates and bool(form.reasoning)}
    return [name for name, is_able in able.items() if is_able]


async def scheduling(engine: ServedEngine, limits: RequestLimits, exchange: HttpExchange) -> None:
    """The scheduling settings in force."""
    await exchange.respond_json(_scheduling(engine, limits))


def _scheduling(engine: ServedEngine, limits: RequestLimits) -> dict[str, Any]:
    return engine.client.scheduling.as_settings() | {"tiers": limits.tiers.settings}


async def reschedule(clients: ServerClients, engine: ServedEngine, limits: RequestLimits,
                     exchange: HttpExchange) -> None:
    """Change scheduling settings from the next step on: the whole body or nothing of it."""
    async with clients.bodies.reading(exchange, MAX_SETTINGS) as body:
        changes = decode_object(body)
    try:
        tiers = read_tiers(changes["tiers"]) if "tiers" in changes else limits.tiers.settings
        limits.tiers.check(tiers)
        engine.client.reschedule(changes | {"tiers": [tier.tier() for tier in tiers]})
    except ValueError as error:
        raise bad_request(str(error)) from error
    except Refused as refused:
        raise from_refusal(refused) from refused
    limits.tiers.change(tiers)
    changed = _scheduling(engine, limits)
    logger.info("scheduling is now %s", changed)
    await exchange.respond_json(changed)


@about(body=WhatIfRequest)
async def what_if(clients: ServerClients, observers: Observers, exchange: HttpExchange) -> None:
    """The last minutes, replayed under other scheduling settings, next to what was measured; changes nothing."""
    async with clients.bodies.reading(exchange, MAX_SETTINGS) as body:
        request = decode(WhatIfRequest, body)
        warn_of_unknown_fields(exchange, WhatIfRequest, body)
    await exchange.respond_json(await observers.what_if.answer(exchange.holder, request))


async def models(
        engine: ServedEngine, settings: ServerSettings, text: TextService, exchange: HttpExchange) -> None:
    """The served model, once by each of its names, and its adapters."""
    cards = [model_card(engine, settings, text, name) for name in engine.models.names]
    await exchange.respond_json({"object": "list", "data": cards})


async def model(engine: ServedEngine, settings: ServerSettings, text: TextService, exchange: HttpExchange) -> None:
    """The served model, or one of its adapters."""
    await exchange.respond_json(model_card(engine, settings, text, exchange.scope["path_params"]["model"]))


@about(body=TokenizeRequest, statuses=(HTTPStatus.TOO_MANY_REQUESTS,))
async def tokenize(api: Api, exchange: HttpExchange) -> None:
    """Token ids of a text, or of messages through the chat template."""
    api.limits.quotas.count_request(api.limits.account(exchange))
    async with api.clients.bodies.reading(exchange) as body:
        request = decode(TokenizeRequest, body)
        warn_of_unknown_fields(exchange, TokenizeRequest, body)
        warn_of_unknown_keys(exchange, "messages", request.messages)
        api.engine.models.adapter(request.model)
        if (request.prompt is None) == (request.messages is None):
            raise bad_request("give either prompt or messages", "prompt")
        if request.messages is not None:
            chat, encoding = request.as_chat(), Encoding(bool(request.add_special_tokens))
            allowed_tools(api.text.output_format, chat)
            conversation = await conversation_of(api, exchange, chat)
            tokens = (await api.text.prompts.of_chat(conversation, exchange.holder, encoding)).ids
        else:
            request.check_text()
            special = request.add_special_tokens is not False
            tokens = await api.text.prompts.plain(request.prompt or "", exchange.holder, add_special_tokens=special)
    inner = api.text.prompts.tokenizer.inner
    texts = [inner.id_to_token(token) for token in tokens] if request.return_token_strs else None
    await exchange.respond_json({
        "count": len(tokens), "max_model_len": api.engine.client.info.limits.max_model_len, "tokens": tokens,
        "token_strs": texts})


@about(body=DetokenizeRequest, statuses=(HTTPStatus.TOO_MANY_REQUESTS,))
async def detokenize(clients: ServerClients, engine: ServedEngine, limits: RequestLimits, text: TextService,
                     exchange: HttpExchange) -> None:
    """The text of token ids."""
    limits.quotas.count_request(limits.account(exchange))
    async with clients.bodies.reading(exchange) as body:
        request = decode(DetokenizeRequest, body)
        warn_of_unknown_fields(exchange, DetokenizeRequest, body)
        engine.models.adapter(request.model)
        prompt = await text.prompts.decode(request.tokens, exchange.holder)
    await exchange.respond_json({"prompt": prompt})
