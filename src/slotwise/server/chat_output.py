"""Parts of an output as `/v1/chat/completions` has them: a stream's deltas, and whole messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from slotwise.server.parsers.parser import new_call_id
from slotwise.server.parsers.parts import CallArguments, CallName, Content, Part, Reasoning, gathered

NAMES_OF_REASONING = ("reasoning_content", "reasoning")  # vLLM's older name, and its newer one


def delta_fields(parts: Sequence[Part]) -> dict[str, Any]:
    """The delta of an event, with what it adds alone: empty content beside tool calls would make a text of its own."""
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
