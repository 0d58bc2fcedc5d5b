"""`pythonic`: Llama 3.2 and 4, and others that call tools as Python does, in a list that is the whole answer:

    [weather(city="Paris", days=3), time()]

Each argument is passed on when it is whole.
"""

from __future__ import annotations

import ast
import json
import re

from slotwise.api.parsers.base_parser import ANY, SPACES, FormatParser, Waiting
from slotwise.api.parsers.json_calls import SURROGATE, dumped

NAME = re.compile(r"[\w.-]+")
PLAIN = re.compile(rf"[^\"'()\[\]{{}},\\{ANY}]+")
IN_STRING = re.compile(rf"[^\"'\\{ANY}]+")
OPENING, CLOSING = "([{", ")]}"
MAX_VALUE = 1 << 16  # characters of an argument
WORDS = {"true": True, "false": False, "null": None}  # of JSON, which models write, too


class Pythonic(FormatParser):
    MODELS = "Llama 3.2 and 4, and others that call tools in a list, as Python does"
    SPELLINGS = ("<|python_start|>", "<|python_end|>")

    def _parse(self) -> Waiting[None]:
        start, end = map(self.markers.of, self.SPELLINGS)
        self._say((yield from self.reader.all_of(SPACES)))
        self.reader.keep()
        yield from self.reader.skip(start)
        yield from self.reader.spaces()
        if not (yield from self.reader.skip("[")):
            self._say(self.reader.pop_kept())
            yield from self.reader.rest(self._say)
            return
        while True:
            yield from self.reader.spaces()
            name = yield from self.reader.all_of(NAME)
            is_call = name in self.tools and (yield from self.reader.skip("("))
            kept = self.reader.pop_kept()
            if not is_call:
                self._say(kept)
                break
            self._call(name)
            if not (yield from self._arguments()):
                break
            self.reader.keep()
            yield from self.reader.spaces()
            if not (yield from self.reader.skip(",")):
                self.reader.pop_kept()
                if (yield from self.reader.skip("]")):
                    yield from self.reader.skip(end)
                break
        yield from self.reader.rest(self._say)

    def _arguments(self) -> Waiting[bool]:
        """Reads arguments up to the bracket behind them.  Returns whether they are complete."""
        before = "{"
        while True:
            yield from self.reader.spaces()
            if (yield from self.reader.skip(")")):
                self._argue("{}" if before == "{" else "}")
                return True
            self.reader.keep()
            name = yield from self.reader.all_of(NAME)
            yield from self.reader.spaces()
            value: list[str] = []
            is_argument = bool(name) and (yield from self.reader.skip("=")) and (yield from self._value(value))
            kept = self.reader.pop_kept()
            if not is_argument:
                if (yield from self.reader.peek()):  # else the output was cut
                    self._say(kept)
                return False
            self._argue(f"{before}{json.dumps(name, ensure_ascii=False)}: {self._meant(''.join(value))}")
            before = ", "
            yield from self.reader.skip(",")

    def _value(self, parts: list[str]) -> Waiting[bool]:
        """Reads an argument's value up to what ends it.  Returns whether it is complete."""
        closing: list[str] = []
        while (character := (yield from self.reader.peek())) and not SURROGATE.match(character):
            if not closing and character in ",)":
                return True
            if character in "\"'":
                if not (yield from self._string(parts)):
                    return False
            elif character in OPENING:
                closing.append(CLOSING[OPENING.index(character)])
                parts.append(self.reader.take(1))
            elif character in CLOSING and (not closing or closing.pop() != character):
                return False
            else:
                parts.append(self.reader.run(PLAIN) or self.reader.take(1))
        return False

    def _string(self, parts: list[str]) -> Waiting[bool]:
        quote = self.reader.take(1)
        parts.append(quote)
        while (yield from self.reader.peek()):
            if text := self.reader.run(IN_STRING):
                parts.append(text)
                continue
            character = self.reader.take(1)
            parts.append(character)
            if character == quote:
                return True
            if character == "\\":
                yield from self.reader.peek()
                parts.append(self.reader.take(1))
            elif SURROGATE.match(character):
                return False
        return False

    def _meant(self, text: str) -> str:
        """The JSON of a literal; of anything else, its text as a string."""
        text = self.markers.spelled(text).strip()
        if len(text) > MAX_VALUE:
            return json.dumps(text, ensure_ascii=False)
        try:
            return dumped(WORDS[text] if text in WORDS else ast.literal_eval(text))
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            return json.dumps(text, ensure_ascii=False)
