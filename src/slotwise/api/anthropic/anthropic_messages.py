"""`/v1/messages` and `/v1/messages/count_tokens`: Anthropic's API, served as a chat.

Whole messages and Anthropic's events are made from the same parts of an output:

    parts      Reasoning, Reasoning, Content, ...  CallName, CallArguments, ...
    blocks     0: thinking           1: text       2: tool_use
    events     content_block_start, content_block_delta ..., content_block_stop: one block after the other
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from http import HTTPStatus
from itertools import takewhile
from typing import Any, Literal

import msgspec

from slotwise.api.anthropic.messages_protocol import LONG, CountTokensRequest, MessagesRequest, up_to_breakpoint
from slotwise.api.generate.choice import Choice, parts_of
from slotwise.api.generate.context import Api
from slotwise.api.generate.generate import Job, ValidatedRequest, respond
from slotwise.api.generate.output_constraints import allowed_tools
from slotwise.api.generate.shapes import MESSAGE, to_json
from slotwise.api.http.api_errors import MODEL_NOT_FOUND, ApiError, ContextExceeded, ErrorFormat, bad_request, renamed
from slotwise.api.http.http_exchange import HttpExchange, about
from slotwise.api.limits.bodies import warn_of_unknown_fields, warn_of_unknown_keys
from slotwise.api.openai.completions import conversation_of, validated_chat
from slotwise.api.parsers.base_parser import CallArguments, CallName, Content, Part, Reasoning, merged, new_call_id
from slotwise.api.parsers.tool_formats import HARMONY
from slotwise.api.protocol.decoding import decode
from slotwise.api.protocol.protocol import MODES, SWITCHES, ChatRequest, effort_variables

Json = dict[str, Any]
MESSAGES = "/v1/messages"  # it and the routes below it write errors in Anthropic's form
STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use"}  # of finish reasons; others end the turn
INVALID = "INVALID_JSON"  # the key that Anthropic's guide names for arguments that are not a JSON object
KINDS = {400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
         413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error", 504: "timeout_error"}
FIELDS = {"stop": "stop_sequences", "user": "metadata.user_id", "thinking_token_budget": "thinking.budget_tokens",
          "response_format": "output_config.format", "reasoning_effort": "output_config.effort"}  # chats' names, here


def event(kind: str, fields: Json) -> bytes:
    """A server-sent event of Anthropic's."""
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), to_json({"type": kind} | fields))


