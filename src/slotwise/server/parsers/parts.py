"""What parsers make of an output: one stream of typed parts, which every route renders in its own way."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field


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
    """Joins neighbours of one kind, and of one call."""
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
class Call:
    """A whole call; `arguments` is what the model wrote, which need not be valid JSON."""

    name: str
    arguments: str = ""


@dataclass(slots=True)
class Message:
    """A whole output."""

    content: str = ""
    reasoning: str = ""
    calls: list[Call] = field(default_factory=list)


def gathered(parts: Iterable[Part]) -> Message:
    """All parts of an output as one message."""
    content, reasoning, calls = [], [], list[Call]()
    arguments: list[list[str]] = []
    for part in parts:
        match part:
            case Content(text):
                content.append(text)
            case Reasoning(text):
                reasoning.append(text)
            case CallName(_, name):
                calls.append(Call(name))
                arguments.append([])
            case CallArguments(index, text):
                arguments[index].append(text)
    for call, texts in zip(calls, arguments, strict=True):
        call.arguments = "".join(texts)
    return Message("".join(content), "".join(reasoning), calls)


def without_reasoning(parts: Iterable[Part]) -> Iterator[Part]:
    return (part for part in parts if not isinstance(part, Reasoning))
