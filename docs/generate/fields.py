"""The fields of classes: names, types as written, and the comment beside each."""

from __future__ import annotations

import ast
import inspect
import io
import re
import textwrap
import tokenize
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from docs.generate.markdown import code, escaped, listed, sentence, table

from slotwise.core.setting_fields import Setting, settings_of

NAMED = re.compile(r"\{(\w+)\}")
OURS = "slotwise."


class Field(NamedTuple):
    name: str
    type: str
    note: str  # its comment, or the string below it; "" without either


def fields_of(kind: type) -> list[Field]:
    """Returns the annotated fields of a class, those of its bases in this package first."""
    found: dict[str, Field] = {}
    for base in reversed(kind.__mro__):
        if base.__module__.startswith(OURS):
            found |= {field.name: field for field in _own_fields(base)}
    return list(found.values())


def note_of(declared: Setting) -> str:
    """Returns what a setting means, with its default where that needs words; names of settings are written as code."""
    text = declared.help + f" (default: {declared.otherwise})" * bool(declared.otherwise)
    return NAMED.sub(lambda found: code(found[1]), text)


def settings_table(kind: type) -> str:
    """Returns a table of the settings that a class declares, as keys of a JSON object."""
    rows = []
    for name, one in settings_of(kind).items():
        values = f" One of {listed(one.choices)}." if one.choices else ""
        if one.range is not None:
            values = " " + sentence(f"{one.range}, in {one.unit}" if one.unit in ("seconds", "ms") else str(one.range))
        default = "" if one.default in (..., None, "", ()) else one.default
        default = f"{default:g}" if isinstance(default, float) else str(default)
        rows.append((code(name), sentence(NAMED.sub(lambda found: code(found[1]), one.help)) + values,
                     sentence(NAMED.sub(lambda found: code(found[1]), one.otherwise) or default) or "–"))
    return table(("key", "meaning", "default"), rows)


def notes_of(kind: type) -> dict[str, str]:
    """Returns the notes of the fields that have one."""
    return {field.name: field.note for field in fields_of(kind) if field.note}


def fields_table(kind: type, common: Mapping[str, str]) -> str:
    """Returns a table of the fields; `common` are the notes of those that have none."""
    return table(("field", "type", "meaning"), [
        (code(field.name), code(field.type), sentence(field.note or common.get(field.name, "")))
        for field in fields_of(kind)])


def documented(kind: type, common: Mapping[str, str]) -> str:
    """Returns the docstring of a class and the table of its fields; the docstring's pictures stay as they are."""
    prose = "\n".join(line if line.startswith("    ") else escaped(line).replace(r"\|", "|")
                      for line in _docstring(kind).splitlines())
    return "\n\n".join(filter(None, (prose, fields_table(kind, common))))


def _docstring(kind: type) -> str:
    """Returns a class' docstring, but not the one that NamedTuple makes."""
    text = kind.__doc__ or ""
    return "" if text.startswith(f"{kind.__name__}(") else inspect.cleandoc(text)


def _own_fields(kind: type) -> Iterator[Field]:
    try:
        source = textwrap.dedent(inspect.getsource(kind))
    except OSError:  # the class is made from declarations that stand elsewhere
        return
    comments = {token.start[0]: token.string.lstrip("# ") for token in tokenize.generate_tokens(
        io.StringIO(source).readline) if token.type == tokenize.COMMENT}
    (statement,) = ast.parse(source).body
    body = getattr(statement, "body", [])
    for node, below in zip(body, [*body[1:], None], strict=True):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and not node.target.id.startswith("_"):
            note = comments.get(node.end_lineno or 0, "") or _string(below)
            yield Field(node.target.id, ast.unparse(node.annotation), note)


def _string(statement: ast.stmt | None) -> str:
    """Returns the text of a statement that is a string, else ""."""
    value = statement.value if isinstance(statement, ast.Expr) else None
    text = value.value if isinstance(value, ast.Constant) else ""
    return inspect.cleandoc(text) if isinstance(text, str) else ""
