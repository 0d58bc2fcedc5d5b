"""The tools of a chat request, and which of them its answer may call."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from slotwise.server.context import Api
from slotwise.server.errors import ApiError, bad_request
from slotwise.server.output_parsing import Parsing
from slotwise.server.parsers.parser import Tools
from slotwise.server.protocol import ChatRequest

MAX_TOOLS = 512
NAME = re.compile(r"[\w.:/-]{1,128}", re.ASCII)

Tool = dict[str, Any]


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
    if chosen.required:
        raise bad_request("tool_choice: only none and auto are supported", "tool_choice", "unsupported_parameter")
    if chosen.strict:
        raise bad_request("tools: strict is not supported", "tools", "unsupported_parameter")
    if chosen.tools is not None and not api.output_format.tools:
        raise bad_request("tools is not supported, because the server has no parser of the model's tool calls: start "
                          "it with --tool-call-parser", "tools", "unsupported_parameter")
    return chosen


def parsing_of(api: Api, request: ChatRequest, chosen: ToolChoice, begun: bool | None) -> Parsing | None:
    """How the outputs of a request are parsed; None where they are text."""
    if not api.output_format.parses(chosen.tools):
        return None
    return Parsing(api.output_format, chosen.tools, begun, 1 if request.parallel_tool_calls is False else None,
                   hides_reasoning=request.include_reasoning is False)


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
            return name
    raise _wrong(choice)


def _wrong(choice: object) -> ApiError:
    kind = choice.get("type") if isinstance(choice, dict) else choice
    return bad_request(
        'tool_choice: must be "none", "auto", "required", or {"type": "function", "function": {"name": ...}}, not '
        f"{kind!r:.40}", "tool_choice")
