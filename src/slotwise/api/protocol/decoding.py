"""Decodes request bodies: their contents are bounded first, and integral floats become integers.

Decoding a hundred thousand short strings or lists costs many times what skipping them does, and every stream waits
meanwhile.  So each field of a large body is first only located, and refused if it has more than could ever be accepted;
then what is left is decoded.  The decoder itself locates them: a struct whose fields are `Raw` skips all else, and one
that is written as an array skips what comes after its last field.
"""

from __future__ import annotations

import contextlib
import gc
import typing
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, TypeVar

import msgspec

from slotwise.api.http.api_errors import bad_request, from_decoding
from slotwise.core.params import MAX_BYTES, MAX_STOP_LENGTH, MAX_STOP_STRINGS
from slotwise.text.conversation import MAX_MESSAGES

LARGE = 64 << 10  # bytes; a smaller body is decoded within a few milliseconds whatever it holds
MAX_FIELD = 64 << 10  # bytes of a field that holds no text
MAX_STOP = MAX_STOP_STRINGS * (6 * MAX_STOP_LENGTH + 8)  # bytes; a character may be written as six
GRAMMARS = ("response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar")
MAX_GRAMMAR_VALUES = 1 << 15  # of a schema or of choices
MAX_ELEMENTS = MAX_PROMPTS = MAX_ABORTS = MAX_MESSAGES  # the last: requests that one abort may name
MAX_VALUES = 1 << 17  # of messages, their texts excluded
MAX_TOKENS = 1 << 16  # of /detokenize
MAX_TOOL_BYTES = 1 << 20  # of all tools of a request
MAX_PREDICTION = 1 << 20  # bytes
LONGER = {"stop": MAX_STOP, "stop_sequences": MAX_STOP, "prediction": MAX_PREDICTION} | dict.fromkeys(
    GRAMMARS, 2 * MAX_BYTES)  # escapes make a field longer than its grammar
LISTS_OF_TEXTS = ("documents", "texts", "query", "queries", "items", "text_1", "text_2", "data_1", "data_2")
JSON_TEXTS = ("state", "questions")  # texts, or JSON whose values are bounded in number
TEXTS = ("system", "instructions")  # a text, or parts as a message has them
SHORT = 1 << 15  # bytes of an array; locating the elements of a longer one costs as much, however few it has
ABSENT = msgspec.Raw()
_OBJECT = msgspec.json.Decoder(dict[str, msgspec.Raw])
_to_json = msgspec.json.Encoder().encode
MAX_NAME = 200  # characters of a name that an error repeats
Body = TypeVar("Body", bound=msgspec.Struct)
_FLOAT_FOR_INTEGER = "got `float`"  # in msgspec's error


# -- bounds on the contents of a large body ----------------------------------------------------------------------------


class _TextFields(msgspec.Struct):
    """A message, an item, or one of its parts: only the fields that may be long."""

    content: msgspec.Raw = ABSENT
    text: msgspec.Raw = ABSENT
    output: msgspec.Raw = ABSENT  # of a tool
    arguments: msgspec.Raw = ABSENT


_TEXT = msgspec.json.Decoder(_TextFields)
_SHORT_ARRAY = msgspec.json.Decoder(list[msgspec.Raw])
_OPENING = msgspec.json.Decoder(msgspec.defstruct(  # the first elements of an array: one more than the most allowed
    "Opening", [(f"at{index}", msgspec.Raw, ABSENT) for index in range(MAX_ELEMENTS + 1)], array_like=True))


@cache
def _raw_fields(kind: type[msgspec.Struct]) -> msgspec.json.Decoder[msgspec.Struct]:
    """A decoder to the fields of `kind` as raw JSON."""
    fields = [(field.encode_name, msgspec.Raw, ABSENT) for field in msgspec.structs.fields(kind)]
    return msgspec.json.Decoder(msgspec.defstruct(kind.__name__, fields))


