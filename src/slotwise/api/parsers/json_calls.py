"""JSON in a text that arrives in parts: passed on as it is written, up to its end, never half an escape sequence.

`JsonCalls` parses calls that a grammar forces, of models whose own format no grammar here describes: a list of objects.

    [{"name": "weather", "parameters": {"city": "Paris"}}]
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Container

from slotwise.api.parsers.base_parser import ANY, FormatParser, Syntax, TextReader, Waiting

Emit = Callable[[str], object]
PLAIN = re.compile(rf'[^"\\{ANY}]+')  # within a string
BETWEEN = re.compile(r"[\s,:\w.+-]+", re.ASCII)  # strings and brackets
SCALAR = re.compile(r"[\w.+-]+", re.ASCII)
ESCAPE = re.compile(r"\\(u[0-9a-fA-F]{4}|[^u])", re.DOTALL)
SURROGATE = re.compile("[\ud800-\udfff]")
HIGH = range(0xD800, 0xDC00)  # the first of two code units
CLOSING = {"{": "}", "[": "]"}
MAX_DEPTH = 512
MAX_NAME = 1024  # characters of a key or a tool's name


def string(reader: TextReader, emit: Emit) -> Waiting[bool]:
    """Reads a string, quotes included.  Returns whether it is complete."""
    if not (yield from reader.skip('"')):
        return False
    emit('"')
    while True:
        character = yield from reader.peek()
        if character == '"':
            emit(reader.take(1))
            return True
        if character == "\\":
            if not (length := (yield from _escape(reader))):
                return False
            emit(reader.take(length))
        elif not (plain := reader.run(PLAIN)):
            return False
        else:
            emit(plain)


def _escape(reader: TextReader) -> Waiting[int]:
    """The length of the escape sequence that comes next, or of two that are one character; 0 if it is not one."""
    escape = yield from reader.ahead(2)
    if escape[1:] == "u":
        escape = yield from reader.ahead(6)
    if not ESCAPE.fullmatch(escape):
        if reader.has_ended and len(escape) < 6:
            reader.take(len(escape))  # the output was cut within it
        return 0
    if escape[1] != "u" or int(escape[2:], 16) not in HIGH or (yield from reader.ahead(8))[6:] != "\\u":
        return len(escape)
    return len(escape) * (1 + (ESCAPE.fullmatch((yield from reader.ahead(12)), 6) is not None))


def dumped(meant: object) -> str:
    """The JSON of a value; half of a surrogate pair is escaped, else no text could be encoded."""
    written = json.dumps(meant, ensure_ascii=False, allow_nan=False)
    return json.dumps(meant) if SURROGATE.search(written) else written


def value(reader: TextReader, emit: Emit) -> Waiting[bool]:
    """Reads any value.  Returns whether it is complete."""
    first = yield from reader.peek()
    if first == '"':
        return (yield from string(reader, emit))
    if first in CLOSING:
        return (yield from nested(reader, emit))
    scalar = yield from reader.all_of(SCALAR)
    emit(scalar)
    return bool(scalar)


def nested(reader: TextReader, emit: Emit) -> Waiting[bool]:
    """Reads an object or a list.  Returns whether it is complete: its brackets match."""
    closing: list[str] = []
    while True:
        character = yield from reader.peek()
        if character in CLOSING:
            if len(closing) == MAX_DEPTH:
                return False
            closing.append(CLOSING[character])
            emit(reader.take(1))
        elif closing and character == closing[-1]:
            emit(reader.take(1))
            closing.pop()
            if not closing:
                return True
        elif character == '"' and closing:
            if not (yield from string(reader, emit)):
                return False
        elif closing and (between := reader.run(BETWEEN)):
            emit(between)
        else:
            return False


class CallObject:
    """Reads a call that is an object, as `{"name": "f", "arguments": {"x": 1}}`; emits the name before the arguments.

    Args:
        names: those that a call may have; None: any.
        call: receives the name, once it is known that this is a call.
        argue: is given the arguments as they come.
    """

    ARGUMENTS = ("arguments", "parameters")

    def __init__(self, reader: TextReader, names: Container[str] | None, call: Emit, argue: Emit) -> None:
        self._reader, self._names, self._call, self._argue = reader, names, call, argue
        self._name = ""
        self._held: list[str] | None = None  # arguments that came before the name
        self.is_call = False  # its name was emitted

    def read(self) -> Waiting[bool]:
        """Reads the object.  Returns whether it is complete; see `is_call`."""
        reader = self._reader
        separators: tuple[str, ...] = ("{",)
        while True:
            yield from reader.spaces()
            separator = yield from reader.at(*separators)
            if not separator:
                return False
            reader.take(1)
            if separator == "}":
                return self._end()
            yield from reader.spaces()
            if separator == "{" and (yield from reader.skip("}")):
                return self._end()
            if not (yield from self._member()):
                return False
            separators = (",", "}")

    def _member(self) -> Waiting[bool]:
        key = yield from self._text()
        yield from self._reader.spaces()
        if key is None or not (yield from self._reader.skip(":")):
            return False
        yield from self._reader.spaces()
        if key == "name" and not self._name:
            self._name = (yield from self._text()) or ""
            if not self._name or (self._names is not None and self._name not in self._names):
                return False
            if self._held is not None:
                self._begin("".join(self._held))
            return True
        if key in self.ARGUMENTS and not self.is_call and self._held is None:
            return (yield from self._arguments())
        return (yield from value(self._reader, lambda _: None))

    def _arguments(self) -> Waiting[bool]:
        if (yield from self._reader.peek()) != "{":
            return False
        if self._name:
            self._begin("")
            return (yield from nested(self._reader, self._argue))
        self._held = []
        return (yield from nested(self._reader, self._held.append))

    def _text(self) -> Waiting[str | None]:
        """Reads a string and returns what it means; None if it is not one, or too long."""
        parts: list[str] = []
        if not (yield from string(self._reader, parts.append)):
            return None
        try:
            meant = str(json.loads("".join(parts)))
        except ValueError:
            return None
        return meant if len(meant) <= MAX_NAME and not SURROGATE.search(meant) else None

    def _begin(self, arguments: str) -> None:
        self.is_call = True
        self._call(self._name)
        self._argue(arguments)

    def _end(self) -> bool:
        if self._name and not self.is_call:
            self._begin("{}")
        return self.is_call


class JsonCalls(FormatParser):
    SYNTAX = Syntax('{"name": ', ', "parameters": ', "}", opening="[", separator=", ", closing="]")

    def _parse(self) -> Waiting[None]:
        self.reader.keep()
        yield from self.reader.spaces()
        is_list = yield from self.reader.skip("[")
        before = self.reader.pop_kept()
        while is_list:
            self.reader.keep()
            call = CallObject(self.reader, self.tools, self._call, self._argue)
            yield from call.read()
            kept = self.reader.pop_kept()
            if not call.is_call:
                before += kept
                break
            yield from self.reader.spaces()
            before = ""
            if not (yield from self.reader.skip(",")):
                yield from self.reader.skip("]")
                break
        self._say(before)
        yield from self.reader.rest(self._say)
