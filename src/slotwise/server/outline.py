"""A look at a large body before it is decoded.

Decoding a hundred thousand short strings or lists costs many times what skipping them does, and every stream waits
meanwhile.  So each field of a large body is first only found, and refused if it has more than could ever be accepted;
then what is left is decoded.
"""

from __future__ import annotations

from functools import cache

import msgspec

from slotwise.core.params import MAX_STOP_LENGTH, MAX_STOP_STRINGS
from slotwise.server.errors import bad_request

LARGE = 64 << 10  # bytes; what is smaller is decoded within a few milliseconds whatever it holds
MAX_FIELD = 64 << 10  # bytes of a field that holds no text
MAX_STOP = MAX_STOP_STRINGS * (6 * MAX_STOP_LENGTH + 8)  # bytes; a character may be written as six
MAX_PROMPTS = 4096
MAX_MESSAGES = 4096
MAX_TOKENS = 1 << 16  # of /detokenize


class Part(msgspec.Struct):
    type: str


class Message(msgspec.Struct):
    """What each must have.  The rest is skipped."""

    role: str
    content: str | list[Part] | None = None


class Messages(msgspec.Struct):
    messages: list[Message] | None = None


ABSENT = msgspec.Raw()


@cache
def _outline(kind: type[msgspec.Struct]) -> msgspec.json.Decoder[msgspec.Struct]:
    """Decodes to the fields of `kind` as they are written."""
    fields = [(field.encode_name, msgspec.Raw, ABSENT) for field in msgspec.structs.fields(kind)]
    return msgspec.json.Decoder(msgspec.defstruct(kind.__name__, fields))


def trimmed(kind: type[msgspec.Struct], body: bytes) -> bytes:
    """A body that is to become a `kind`, without what is unknown or said again later.

    Raises:
        ApiError: a field has more than could ever be accepted.
        msgspec.DecodeError, RecursionError: it is not JSON, or has messages that are none.
    """
    found = _outline(kind).decode(body)
    kept = []
    for name in found.__struct_fields__:
        raw = getattr(found, name)
        if raw is not ABSENT:
            field = b'"%b":%b' % (name.encode(), raw)
            _check(name, field)
            kept.append(field)
    return b"{%b}" % b",".join(kept)


def _check(name: str, field: bytes) -> None:
    if name == "prompt":
        _check_prompts(field.removeprefix(b'"prompt":'))
    elif name == "messages":
        _check_messages(msgspec.json.decode(b"{%b}" % field, type=Messages).messages or [])
    elif name == "tokens":
        if field.count(b",") >= MAX_TOKENS:
            raise bad_request(f"tokens: at most {MAX_TOKENS} tokens at once", "tokens")
    elif len(field) > (most := MAX_STOP if name == "stop" else MAX_FIELD):
        raise bad_request(f"{name}: {len(field)} bytes are more than the {most} that it may have", name)


def _check_messages(messages: list[Message]) -> None:
    num_parts = sum([len(message.content) for message in messages if isinstance(message.content, list)])
    if len(messages) > MAX_MESSAGES or num_parts > MAX_MESSAGES:
        raise bad_request(f"messages: must hold 1 to {MAX_MESSAGES} messages, and as many parts", "messages")


def _check_prompts(raw: bytes) -> None:
    """By a lower bound of how many there are: nothing that could be right is refused."""
    if raw.startswith(b'"'):
        return
    quotes = raw.count(b'"')
    prompts = (quotes - raw.count(b'\\"')) // 2 if quotes else raw.count(b"[") - 1
    if prompts > MAX_PROMPTS:
        raise bad_request(f"prompt: at most {MAX_PROMPTS} prompts in one request", "prompt")
