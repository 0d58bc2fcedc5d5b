"""Markdown tables, whose cells are sentences."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

ENDS = (".", "!", "?", ":")
PAGE = re.compile(r"docs/(?:(reference)/)?(\w+)\.md")


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a table; a heading that ends in `>` aligns its column to the right."""
    marks = ["--:" if heading.endswith(">") else "---" for heading in headings]
    lines = [[heading.removesuffix(">") for heading in headings], marks, *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def sentence(text: str) -> str:
    """Returns `text` as a sentence for a cell: capitalised, with a full stop, without characters that end the cell."""
    text = " ".join(text.split())
    if re.match(r"[a-z]+\b(?![_.(])", text):  # a word, not a name
        text = text[0].upper() + text[1:]
    if text and not text.endswith(ENDS):
        text += "."
    return PAGE.sub(lambda page: f"[{page[2]}]({'' if page[1] else '../'}{page[2]}.md)", escaped(text))


def code(text: str) -> str:
    return f"`{text}`".replace("|", r"\|")


def listed(names: Iterable[object]) -> str:
    return ", ".join(code(str(name)) for name in names)


def number(value: float) -> str:
    return f"{int(value):,}" if value == int(value) else f"{value:g}"


def first_sentence(docstring: str | None) -> str:
    """Returns the first sentence of a docstring, or its first paragraph if that is one without a full stop."""
    paragraph = " ".join((docstring or "").strip().partition("\n\n")[0].split())
    return re.split(r"(?<=[a-z\])`]\.)\s+(?=[A-Z`])", paragraph, maxsplit=1)[0]


def escaped(text: str) -> str:
    """Returns `text` with `|` escaped, and `<` outside of code."""
    parts = re.split(r"(`[^`]*`)", text.replace("|", r"\|"))
    return "".join(part if part.startswith("`") else part.replace("<", "&lt;") for part in parts)
