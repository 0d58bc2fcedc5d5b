"""A grammar: what the text of an output must match, as data that crosses processes and is written to event logs."""

from __future__ import annotations

import re
from dataclasses import dataclass

JSON_SCHEMA, REGEX, LARK = "json_schema", "regex", "lark"
KINDS = (JSON_SCHEMA, REGEX, LARK)
MAX_BYTES = 256 << 10  # of a grammar's text
CLASSES = {r"\d": "[0-9]", r"\D": "[^0-9]", r"\w": "[0-9A-Za-z_]", r"\W": "[^0-9A-Za-z_]"}
_CLASS = re.compile(r"\\.|--|-(?=\\[dDwW])", re.DOTALL)  # or another escape; `--` is a difference of classes
GBNF = re.compile(r"(?:\s|#[^\n]*\n)*[\w-]+[ \t]*::=")  # its first rule, behind comments


@dataclass(frozen=True, slots=True)
class Grammar:
    """A JSON schema, a regular expression or a grammar in the syntax of Lark or llama.cpp (GBNF).

    Raises:
        ValueError: the kind is none of `KINDS`, or the text is too long.
    """

    kind: str
    text: str
    field: str = "structured_outputs"  # of the request, for messages

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"{self.field}: a grammar is one of {', '.join(KINDS)}, not {self.kind!r:.40}")
        if (size := len(self.text.encode(errors="replace"))) > MAX_BYTES:
            raise ValueError(f"{self.field}: {size} bytes are more than the {MAX_BYTES} that a grammar may have")


def in_ascii(pattern: str) -> str:
    r"""Returns a regular expression whose `\d` and `\w` are digits and letters of ASCII, as JSON schemas' are.

    `\D` and `\W` are all other characters.  A hyphen between a class and another character is itself.
    """
    return _CLASS.sub(lambda found: CLASSES.get(found[0], r"\-" if found[0] == "-" else found[0]), pattern)


def is_gbnf(text: str) -> bool:
    """Whether a grammar is in GBNF, the syntax of llama.cpp, and not in Lark's."""
    return GBNF.match(text) is not None
