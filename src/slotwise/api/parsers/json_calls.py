"""Calls that are objects of JSON, and JSON in a text that arrives in parts, as most formats have it.

    <tool_call>                                                           one object between tags
    {"name": "weather", "arguments": {"city": "Paris"}}
    </tool_call>
    <tool_calls>[{"name": "weather", "arguments": {"city": "Paris"}}, ...]</tool_calls>                        a list
    [{"name": "weather", "parameters": {"city": "Paris"}}]                                    a list without any mark
    <|tools_prefix|>[{"weather": {"city": "Paris"}}]<|tools_suffix|>              the name is the key of the arguments

JSON is passed on as it is written, up to its end, never half an escape sequence.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Container
from typing import NamedTuple

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
        name_key: of the name; "": the name is the key of the arguments.
    """

    ARGUMENTS = ("arguments", "parameters")

    def __init__(self, reader: TextReader, names: Container[str] | None, call: Emit, argue: Emit,
                 name_key: str = "name") -> None:
        self._reader, self._names, self._call, self._argue, self._name_key = reader, names, call, argue, name_key
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
        if not self._name_key and not self._name:
            self._name = key
            return not self._is_other() and (yield from self._arguments())
        if key == self._name_key and not self._name:
            self._name = (yield from self._text()) or ""
            if self._is_other():
                return False
            if self._held is not None:
                self._begin("".join(self._held))
            return True
        if key in self.ARGUMENTS and not self.is_call and self._held is None:
            return (yield from self._arguments())
        return (yield from value(self._reader, lambda _: None))

    def _is_other(self) -> bool:
        """Whether the name is not one that a call may have."""
        return not self._name or (self._names is not None and self._name not in self._names)

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


class Objects(NamedTuple):
    """How calls that are objects are marked."""

    openings: tuple[str, ...] = ()  # any of these; none: the output begins with the calls
    closing: str = ""
    is_fenced: bool = False  # a code block stands around the calls
    name: str = "name"  # the key of a call's name; "": the name is itself the key of the arguments
    arguments: str = "arguments"
    is_list: bool = True
    break_: str = ""  # between a mark and a call

    @property
    def syntax(self) -> Syntax | None:
        trigger = self.openings[0] if self.openings else ""
        has_end = trigger.startswith("<")  # a word has no counterpart
        fence = FENCE if self.is_fenced else ("", "")
        opening = trigger + self.break_ * self.is_fenced + fence[0] + self.break_
        closing = self.break_ + fence[1] + self.closing * has_end
        before, middle = (f'{{"{self.name}": ', f', "{self.arguments}": ') if self.name else ("{", ": ")
        if self.is_list:
            return Syntax(before, middle, "}", trigger, f"{opening}[", ", ", f"]{closing}")
        return Syntax(opening + before, middle, "}" + closing, trigger, separator="\n")


FENCE = ("```json", "```")  # of a code block, which any model may write around its calls
JSON_LIST = Objects(arguments="parameters")
"""Calls that a grammar writes, of models whose own format no grammar describes."""


class ObjectCalls(FormatParser):
    """Calls with the marks of a layout, one object or several, in a list or not.

    Where only JSON marks a call, the output begins with it, and only names of the request's tools count.
    """

    layout: Objects

    def _parse(self) -> Waiting[None]:
        if self.layout.openings:
            openings = {self.markers.of(opening): opening for opening in self.layout.openings}
            while opening := (yield from self.reader.until(self._say, *openings)):
                is_word = not openings[opening].startswith(("<", "["))
                yield from self._calls(opening, self.tools if is_word else None)
            return
        yield from self._calls("", self.tools)
        yield from self.reader.rest(self._say)

    def _calls(self, before: str, names: Container[str] | None) -> Waiting[None]:
        """Reads the calls after a mark.  Anything else becomes text, after what stands `before` it."""
        reader, fence = self.reader, ""
        reader.keep()
        yield from reader.spaces()
        if (yield from reader.skip(FENCE[0])):
            fence = FENCE[1]
            yield from reader.spaces()
        is_list = yield from reader.skip("[")
        before += reader.pop_kept()
        if not self.layout.openings and not is_list:
            self._say(before)
            return
        while True:
            reader.keep()
            call = CallObject(reader, names, self._call, self._argue, self.layout.name)
            is_complete = yield from call.read()
            kept = reader.pop_kept()
            if not call.is_call:
                self._say(before + kept)
                return
            if not is_complete:
                return
            reader.keep()
            yield from reader.spaces()
            if (yield from reader.at(",", ";")):
                reader.take(1)
                yield from reader.spaces()
            elif is_list and (yield from reader.at("]")):
                break
            before = reader.pop_kept()
            if not (yield from reader.at("{")):
                yield from self._end(before, fence)
                return
        reader.take(1)
        yield from reader.spaces()
        yield from self._end(reader.pop_kept().replace("]", "", 1), fence)

    def _end(self, before: str, fence: str) -> Waiting[None]:
        """Reads the marks after calls.

        Args:
            before: read already; the content's where no mark follows.
            fence: of a code block that has begun; "": none has.
        """
        closing = self.markers.of(self.layout.closing)
        if fence and (yield from self.reader.skip(fence)):
            before = ""
            yield from self.reader.spaces()
        if not closing or not (yield from self.reader.skip(closing)):
            self._say(before)
