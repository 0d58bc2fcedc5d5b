"""What a parser of outputs is: text that arrives in parts, to typed parts, which every route renders in its own way.

A format is a generator, `_parse`, that reads with `self.reader` and says what it finds with `_say`, `_think`, `_call`
and `_argue`.  Methods of `TextReader` that may need text which has not come yet are generators, too: they yield while
they wait, and return what they read.  So a parser reads like one of a whole text, and finds the same wherever the text
is cut.

The text of an output leaves special tokens out.  Those that a format is made of stand in it as one character each, a
lone surrogate, which no decoded text has: a text that merely spells a special token is not taken for it.  Where a
tokenizer has no such special token, a format is made of the spelling itself.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple, Protocol, TypeVar

FIRST, MOST = 0xDC00, 256  # lone surrogates in use
ANY = f"{chr(FIRST)}-{chr(FIRST + MOST - 1)}"  # of them, in a class of a regular expression
MOST_CALLS = 16  # of one output
T = TypeVar("T")
Waiting = Generator[None, None, T]
SPACES = re.compile(r"[ \t\r\n]+")
NAME = re.compile(r"[\w.:/-]+", re.ASCII)  # of a function, as most formats write it
Tools = Mapping[str, Mapping[str, Any]]
"""The schema of each tool's arguments, by the tool's name."""


# -- parts -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Content:
    """More text of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """More text of what the model thinks before it answers."""

    text: str


@dataclass(frozen=True, slots=True)
class CallName:
    """A tool call begins.  `index` counts the calls of an output."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of a call's arguments, a text of JSON.  It never ends within an escape sequence."""

    index: int
    text: str


Part = Content | Reasoning | CallName | CallArguments


def merged(parts: Iterable[Part]) -> list[Part]:
    """Joins neighbors of one kind, and of one call."""
    found: list[Part] = []
    for part in parts:
        last = found[-1] if found else None
        match last, part:
            case (Content(before), Content(text)):
                found[-1] = Content(before + text)
            case (Reasoning(before), Reasoning(text)):
                found[-1] = Reasoning(before + text)
            case (CallArguments(index, before), CallArguments(same, text)) if index == same:
                found[-1] = CallArguments(index, before + text)
            case _:
                found.append(part)
    return found


@dataclass(slots=True)
class ToolCall:
    """A whole call; `arguments` is what the model wrote, which need not be valid JSON."""

    name: str
    arguments: str = ""


@dataclass(slots=True)
class ParsedMessage:
    """A whole output."""

    content: str = ""
    reasoning: str = ""
    calls: list[ToolCall] = field(default_factory=list)


def gathered(parts: Iterable[Part]) -> ParsedMessage:
    """All parts of an output as one message."""
    content, reasoning, calls = [], [], list[ToolCall]()
    arguments: list[list[str]] = []
    for part in parts:
        match part:
            case Content(text):
                content.append(text)
            case Reasoning(text):
                reasoning.append(text)
            case CallName(_, name):
                calls.append(ToolCall(name))
                arguments.append([])
            case CallArguments(index, text):
                arguments[index].append(text)
    for call, texts in zip(calls, arguments, strict=True):
        call.arguments = "".join(texts)
    return ParsedMessage("".join(content), "".join(reasoning), calls)


def without_reasoning(parts: Iterable[Part]) -> Iterator[Part]:
    return (part for part in parts if not isinstance(part, Reasoning))


# -- special tokens in a text ------------------------------------------------------------------------------------------


class Markers:
    """The special tokens that formats are made of.

    Args:
        special: ids of the tokenizer's special tokens, by their spelling.
        spellings: of the tokens that are wanted.
    """

    def __init__(self, special: Mapping[str, int] | None = None, spellings: Iterable[str] = ()) -> None:
        found = [spelling for spelling in dict.fromkeys(spellings) if spelling in (special or {})][:MOST]
        self._stand_ins = {spelling: chr(FIRST + number) for number, spelling in enumerate(found)}
        self._spelled = {ord(character): spelling for spelling, character in self._stand_ins.items()}
        self.by_id = {(special or {})[spelling]: character for spelling, character in self._stand_ins.items()}

    def __contains__(self, spelling: str) -> bool:
        return spelling in self._stand_ins

    @property
    def spellings(self) -> Collection[str]:
        """Those of the special tokens."""
        return self._stand_ins.keys()

    def of(self, spelling: str) -> str:
        """What stands in an output for a text: each of its special tokens as a character, all else as it is spelled."""
        if spelling in self._stand_ins:
            return self._stand_ins[spelling]
        for token, character in self._stand_ins.items():
            spelling = spelling.replace(token, character)
        return spelling

    def spelled(self, text: str) -> str:
        """The text with its special tokens spelled out."""
        return text if not self._spelled or text.isascii() else text.translate(self._spelled)