def stop_fields(finish_reason: str | None, stop_reason: str | int | None) -> Json:
    """Why a message ended: Anthropic's `stop_reason`, and the stop sequence that ended it."""
    if isinstance(stop_reason, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": stop_reason}
    return {"stop_reason": STOP_REASONS.get(finish_reason or "", "end_turn"), "stop_sequence": None}


def usage(num_prompt: int, num_output: int, num_cached: int, num_written: int = 0, ttl: str = "5m") -> Json:
    """Token counts.  As Anthropic counts them, `input_tokens` were neither found in the cache nor written to it.

    Args:
        num_written: prompt tokens that are retained and were not found.
    """
    return {"input_tokens": num_prompt - num_cached - num_written, "cache_creation_input_tokens": num_written,
            "cache_read_input_tokens": num_cached, "output_tokens": num_output,
            "cache_creation": {"ephemeral_5m_input_tokens": num_written if ttl == "5m" else 0,
                               "ephemeral_1h_input_tokens": num_written if ttl == LONG else 0}}


class MessageBlocks:
    """The content blocks of one message, as its parts come."""

    def __init__(self) -> None:
        self._index = -1
        self._kind: str | int | None = None  # of the block that is open: a call's is its number

    def read(self, parts: Sequence[Part]) -> Iterator[bytes]:
        """Yields the events of the next parts."""
        for part in parts:
            match part:
                case Content(text):
                    yield from self._open("text", {"type": "text", "text": ""})
                    yield self._delta({"type": "text_delta", "text": text})
                case Reasoning(text):
                    yield from self._open("thinking", {"type": "thinking", "thinking": "", "signature": ""})
                    yield self._delta({"type": "thinking_delta", "thinking": text})
                case CallName(index, name):
                    yield from self._open(index, _tool_use(name, {}))
                case CallArguments(_, text):
                    yield self._delta({"type": "input_json_delta", "partial_json": text})

    def close(self) -> Iterator[bytes]:
        """Yields the end of the block that is open."""
        if self._kind is not None:
            yield event("content_block_stop", {"index": self._index})
            self._kind = None

    def _open(self, kind: str | int, block: Json) -> Iterator[bytes]:
        if kind == self._kind:
            return
        yield from self.close()
        self._kind = kind
        self._index += 1
        yield event("content_block_start", {"index": self._index, "content_block": block})

    def _delta(self, delta: Json) -> bytes:
        return event("content_block_delta", {"index": self._index, "delta": delta})


def content(parts: Sequence[Part]) -> list[Json]:
    """The content blocks of a whole message."""
    blocks: list[Json] = []
    for part in merged(parts):
        match part:
            case Content(text) if text:
                blocks.append({"type": "text", "text": text})
            case Reasoning(text):
                blocks.append({"type": "thinking", "thinking": text, "signature": ""})
            case CallName(_, name):
                blocks.append(_tool_use(name, {}))
            case CallArguments(_, text):
                blocks[-1]["input"] = _arguments(text)
    return blocks


def _tool_use(name: str, given: Json) -> Json:
    return {"type": "tool_use", "id": new_call_id(), "name": name, "input": given}


def _arguments(text: str) -> Json:
    try:
        given = msgspec.json.decode(text)
    except (ValueError, RecursionError):
        given = None
    return given if isinstance(given, dict) else {INVALID: text}


class MessagesErrorContent(msgspec.Struct):
    type: str
    message: str
    code: str | None  # as OpenAI's errors have it; Anthropic's have none


class MessagesErrorBody(msgspec.Struct, kw_only=True):
    """Anthropic's error object."""

    type: Literal["error"] = "error"
    error: MessagesErrorContent
    request_id: str


def _body(error: ApiError, request_id: str) -> bytes:
    others = "invalid_request_error" if error.status < HTTPStatus.INTERNAL_SERVER_ERROR else "api_error"
    told = MessagesErrorContent(KINDS.get(error.status, others), _sentence(error), error.code)
    return to_json(MessagesErrorBody(error=told, request_id=request_id))


def _sentence(error: ApiError) -> str:
    """The message, in Anthropic's words where clients read them: Claude Code, LangChain, LiteLLM."""
    if isinstance(error, ContextExceeded):
        if error.num_prompt > error.longest:
            return f"prompt is too long: {error.num_prompt} tokens > {error.longest} maximum.{error.hint}"
        return (f"input length and `max_tokens` exceed context limit: {error.num_prompt} + {error.num_output} > "
                f"{error.longest}, decrease input length or `max_tokens` and try again.{error.hint}")
    if error.code == MODEL_NOT_FOUND:
        return f"model: {error.message}"
    return renamed(error, FIELDS).message


ERRORS = ErrorFormat(_body, b"event: error\ndata: %b\n\n")


# -- the endpoints -----------------------------------------------------------------------------------------------------


@about(body=MessagesRequest, streams=True)
async def messages(api: Api, exchange: HttpExchange) -> None:
    """Answers to a conversation in Anthropic's form, whole or as a stream."""
    await respond(api, exchange, MESSAGE, _message)


@about(body=CountTokensRequest)
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
        allowed_tools(api.text.output_format, chat)
        rendered = await api.text.prompts.of_chat(await conversation_of(api, exchange, chat), exchange.holder)
    await exchange.respond_json({"input_tokens": len(rendered.ids)})


async def _message(api: Api, exchange: HttpExchange, body: bytes) -> ValidatedRequest:
    request = decode(MessagesRequest, body)
    warn_of_unknown_fields(exchange, MessagesRequest, body)
    warn_of_unknown_keys(exchange, "messages", request.messages)
    warn_of_unknown_keys(exchange, "system", request.system)
    chat = await _as_chat(api, exchange, request)
    validated = await validated_chat(api, exchange, chat, _stream if request.stream else _whole)
    if chat.prompt_cache_retention is None or request.retain is not None:
        return validated
    num_marked = await _num_up_to_breakpoint(api, exchange, request, validated.prompts[0])
    return replace(validated, spec=replace(validated.spec, retain_tokens=num_marked))


async def _num_up_to_breakpoint(
    api: Api, exchange: HttpExchange, request: MessagesRequest, prompt: Sequence[int],
) -> int:
    """Number of tokens of a prompt up to the end of its last part with a cache_control.

    That is the length of the common prefix with a prompt from which later parts were removed.  If the template refuses
    the shorter prompt, all tokens count: a hint never fails a request.
    """
    if (marked := up_to_breakpoint(request)) is request:
        return len(prompt)
    try:
        chat = await _as_chat(api, exchange, marked)
        rendered = await api.text.prompts.of_chat(await conversation_of(api, exchange, chat), exchange.holder)
    except ApiError:
        return len(prompt)
    pairs = zip(prompt, rendered.ids, strict=False)
    return max(1, sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs)))  # 0 stands for all tokens


async def _as_chat(api: Api, exchange: HttpExchange, request: CountTokensRequest) -> ChatRequest:
    """The request as a chat.  Raises ApiError for a field `thinking` that the model cannot follow."""
    chat, thinking = request.as_chat(), request.thinking
    if thinking is None:
        return chat
    read = await api.text.prompts.template_variables(None, exchange.holder)
    told = effort_variables("none" if thinking.type == "disabled" else "high", read)
    switches = {name: told[name] for name in (*SWITCHES, *MODES) if name in told}
    chat.chat_template_kwargs = switches | (chat.chat_template_kwargs or {})
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
    blocks, first_ns, num_events = MessageBlocks(), 0, 0
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
    ttl = getattr(job.request, "prompt_cache_retention", None) or ""
    return usage(len(job.prompts[0]), choice.num_tokens, choice.num_cached,
                 job.num_written(choice.num_cached) if ttl else 0, ttl)


def _check_end(finish_reason: str | None) -> None:
    """Raises ApiError for a message that was aborted: Anthropic has no stop reason for it."""
    if finish_reason == "abort":
        raise bad_request("the request was aborted", code="abort")
