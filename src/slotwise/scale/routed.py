"""From an HTTP request to what a router knows of it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import NamedTuple

import msgspec

from slotwise.routing.prompt import PIECE, RoutedRequest, digests, written

PROMPT_FIELDS = ("tools", "system", "instructions", "messages", "input", "prompt")  # in the order of a prompt
SALTS = ("model", "cache_salt")  # fields whose values prompts have to share before they share cached blocks
SESSIONS = ("session_id", "prompt_cache_key")  # hints of a body, of which the first given names its session
SESSION_HEADER = b"x-session-id"
BYTES_PER_TOKEN = 4.0  # until a replica has told
ELEMENT = b"\x00"  # between two fields: it stands in no JSON text

_decode = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


class Prompt(NamedTuple):
    """What is read of a body, whichever replica it is sent to."""

    num_bytes: int
    pieces: tuple[int, ...]
    session: str
    previous_response_id: str
    model: str = ""  # as the client names it

    @property
    def header(self) -> str:
        """The value of `X-Slotwise-Prefix`."""
        return written(self.num_bytes, self.pieces)

    def request(self, request_id: str, piece_tokens: float, adapters: Collection[str]) -> RoutedRequest:
        """Args:
            piece_tokens: mean tokens of a piece, as replicas have told; 0: none has.
            adapters: those of all replicas.
        """
        piece = piece_tokens or PIECE / BYTES_PER_TOKEN
        return RoutedRequest(request_id, max(1.0, self.num_bytes / PIECE * piece), self.pieces, piece, self.session,
                             self.model if self.model in adapters else "")


def prompt_of(body: bytes, tenant: str, headers: Mapping[bytes, bytes]) -> Prompt:
    """Reads the fields of a body that make its prompt; a body that is no JSON object has none, and is refused later.

    Args:
        tenant: prompts of different tenants share nothing.
    """
    try:
        fields: dict[str, msgspec.Raw] = _decode(body)
    except (msgspec.DecodeError, RecursionError):
        fields = {}
    salts = [bytes(fields[name]).decode(errors="replace") if name in fields else "" for name in SALTS]
    salt = "\0".join([tenant, *salts])
    parts = [part for name in PROMPT_FIELDS if name in fields for part in (ELEMENT, _content(bytes(fields[name])))]
    session = headers.get(SESSION_HEADER, b"").decode("latin-1") or next(_texts(fields, SESSIONS), "")
    return Prompt(sum(map(len, parts)), digests(salt, parts), f"{tenant}:{session}" if session else "",
                  next(_texts(fields, ("previous_response_id",)), ""), next(_texts(fields, ("model",)), ""))


def _content(raw: bytes) -> bytes:
    """A list without its closing bracket: a conversation that goes on begins with the one before."""
    return raw.rstrip().removesuffix(b"]") if raw.startswith(b"[") else raw


def _texts(fields: Mapping[str, msgspec.Raw], names: Iterable[str]) -> Iterator[str]:
    for name in names:
        if name in fields:
            try:
                yield msgspec.json.decode(fields[name], type=str)
            except msgspec.DecodeError:  # the replica says what is wrong with it
                continue