def trimmed(kind: type[msgspec.Struct], body: bytes) -> bytes:
    """A body to be decoded as `kind`, without unknown and repeated fields.

    Raises:
        ApiError: a field has more than could ever be accepted.
        msgspec.DecodeError, RecursionError: it is not JSON, or its messages are malformed.
    """
    found = _raw_fields(kind).decode(body)
    kept = []
    for name in found.__struct_fields__:
        raw = getattr(found, name)
        if raw is not ABSENT:
            field = b'"%b":%b' % (name.encode(), raw)
            _check(name, field)
            kept.append(field)
    return b"{%b}" % b",".join(kept)


def _check(name: str, field: bytes) -> None:
    value = field[len(name) + 3 :]
    if name == "prompt" or (name == "input" and b"{" not in value[:2]):
        _check_prompts(name, value)
    elif name in ("messages", "input"):
        _check_messages(name, value)
    elif name in TEXTS:
        if not value.startswith(b'"'):
            _check_messages(name, b'[{"content":%b}]' % value)
    elif name in LISTS_OF_TEXTS:
        _check_texts(name, value)
    elif name in JSON_TEXTS:
        if not value.startswith(b'"') and _most_values(value) > MAX_VALUES:
            raise bad_request(f"{name}: more than {MAX_VALUES} commas and brackets", name)
    elif name == "tools":
        if len(value) > MAX_TOOL_BYTES or _most_values(value) > MAX_VALUES:
            raise bad_request(f"tools: at most {MAX_TOOL_BYTES} bytes, and {MAX_VALUES} commas and brackets", name)
    elif name == "request_ids":
        _check_strings(name, value)
    elif name == "tokens":
        if value.count(b",") >= MAX_TOKENS:
            raise bad_request(f"tokens: at most {MAX_TOKENS} tokens at once", name)
    elif len(field) > (most := LONGER.get(name, MAX_FIELD)):
        raise bad_request(f"{name}: {len(field)} bytes are more than the {most} that it may have", name)
    elif name in GRAMMARS and not value.startswith(b'"') and _most_values(value) > MAX_GRAMMAR_VALUES:
        raise bad_request(f"{name}: more than {MAX_GRAMMAR_VALUES} values", name)


def _elements(value: bytes) -> list[msgspec.Raw]:
    """Elements of an array; more than `MAX_ELEMENTS` when there are more.  Raises msgspec.ValidationError."""
    if len(value) < SHORT:
        return _SHORT_ARRAY.decode(value)
    return [one for one in msgspec.structs.astuple(_OPENING.decode(value)) if one is not ABSENT]


def _check_strings(name: str, value: bytes) -> None:
    """Bound the length of an array of texts."""
    with contextlib.suppress(msgspec.ValidationError):  # the decoder refuses it as early
        if len(_elements(value)) > MAX_ELEMENTS:
            raise bad_request(f"{name}: at most {MAX_ELEMENTS} in one request", name)


def _check_messages(name: str, value: bytes) -> None:
    """Bound parts and values.  Each message is decoded whole, so every value that is not text counts."""
    num_parts, num_values = 0, _most_values(value)
    try:
        messages = _elements(value)
        for message in messages:
            if (text := bytes(_TEXT.decode(message).content)).startswith(b"["):
                parts = _elements(text)
                if (num_parts := num_parts + len(parts)) > MAX_ELEMENTS:
                    break
                num_values -= sum(map(_in_texts, parts))
            else:
                num_values -= _in_texts(message)
    except msgspec.ValidationError as error:
        raise bad_request(f"{name}: must be a list of objects, with texts or lists of parts", name) from error
    if len(messages) > MAX_ELEMENTS or num_parts > MAX_ELEMENTS:
        raise bad_request(f"{name}: must hold 1 to {MAX_ELEMENTS} messages, and as many parts", name)
    if num_values > MAX_VALUES:
        raise bad_request(f"{name}: more than {MAX_VALUES} values in addition to their texts", name)


def _check_texts(name: str, value: bytes) -> None:
    """Bound the number of texts, and the values of objects that contain one."""
    if not value.startswith(b"["):
        return
    num_values = 0
    with contextlib.suppress(msgspec.ValidationError):  # the decoder refuses it as early
        elements = _elements(value)
        for element in map(bytes, elements):
            if not element.startswith(b'"'):
                num_values += _most_values(element) - _in_texts(msgspec.Raw(element))
        if len(elements) > MAX_ELEMENTS:
            raise bad_request(f"{name}: at most {MAX_ELEMENTS} in one request", name)
    if num_values > MAX_VALUES:
        raise bad_request(f"{name}: more than {MAX_VALUES} values next to their texts", name)


