"""Request bodies: read within a bound on memory; fields that are ignored are named to the client.

The bound is checked before the memory is allocated.  A body counts from the moment its length is known, or as it
arrives, until its prompts are token ids; once it is read, so do the values it is decoded to, which may take twenty
times its bytes.  The bound is shared by tenants, or by client addresses where there are no keys (see
core.tenant_capacity).  Small bodies do not count: the number of connections bounds them.

A body may be packed with gzip.  Packed and unpacked it has the same bound, and both count: what it unpacks to is known
only as it is unpacked, a piece at a time, with other work of the event loop in between.

Fields that neither OpenAI's nor vLLM's protocol has are named in a header of the response and in the log, for they may
be misspelled.  A field of an inner object is named with its object: `stream_options.include`,
`messages[2].content[0].foo`; a parameter of the query with a question mark.  Names are the client's text: bounded in
number and length, and escaped.  The log has one line a minute.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import re
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from functools import cache
from http import HTTPStatus
from itertools import islice
from typing import Any, get_args
from urllib.parse import parse_qsl

import msgspec

from slotwise.api.http.api_errors import ApiError, bad_request
from slotwise.api.http.http_exchange import STEP, HttpExchange, too_large
from slotwise.api.limits.server_settings import ServerSettings
from slotwise.api.protocol.decoding import ABSENT, LARGE, MAX_VALUES
from slotwise.core.tenant_capacity import TenantCapacity
from slotwise.errors import ThrottledWarning

MOST = 256 << 20  # bytes
LEAST_BODIES = 4  # bodies of the largest size that fit at once
VALUE = 64  # bytes of a decoded value
SMALL = 64 << 10  # bytes of a body that does not count
GIVE_BACK = 32 << 20  # bytes of bodies after which freed memory is returned to the system: a millisecond or two
GZIP = (b"gzip", b"x-gzip")  # RFC 9110, 8.4.1.3
GZIP_FORMAT = 16 + zlib.MAX_WBITS  # zlib's number for it

Claim = Callable[[int], None]
Unpack = Callable[[bytes, int, Claim], Awaitable[bytes]]
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


class Bodies:
    """Reads bodies within the bound."""

    def __init__(self, settings: ServerSettings) -> None:
        self._max_bytes = settings.max_body_bytes
        self._timeout = settings.body_timeout
        self._most = max(MOST, LEAST_BODIES * (settings.max_body_bytes + STEP + VALUE * MAX_VALUES))
        self._capacity = TenantCapacity("bytes of bodies are on their way", self._most)
        self._freed = 0  # bytes since memory was last returned
        self._turn = asyncio.Lock()  # a pass of the event loop is begun for each large body
        self._trim = _trim()

    @asynccontextmanager
    async def reading(self, exchange: HttpExchange, max_bytes: int | None = None) -> AsyncIterator[bytes]:
        """The body of a request, counted until the context ends.

        Args:
            max_bytes: a smaller bound than that of any body.

        Raises:
            ApiError: it is too large or too slow, there are too many at once, or it cannot be unpacked.
            ClientGone: the client disconnected before its end.
        """
        holder, held = exchange.holder, 0

        def claim(size: int) -> None:
            nonlocal held
            if size <= max(SMALL, held):
                return
            if objection := self._capacity.objection(holder, size - held):
                raise ApiError(HTTPStatus.SERVICE_UNAVAILABLE, f"too much is being sent: {objection}",
                               code="bodies_full")
            self._capacity.acquire(holder, size - held)
            held = size

        try:
            most = self._max_bytes if max_bytes is None else max_bytes
            unpack = _unpacker(exchange)
            body = await exchange.body(most, self._timeout, claim)
            if unpack is not None:
                body = await unpack(body, most, claim)
            claim(len(body) + VALUE * _num_values(body))
            if len(body) > SMALL:
                async with self._turn:
                    await asyncio.sleep(0)
            yield body
        finally:
            if held:
                self._capacity.release(holder, held)
                self._give_back(held)

    def _give_back(self, num_bytes: int) -> None:
        self._freed += num_bytes
        if self._freed >= GIVE_BACK:
            self._freed = 0
            self._trim()


def _num_values(body: bytes) -> int:
    """At most how many values a body holds, up to what the decoder accepts in addition to token ids and texts."""
    return min(MAX_VALUES, body.count(b",") + body.count(b"[") + body.count(b"{"))


def _trim() -> Callable[[], object]:
    """Returns glibc's `malloc_trim`, which returns freed memory to the system; a no-op elsewhere."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return (lambda: trim(0)) if trim is not None else (lambda: None)


def _unpacker(exchange: HttpExchange) -> Unpack | None:
    """Returns what unpacks the body of a request; None: it is not packed.

    Raises:
        ApiError: it is packed in another way than with gzip.
    """
    given = b",".join([value for name, value in exchange.scope["headers"] if name == b"content-encoding"])
    codings = [coding for part in given.lower().split(b",") if (coding := part.strip()) not in (b"", b"identity")]
    if not codings:
        return None
    if len(codings) == 1 and codings[0] in GZIP:
        return unpacked
    exchange.more.append((b"accept-encoding", b"gzip"))
    raise ApiError(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "the body may be packed with gzip, and in no other way",
                   "Content-Encoding", "encoding_not_supported")


async def unpacked(body: bytes, most: int, claim: Claim) -> bytes:
    """The content of `body`, one gzip member, with a pass of the event loop after each piece.

    Args:
        most: bytes that it may have.
        claim: receives the bytes of both, before each piece of the content is there; may refuse by raising.

    Raises:
        ApiError: it is not gzip, or unpacks to too much.
    """
    inflate = zlib.decompressobj(GZIP_FORMAT)
    parts: list[bytes] = []
    size, rest = 0, body
    while not inflate.eof:
        claim(len(body) + size + STEP)
        try:
            part = inflate.decompress(rest, STEP)
        except zlib.error as error:
            raise _no_gzip(str(error)) from error
        rest = inflate.unconsumed_tail
        if not part and not rest and not inflate.eof:
            raise _no_gzip("it ends too early")
        size += len(part)
        if size > most:
            raise too_large(most)
        parts.append(part)
        await asyncio.sleep(0)
    if inflate.unused_data:
        raise _no_gzip("something follows its end")
    return b"".join(parts)


def _no_gzip(why: str) -> ApiError:
    return bad_request(f"the body is not the gzip that Content-Encoding says: {why}", code="malformed_gzip")


# -- fields that are ignored -------------------------------------------------------------------------------------------


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