# -- reading -----------------------------------------------------------------------------------------------------------


@lru_cache(64)
def _any_of(spellings: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, sorted(spellings, key=len, reverse=True))))


class TextReader:
    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._kept: list[str] | None = None
        self.has_ended = False  # no more text comes
        self.is_cut = False  # the model was not done

    def feed(self, text: str) -> None:
        self._text = self._text[self._at :] + text
        self._at = 0

    def keep(self) -> None:
        """Keeps what is read from here on, for `pop_kept`."""
        self._kept = []

    def pop_kept(self) -> str:
        """Returns what was read since `keep`."""
        kept, self._kept = self._kept or [], None
        return "".join(kept)

    def take(self, length: int) -> str:
        """Reads so many characters of those that are there."""
        taken = self._text[self._at : self._at + length]
        self._at += length
        if self._kept is not None:
            self._kept.append(taken)
        return taken

    def _left(self) -> int:
        return len(self._text) - self._at

    def peek(self) -> Waiting[str]:
        """The next character; "" at the end."""
        while not self._left() and not self.has_ended:
            yield
        return self._text[self._at : self._at + 1]

    def ahead(self, length: int) -> Waiting[str]:
        """The next characters, unread: so many, or all that are left at the end."""
        while self._left() < length and not self.has_ended:
            yield
        return self._text[self._at : self._at + length]

    def at(self, *spellings: str) -> Waiting[str]:
        """The one of `spellings` that comes next, the longest of them; "" if none does."""
        while True:
            left = self._text[self._at : self._at + max(map(len, spellings))]
            if self.has_ended or not any(len(left) < len(one) and one.startswith(left) for one in spellings):
                return max((one for one in spellings if left.startswith(one)), key=len, default="")
            yield

    def skip(self, spelling: str) -> Waiting[bool]:
        """Reads `spelling` if it comes next."""
        if (yield from self.at(spelling)) != spelling:
            return False
        self.take(len(spelling))
        return True

    def run(self, pattern: re.Pattern[str]) -> str:
        """Reads what matches next, of what is there: for patterns of which any beginning matches, too."""
        found = pattern.match(self._text, self._at)
        return self.take(found.end() - self._at) if found else ""

    def all_of(self, pattern: re.Pattern[str]) -> Waiting[str]:
        """Reads all that matches: for patterns of which any beginning matches, too."""
        parts: list[str] = []
        while (yield from self.peek()) and (run := self.run(pattern)):
            parts.append(run)
        return "".join(parts)

    def spaces(self) -> Waiting[None]:
        """Reads white space."""
        yield from self.all_of(SPACES)

    def until(self, emit: Callable[[str], object], *spellings: str) -> Waiting[str]:
        """Gives the text before the first of `spellings` to `emit` as it comes, and reads it; returns which it is.

        Returns "" at the end of the text.
        """
        found = _any_of(spellings)
        while True:
            if match := found.search(self._text, self._at):
                spelling = match.group()
                if safe := match.start() - self._at:
                    emit(self.take(safe))
                if (yield from self.at(*spellings)) == spelling:  # else a longer one may come
                    self.take(len(spelling))
                    return spelling
                continue
            safe = self._left() - (0 if self.has_ended else self._begun(spellings))
            if safe:
                emit(self.take(safe))
            if self.has_ended:
                return ""
            yield

    def rest(self, emit: Callable[[str], object]) -> Waiting[None]:
        """Gives all that is left to `emit` as it comes."""
        while (yield from self.peek()):
            emit(self.take(self._left()))

    def unread(self, text: str) -> None:
        """Puts back what was read last."""
        if self._kept is not None:
            self._kept = ["".join(self._kept).removesuffix(text)]
        self._text = text + self._text[self._at :]
        self._at = 0

    def _begun(self, spellings: tuple[str, ...]) -> int:
        """Characters at the end of the text that begin one of `spellings`."""
        for length in range(min(self._left(), max(map(len, spellings)) - 1), 0, -1):
            if any(one.startswith(self._text[-length:]) for one in spellings):
                return length
        return 0


# -- parsers -----------------------------------------------------------------------------------------------------------


NUMBER, BREAK = "\0", "\1"  # in a syntax: any number, and a line break or none


