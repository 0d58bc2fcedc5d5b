"""Grammars of outputs that must call tools, or must match something after the reasoning: in llguidance's Lark syntax.

    start: thinking calls               a call is required, or a tool is named
    start: thinking tagged* TEXT        calls are free, and the arguments of strict tools match their schemas
    start: thinking answer              structured output, after the reasoning
    start: thinking (calls | answer)    with tools beside it

Rules are texts; a special token is written by its name, as `<|message|>`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from slotwise.api.parsers.base_parser import MOST_CALLS, NUMBER, Markers, Syntax

TEXT = r"TEXT: /(.|\n)*/"
NAMED = re.compile(r"<[^<>\[\]]+>")  # how a grammar can name a special token


class Schemas(NamedTuple):
    """The tools that may be called, each with the JSON schema of its arguments, as text."""

    by_name: Mapping[str, str]
    most: int = MOST_CALLS  # calls of one output


def can_write(syntax: Syntax, markers: Markers) -> bool:
    """Whether a grammar can name the special tokens of a syntax."""
    return all(NAMED.fullmatch(spelling) for spelling in markers.spellings if spelling in "".join(map(str, syntax)))


def terms(text: str, markers: Markers) -> str:
    """A literal text as terms of a rule."""
    special = [NUMBER, *[spelling for spelling in markers.spellings if spelling in text]]
    pieces = re.split("(" + "|".join(map(re.escape, special)) + ")", text)
    return " ".join(["/[0-9]+/" if piece == NUMBER else piece if piece in special else
                     json.dumps(piece, ensure_ascii=False) for piece in pieces if piece])


def call_rules(syntax: Syntax, markers: Markers, schemas: Schemas) -> list[str]:
    """The rule `calls`, one or more of them, and the rule `call`."""
    names = list(schemas.by_name)
    more = min(schemas.most, syntax.most) - 1
    repeated = f"({terms(syntax.separator, markers)} call){{0,{more}}}" if more > 0 else ""
    rules = [f"calls: {terms(syntax.opening, markers)} call {repeated} {terms(syntax.closing, markers)}",
             f"call: {' | '.join(f'call_{index}' for index in range(len(names)))}"]
    return rules + _each(syntax, markers, schemas, syntax.before, "call")


def tagged_rules(syntax: Syntax, markers: Markers, schemas: Schemas) -> list[str]:
    """The rule `tagged`: text, and a call or a list of calls behind it that is whole."""
    trigger = f"trigger{_text_until(syntax.trigger, markers)}"
    if syntax.opening:
        rules = call_rules(syntax._replace(opening=syntax.opening.removeprefix(syntax.trigger)), markers, schemas)
        return ["tagged: trigger calls", trigger, *rules]
    names = range(len(schemas.by_name))
    return [f"tagged: trigger ({' | '.join(f'tag_{index}' for index in names)})", trigger,
            *_each(syntax, markers, schemas, syntax.before.removeprefix(syntax.trigger), "tag")]


def _text_until(spelling: str, markers: Markers) -> str:
    """The end of a rule: any text and a literal one, which begins with a special token or comes as early as it can."""
    is_special = any(spelling.startswith(token) for token in markers.spellings)
    return f"{'' if is_special else '[lazy]'}: TEXT {terms(spelling, markers)}"


def _each(syntax: Syntax, markers: Markers, schemas: Schemas, before: str, rule: str) -> list[str]:
    rules = []
    for index, (name, schema) in enumerate(schemas.by_name.items()):
        written = json.dumps(name) if syntax.quotes else name
        head, tail = terms(before + written + syntax.middle, markers), terms(syntax.after, markers)
        rules += [f"{rule}_{index}: {head} arguments_{index} {tail}", f"arguments_{index}: %json {schema}"]
    return rules


def thinking_rules(markers: Markers, opening: str, closing: str, begun: bool | None) -> list[str]:
    """The rule `thinking`: what stands before an answer.

    Args:
        begun: the output begins within reasoning; None: it may begin with reasoning.
    """
    inner = [f"reasoned{_text_until(closing, markers)}", r"BREAKS: /\n{0,4}/"]
    if begun:
        return ["thinking: reasoned BREAKS", *inner]
    return [rf"thinking: ({terms(opening, markers)} reasoned BREAKS)?", *inner]


def lark_of_regex(pattern: str) -> str:
    """A regular expression as a term of a rule."""
    return "/" + re.sub(r"\\.|/", lambda found: r"\/" if found.group() == "/" else found.group(), pattern,
                        flags=re.DOTALL) + "/"


def grammar(start: str, *rules: Sequence[str]) -> str:
    """A whole grammar."""
    return "\n".join([f"start: {start}", *[rule for some in rules for rule in some], TEXT]) + "\n"
