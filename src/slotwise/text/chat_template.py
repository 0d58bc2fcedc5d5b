"""Renders chat messages to one prompt, by a checkpoint's Jinja template.

The environment is the one chat templates are written for (transformers' `apply_chat_template`): sandboxed, immutable,
blocks trimmed, with `raise_exception`, `strftime_now` and a `tojson` that does not escape HTML.

A server renders in a worker process, for a checkpoint's template may never end or exhaust memory: `CALLS` are what it
calls there (`api/http/worker_process.py`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import meta, nodes
from jinja2.compiler import CodeGenerator
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Expr, Impossible, Node, TemplateData
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from slotwise.text.chat_source import ChatTemplateError, find_chat_template
from slotwise.text.conversation import RESERVED_VARIABLES, Message
from slotwise.text.normalization import ArgumentsError, Normalizer

__all__ = ["ChatTemplate", "ChatTemplateError", "load_chat_template"]

MAX_CHARACTERS = 16 << 20  # of a rendered prompt: more than any context holds
Special = Sequence[Sequence[str]]  # pairs of a variable's name and its value


class _GenerationTag(Extension):
    """`{% generation %}` marks the assistant's words for training; here it is without effect."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's declaration)

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Compiler(CodeGenerator):
    """Folds no constants: one such as `"x" * 10**10` is computed when the template runs, within its limits."""

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

    Neither compiling nor rendering is bounded in time: a server does both in a worker (see `text.chat_template`).

    Raises:
        ChatTemplateError: `source` is not a valid template.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self._source = source
        try:
            self._template = _environment().from_string(source)
        except MemoryError:
            raise
        except Exception as error:  # a source can fail in any way that Python can: it is compiled to Python
            raise ChatTemplateError(f"the chat template does not compile: {error}") from error
        self._special_tokens = dict(special_tokens)
        self._normalizer = Normalizer(self._write, source)

    def variables(self) -> dict[str, Variable]:
        """What the template may be given, by name: see `variables_of`; without its special tokens."""
        found = variables_of(self._source)
        return {name: found[name] for name in sorted(found) if name not in self._special_tokens}

    @property
    def ignores_tools(self) -> bool:
        """Whether the template leaves tools out; then the system prompt describes them."""
        return self._normalizer.ignores_tools

    def render(self, messages: Sequence[Mapping[str, Any]], is_open: bool = False, /, **variables: Any) -> str:
        """The prompt for `messages`, each with `role` and `content`, normalized to what the template accepts.

        `add_generation_prompt` (default true) opens the assistant's answer; other variables are the template's.

        Args:
            is_open: the prompt will be cut at the end of the last message.

        Raises:
            ChatTemplateError: the template refuses the messages or leaves one out, fails, or writes more than
                `MAX_CHARACTERS`.
            MemoryError: it exceeds this process' memory limit.
        """
        given = {"add_generation_prompt": True, "tools": None, "documents": None} | variables
        try:
            return self._write(*self._normalizer.normalized(messages, given, is_open=is_open))
        except ArgumentsError as error:
            raise ChatTemplateError(str(error)) from error
        except RecursionError as error:
            raise ChatTemplateError(f"the chat template failed: {error}") from error

    def _write(self, messages: list[Message], variables: Mapping[str, Any]) -> str:
        """Messages as the template writes them."""
        parts: list[str] = []
        size = 0
        try:
            for part in self._template.generate({**self._special_tokens, **variables, "messages": messages}):
                parts.append(part)
                size += len(part)
                if size > MAX_CHARACTERS:
                    raise ChatTemplateError(f"the chat template wrote more than {MAX_CHARACTERS} characters")
        except (ChatTemplateError, MemoryError):
            raise
        except Exception as error:  # a template can fail in any way that Python can
            raise ChatTemplateError(f"the chat template failed: {error}") from error
        return "".join(parts)


def load_chat_template(folder: str | Path, special_tokens: Mapping[str, str],
                       file: str | Path | None = None) -> ChatTemplate | None:
    """The template in `file`, else the checkpoint's, compiled in this process; None when the checkpoint has none.

    Raises:
        ChatTemplateError: there is one and it cannot be used.
    """
    source = find_chat_template(folder, file)
    return ChatTemplate(source, special_tokens) if source else None


# -- what a template reads ---------------------------------------------------------------------------------------------


Variable = dict[str, Any]
"""What is known of a variable: `type` (`boolean`, `string`, `number`), `values` that the template distinguishes, and
its `default`; each only where the template's source says it."""

_DEFINED = ("defined", "undefined")


def variables_of(source: str) -> dict[str, Variable]:
    """The variables that a template reads and does not only set itself, with what its source says about each."""
    environment = _environment()
    read = meta.find_undeclared_variables(environment.parse(source)) - environment.globals.keys()
    tree = environment.parse(source)
    names = list(tree.find_all(nodes.Name))
    own, arguments = [{one.name for one in names if one.ctx == context} for context in ("store", "param")]
    defaults, compared, asked = _defaults(tree), _compared(tree), _asked(tree)
    found: dict[str, Variable] = {}
    for name in read:
        if (name in arguments or (name in own and name not in defaults)) and name not in RESERVED_VARIABLES:
            continue  # a variable of the template's own
        values = list(dict.fromkeys(compared.get(name, ())))
        known = [*values, *defaults.get(name, ())]
        found[name] = variable = Variable()
        is_switch = not known and asked.count(name) == sum(one.name == name and one.ctx == "load" for one in names)
        if kind := "boolean" if is_switch else _type(known):
            variable["type"] = kind
        if kind == "string" and values:
            variable["values"] = values
        if len(told := {repr(one): one for one in defaults.get(name, ())}) == 1:
            variable["default"] = next(iter(told.values()))
    return found


