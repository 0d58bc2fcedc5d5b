"""Fields that neither OpenAI's nor vLLM's protocol has: named in a header of the response, and in the log.

They may be misspelt.  Their names are the client's text: bounded in number and length, and escaped.  The log has one
line a minute.
"""

from __future__ import annotations

import logging
import re
from functools import cache

import msgspec

from slotwise.server.body_precheck import ABSENT, LARGE
from slotwise.server.http_exchange import HttpExchange
from slotwise.server.throttled_warning import ThrottledWarning

HEADER = b"x-slotwise-warning"
MAX_NAMES = 5
UNREADABLE = "(not UTF-8)"  # in the place of a name
MAX_CHARACTERS = 40  # of a name; each may be written as ten

_OBJECT = msgspec.json.Decoder(dict[str, msgspec.Raw])
_UNKNOWN = re.compile("Object contains unknown field `(?P<name>.*)`", re.DOTALL)
_warning = ThrottledWarning(logging.getLogger(__name__))


def warn_of_unknown_fields(exchange: HttpExchange, kind: type[msgspec.Struct], body: bytes) -> None:
    """Tell the client, and the log, which fields of a decoded body are ignored."""
    if names := unknown_fields(kind, body):
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
            return [found["name"]] if found else []
        return _unknown(kind, body)
    except UnicodeDecodeError:
        return [UNREADABLE]
    return []


def _unknown(kind: type[msgspec.Struct], body: bytes) -> list[str]:
    known = {field.encode_name for field in msgspec.structs.fields(kind)}
    try:
        return [name for name in _OBJECT.decode(body) if name not in known][:MAX_NAMES]
    except UnicodeDecodeError:
        return [UNREADABLE]


@cache
def _known_only(kind: type[msgspec.Struct]) -> msgspec.json.Decoder[msgspec.Struct]:
    """A decoder that skips the fields of `kind` and refuses any other."""
    fields = [(field.encode_name, msgspec.Raw, ABSENT) for field in msgspec.structs.fields(kind)]
    return msgspec.json.Decoder(msgspec.defstruct(kind.__name__, fields, forbid_unknown_fields=True))


def _shown(name: str) -> str:
    return ascii(name[:MAX_CHARACTERS])
