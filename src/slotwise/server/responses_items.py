"""Output items of a response, and the events that build them, from the parts of an output.

    parts      Reasoning, ...    Content, ...                       CallName, CallArguments, ...
    items      0: reasoning      1: message                         2: function_call
    events     output_item.added, [content_part.added], *.delta ..., *.done, [content_part.done], output_item.done
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from slotwise.server.parsers.parser import new_call_id
from slotwise.server.parsers.parts import CallArguments, CallName, Content, Part, Reasoning

Json = dict[str, Any]
Event = tuple[str, Json]  # its type without `response.`, and its fields

MESSAGE, REASONING, CALL = "message", "reasoning", "function_call"
PARTS: dict[str, Json] = {
    MESSAGE: {"type": "output_text", "text": "", "annotations": [], "logprobs": []},
    REASONING: {"type": "reasoning_text", "text": ""}}
DELTAS = {MESSAGE: "output_text", REASONING: "reasoning_text", CALL: "function_call_arguments"}


class Items:
    """The items of one response, one after the other.

    Args:
        name: of the response, in the items' ids.
    """

    def __init__(self, name: str) -> None:
        self.items: list[Json] = []  # the last one may be open
        self._name = name
        self._open: str | int | None = None  # the kind of the item that is open: a call's is its number
        self._texts: list[str] = []  # of the item that is open

    def read(self, parts: Sequence[Part]) -> Iterator[Event]:
        """Yields the events of the next parts."""
        for part in parts:
            match part:
                case Content(text):
                    yield from self._begin(MESSAGE, MESSAGE)
                    yield self._delta(text)
                case Reasoning(text):
                    yield from self._begin(REASONING, REASONING)
                    yield self._delta(text)
                case CallName(index, name):
                    yield from self._begin(index, CALL, call_id=new_call_id(), name=name)
                case CallArguments(_, text):
                    yield self._delta(text)

    def end(self, status: str = "completed") -> Iterator[Event]:
        """Yields the end of the item that is open.  Args: status: `incomplete` if the output was cut off."""
        if self._open is None:
            return
        self._open = None
        item, text = self.items[-1], "".join(self._texts)
        kind = item["type"]
        item["status"] = status
        done: Json = {"text": text} if kind != CALL else {"arguments": text, "name": item["name"]}
        if kind == MESSAGE:
            done["logprobs"] = []
        yield f"{DELTAS[kind]}.done", self._place(item) | done
        if kind == CALL:
            item["arguments"] = text
        else:
            item["content"] = [PARTS[kind] | {"text": text}]
            yield "content_part.done", self._place(item) | {"part": item["content"][0]}
        yield "output_item.done", {"output_index": len(self.items) - 1, "item": item}

    def _begin(self, opened: str | int, kind: str, **fields: str) -> Iterator[Event]:
        if opened == self._open:
            return
        yield from self.end()
        self._open, self._texts = opened, []
        item: Json = {"id": f"{kind}-{self._name}-{len(self.items)}", "type": kind, "status": "in_progress"} | fields
        if kind == CALL:
            item["arguments"] = ""
        else:
            item["content"] = []
            if kind == MESSAGE:
                item["role"] = "assistant"
            else:
                item["summary"] = []
        self.items.append(item)
        yield "output_item.added", {"output_index": len(self.items) - 1, "item": dict(item)}
        if kind != CALL:
            yield "content_part.added", self._place(item) | {"part": PARTS[kind]}

    def _delta(self, text: str) -> Event:
        item = self.items[-1]
        self._texts.append(text)
        fields: Json = self._place(item) | {"delta": text}
        if item["type"] == MESSAGE:
            fields["logprobs"] = []
        return f"{DELTAS[item['type']]}.delta", fields

    def _place(self, item: Json) -> Json:
        place: Json = {"item_id": item["id"], "output_index": len(self.items) - 1}
        return place if item["type"] == CALL else place | {"content_index": 0}
