"""`/v1/completions` and `/v1/chat/completions`: from each endpoint's own fields to a `Job`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import NamedTuple

from slotwise.core.params import InvalidParams, SamplingParams
from slotwise.core.slo import SLO
from slotwise.server.context import Api
from slotwise.server.errors import bad_request, from_params
from slotwise.server.generate import Job, answer
from slotwise.server.http_exchange import HttpExchange, checked_request_id
from slotwise.server.logprobs import most_tokens
from slotwise.server.protocol import ChatRequest, CompletionRequest, Generate, check_model, decode
from slotwise.server.shapes import CHAT, COMPLETION, Heading, Shape
from slotwise.server.slo import UNTIERED

COMPLETION_TOKENS = 16  # OpenAI's default of max_tokens; a chat's is whatever fits
RESERVED_VARIABLES = ("messages", "tools", "documents", "add_generation_prompt")


async def completions(api: Api, exchange: HttpExchange) -> None:
    """Continuations of one prompt or several, whole or as a stream."""
    await _respond(api, exchange, COMPLETION, _completion)


async def chat_completions(api: Api, exchange: HttpExchange) -> None:
    """Answers to a conversation, whole or as a stream."""
    await _respond(api, exchange, CHAT, _chat)


async def _completion(api: Api, exchange: HttpExchange, body: bytes) -> Asked:
    request = decode(CompletionRequest, body)
    slo = _check(api, exchange, request)
    api.check_capacity(slo)
    with api.admission_control.entering(slo):
        prompts = await api.prompts.of_completion(request.prompt, api.settings.max_choices, exchange.holder)
    request.prompt = ""
    default = _default(api, slo, request, prompts, COMPLETION_TOKENS, request.logprobs)
    max_tokens = api.prompts.max_tokens(request.max_tokens, max(map(len, prompts)), default)
    params = request.sampling_params(max_tokens, request.logprobs)
    return Asked(request, slo, prompts, params)


async def _chat(api: Api, exchange: HttpExchange, body: bytes) -> Asked:
    request = decode(ChatRequest, body)
    slo = _check(api, exchange, request)
    variables = request.chat_template_kwargs or {}
    if not variables.keys().isdisjoint(RESERVED_VARIABLES):
        raise bad_request("chat_template_kwargs: names a variable that the request sets", "chat_template_kwargs")
    api.check_capacity(slo)
    with api.admission_control.entering(slo):
        prompt = await api.prompts.of_chat(request, exchange.holder, variables)
    request.messages = []
    param = "max_tokens" if request.max_completion_tokens is None else "max_completion_tokens"
    logprobs = (request.top_logprobs or 0) if request.logprobs else None
    default = _default(api, slo, request, [prompt], None, logprobs)
    max_tokens = api.prompts.max_tokens(getattr(request, param), len(prompt), default, param)
    params = request.sampling_params(max_tokens, logprobs)
    return Asked(request, slo, [prompt], params)


class Asked(NamedTuple):
    """A checked request with its prompts, parameters and objectives."""

    request: Generate
    slo: SLO
    prompts: list[list[int]]
    params: SamplingParams


async def _respond(api: Api, exchange: HttpExchange, shape: Shape,
                   check: Callable[[Api, HttpExchange, bytes], Awaitable[Asked]]) -> None:
    _enter(api, exchange)
    async with api.bodies.reading(exchange) as body:
        request, slo, prompts, params = await check(api, exchange, body)
        del body  # frees its memory while the response is generated
    try:
        params.check_vocabulary(api.engine_client.info.vocab_size)
    except InvalidParams as error:
        raise from_params(error) from error
    tier = slo.tier or (UNTIERED if request.service_tier is not None else "")
    heading = Heading.now(shape, exchange.request_id, api.settings.served_model_name, tier)
    salt = _salt(exchange.tenant, request.cache_salt)
    job = Job(request, prompts, params, heading, slo, salt, exchange.received_ns, exchange.traceparent)
    await answer(api, exchange, job)


def _default(api: Api, slo: SLO, request: Generate, prompts: list[list[int]], usual: int | None,
             logprobs: int | None) -> int | None:
    """`max_tokens` by default: `usual`, within the client's quota and the bound of log-probabilities; None: any."""
    num_choices = len(prompts) * (request.n or 1)
    capacity = api.quotas.account(slo.tenant).output_capacity(sum(map(len, prompts)), num_choices)
    bounds = (usual, capacity, most_tokens(num_choices, logprobs))
    return min((bound for bound in bounds if bound is not None), default=None)


def _salt(tenant: str, cache_salt: str | None) -> str:
    """The salt of prefix-cache hashes.  Tenants' names are all of one length: no salt can equal another tenant's."""
    return f"{tenant}:{cache_salt}" if cache_salt else tenant


def _enter(api: Api, exchange: HttpExchange) -> None:
    """Refuse, before its body is read, a request that finds the queue full or its quota of requests used up."""
    api.check_capacity(SLO(exchange.tenant))
    account = api.account(exchange)
    api.quotas.check_queue(account)
    api.quotas.count_request(account)


def _check(api: Api, exchange: HttpExchange, request: Generate) -> SLO:
    """All checks that need no prompt.  Returns the objectives the request is served on."""
    check_model(request.model, api.settings.model_names)
    request.refuse_unsupported()
    if request.request_id is not None:
        exchange.request_id = checked_request_id(request.request_id, "request_id")
    return api.slo(request, exchange.tenant)
