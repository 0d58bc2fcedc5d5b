"""`/v1/completions` and `/v1/chat/completions`: from each endpoint's own fields to a `Job`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slotwise.api.generate.context import Api
from slotwise.api.generate.generate import Echo, Renderer, ValidatedRequest, check, encoding_of, respond
from slotwise.api.generate.logprobs import most_tokens
from slotwise.api.generate.output_constraints import (
    BUDGET,
    allowed_tools,
    constraint_of,
    grammar_of,
    parsing_of,
    thinking_budget,
)
from slotwise.api.generate.prompts import Conversation, Encoding, last_text
from slotwise.api.generate.shapes import CHAT, COMPLETION
from slotwise.api.http.api_errors import bad_request
from slotwise.api.http.http_exchange import HttpExchange, about
from slotwise.api.limits.bodies import warn_of_ignored, warn_of_unknown_fields, warn_of_unknown_keys
from slotwise.api.openai.renderers import respond_stream, respond_whole
from slotwise.api.protocol.decoding import decode
from slotwise.api.protocol.protocol import EFFORTS, MODES, SWITCHES, ChatRequest, CompletionRequest, Generate
from slotwise.core.params import Grammar, ThinkingBudget
from slotwise.core.scheduler_limits import SLO

COMPLETION_TOKENS = 16  # OpenAI's default of max_tokens; a chat's is the model's own, else whatever fits


@about(body=CompletionRequest, streams=True)
async def completions(api: Api, exchange: HttpExchange) -> None:
    """Continuations of one prompt or several, whole or as a stream."""
    await respond(api, exchange, COMPLETION, _completion)


@about(body=ChatRequest, streams=True)
async def chat_completions(api: Api, exchange: HttpExchange) -> None:
    """Answers to a conversation, whole or as a stream."""
    await respond(api, exchange, CHAT, _chat)


async def _completion(api: Api, exchange: HttpExchange, body: bytes) -> ValidatedRequest:
    request = decode(CompletionRequest, body)
    warn_of_unknown_fields(exchange, CompletionRequest, body)
    slo = check(api, exchange, request)
    if request.suffix:
        request.prompt = api.text.prompts.with_gap(request.prompt, request.suffix)
    asked, is_silent = request.length("max_tokens")
    encoding = encoding_of(api, request, COMPLETION_TOKENS if asked is None else asked, adds_special_tokens=True)
    api.limits.check_capacity(slo)
    with api.limits.admission_control.entering(slo):
        prompts = await api.text.prompts.of_completion(
            request.prompt, api.settings.max_choices, exchange.holder, encoding)
        echo = await _echo(api, exchange, request, prompts, encoding)
        budget = await _budget(api, exchange, request, prompts, encoding)
    request.prompt = ""
    default = _default(api, slo, request, prompts, COMPLETION_TOKENS, request.logprobs)
    limited = api.settings.sampling_defaults.limited(asked)
    max_tokens = api.text.prompts.max_tokens(limited, max(map(len, prompts)), default)
    others = await _others(api, exchange, request, grammar_of(request))
    others["thinking"] = budget
    params = request.sampling_params(max_tokens, request.logprobs, others)
    return ValidatedRequest(request, prompts, request.spec(params, slo), _renderer(request), echo, is_silent)


async def _echo(api: Api, exchange: HttpExchange, request: CompletionRequest, prompts: list[list[int]],
                    encoding: Encoding) -> Echo:
    if not request.echo:
        return Echo()
    asked, special = (request.prompt, prompts, exchange.holder, encoding), request.skip_special_tokens is False
    texts = await api.text.prompts.texts(*asked, special=special)
    offsets = [] if request.logprobs is None else await api.text.prompts.offsets(*asked, special=special)
    return Echo(tuple(texts), tuple(offsets))


async def _budget(api: Api, exchange: HttpExchange, request: CompletionRequest, prompts: list[list[int]],
                  encoding: Encoding) -> ThinkingBudget | None:
    """The budget of reasoning, where each prompt says itself whether it has begun."""
    if request.thinking_token_budget in (None, -1):
        return None
    if grammar_of(request) is not None:
        raise bad_request(f"{BUDGET}: not available where a grammar begins with the output, as in completions", BUDGET)
    texts = await api.text.prompts.texts(request.prompt, prompts, exchange.holder, encoding, special=True)
    begun, *others = set(map(api.text.output_format.has_begun, texts))
    if others:
        raise bad_request(f"{BUDGET}: some prompts have begun to reason, others not; send them one by one", BUDGET)
    return thinking_budget(api.text.output_format, api.text.prompts.tokenizer, request.thinking_token_budget, begun)


async def _chat(api: Api, exchange: HttpExchange, body: bytes) -> ValidatedRequest:
    request = decode(ChatRequest, body)
    warn_of_unknown_fields(exchange, ChatRequest, body)
    warn_of_unknown_keys(exchange, "messages", request.messages)
    return await validated_chat(api, exchange, request, _renderer(request))


async def validated_chat(api: Api, exchange: HttpExchange, request: ChatRequest, render: Renderer) -> ValidatedRequest:
    """Checks a conversation, and encodes it: for every route that has one.

    Args:
        render: sends the response.

    Raises:
        ApiError: a field is not valid, or the conversation cannot be served.
    """
    slo = check(api, exchange, request)
    chosen = allowed_tools(api.text.output_format, request)
    conversation = await conversation_of(api, exchange, request)
    param = "max_tokens" if request.max_completion_tokens is None else "max_completion_tokens"
    asked, is_silent = request.length(param)
    encoding = encoding_of(api, request, 1 if asked is None else asked, adds_special_tokens=False)
    api.limits.check_capacity(slo)
    with api.limits.admission_control.entering(slo):
        rendered = await api.text.prompts.of_chat(conversation, exchange.holder, encoding)
    continued = last_text(request.messages, "assistant")
    form = api.text.output_format
    begun = form.has_begun(rendered.text, continued if conversation.continues else None)
    grammar, writes_calls = constraint_of(form, request, chosen, begun)
    parsing = parsing_of(form, request, chosen, begun, is_written=writes_calls)
    request.messages, prompt = [], rendered.ids
    logprobs = (request.top_logprobs or 0) if request.logprobs else None
    defaults = api.settings.sampling_defaults
    default = _default(api, slo, request, [prompt], defaults.max_tokens, logprobs)
    max_tokens = api.text.prompts.max_tokens(defaults.limited(asked), len(prompt), default, "messages", param)
    others = await _others(api, exchange, request, grammar)
    if form.last_ids and not request.ignore_eos:
        request.stop_token_ids = [*(request.stop_token_ids or ()), *form.last_ids]
    others["thinking"] = thinking_budget(form, api.text.prompts.tokenizer, request.thinking_token_budget, begun)
    params = request.sampling_params(max_tokens, logprobs, others)
    echo = Echo((continued,) if request.echo and continued else (),
                prompt_text=rendered.text if request.return_prompt_text else None)
    return ValidatedRequest(request, [prompt], request.spec(params, slo), render, echo, is_silent, parsing)


async def conversation_of(api: Api, exchange: HttpExchange, request: ChatRequest) -> Conversation:
    """The conversation of a request; a header of the response names variables that its template ignores.

    Raises:
        ApiError: a template in a request of a server that takes none, or documents for one that leaves them out.
    """
    if request.chat_template is not None and not api.settings.trust_request_chat_template:
        raise bad_request("chat_template: the server takes none from requests unless it is started with "
                          "--trust-request-chat-template", "chat_template")
    read: Mapping[str, Any] = {}
    if (request.documents or request.chat_template_kwargs or request.reasoning_effort
            or request.thinking_token_budget is not None):
        read = await api.text.prompts.template_variables(request.chat_template, exchange.holder)
        if request.documents and "documents" not in read:
            raise bad_request("documents: the model's chat template leaves them out; put them into a message",
                              "documents", "unsupported_parameter")
        ignored = [f"chat_template_kwargs.{name}" for name in request.chat_template_kwargs or () if name not in read]
        if request.reasoning_effort and read.keys().isdisjoint((*SWITCHES, *EFFORTS, *MODES)):
            ignored.append("reasoning_effort")
        warn_of_ignored(exchange, ignored)
    return Conversation(
        request.messages, request.variables(read), request.chat_template, bool(request.continue_final_message))


def _renderer(request: Generate) -> Renderer:
    return respond_stream if request.stream else respond_whole


async def _others(api: Api, exchange: HttpExchange, request: Generate, grammar: Grammar | None) -> dict[str, Any]:
    """Sampling parameters that are the model's own, or that need the tokenizer or the compiler of grammars."""
    others = api.settings.sampling_defaults.of_sampling
    if request.bad_words:
        others["bad_words_token_ids"] = await api.text.prompts.of_bad_words(request.bad_words, exchange.holder)
    if grammar is not None:
        await api.text.grammars.check(grammar, exchange.holder)
        others["grammar"] = grammar
    return others


def _default(api: Api, slo: SLO, request: Generate, prompts: list[list[int]], usual: int | None,
             logprobs: int | None) -> int | None:
    """`max_tokens` by default: `usual`, within the bounds of server, quota and log-probabilities; None: any."""
    num_choices = len(prompts) * (request.n or 1)
    capacity = api.limits.quotas.account(slo.tenant).output_capacity(sum(map(len, prompts)), num_choices)
    limit = api.settings.sampling_defaults.max_tokens_limit
    bounds = (usual, limit, capacity, most_tokens(num_choices, logprobs))
    return min((bound for bound in bounds if bound is not None), default=None)