class Parameters(NamedTuple):
    """How arguments that are not an object are written: `before KEY middle VALUE after separator before ...`."""

    before: str
    middle: str
    after: str
    end: str = ""  # of a call whose beginning is the trigger
    separator: str = ""
    is_json: bool = False  # values are; else text is written as it is, and all else as JSON


class Syntax(NamedTuple):
    """How calls are written: `opening before NAME middle ARGUMENTS after separator before ... closing`."""

    before: str
    middle: str
    after: str
    trigger: str = ""  # what begins calls and no other text; `opening` begins with it, or `before` where that is empty
    opening: str = ""
    separator: str = ""
    closing: str = ""
    quotes: bool = True  # around the name
    most: int = MOST_CALLS
    parameters: Parameters | None = None  # None: arguments are JSON


class OutputParser(Protocol):
    """Parses one output, fed in parts."""

    def feed(self, text: str) -> list[Part]:
        """The parts that `text` completes."""
        ...

    def end(self, *, is_cut: bool = False) -> list[Part]:
        """The rest, when no more text comes.  Args: is_cut: the model was not done, as at `max_tokens`."""
        ...


class Layout(NamedTuple):
    """A format that needs no description beyond its parser."""

    @property
    def syntax(self) -> Syntax | None:
        """How a grammar writes calls; None: in no way that the parser reads."""
        return None


class Describes(Protocol):
    """The data that describe a format to its parser: a tuple whose texts are what the format is made of."""

    @property
    def syntax(self) -> Syntax | None:
        """See `Layout.syntax`."""
        ...

    def __iter__(self) -> Iterator[Any]: ...


class Format(NamedTuple):
    """A format: its parser, and the data that distinguish it from others of that parser."""

    models: str  # that write it
    parser: Callable[..., FormatParser]  # of markers, tools and a layout
    layout: Describes = Layout()
    tokens: tuple[str, ...] = ()  # that it is made of, in addition to those of `TOKEN` in its layout

    @property
    def spellings(self) -> tuple[str, ...]:
        """Of the tokens that it is made of, and that may be special."""
        return (*self.tokens, *TOKEN.findall("\n".join(_texts(self.layout))))

    def read_by(self, markers: Markers, tools: Tools) -> FormatParser:
        """A parser of one output.  Args: tools: those that the output may call."""
        return self.parser(markers, tools, self.layout)


TOKEN = re.compile(r"<[^<>\s]*>|\[/?[A-Z_]+\]")  # a spelling in a layout that a tokenizer may have as a special token


def _texts(layout: Iterable[Any]) -> Iterator[str]:
    for one in layout:
        if isinstance(one, str):
            yield one
        elif isinstance(one, tuple):
            yield from _texts(one)


class FormatParser:
    """One output in one format.

    Args:
        tools: those that the output may call.
        layout: of the format, for parsers of several.
    """

    def __init__(self, markers: Markers, tools: Tools, layout: Any = Layout()) -> None:  # noqa: B008 (a constant)
        self.markers = markers
        self.tools = tools
        self.layout = layout
        self.reader = TextReader()
        self._parts: list[Part] = []
        self._num_calls = 0
        self._spaces = ""  # at the end of the content so far; dropped before and after calls
        self._parsing = self._parse()

    def feed(self, text: str) -> list[Part]:
        self.reader.feed(text)
        next(self._parsing, None)
        return self._pop()

    def end(self, *, is_cut: bool = False) -> list[Part]:
        self.reader.has_ended, self.reader.is_cut = True, is_cut
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

    def end(self, *, is_cut: bool = False) -> list[Part]:
        found: list[Part] = []
        for place, parser in enumerate(self._parsers):
            found += self._through(list(parser.end(is_cut=is_cut)), self._parsers[place + 1 :])
        return found

    def _through(self, parts: list[Part], parsers: Sequence[OutputParser]) -> list[Part]:
        for parser in parsers:
            parts = [more for part in parts for more in (
                parser.feed(part.text) if isinstance(part, Content) else [part])]
        return parts


class SpellingParser:
    """Spells out the special tokens that stand in another parser's parts."""

    def __init__(self, parser: OutputParser, markers: Markers) -> None:
        self._parser, self._markers = parser, markers

    def feed(self, text: str) -> list[Part]:
        return self._spelled(self._parser.feed(text))

    def end(self, *, is_cut: bool = False) -> list[Part]:
        return self._spelled(self._parser.end(is_cut=is_cut))

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
