"""The interface of output parsers, and the base of those that read one format.

A format is a generator, `_parse`, that reads with `self.reader` and says what it finds with `_say`, `_think`, `_call`
and `_argue`.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Protocol

from slotwise.server.parsers.grammar import Syntax
from slotwise.server.parsers.markers import Markers
from slotwise.server.parsers.parts import CallArguments, CallName, Content, Part, Reasoning, merged
from slotwise.server.parsers.reader import Reader, Waiting

Tools = Mapping[str, Mapping[str, Any]]
"""The schema of each tool's arguments, by the tool's name."""


class OutputParser(Protocol):
    """Parses one output, fed in parts."""

    def feed(self, text: str) -> list[Part]:
        """The parts that `text` completes."""
        ...

    def end(self) -> list[Part]:
        """The rest, when no more text comes."""
        ...


class FormatParser:
    """One output in one format.

    Args:
        tools: those that the output may call.
    """

    MODELS: ClassVar[str] = ""  # that write it
    SYNTAX: ClassVar[Syntax | None] = None  # how a grammar writes calls; None: in no way that the parser reads
    SPELLINGS: ClassVar[tuple[str, ...]] = ()  # of tokens that the format is made of, and that may be special

    def __init__(self, markers: Markers, tools: Tools) -> None:
        self.markers = markers
        self.tools = tools
        self.reader = Reader()
        self._parts: list[Part] = []
        self._num_calls = 0
        self._spaces = ""  # at the end of the content so far; dropped before and after calls
        self._parsing = self._parse()

    def feed(self, text: str) -> list[Part]:
        self.reader.feed(text)
        next(self._parsing, None)
        return self._pop()

    def end(self) -> list[Part]:
        self.reader.has_ended = True
        next(self._parsing, None)
        if not self._num_calls:
            self._parts.append(Content(self._spaces))
        return self._pop()

    def _parse(self) -> Waiting[None]:
        """Reads all of the output."""
        raise NotImplementedError

    def _pop(self) -> list[Part]:
        parts, self._parts = merged(self._parts), []
        return [part for part in parts if isinstance(part, CallName) or part.text]

    def _say(self, text: str) -> None:
        stripped = text.rstrip()
        if stripped:
            self._parts.append(Content(self._spaces + stripped))
            self._spaces = ""
        self._spaces += text[len(stripped) :]

    def _think(self, text: str) -> None:
        self._parts.append(Reasoning(text))

    def _call(self, name: str) -> None:
        """A call begins; what `_argue` is given belongs to it."""
        self._parts.append(CallName(self._num_calls, name))
        self._num_calls += 1
        self._spaces = ""

    def _argue(self, text: str) -> None:
        self._parts.append(CallArguments(self._num_calls - 1, text))


class Chain:
    """Parsers in a row: each parses what is content to those before it."""

    def __init__(self, *parsers: OutputParser) -> None:
        self._parsers = parsers

    def feed(self, text: str) -> list[Part]:
        return self._through([Content(text)], self._parsers)

    def end(self) -> list[Part]:
        found: list[Part] = []
        for place, parser in enumerate(self._parsers):
            found += self._through(list(parser.end()), self._parsers[place + 1 :])
        return found

    def _through(self, parts: list[Part], parsers: Sequence[OutputParser]) -> list[Part]:
        for parser in parsers:
            parts = [more for part in parts for more in (
                parser.feed(part.text) if isinstance(part, Content) else [part])]
        return parts


class Spelled:
    """Spells out the special tokens that stand in another parser's parts."""

    def __init__(self, parser: OutputParser, markers: Markers) -> None:
        self._parser, self._markers = parser, markers

    def feed(self, text: str) -> list[Part]:
        return self._spelled(self._parser.feed(text))

    def end(self) -> list[Part]:
        return self._spelled(self._parser.end())

    def _spelled(self, parts: list[Part]) -> list[Part]:
        spelled, found = self._markers.spelled, list[Part]()
        for part in parts:
            match part:
                case Content(text):
                    found.append(Content(spelled(text)))
                case Reasoning(text):
                    found.append(Reasoning(spelled(text)))
                case CallName(index, name):
                    found.append(CallName(index, spelled(name)))
                case CallArguments(index, text):
                    found.append(CallArguments(index, spelled(text)))
        return found


def new_call_id() -> str:
    """An id for a tool call: nine letters and digits, as the templates of Mistral's models demand."""
    alphabet = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
    return "".join(secrets.choice(alphabet) for _ in range(9))
