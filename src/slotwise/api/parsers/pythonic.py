"""Calls as Python writes them: in a list that begins the answer, or between marks.

    [weather(city="Paris", days=3), time()]                                     `pythonic`: Llama 3.2 and 4, and others
    <|tool_call_start|>[weather(city="Paris"), time()]<|tool_call_end|>                                         `lfm2`
    <function_calls>
    weather(city="Paris")
    time()
    </function_calls>                                                                                          `olmo3`

Each argument is passed on when it is whole.
"""

from __future__ import annotations

import ast
import json
import re
from typing import NamedTuple, NoReturn

from slotwise.api.parsers.base_parser import ANY, SPACES, FormatParser, Parameters, Syntax, Waiting
from slotwise.api.parsers.json_calls import SURROGATE, dumped

NAME = re.compile(r"[\w.-]+")
PLAIN = re.compile(rf"[^\"'()\[\]{{}},\\{ANY}]+")
IN_STRING = re.compile(rf"[^\"'\\{ANY}]+")
OPENING, CLOSING = "([{", ")]}"
STRING = re.compile(r""""(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'""", re.DOTALL)
BREAKS = re.compile(r"\\.|\n", re.DOTALL)
MAX_VALUE = 1 << 16  # characters of an argument


class Python(NamedTuple):
    """How calls are marked."""

    opening: str
    closing: str
    is_first: bool = False  # the answer begins with the calls, with or without the mark, and they are a list

    is_list: bool = True

    @property
    def syntax(self) -> Syntax | None:
        begin, between, end = ("[", ", ", "]") if self.is_list else ("\n", "\n", "\n")
        trigger, closing = ("", "") if self.is_first else (self.opening, self.closing)
        return Syntax("", "(", ")", trigger, trigger + begin, between, end + closing, quotes=False,
                      parameters=Parameters("", "=", "", separator=", ", is_json=True))


class PythonCalls(FormatParser):
    """Only names of the request's tools count."""

    layout: Python

    def _parse(self) -> Waiting[None]:
        opening = self.markers.of(self.layout.opening)
        if self.layout.is_first:
            self._say((yield from self.reader.all_of(SPACES)))
            yield from self._calls(opening if (yield from self.reader.skip(opening)) else "")
            yield from self.reader.rest(self._say)
            return
        while (yield from self.reader.until(self._say, opening)):
            yield from self._calls(opening)

    def _calls(self, before: str) -> Waiting[None]:
        """Reads calls and the mark behind them.  Anything else becomes text, after what stands `before` it."""
        reader, closing = self.reader, self.markers.of(self.layout.closing)
        reader.keep()
        yield from reader.spaces()
        is_list = yield from reader.skip("[")
        if self.layout.is_first and not is_list:
            self._say(before + reader.pop_kept())
            return
        while True:
            yield from reader.spaces()
            name = yield from reader.all_of(NAME)
            is_call = name in self.tools and (yield from reader.skip("("))
            kept = reader.pop_kept()
            if not is_call:
                self._say(before + kept)
                return
            self._call(name)
            before = ""
            if not (yield from self._arguments()):
                return
            reader.keep()
            yield from reader.spaces()
            if (yield from reader.skip("]")):
                yield from reader.spaces()
            elif ((yield from reader.skip(",")) or not is_list) and not (yield from reader.at(closing)):
                continue
            reader.pop_kept()
            yield from reader.skip(closing)
            return

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
        """The JSON of a literal, of JSON or Python; of anything else, its text as a string."""
        text = self.markers.spelled(text).strip()
        if len(text) > MAX_VALUE:
            return json.dumps(text, ensure_ascii=False)
        try:
            return dumped(json.loads(text, parse_constant=_no_constant, strict=False))
        except (ValueError, RecursionError):
            pass
        try:
            return dumped(ast.literal_eval(STRING.sub(lambda found: BREAKS.sub(_escaped, found[0]), text)))
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            return json.dumps(text, ensure_ascii=False)


def _escaped(found: re.Match[str]) -> str:
    """A line break as Python has it in a string of one line; what is escaped as it is."""
    return "\\n" if found[0] == "\n" else found[0]


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