def _type(values: Sequence[Any]) -> str:
    kinds = {"boolean" if isinstance(one, bool) else "string" if isinstance(one, str) else
             "number" if isinstance(one, int | float) else "" for one in values}
    return kinds.pop() if len(kinds) == 1 else ""


def _name(node: nodes.Node | None) -> str:
    """The variable that an expression is, or is made of by filters as `lower`."""
    while isinstance(node, nodes.Filter) and node.name in ("lower", "trim", "string"):
        node = node.node
    return node.name if isinstance(node, nodes.Name) else ""


def _defaults(tree: nodes.Template) -> dict[str, list[Any]]:
    """The constants that stand for variables which are not given, by the names of all that may be left out."""
    found: dict[str, list[Any]] = {}
    for test in tree.find_all(nodes.Test):
        if test.name in _DEFINED and (name := _name(test.node)):
            found.setdefault(name, [])
    for one in tree.find_all(nodes.Filter):
        if one.name in ("default", "d") and (name := _name(one.node)):
            found.setdefault(name, []).extend(_constants(one.args[:1]))
    for branch in tree.find_all(nodes.If):
        for name in _tested(branch.test):
            found[name] += _constants([one.node for one in (*branch.body, *branch.else_)
                                       if isinstance(one, nodes.Assign) and _name(one.target) == name])
    for choice in tree.find_all(nodes.CondExpr):
        ends = (choice.expr1, choice.expr2)
        for name in _tested(choice.test):
            found[name] += _constants([one for one, other in (ends, ends[::-1]) if _name(other) == name])
    return found


def _tested(test: nodes.Node) -> list[str]:
    """The variables of which an expression says whether they are given."""
    tests = [test] if isinstance(test, nodes.Test) else list(test.find_all(nodes.Test))
    return [name for one in tests if one.name in _DEFINED and (name := _name(one.node))]


def _compared(tree: nodes.Template) -> dict[str, list[Any]]:
    """The constants that variables are compared with."""
    found: dict[str, list[Any]] = {}
    for one in tree.find_all(nodes.Compare):
        for operand in one.ops:
            sides = (one.expr, operand.expr)
            for side, other in (sides, sides[::-1]) if operand.op in ("eq", "ne") else (sides,):
                listed = other.items if isinstance(other, nodes.List | nodes.Tuple) else [other]
                if (name := _name(side)) and operand.op in ("eq", "ne", "in", "notin"):
                    found.setdefault(name, []).extend(_constants(listed))
    return found


def _constants(given: Iterable[nodes.Node | None]) -> list[Any]:
    """The values of those expressions that are texts, numbers, or true or false."""
    found = []
    for one in given:
        value = one.node if isinstance(one, nodes.Neg) else one
        if isinstance(value, nodes.Const) and isinstance(value.value, str | int | float):
            found.append(-value.value if one is not value and not isinstance(value.value, str) else value.value)
    return found


def _asked(tree: nodes.Template) -> list[str]:
    """The variables of expressions of which only the truth matters."""
    found: list[str] = []
    kinds = (nodes.If, nodes.CondExpr, nodes.And, nodes.Or, nodes.Not, nodes.Test)
    for one in tree.find_all(kinds):
        parts = [one.test] if isinstance(one, nodes.If | nodes.CondExpr) else one.iter_child_nodes()
        is_told = not isinstance(one, nodes.Test) or one.name in (*_DEFINED, "true", "false", "none", "boolean")
        found += [part.name for part in parts if is_told and isinstance(part, nodes.Name)]
    return found


# -- calls of a worker process -----------------------------------------------------------------------------------------


@lru_cache(2)  # one may be for tools
def _compiled(source: str, special: tuple[tuple[str, str], ...]) -> ChatTemplate:
    return ChatTemplate(source, dict(special))


def _template_of(source: str, special: Special) -> ChatTemplate:
    return _compiled(source, tuple([(name, value) for name, value in special]))


def check_source(source: str, special: Special) -> None:
    """Raises ChatTemplateError for a template that does not compile."""
    _template_of(source, special)


def ignores_tools(source: str, special: Special) -> bool:
    """See `ChatTemplate.ignores_tools`."""
    return _template_of(source, special).ignores_tools


def render(source: str, special: Special, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any],
           is_open: bool) -> str:
    """See `ChatTemplate.render`."""
    return _template_of(source, special).render(messages, is_open, **variables)


def variables(source: str, special: Special) -> dict[str, Variable]:
    """See `ChatTemplate.variables`."""
    return _template_of(source, special).variables()


CALLS = {"check": check_source, "ignores_tools": ignores_tools, "render": render, "variables": variables}
