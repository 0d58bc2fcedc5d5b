"""Fields that neither OpenAI's nor vLLM's protocol has: named in a header of the response, and in the log.

They may be misspelt.  A field of an inner object is named with its object: `stream_options.include`.  Names are the
client's text: bounded in number and length, and escaped.  The log has one line a minute.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from functools import cache
from typing import Any, get_args

import msgspec

from slotwise.server.body_precheck import ABSENT, LARGE
from slotwise.server.http_exchange import HttpExchange
from slotwise.throttled_warning import ThrottledWarning

HEADER = b"x-slotwise-warning"
MAX_NAMES = 5
UNREADABLE = "(not UTF-8)"  # in the place of a name
MAX_CHARACTERS = 40  # of a name; each may be written as ten

_OBJECT = msgspec.json.Decoder(dict[str, msgspec.Raw])
_UNKNOWN = re.compile(
    r"Object contains unknown field `(?P<name>.*?)`(?: - at `\$\.(?P<inside>[^`]*)`)?\Z", re.DOTALL)
_warning = ThrottledWarning(logging.getLogger(__name__))


def warn_of_unknown_fields(exchange: HttpExchange, kind: type[msgspec.Struct], body: bytes) -> None:
    """Tell the client, and the log, which fields of a decoded body are ignored."""
    warn_of_ignored(exchange, unknown_fields(kind, body))


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
