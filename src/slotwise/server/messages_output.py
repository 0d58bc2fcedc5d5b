"""Responses of `/v1/messages`: a whole message, or Anthropic's events, from the same parts of an output.

    parts      Reasoning, Reasoning, Content, ...  CallName, CallArguments, ...
    blocks     0: thinking           1: text       2: tool_use
    events     content_block_start, content_block_delta ..., content_block_stop: one block after the other
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from http import HTTPStatus
from typing import Any, Literal

import msgspec

from slotwise.server.errors import MODEL_NOT_FOUND, ApiError, ContextExceeded, ErrorFormat, renamed
from slotwise.server.parsers.parser import new_call_id
from slotwise.server.parsers.parts import CallArguments, CallName, Content, Part, Reasoning, merged
from slotwise.server.shapes import to_json

Json = dict[str, Any]
MESSAGES = "/v1/messages"  # it and the routes below it write errors in Anthropic's form
STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use"}  # of finish reasons; others end the turn
INVALID = "INVALID_JSON"  # the key that Anthropic's guide names for arguments that are no JSON object
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


def usage(num_prompt: int, num_output: int, num_cached: int) -> Json:
    """Token counts.  As Anthropic counts them, `input_tokens` are those that were not found in the cache."""
    return {"input_tokens": num_prompt - num_cached, "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": num_cached, "output_tokens": num_output}


class Blocks:
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
