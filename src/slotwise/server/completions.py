"""`/v1/completions` and `/v1/chat/completions`: from each endpoint's own fields to a `Job`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

from slotwise.core.params import InvalidParams, SamplingParams
from slotwise.core.slo import SLO
from slotwise.server.context import Api
from slotwise.server.conversation import Conversation, last_text
from slotwise.server.errors import bad_request, from_params
from slotwise.server.generate import answer
from slotwise.server.grammars import grammar_of
from slotwise.server.http_exchange import HttpExchange, checked_request_id
from slotwise.server.job import Job, Repeated
from slotwise.server.logprobs import most_tokens
from slotwise.server.prompts import Encoding
from slotwise.server.protocol import ChatRequest, CompletionRequest, Generate, check_model, decode
from slotwise.server.shapes import CHAT, COMPLETION, Heading, Shape
from slotwise.server.slo import UNTIERED
from slotwise.server.unknown_fields import warn_of_unknown_fields

COMPLETION_TOKENS = 16  # OpenAI's default of max_tokens; a chat's is the model's own, else whatever fits


async def completions(api: Api, exchange: HttpExchange) -> None:
    """Continuations of one prompt or several, whole or as a stream."""
    await _respond(api, exchange, COMPLETION, _completion)


async def chat_completions(api: Api, exchange: HttpExchange) -> None:
    """Answers to a conversation, whole or as a stream."""
    await _respond(api, exchange, CHAT, _chat)


class Asked(NamedTuple):
    """A checked request with its prompts, parameters and objectives."""

    request: Generate
    slo: SLO
    prompts: list[list[int]]
    params: SamplingParams
    repeated: Repeated
    is_silent: bool


async def _completion(api: Api, exchange: HttpExchange, body: bytes) -> Asked:
    request = decode(CompletionRequest, body)
    warn_of_unknown_fields(exchange, CompletionRequest, body)
    slo = _check(api, exchange, request)
    asked, is_silent = request.length("max_tokens")
    encoding = _encoding(api, request, COMPLETION_TOKENS if asked is None else asked, adds_special_tokens=True)
    api.check_capacity(slo)
    with api.admission_control.entering(slo):
        prompts = await api.prompts.of_completion(
            request.prompt, api.settings.max_choices, exchange.holder, encoding)
        echoes = await _echoes(api, exchange, request, prompts, encoding)
    request.prompt = ""
    default = _default(api, slo, request, prompts, COMPLETION_TOKENS, request.logprobs)
    limited = api.settings.sampling_defaults.limited(asked)
    max_tokens = api.prompts.max_tokens(limited, max(map(len, prompts)), default)
    params = request.sampling_params(max_tokens, request.logprobs, await _others(api, exchange, request))
    return Asked(request, slo, prompts, params, Repeated(echoes), is_silent)


async def _echoes(api: Api, exchange: HttpExchange, request: CompletionRequest, prompts: list[list[int]],
                  encoding: Encoding) -> tuple[str, ...]:
    if not request.echo:
        return ()
    special = request.skip_special_tokens is False
    return tuple(await api.prompts.texts(request.prompt, prompts, exchange.holder, encoding, special=special))


async def _chat(api: Api, exchange: HttpExchange, body: bytes) -> Asked:
    request = decode(ChatRequest, body)
    warn_of_unknown_fields(exchange, ChatRequest, body)
    slo = _check(api, exchange, request)
    if request.chat_template is not None and not api.settings.trust_request_chat_template:
        raise bad_request("chat_template: the server takes none from requests unless it is started with "
                          "--trust-request-chat-template", "chat_template")
    conversation = Conversation(
        request.messages, request.variables(), request.chat_template, bool(request.continue_final_message))
    param = "max_tokens" if request.max_completion_tokens is None else "max_completion_tokens"
    asked, is_silent = request.length(param)
    encoding = _encoding(api, request, 1 if asked is None else asked, adds_special_tokens=False)
    api.check_capacity(slo)
    with api.admission_control.entering(slo):
        rendered = await api.prompts.of_chat(conversation, exchange.holder, encoding)
    echo = last_text(request.messages, "assistant") if request.echo else ""
    request.messages, prompt = [], rendered.ids
    logprobs = (request.top_logprobs or 0) if request.logprobs else None
    defaults = api.settings.sampling_defaults
    default = _default(api, slo, request, [prompt], defaults.max_tokens, logprobs)
    max_tokens = api.prompts.max_tokens(defaults.limited(asked), len(prompt), default, param)
    params = request.sampling_params(max_tokens, logprobs, await _others(api, exchange, request))
    repeated = Repeated((echo,) if echo else (), rendered.text if request.return_prompt_text else None)
    return Asked(request, slo, [prompt], params, repeated, is_silent)


async def _others(api: Api, exchange: HttpExchange, request: Generate) -> dict[str, Any]:
    """Sampling parameters that are the model's own, or that need the tokenizer."""
    others = api.settings.sampling_defaults.of_sampling
    if request.bad_words:
        others["bad_words_token_ids"] = await api.prompts.of_bad_words(request.bad_words, exchange.holder)
    if (grammar := grammar_of(request)) is not None:
        await api.grammars.check(grammar, exchange.holder)
        others["grammar"] = grammar
    return others


def _encoding(api: Api, request: Generate, num_output: int, *, adds_special_tokens: bool) -> Encoding:
    """How prompts are encoded.

    Args:
        num_output: tokens for which a prompt leaves room if as many of its own are kept as fit.
        adds_special_tokens: by default.
    """
    most, longest = request.truncate_prompt_tokens, api.prompts.longest
    if most == -1:
        most = max(1, longest - num_output)
    elif most is not None and not 0 < most <= longest:
        raise bad_request(f"truncate_prompt_tokens: must be -1 or between 1 and {longest}", "truncate_prompt_tokens")
    adds = request.add_special_tokens
    return Encoding(adds_special_tokens if adds is None else adds, most, request.truncation_side != "right")


async def _respond(api: Api, exchange: HttpExchange, shape: Shape,
                   check: Callable[[Api, HttpExchange, bytes], Awaitable[Asked]]) -> None:
    _enter(api, exchange)
    async with api.bodies.reading(exchange) as body:
        request, slo, prompts, params, repeated, is_silent = await check(api, exchange, body)
        del body  # frees its memory while the response is generated
    try:
        params.check_vocabulary(api.engine_client.info.vocab_size, api.engine_client.info.eos_token_ids)
    except InvalidParams as error:
        raise from_params(error) from error
    tier = slo.tier or (UNTIERED if request.service_tier is not None else "")
    heading = Heading.now(shape, exchange.request_id, api.settings.served_model_name, tier)
    salt = _salt(exchange.tenant, request.cache_salt)
    job = Job(request, prompts, params, heading, slo, salt, exchange.received_ns, exchange.read_ns,
              exchange.traceparent, repeated, is_silent)
    await answer(api, exchange, job)


def _default(api: Api, slo: SLO, request: Generate, prompts: list[list[int]], usual: int | None,
             logprobs: int | None) -> int | None:
    """`max_tokens` by default: `usual`, within the bounds of server, quota and log-probabilities; None: any."""
    num_choices = len(prompts) * (request.n or 1)
    capacity = api.quotas.account(slo.tenant).output_capacity(sum(map(len, prompts)), num_choices)
    limit = api.settings.sampling_defaults.max_tokens_limit
    bounds = (usual, limit, capacity, most_tokens(num_choices, logprobs))
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
