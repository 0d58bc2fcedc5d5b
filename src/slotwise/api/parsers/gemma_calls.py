"""Calls of Gemma 4 and FunctionGemma: objects with bare keys, whose strings stand between quotes of their own.

    <|tool_call>call:weather{city:<|"|>Paris<|"|>,days:2,where:[<|"|>a<|"|>,{b:null}]}<tool_call|>
    <start_function_call>call:weather{city:<escape>Paris<escape>,days:2}<end_function_call>

They become JSON while they come.
"""

from __future__ import annotations

import json
import re
from typing import NamedTuple

from slotwise.api.parsers.base_parser import ANY, NAME, FormatParser, Syntax, Waiting
from slotwise.api.parsers.json_calls import CLOSING, MAX_DEPTH, string

SCALAR = re.compile(rf"[^,\[\]{{}}<>\"{ANY}]+")
WORDS = {"True": "true", "False": "false", "None": "null"}  # of Python, which templates write
NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?", re.ASCII)
KEY = re.compile(rf"[^:,{{}}\[\]<>{ANY}]+")


class Quoted(NamedTuple):
    """The marks of a call, and the quote of its strings."""

    opening: str
    closing: str
    quote: str
    prefix: str = "call:"

    @property
    def syntax(self) -> Syntax | None:
        return None


class QuotedCalls(FormatParser):
    """A call counts once the object of its arguments begins."""

    layout: Quoted

    def _parse(self) -> Waiting[None]:
        opening, closing = self.markers.of(self.layout.opening), self.markers.of(self.layout.closing)
        while (yield from self.reader.until(self._say, opening)):
            self.reader.keep()
            yield from self.reader.spaces()
            is_call = yield from self.reader.skip(self.layout.prefix)
            name = (yield from self.reader.all_of(NAME)) if is_call else ""
            is_call = bool(name) and (yield from self.reader.peek()) == "{"
            kept = self.reader.pop_kept()
            if not is_call:
                self._say(opening + kept)
                continue
            self._call(name)
            if (yield from self._nested()):
                yield from self.reader.spaces()
                yield from self.reader.skip(closing)

    def _nested(self) -> Waiting[bool]:
        """Reads an object and all within it.  Returns whether it is complete."""
        reader, quote = self.reader, self.markers.of(self.layout.quote)
        ends: list[str] = []
        wants_key = False
        while True:
            yield from reader.spaces()
            character = yield from reader.peek()
            if ends and character == ends[-1]:
                self._argue(reader.take(1))
                ends.pop()
                wants_key = False
                if not ends:
                    return True
            elif character == "," and ends:
                reader.take(1)
                self._argue(", ")
                wants_key = ends[-1] == "}"
            elif wants_key:
                if not (yield from self._key(quote)):
                    return False
                wants_key = False
            elif character in CLOSING and character and len(ends) < MAX_DEPTH:
                ends.append(CLOSING[character])
                self._argue(reader.take(1))
                wants_key = character == "{"
            elif not (yield from self._value(quote)):
                return False

    def _key(self, quote: str) -> Waiting[bool]:
        if (yield from self.reader.at(quote, '"')):
            if not (yield from self._value(quote)):
                return False
            yield from self.reader.spaces()
        else:
            key = yield from self.reader.all_of(KEY)
            self._argue(json.dumps(self.markers.spelled(key).strip(), ensure_ascii=False))
        self._argue(": ")
        return (yield from self.reader.skip(":"))

    def _value(self, quote: str) -> Waiting[bool]:
        """Reads a string or a word.  Returns whether it is complete."""
        reader = self.reader
        if (yield from reader.skip(quote)):
            self._argue('"')
            end = yield from reader.until(lambda text: self._argue(json.dumps(text, ensure_ascii=False)[1:-1]), quote)
            if end:
                self._argue('"')
            return bool(end)
        if (yield from reader.peek()) == '"':
            return (yield from string(reader, self._argue))
        word = (yield from reader.all_of(SCALAR)).strip()
        if not word or not (yield from reader.peek()):
            return False  # the output was cut within it
        word = WORDS.get(word, word)
        is_json = word in WORDS.values() or NUMBER.fullmatch(word)
        self._argue(word if is_json else json.dumps(word, ensure_ascii=False))
        return True
