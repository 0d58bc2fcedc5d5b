"""Fields that neither OpenAI's nor vLLM's protocol has: named in a header of the response, and in the log.

They may be misspelt.  A field of an inner object is named with its object: `stream_options.include`,
`messages[2].content[0].foo`; a parameter of the query with a question mark.  Names are the client's text: bounded in
number and length, and escaped.  The log has one line a minute.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import islice
from typing import Any, get_args
from urllib.parse import parse_qsl

import msgspec

from slotwise.server.body_precheck import ABSENT, LARGE
from slotwise.server.http_exchange import HttpExchange
from slotwise.throttled_warning import ThrottledWarning

HEADER = b"x-slotwise-warning"
MAX_NAMES = 5
UNREADABLE = "(not UTF-8)"  # in the place of a name
MAX_CHARACTERS = 48  # of a name; each may be written as ten
MAX_QUERY = 1024  # characters that are looked at
QUERY_HINTS = ("beta", "api-version")  # that clients of Anthropic's and of Azure's send with every request

# Keys of messages, items, parts, blocks and calls: those that are read, those that chat templates read, and what the
# APIs themselves send and clients send back with the next turn, which changes nothing.
KEYS = frozenset((
    "role", "content", "type", "text", "refusal", "name", "id", "index", "status", "phase", "input", "output",
    "arguments", "function", "tool_calls", "tool_call_id", "tool_use_id", "call_id", "is_error", "audio",
    "function_call", "reasoning", "reasoning_content", "thinking", "tool_plan", "thoughts", "prefix", "tools",
    "documents", "weight", "signature", "summary", "encrypted_content", "annotations", "logprobs", "citations",
    "cache_control", "prompt_cache_breakpoint", "caller", "async", "async_", "namespace", "created_by", "parsed",
    "parsed_arguments", "toolset_name", "diagnostics", "thought", "tool_responses", "recipient", "end_turn",
    "content_type", "outputs", "calls", "chosen",
    "model", "stop_reason", "stop_sequence", "stop_details", "usage", "container", "context_management"))
DEPTH = 3  # a message, a result in it, and the texts of that
NESTED = ("content", "output", "summary", "tool_calls")  # keys whose lists hold such objects

_OBJECT = msgspec.json.Decoder(dict[str, msgspec.Raw])
_UNKNOWN = re.compile(
    r"Object contains unknown field `(?P<name>.*?)`(?: - at `\$\.(?P<inside>[^`]*)`)?\Z", re.DOTALL)
_warning = ThrottledWarning(logging.getLogger(__name__))


def warn_of_unknown_fields(exchange: HttpExchange, kind: type[msgspec.Struct], body: bytes) -> None:
    """Tell the client, and the log, which fields of a decoded body are ignored."""
    query = exchange.scope["query_string"][:MAX_QUERY].decode("latin-1")
    asked = [f"?{name}" for name, _ in parse_qsl(query, keep_blank_values=True) if name not in QUERY_HINTS]
    warn_of_ignored(exchange, [*unknown_fields(kind, body), *asked])


def warn_of_unknown_keys(exchange: HttpExchange, name: str, values: object) -> None:
    """Tell of keys that are ignored inside the messages, items or blocks of the field `name`."""
    warn_of_ignored(exchange, list(islice(unknown_keys(name, values), MAX_NAMES)))


def unknown_keys(where: str, values: object, depth: int = DEPTH) -> Iterator[str]:
    """Yields the paths of keys of messages, items and their parts that are ignored and hold a value."""
    for index, value in enumerate(values if isinstance(values, list) else ()):
        if not isinstance(value, dict):
            continue
        path = f"{where}[{index}]"
        yield from _keys_beside(path, value)
        if isinstance(called := value.get("function"), dict):
            yield from _keys_beside(f"{path}.function", called)
        for name in NESTED if depth > 1 else ():
            if isinstance(inside := value.get(name), list):
                yield from unknown_keys(f"{path}.{name}", inside, depth - 1)


def _keys_beside(path: str, value: dict[str, Any]) -> Iterator[str]:
    if not value.keys() <= KEYS:
        yield from (f"{path}.{key}" for key in value if key not in KEYS and value[key])


def warn_of_ignored(exchange: HttpExchange, names: Sequence[str]) -> None:
    """Tell the client, and the log, of these fields; of many, the first ones."""
    if names := names[:MAX_NAMES]:
        told = f"unknown fields are ignored: {', '.join(map(_shown, names))}"
        exchange.more.append((HEADER, told.encode("ascii")))
        _warning.warn(told)


def unknown_fields(kind: type[msgspec.Struct], body: bytes) -> list[str]:
    """Names in a JSON object that `kind` does not have: a few of them, and of a large body the first."""
    try:
        _known_only(kind).decode(body)
    except msgspec.ValidationError as error:
        found = _UNKNOWN.match(str(error))
        if found is None or len(body) > LARGE:
            return [".".join(filter(None, (found["inside"], found["name"])))] if found else []
        return _unknown(kind, body)
    except UnicodeDecodeError:
        return [UNREADABLE]
    return []


def _unknown(kind: type[msgspec.Struct], body: bytes) -> list[str]:
    known = {field.encode_name: _object_in(field.type) for field in msgspec.structs.fields(kind)}
    names: list[str] = []
    try:
        for name, value in _OBJECT.decode(body).items():
            if name not in known:
                names.append(name)
            elif (inside := known[name]) is not None and bytes(value).startswith(b"{"):
                names += [f"{name}.{one}" for one in _unknown(inside, bytes(value))]
    except UnicodeDecodeError:
        return [UNREADABLE]
    return names[:MAX_NAMES]


@cache
def _known_only(kind: type[msgspec.Struct]) -> msgspec.json.Decoder[msgspec.Struct]:
    """A decoder that skips the fields of `kind` and refuses any other."""
    return msgspec.json.Decoder(_skipping(kind))


def _skipping(kind: type[msgspec.Struct]) -> type[msgspec.Struct]:
    fields: list[tuple[str, Any, Any]] = []
    for field in msgspec.structs.fields(kind):
        inside = _object_in(field.type)
        fields.append((field.encode_name, msgspec.Raw if inside is None else _skipping(inside) | None, ABSENT))
    return msgspec.defstruct(kind.__name__, fields, forbid_unknown_fields=True)


def _object_in(kind: Any) -> type[msgspec.Struct] | None:
    """The type of objects that a field of type `kind`, an optional struct, takes; None for fields of other types."""
    kinds = [one for one in get_args(kind) or (kind,) if one is not type(None)]
    is_struct = len(kinds) == 1 and isinstance(kinds[0], type) and issubclass(kinds[0], msgspec.Struct)
    return kinds[0] if is_struct else None


def _shown(name: str) -> str:
    return ascii(name[:MAX_CHARACTERS])
