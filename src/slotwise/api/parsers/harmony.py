"""`openai`: gpt-oss's harmony, marked by special tokens: reasoning, tool calls and answers in channels.

    <|channel|>analysis<|message|>The user wants ...<|end|>
    <|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Paris"}<|call|>
    <|start|>assistant<|channel|>final<|message|>It is sunny.<|return|>

The prompt ends with `<|start|>assistant`.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from slotwise.api.parsers.base_parser import FormatParser, Syntax, Waiting
from slotwise.api.parsers.json_calls import Emit, nested

RECIPIENT = re.compile(r"to=([\w.:-]+)")
FUNCTIONS = "functions."
START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
THOUGHT, NOTE, FINAL = [f"{CHANNEL}{channel}{MESSAGE}" for channel in ("analysis", "commentary", "final")]
NEXT = f"<|end|>{START}assistant"  # between two messages
LAST = ("<|call|>", "<|return|>")  # what an answer ends with
ENDS = ("<|end|>", *LAST)


class HarmonyLayout(NamedTuple):
    @property
    def syntax(self) -> Syntax | None:
        return Syntax(f"{CHANNEL}commentary to={FUNCTIONS}", f" {CONSTRAIN}json{MESSAGE}", "", quotes=False, most=1)


class Harmony(FormatParser):
    SPELLINGS = (START, CHANNEL, MESSAGE, *ENDS, CONSTRAIN)

    def _parse(self) -> Waiting[None]:
        start, channel, message = map(self.markers.of, (START, CHANNEL, MESSAGE))
        ends = tuple(map(self.markers.of, ENDS))
        yield from self.reader.spaces()
        is_header = bool((yield from self.reader.at(start, channel, message, "to=")))
        if not is_header:  # the prompt had it
            is_header = yield from self._body("")
        while (yield from self.reader.peek()):
            parts: list[str] = []
            found = yield from self.reader.until(parts.append, message, *ends)
            before, is_started, header = "".join(parts).rpartition(start)
            self._say(before if is_started or is_header or found == message else header)
            is_header = found == message and (yield from self._body(header))

    def _body(self, header: str) -> Waiting[bool]:
        """Reads a message.  Returns whether the header of another one follows."""
        recipient = RECIPIENT.search(header)
        _, _, channel = header.partition(self.markers.of(CHANNEL))
        if recipient and recipient[1].startswith(FUNCTIONS):
            self._call(recipient[1].removeprefix(FUNCTIONS))
            if (yield from self.reader.peek()) == "{":
                yield from nested(self.reader, self._argue)
            say: Emit = self._argue
        elif channel.startswith("analysis") or recipient:  # what goes to built-in tools is not an answer
            say = self._think
        else:
            say = self._say
        start = self.markers.of(START)
        return (yield from self.reader.until(say, *map(self.markers.of, ENDS), start)) == start
