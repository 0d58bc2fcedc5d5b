"""`/v1/messages` and `/v1/messages/count_tokens`: Anthropic's API, served as a chat."""

from __future__ import annotations

import time
from typing import Any

from slotwise.server.choice import Choice, parts_of
from slotwise.server.completions import asked_of_chat, conversation_of
from slotwise.server.context import Api
from slotwise.server.errors import bad_request
from slotwise.server.http_exchange import HttpExchange
from slotwise.server.job import Job
from slotwise.server.messages_output import Blocks, content, event, stop_fields, usage
from slotwise.server.messages_protocol import CountTokensRequest, MessagesRequest
from slotwise.server.parsers.parts import Part
from slotwise.server.parsers.registry import HARMONY
from slotwise.server.pipeline import Asked, respond
from slotwise.server.protocol import SWITCHES, ChatRequest, decode
from slotwise.server.shapes import MESSAGE
from slotwise.server.tools import allowed_tools
from slotwise.server.unknown_fields import warn_of_unknown_fields, warn_of_unknown_keys


async def messages(api: Api, exchange: HttpExchange) -> None:
    """Answers to a conversation in Anthropic's form, whole or as a stream."""
    await respond(api, exchange, MESSAGE, _message)


async def count_tokens(api: Api, exchange: HttpExchange) -> None:
    """The number of tokens that the prompt of such a conversation has."""
    api.limits.quotas.count_request(api.limits.account(exchange))
    async with api.clients.bodies.reading(exchange) as body:
        request = decode(CountTokensRequest, body)
        warn_of_unknown_fields(exchange, CountTokensRequest, body)
        warn_of_unknown_keys(exchange, "messages", request.messages)
        warn_of_unknown_keys(exchange, "system", request.system)
        api.engine.models.adapter(request.model)
        chat = await _as_chat(api, exchange, request)
        allowed_tools(api, chat)
        rendered = await api.text.prompts.of_chat(await conversation_of(api, exchange, chat), exchange.holder)
    await exchange.respond_json({"input_tokens": len(rendered.ids)})


async def _message(api: Api, exchange: HttpExchange, body: bytes) -> Asked:
    request = decode(MessagesRequest, body)
    warn_of_unknown_fields(exchange, MessagesRequest, body)
    warn_of_unknown_keys(exchange, "messages", request.messages)
    warn_of_unknown_keys(exchange, "system", request.system)
    chat = await _as_chat(api, exchange, request)
    return await asked_of_chat(api, exchange, chat, _stream if request.stream else _whole)


async def _as_chat(api: Api, exchange: HttpExchange, request: CountTokensRequest) -> ChatRequest:
    """The request as a chat.  Raises ApiError for thinking that the model cannot be told to do, or not to do."""
    chat, thinking = request.as_chat(), request.thinking
    if thinking is None:
        return chat
    read = await api.text.prompts.template_variables(None, exchange.holder)
    switches = [name for name in SWITCHES if name in read]
    chat.chat_template_kwargs = dict.fromkeys(switches, thinking.type != "disabled") | (chat.chat_template_kwargs or {})
    reasons = api.text.output_format.reasoning
    if thinking.type == "enabled":
        if not switches and not reasons:
            raise bad_request("thinking: this model does not reason: its chat template reads neither "
                              f"{' nor '.join(SWITCHES)}; leave the field out", "thinking", "unsupported_parameter")
        if thinking.budget_tokens == 0:
            raise bad_request("thinking.budget_tokens: must be at least 1; the type disabled turns thinking off",
                              "thinking")
        chat.thinking_token_budget = thinking.budget_tokens
    elif thinking.type == "disabled" and reasons and not switches:
        if reasons == HARMONY:
            raise bad_request("thinking: this model always reasons; leave the field out", "thinking",
                              "unsupported_parameter")
        chat.thinking_token_budget = 0  # what it begins ends at once
    if thinking.display == "omitted":
        chat.include_reasoning = False
    return chat


async def _whole(api: Api, exchange: HttpExchange, job: Job, choices: list[Choice]) -> None:
    """Send the message when it is complete."""
    (choice,) = choices
    choice.wait()
    parts: list[Part] = []
    ending: dict[str, Any] = {}
    async for chunk in choice.generation:
        delta = choice.read(chunk)
        parts += parts_of(delta)
        if delta.finish_reason is not None:
            _check_end(delta.finish_reason)
            ending = stop_fields(delta.finish_reason, delta.stop_reason)
            break
    first_ns = time.monotonic_ns()
    await exchange.respond_json(_heading(job) | {"content": content(parts)} | ending | {"usage": _usage(job, choice)})
    api.observers.batched_observer.sent(choice.generation.request_id, first_ns, time.monotonic_ns(), 1)


async def _stream(api: Api, exchange: HttpExchange, job: Job, choices: list[Choice]) -> None:
    """Send Anthropic's events, each as soon as it is there."""
    (choice,) = choices
    blocks, first_ns, num_events = Blocks(), 0, 0
    async for chunk in choice.generation:
        delta = choice.read(chunk)
        _check_end(delta.finish_reason)
        events = b"" if num_events else _opening(job, choice)
        events += b"".join(blocks.read(parts_of(delta)))
        if delta.finish_reason is not None:
            events += b"".join(blocks.close()) + event("message_delta", {
                "delta": stop_fields(delta.finish_reason, delta.stop_reason), "usage": _usage(job, choice)})
            await exchange.event(events + event("message_stop", {}))
        elif events:
            await exchange.event(events)
        first_ns = first_ns or time.monotonic_ns()
        num_events += 1
        if delta.finish_reason is not None:
            break
        choice.generation.interval = api.settings.stream_interval
    await exchange.close()
    api.observers.batched_observer.sent(choice.generation.request_id, first_ns, time.monotonic_ns(), num_events)


def _opening(job: Job, choice: Choice) -> bytes:
    message = _heading(job) | {"content": [], "stop_reason": None, "stop_sequence": None, "usage": _usage(job, choice)}
    return event("message_start", {"message": message}) + MESSAGE.waiting


def _heading(job: Job) -> dict[str, Any]:
    return {"id": job.heading.response_id, "type": "message", "role": "assistant", "model": job.heading.model}


def _usage(job: Job, choice: Choice) -> dict[str, Any]:
    return usage(len(job.prompts[0]), choice.num_tokens, choice.num_cached)


def _check_end(finish_reason: str | None) -> None:
    """Raises ApiError for a message that was aborted: Anthropic has no stop reason for it."""
    if finish_reason == "abort":
        raise bad_request("the request was aborted", code="abort")
