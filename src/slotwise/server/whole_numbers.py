"""Integral floats in a body, such as 16.0, as integers: some clients write every number with a fraction."""

from __future__ import annotations

import contextlib
import typing
from functools import cache
from typing import Any

import msgspec

from slotwise.server.body_precheck import MAX_FIELD

_OBJECT = msgspec.json.Decoder(dict[str, msgspec.Raw])
_to_json = msgspec.json.Encoder().encode


def with_whole_numbers(kind: type[msgspec.Struct], body: bytes) -> bytes:
    """A body to be decoded as `kind`, with integral floats written as integers where the type has integers.

    Fields of more than `MAX_FIELD` bytes stay as they are: a rewritten one costs many times what decoding does.

    Raises:
        msgspec.DecodeError, RecursionError: it is no JSON object.
    """
    fields = {name: bytes(raw) for name, raw in _OBJECT.decode(body).items()}
    for name in _integer_fields(kind) & fields.keys():
        if len(fields[name]) <= MAX_FIELD:
            # Decoding the whole body again names what is wrong.
            with contextlib.suppress(ValueError, msgspec.MsgspecError, RecursionError, OverflowError):
                fields[name] = _to_json(_whole(msgspec.json.decode(fields[name])))
    return b"{%b}" % b",".join([_to_json(name) + b":" + raw for name, raw in fields.items()])


@cache
def _integer_fields(kind: type[msgspec.Struct]) -> frozenset[str]:
    return frozenset(field.encode_name for field in msgspec.structs.fields(kind) if _has_integers(field.type))


def _has_integers(annotation: Any) -> bool:
    return annotation is int or any(map(_has_integers, typing.get_args(annotation)))


def _whole(value: Any) -> Any:
    if isinstance(value, list):
        return [_whole(one) for one in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value
