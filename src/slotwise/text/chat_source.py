"""Finds the source of a chat template.  Does not import Jinja: a server compiles templates in another process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from slotwise.errors import CheckpointError, OneLineError, described
from slotwise.platform.files import has_part, read_part, read_regular
from slotwise.text.gguf_tokenizer import read_template
from slotwise.text.tokenizer import TokenizerError, read_json

MAX_SOURCE = 1 << 20  # characters; the longest templates in use have some ten thousand
MAX_BYTES = 4 * MAX_SOURCE  # in UTF-8
DEFAULT, FOR_TOOLS = "default", "tool_use"  # names of templates


class ChatTemplateError(OneLineError, ValueError):
    """The template does not compile, or refuses these messages."""


def find_chat_template(folder: str | Path, file: str | Path | None = None) -> str | None:
    """The source in `file`, else the checkpoint's: `chat_template.jinja`, `tokenizer_config.json`, or of a GGUF file.

    Returns None when the checkpoint has none.

    Raises:
        ChatTemplateError: it cannot be read, or is not a text.
    """
    path = Path(file) if file is not None else Path(folder) / "chat_template.jinja"
    if file is not None or has_part(path):
        return _read(path, read_regular if file is not None else read_part)
    named = _named(folder)
    if named and DEFAULT not in named:
        raise ChatTemplateError(f"none of the chat templates {sorted(named)} is named {DEFAULT!r}")
    return _bounded(named[DEFAULT], path) if named.get(DEFAULT) else None


def find_tool_template(folder: str | Path, file: str | Path | None = None) -> str | None:
    """The checkpoint's template for conversations with tools, as transformers chooses it; None where it has none.

    Raises:
        ChatTemplateError: it cannot be read, or is not a text.
    """
    if file is not None:
        return None
    path = Path(folder) / "additional_chat_templates" / f"{FOR_TOOLS}.jinja"
    if has_part(Path(folder) / "chat_template.jinja"):
        return _read(path, read_part) if has_part(path) else None
    return _bounded(source, path) if (source := _named(folder).get(FOR_TOOLS)) else None


def _read(path: Path, read: Callable[[Path, int], bytes]) -> str:
    try:
        return _bounded(read(path, MAX_BYTES).decode(), path)
    except (OSError, UnicodeError) as error:
        raise ChatTemplateError(f"cannot read the chat template {path}: {described(error)}") from error


def _bounded(source: str, path: Path) -> str:
    if len(source) > MAX_SOURCE:
        raise ChatTemplateError(f"the chat template {path} has more than {MAX_SOURCE} characters")
    return source


def _named(folder: str | Path) -> dict[str, str]:
    """The templates of `tokenizer_config.json` by name: one text, or a list, [{"name", "template"}].

    A GGUF file has the usual one and others in its metadata.
    """
    try:
        if Path(folder).is_file():
            named = {DEFAULT: read_template(Path(folder)), FOR_TOOLS: read_template(Path(folder), FOR_TOOLS)}
            return {name: source for name, source in named.items() if source is not None}
        given = read_json(Path(folder) / "tokenizer_config.json").get("chat_template")
    except (TokenizerError, CheckpointError) as error:
        raise ChatTemplateError(str(error)) from error
    entries: list[Any] = given if isinstance(given, list) else [{"name": DEFAULT, "template": given}] if given else []
    if not all(isinstance(entry, dict) and isinstance(entry.get("name"), str) for entry in entries):
        raise ChatTemplateError("chat_template must be a text, or a list of objects with name and template")
    for entry in entries:
        if not isinstance(source := entry.get("template", ""), str):
            raise ChatTemplateError(f"the chat template in {folder} must be a text, not {source!r:.40}")
    return {entry["name"]: entry.get("template", "") for entry in entries}
