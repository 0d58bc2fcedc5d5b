"""Response formats of OpenAI's endpoints: whole JSON, or server-sent events.

What is constant within a stream is encoded once; a plain token costs a few concatenations of bytes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from slotwise.api.generate.choice import Delta
from slotwise.api.parsers.base_parser import (
    CallArguments,
    CallName,
    Content,
    Part,
    Reasoning,
    gathered,
    new_call_id,
)

NAMES_OF_REASONING = ("reasoning_content", "reasoning")  # vLLM's older name, and its newer one
to_json = msgspec.json.Encoder().encode


def delta_fields(parts: Sequence[Part]) -> dict[str, Any]:
    """The delta of an event, with only what it adds: empty content next to tool calls would begin a text of its own."""
    content, reasoning, calls = "", "", dict[int, dict[str, Any]]()
    for part in parts:
        match part:
            case Content(text):
                content += text
            case Reasoning(text):
                reasoning += text
            case CallName(index, name):
                calls[index] = {"index": index} | _call(name, "")
            case CallArguments(index, text):
                call = calls.setdefault(index, {"index": index, "function": {"arguments": ""}})
                call["function"]["arguments"] += text
    fields: dict[str, Any] = _reasoning(reasoning)
    if content:
        fields["content"] = content
    if calls:
        fields["tool_calls"] = list(calls.values())
    return fields


def message_fields(parts: Sequence[Part]) -> dict[str, Any]:
    """A choice's whole message."""
    said = gathered(parts)
    message: dict[str, Any] = {"role": "assistant", "content": said.content, "refusal": None}
    if said.calls:
        message["content"] = said.content or None
        message["tool_calls"] = [_call(call.name, call.arguments) for call in said.calls]
    return {"message": message | _reasoning(said.reasoning)}


def _call(name: str, arguments: str) -> dict[str, Any]:
    return {"id": new_call_id(), "type": "function", "function": {"name": name, "arguments": arguments}}


def _reasoning(text: str) -> dict[str, Any]:
    return dict.fromkeys(NAMES_OF_REASONING, text) if text else {}


@dataclass(frozen=True, slots=True)
class Shape:
    """An endpoint's field names and object types."""

    id_prefix: str
    whole_object: str
    event_object: str
    before_text: bytes  # in an event's choice
    after_text: bytes
    opening: bytes  # a choice's first event, before any text; may be empty
    whole: Callable[[str], dict[str, Any]]  # a choice's whole text
    prompts_in_choices: bool  # log-probabilities of prompts are in the choices; else a field of the response
    waiting: bytes = b": waiting\n\n"  # what a silent stream sends: a comment, which clients pass over


COMPLETION = Shape(
    "cmpl", "text_completion", "text_completion", b'"text":', b"", b"", lambda text: {"text": text},
    prompts_in_choices=True)
CHAT = Shape(
    "chatcmpl", "chat.completion", "chat.completion.chunk", b'"delta":{"content":', b"}",
    b'"delta":{"role":"assistant","content":""}',
    lambda text: {"message": {"role": "assistant", "content": text, "refusal": None}},
    prompts_in_choices=False)

RESPONSE = replace(CHAT, id_prefix="resp", whole_object="response")
MESSAGE = replace(CHAT, id_prefix="msg", waiting=b'event: ping\ndata: {"type":"ping"}\n\n')
EMBEDDING = replace(COMPLETION, id_prefix="embd", whole_object="list")
RERANK = replace(EMBEDDING, id_prefix="rerank")
SCORE = replace(EMBEDDING, id_prefix="score")
CLASSIFICATION = replace(EMBEDDING, id_prefix="classify")
DECISION = replace(EMBEDDING, id_prefix="decision", whole_object="structured_decision")


def usage(num_prompt: int, num_output: int, num_cached: int) -> dict[str, Any]:
    return {
        "prompt_tokens": num_prompt, "completion_tokens": num_output, "total_tokens": num_prompt + num_output,
        "prompt_tokens_details": {"cached_tokens": num_cached},
    }


def drafted(counts: Sequence[tuple[int, int]]) -> dict[str, Any]:
    """The field of usage about drafts.  Args: counts: of each choice, those that were right and those that were not."""
    right, wrong = map(sum, zip(*counts, strict=True)) if counts else (0, 0)
    return {"completion_tokens_details": {"accepted_prediction_tokens": right, "rejected_prediction_tokens": wrong}}


