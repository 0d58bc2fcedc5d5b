"""The tools of a chat request: which of them its answer may call, or must, and the grammar that sees to it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from slotwise.core.grammar import JSON_SCHEMA, LARK, REGEX, Grammar, is_gbnf
from slotwise.server.context import Api
from slotwise.server.errors import ApiError, bad_request
from slotwise.server.grammars import grammar_of
from slotwise.server.output_parsing import Parsing
from slotwise.server.parsers.grammar import MOST_CALLS, Schemas, lark_of_regex
from slotwise.server.parsers.parser import Tools
from slotwise.server.parsers.registry import TOOL_PARSERS, OutputFormat
from slotwise.server.protocol import ChatRequest
from slotwise.server.unsupported import refuse_others
from slotwise.text.structured_output import StructuredOutputError, json_schema, lark

MAX_TOOLS = 512
NAME = re.compile(r"[\w.:/-]{1,128}", re.ASCII)

Tool = dict[str, Any]


class Constraint(NamedTuple):
    """What an output must match."""

    grammar: Grammar | None = None  # None: anything
    writes_calls: bool = False  # calls, too, are written by the grammar


class ToolChoice(NamedTuple):
    """What an answer may call, or must."""

    tools: Tools | None = None  # schemas of arguments, by name; None: no tool may be called
    required: bool = False  # at least one is called
    strict: frozenset[str] = frozenset()  # arguments of these match their schemas


def allowed_tools(api: Api, request: ChatRequest) -> ToolChoice:
    """What the answer to a request may call.

    Raises:
        ApiError: a field is not valid, or the server cannot do what it asks for.
    """
    chosen = tool_choice(request.tools or (), request.tool_choice)
    if chosen.tools is not None and not chosen.required and not api.text.output_format.tools:
        raise bad_request("tools is not supported, because the server has no parser of the model's tool calls: start "
                          f"it with --tool-call-parser and one of {', '.join(sorted(TOOL_PARSERS))}", "tools",
                          "unsupported_parameter")
    return chosen


def constraint(form: OutputFormat, request: ChatRequest, chosen: ToolChoice, begun: bool | None) -> Constraint:
    """What the output of a request must match.

    Args:
        begun: whether the output begins within reasoning; see `parsers.thinking.has_begun`.

    Raises:
        ApiError: the fields describe no grammar, or none that this format has.
    """
    answer = grammar_of(request)
    if chosen.required:
        if answer is not None:
            raise bad_request(f"{answer.field}: not available with a tool_choice that requires a call", answer.field)
        return Constraint(_lark(form.grammar_of_calls(_schemas(request, chosen), begun), "tools"), True)
    if answer is not None:
        if not form.parses(chosen.tools):
            return Constraint(answer)
        schemas = None if chosen.tools is None else _schemas(request, chosen)
        return Constraint(
            _lark(form.grammar_of_answer(_terms(answer), begun, schemas), answer.field), schemas is not None)
    if not chosen.strict:
        return Constraint()
    text = form.grammar_of_strict(_schemas(request, chosen), begun)
    if text is None:
        raise bad_request(f"tools: strict is not supported by the parser {form.tools} unless tool_choice requires a "
                          "call", "tools", "unsupported_parameter")
    return Constraint(_lark(text, "tools"), True)


def _lark(text: str, field: str) -> Grammar:
    """Args: field: of the request, that an error names."""
    try:
        return lark(text, field)
    except StructuredOutputError as error:
        raise bad_request(str(error), field) from error


def _schemas(request: ChatRequest, chosen: ToolChoice) -> Schemas:
    """The schemas that calls must match: of any object for tools that are neither strict nor required."""
    schemas = {}
    for name, schema in (chosen.tools or {}).items():
        if schema.get("type", "object") != "object":
            raise bad_request(f"tools: the parameters of {name} must be of type object", "tools")
        wanted = {"type": "object"} | dict(schema) if chosen.required or name in chosen.strict else {"type": "object"}
        try:
            schemas[name] = json_schema(wanted, "tools").text
        except StructuredOutputError as error:
            raise bad_request(str(error), "tools") from error
    is_one = request.parallel_tool_calls is False or isinstance(request.tool_choice, dict)
    return Schemas(schemas, 1 if is_one else MOST_CALLS)


def _terms(answer: Grammar) -> str:
    """A grammar as terms of a rule.  Raises ApiError for GBNF, which is translated only where it stands alone."""
    if answer.kind == LARK and is_gbnf(answer.text):
        raise bad_request(f"{answer.field}: a grammar in GBNF is not available beside tools or reasoning; write it in "
                          "Lark's syntax", answer.field)
    if answer.kind == REGEX:
        return lark_of_regex(answer.text)
    return f"%json {answer.text}" if answer.kind == JSON_SCHEMA else f"%lark {{\n{answer.text}\n}}"


def parsing_of(form: OutputFormat, request: ChatRequest, chosen: ToolChoice, begun: bool | None, *,
               is_written: bool) -> Parsing | None:
    """How the outputs of a request are parsed; None where they are text.

    Args:
        is_written: a grammar writes the calls.
    """
    if not is_written and not form.parses(chosen.tools):
        return None
    return Parsing(form, chosen.tools, begun, 1 if request.parallel_tool_calls is False else None,
                   hides_reasoning=request.include_reasoning is False, is_written=is_written)


def tool_choice(tools: Sequence[Tool], choice: str | dict[str, Any] | None) -> ToolChoice:
    """What the fields `tools` and `tool_choice` of a request say.

    Raises:
        ApiError: a tool or the choice is not valid.
    """
    functions = _functions(tools)
    if choice == "none" or (not functions and choice in (None, "auto")):
        return ToolChoice()
    if not functions:
        raise bad_request("tool_choice: only allowed when tools are specified", "tool_choice")
    strict = frozenset(name for name, function in functions.items() if function.get("strict"))
    schemas = {name: function.get("parameters") or {} for name, function in functions.items()}
    if choice in (None, "auto", "required"):
        return ToolChoice(schemas, choice == "required", strict)
    name = _named(choice)
    if name not in schemas:
        raise bad_request(f"tool_choice: none of the tools is called {name!r:.200}", "tool_choice")
    return ToolChoice({name: schemas[name]}, True, strict)


def _functions(tools: Sequence[Tool]) -> dict[str, dict[str, Any]]:
    if len(tools) > MAX_TOOLS:
        raise bad_request(f"tools: at most {MAX_TOOLS} tools", "tools")
    functions: dict[str, dict[str, Any]] = {}
    for index, tool in enumerate(tools):
        function = _function(f"tools[{index}]", tool)
        if functions.setdefault(function["name"], function) is not function:
            raise bad_request(f"tools[{index}]: two tools are called {function['name']}", "tools")
    return functions


def _function(where: str, tool: Tool) -> dict[str, Any]:
    if (kind := tool.get("type")) != "function":
        raise bad_request(f"{where}.type: only function is supported, not {kind!r:.40}", "tools",
                          "unsupported_parameter")
    function = tool.get("function")
    if not isinstance(function, dict):
        raise bad_request(f"{where}.function: must be an object", "tools")
    if not isinstance(name := function.get("name"), str) or not NAME.fullmatch(name):
        raise bad_request(f"{where}.function.name: must be 1 to 128 letters, digits and _.:/-", "tools")
    for field, kind, meant in (("description", str, "a string"), ("parameters", dict, "an object"),
                               ("strict", bool, "true or false")):
        if not isinstance(function.get(field), kind | None):
            raise bad_request(f"{where}.function.{field}: must be {meant}", "tools")
    return function


def _named(choice: object) -> str:
    if isinstance(choice, dict) and choice.get("type") == "function":
        function = choice.get("function")
        if isinstance(function, dict) and isinstance(name := function.get("name"), str):
            refuse_others(choice, "tool_choice", "tool_choice", ("type", "function"))
            refuse_others(function, "tool_choice.function", "tool_choice", ("name",))
            return name
    raise _wrong(choice)


def _wrong(choice: object) -> ApiError:
    kind = choice.get("type") if isinstance(choice, dict) else choice
    return bad_request(
        'tool_choice: must be "none", "auto", "required", or {"type": "function", "function": {"name": ...}}, not '
        f"{kind!r:.40}", "tool_choice")
