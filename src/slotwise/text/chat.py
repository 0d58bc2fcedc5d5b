"""Chat messages to one prompt, by the Jinja template that a checkpoint brings along.

The environment is the one chat templates are written for (transformers' `apply_chat_template`): sandboxed, immutable,
blocks trimmed, with `raise_exception`, `strftime_now` and a `tojson` that does not escape HTML.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2.compiler import CodeGenerator
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Expr, Impossible, Node, TemplateData
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from slotwise.errors import OneLineError
from slotwise.text.tokenizer import TokenizerError, read_json

MAX_CHARACTERS = 64 << 20  # of a rendered prompt
MAX_TEMPLATE = 1 << 20  # characters; those in use have less than a tenth


class ChatTemplateError(OneLineError, ValueError):
    """The template does not compile, or refuses these messages."""


class _GenerationTag(Extension):
    """`{% generation %}` marks the assistant's words for training; here it only passes them on."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's declaration)

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Compiler(CodeGenerator):
    """Computes nothing while it compiles: a constant such as `"x" * 10**10` is the template's to compute, in bounds."""

    def _output_child_to_const(self, node: Expr, *more: Any) -> str:
        if not isinstance(node, TemplateData):
            raise Impossible
        return super()._output_child_to_const(node, *more)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None,
            separators: tuple[str, str] | None = None, sort_keys: bool = False) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols], optimized=False
    )
    environment.code_generator_class = _Compiler
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


class ChatTemplate:
    """A compiled template.  `special_tokens` (`bos_token`, `eos_token`, ...) are its variables.

    Raises:
        ChatTemplateError: `source` is not a valid template.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        if not isinstance(source, str) or len(source) > MAX_TEMPLATE:
            raise ChatTemplateError(f"the chat template must be a text of at most {MAX_TEMPLATE} characters")
        try:
            self._template = _environment().from_string(source)
        except Exception as error:  # Python's own compiler has the last word, and refuses in many ways
            raise ChatTemplateError(f"the chat template does not compile: {error}") from error
        self._special_tokens = dict(special_tokens)

    def render(self, messages: Sequence[Mapping[str, Any]], /, **variables: Any) -> str:
        """The prompt for `messages`, each with `role` and `content`.

        `add_generation_prompt` (true unless given) opens the assistant's answer; other variables are the template's.

        Raises:
            ChatTemplateError: the template refuses the messages, fails, or writes more than `MAX_CHARACTERS`.
        """
        chosen = {"add_generation_prompt": True, "tools": None, "documents": None} | self._special_tokens | variables
        parts: list[str] = []
        size = 0
        try:
            for part in self._template.generate(chosen | {"messages": [_with_plain_text(m) for m in messages]}):
                parts.append(part)
                size += len(part)
                if size > MAX_CHARACTERS:
                    raise ChatTemplateError(f"the chat template wrote more than {MAX_CHARACTERS} characters")
        except ChatTemplateError:
            raise
        except Exception as error:  # a template can fail in any way that Python can
            raise ChatTemplateError(f"the chat template failed: {error}") from error
        return "".join(parts)


def load_chat_template(folder: str | Path, special_tokens: Mapping[str, str],
                       file: str | Path | None = None) -> ChatTemplate | None:
    """The template in `file`, else the checkpoint's: `chat_template.jinja`, else `tokenizer_config.json`.

    Returns None when the checkpoint has none.

    Raises:
        ChatTemplateError: there is one and it cannot be used.
    """
    path = Path(file) if file is not None else Path(folder) / "chat_template.jinja"
    if file is not None or path.is_file():
        try:
            with path.open(encoding="utf-8") as text:
                return ChatTemplate(text.read(MAX_TEMPLATE + 1), special_tokens)
        except (OSError, UnicodeError) as error:
            raise ChatTemplateError(f"cannot read the chat template {path}: {error}") from error
    try:
        source = read_json(Path(folder) / "tokenizer_config.json").get("chat_template")
    except TokenizerError as error:
        raise ChatTemplateError(str(error)) from error
    if isinstance(source, list):
        source = _default_of(source)
    return ChatTemplate(source, special_tokens) if source else None


def _default_of(named: list[Any]) -> Any:
    """Of several templates, [{"name", "template"}], the one for plain chat."""
    if not all(isinstance(entry, dict) and isinstance(entry.get("name"), str) for entry in named):
        raise ChatTemplateError("chat_template must be a text, or a list of objects with name and template")
    templates = {entry.get("name"): entry.get("template", "") for entry in named}
    if "default" not in templates:
        raise ChatTemplateError(f"none of the chat templates {sorted(map(str, templates))} is named 'default'")
    return templates["default"]


def _with_plain_text(message: Mapping[str, Any]) -> dict[str, Any]:
    """Content given as text parts, [{"type": "text", "text"}], becomes one string, a line for each part."""
    content = message.get("content")
    if not isinstance(content, list):
        return dict(message)
    return {**message, "content": "\n".join(part["text"] for part in content)}
