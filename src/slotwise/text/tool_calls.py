"""Tool calls of earlier turns, as chat templates expect them.

OpenAI's clients send a call's `arguments` as a text of JSON.  Templates write `arguments | tojson`, or walk through
them, so that a text would be encoded twice: it is parsed first, as in vLLM, and no arguments become an empty object.
A text that is not JSON, or no object, stays as it is: models write such texts, and clients send them back.  (vLLM
refuses what is not JSON.)
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NoReturn

MAX_CHARACTERS = 1 << 20  # of the arguments of one call
MAX_DEPTH = 64  # of objects and lists within each other


class ArgumentsError(ValueError):
    """Arguments that are too large to be parsed; the message says which bound they exceed."""


def with_parsed_arguments(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """A message of the assistant with the arguments of its tool calls as objects, and without an empty list of calls.

    Any other message, and what does not have the shape of a call, is returned as it is.

    Raises:
        ArgumentsError: the arguments of a call exceed a bound.
    """
    calls = message.get("tool_calls")
    if message.get("role") != "assistant" or not isinstance(calls, list):
        return message
    if not calls:
        return {name: value for name, value in message.items() if name != "tool_calls"}
    return {**message, "tool_calls": [_parsed(call) for call in calls]}


def _parsed(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return call
    return {**call, "function": {**function, "arguments": _arguments(function.get("arguments"))}}


def _arguments(given: Any) -> Any:
    if given is None or given == "":
        return {}
    if not isinstance(given, str):
        return given
    if len(given) > MAX_CHARACTERS:
        raise ArgumentsError(f"the arguments of a tool call have {len(given)} characters, more than {MAX_CHARACTERS}")
    try:
        parsed = json.loads(given, parse_constant=_no_constant)
    except RecursionError:
        raise _too_deep() from None
    except ValueError:
        return given
    if not isinstance(parsed, dict):
        return given
    _check_depth(parsed)
    return parsed


def _check_depth(value: Any) -> None:
    """Raises ArgumentsError for objects and lists that are nested too deeply."""
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        level = [inner for outer in level for inner in (outer.values() if isinstance(outer, dict) else outer)
                 if isinstance(inner, (dict, list))]
        if not level:
            return
    raise _too_deep()


def _too_deep() -> ArgumentsError:
    return ArgumentsError(f"the arguments of a tool call are nested more than {MAX_DEPTH} levels deep")


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