def _in_texts(raw: msgspec.Raw) -> int:
    """Of an upper bound of the values in a message or part, those that are in its texts."""
    texts = map(bytes, msgspec.structs.astuple(_TEXT.decode(raw)))
    return sum([_most_values(text) for text in texts if text.startswith(b'"')])


def _most_values(raw: bytes) -> int:
    """An upper bound of the values in `raw`: one of these characters precedes each, outside of texts."""
    return len(raw) - len(raw.translate(None, b",[{"))


def _check_prompts(name: str, value: bytes) -> None:
    """Bound the number of prompts: decoding fails at the first value that is not a prompt."""
    if value.startswith(b'"'):
        return
    if b'"' in value:
        _check_strings(name, value)
    elif value.count(b"[") > MAX_PROMPTS + 1:
        raise bad_request(f"{name}: at most {MAX_PROMPTS} prompts in one request", name)


# -- integral floats, such as 16.0: some clients write every number with a fraction ------------------------------------


def with_whole_numbers(kind: type[msgspec.Struct], body: bytes) -> bytes:
    """A body to be decoded as `kind`, with integral floats written as integers where the type has integers.

    Fields of more than `MAX_FIELD` bytes stay as they are: a rewritten one costs many times what decoding does.

    Raises:
        msgspec.DecodeError, RecursionError: it is not a JSON object.
    """
    fields = {name: bytes(raw) for name, raw in _OBJECT.decode(body).items()}
    for name in _integer_fields(kind) & fields.keys():
        if len(fields[name]) <= MAX_FIELD:
            # Decoding the whole body again names what is wrong.
            with contextlib.suppress(ValueError, msgspec.MsgspecError, RecursionError, OverflowError):
                fields[name] = _to_json(_with_integers(msgspec.json.decode(fields[name])))
    return b"{%b}" % b",".join([_to_json(name) + b":" + raw for name, raw in fields.items()])


@cache
def _integer_fields(kind: type[msgspec.Struct]) -> frozenset[str]:
    return frozenset(field.encode_name for field in msgspec.structs.fields(kind) if _has_integers(field.type))


def _has_integers(annotation: Any) -> bool:
    return annotation is int or any(map(_has_integers, typing.get_args(annotation)))


def _with_integers(value: Any) -> Any:
    if isinstance(value, list):
        return [_with_integers(one) for one in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


# -- decoding ----------------------------------------------------------------------------------------------------------


@cache
def _decoder(kind: type[Body]) -> msgspec.json.Decoder[Body]:
    return msgspec.json.Decoder(kind)


def decode(kind: type[Body], body: bytes) -> Body:
    """The body as a `kind`.  Raises ApiError, with the field at fault as its `param`."""
    with _decoding(body):
        kept = trimmed(kind, body) if len(body) > LARGE else body
        try:
            decoded: Body = _decoder(kind).decode(kept)
        except msgspec.ValidationError as error:
            if _FLOAT_FOR_INTEGER not in str(error):
                raise
            decoded = _decoder(kind).decode(with_whole_numbers(kind, kept))
    return decoded


def decode_object(body: bytes) -> dict[str, Any]:
    """The fields of a JSON object.  Raises ApiError for any other body, with the field at fault as its `param`."""
    with _decoding(body):
        fields = _OBJECT.decode(body)
    return {name: _value(name, raw) for name, raw in fields.items()}


def _value(name: str, raw: msgspec.Raw) -> Any:
    try:
        return msgspec.json.decode(raw)
    except (ValueError, RecursionError) as error:
        raise bad_request(f"{name[:MAX_NAME]}: {error}", name[:MAX_NAME]) from error


@contextmanager
def _decoding(body: bytes) -> Iterator[None]:
    gc.disable()  # JSON has no cycles; the collector would scan a hostile body's hundred thousand lists
    try:
        yield
    except (ValueError, RecursionError) as error:
        raise from_decoding(error, body) from error
    finally:
        gc.enable()