@dataclass(frozen=True, slots=True)
class Heading:
    """Fields at the start of every event and of the whole response."""

    shape: Shape
    response_id: str
    model: str
    created: int
    service_tier: str  # empty: the field is absent

    @classmethod
    def now(cls, shape: Shape, request_id: str, model: str, service_tier: str) -> Heading:
        return cls(shape, f"{shape.id_prefix}-{request_id}", model, int(time.time()), service_tier)

    def of(self, kind: str) -> dict[str, Any]:
        fields = {"id": self.response_id, "object": kind, "created": self.created, "model": self.model}
        return fields | {"service_tier": self.service_tier} if self.service_tier else fields


def whole_response(heading: Heading, choices: list[list[bytes]], used: dict[str, Any],
                   extras: dict[str, Any], last: Sequence[bytes] = ()) -> list[bytes]:
    """The response as JSON, in parts.

    Args:
        extras: fields that OpenAI's responses do not have.
        last: further ones, as JSON in parts, each field after a comma.
    """
    parts = [to_json(heading.of(heading.shape.whole_object))[:-1] + b',"choices":']
    for i, choice in enumerate(choices):
        parts += (b"," if i else b"[", *choice)
    return [*parts, b"]," + to_json({"usage": used} | extras)[1:-1], *last, b"}"]


def whole_choice(index: int, output: dict[str, Any], logprobs: list[bytes], ending: bytes) -> list[bytes]:
    """A choice as JSON, in parts.  Args: output: see `Shape.whole`; logprobs: JSON, in parts; ending: see `ending`."""
    head = to_json({"index": index} | output)[:-1] + b',"logprobs":'
    return [head, *logprobs, b"," + ending + b"}"]


def ending(finish_reason: str | None, stop_reason: str | int | None) -> bytes:
    """The fields of a choice that say why its output ended."""
    return b'"finish_reason":%b,"stop_reason":%b' % (to_json(finish_reason), to_json(stop_reason))


def add_field(choice: list[bytes], name: bytes, parts: list[bytes]) -> None:
    """Add a field, JSON in parts, to a choice from `whole_choice`."""
    choice[-1:] = [choice[-1][:-1] + b',"%b":' % name, *parts, b"}"]


class Events:
    """The events of one stream.

    Args:
        has_usage: the client requested usage; every event then has the field.
        may_call: outputs may call tools; there is no content before they have any.
    """

    def __init__(self, heading: Heading, *, has_usage: bool, may_call: bool = False) -> None:
        shape = heading.shape
        self._head = b"data: " + to_json(heading.of(shape.event_object))[:-1] + b',"choices":['
        self._no_usage = b',"usage":null' if has_usage else b""
        self._before, self._after = b"," + shape.before_text, shape.after_text
        self._plain = self._after + b',"logprobs":null,"finish_reason":null}]' + self._no_usage + b"}\n\n"
        self._opening = shape.opening.replace(b',"content":""', b"") if may_call else shape.opening

    def opening(self, index: int, extras: bytes = b"") -> bytes:
        """The first event of a choice, before any text; empty where its endpoint has none.

        Args:
            extras: further fields of the event, each after a comma.
        """
        if not self._opening:
            return b""
        return (b'%b{"index":%d,%b,"logprobs":null,"finish_reason":null}]%b%b}\n\n'
                % (self._head, index, self._opening, self._no_usage, extras))

    def plain(self, index: int, text: str) -> bytes:
        """An event with text only: nearly every event."""
        return b'%b{"index":%d%b%b%b' % (self._head, index, self._before, to_json(text), self._plain)

    def full(self, index: int, delta: Delta, logprobs: bytes, used: dict[str, Any] | None,
             fields: bytes = b"") -> bytes:
        """An event with any of log-probabilities (JSON), the end and usage so far.

        Args:
            fields: further fields of the choice, each after a comma.
        """
        usage_field = self._no_usage if used is None else b',"usage":' + to_json(used)
        end = b'"finish_reason":null' if delta.finish_reason is None else ending(delta.finish_reason, delta.stop_reason)
        if delta.parts is None:
            output = self._before + to_json(delta.text) + self._after
        else:
            output = b',"delta":' + to_json(delta_fields(delta.parts))
        return b'%b{"index":%d%b,"logprobs":%b,%b%b}]%b}\n\n' % (
            self._head, index, output, logprobs, end, fields, usage_field)

    def last(self, used: dict[str, Any], extras: dict[str, Any]) -> bytes:
        """The last event: usage of the whole request, and `extras` as in `whole_response`."""
        return self._head + b"]," + to_json({"usage": used} | extras)[1:] + b"\n\n"
