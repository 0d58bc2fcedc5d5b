"""What a router knows of a request: its prompt in pieces of equal length, each known by a digest.

    prompt   |■■■■■■■■■■■|■■■■■■■■■■■|■■■■■■■■■■■|■■■■|        the rest after the last whole piece has no digest
    digests      d0          d1          d2                   each of all bytes up to the end of its piece

Two prompts that begin alike share their first digests, so a replica that has computed `d1` needs to compute only what
comes after it.  Nothing is tokenized: a router needs no files of the model.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b
from typing import NamedTuple

PIECE = 256  # bytes: about a block of 64 tokens
MAX_PIECES = 1024  # of a prompt; what comes after them is not looked up
DIGEST = 6  # bytes: an exact integer in JSON


class RoutedRequest(NamedTuple):
    """A request as routers see it."""

    request_id: str
    num_tokens: float = 1.0  # of its prompt
    digests: tuple[int, ...] = ()  # of its prompt's pieces
    piece_tokens: float = 1.0  # tokens of a piece
    session: str = ""  # requests of one session build on one another; "": of none
    adapter: str = ""  # the adapter it names; "": none


def digests(salt: str, parts: Iterable[bytes], piece: int = PIECE) -> tuple[int, ...]:
    """Returns the digests of the pieces of a prompt, which is `parts` joined.

    Args:
        salt: prompts with different salts have no digest in common.
        piece: bytes of a piece.
    """
    found: list[int] = []
    running, filled = blake2b(salt.encode(), digest_size=DIGEST), 0
    for part in parts:
        at = 0
        while len(found) < MAX_PIECES and at < len(part):
            taken = part[at : at + piece - filled]
            running.update(taken)
            at, filled = at + len(taken), filled + len(taken)
            if filled == piece:
                found.append(int.from_bytes(running.digest()))
                filled = 0
    return tuple(found)


def written(num_bytes: int, pieces: Iterable[int]) -> str:
    """Returns the value of the header that carries the digests of a request; `read` reverses it."""
    return f"{num_bytes}:{''.join([f'{piece:0{2 * DIGEST}x}' for piece in pieces])}"


def read(value: str) -> tuple[int, tuple[int, ...]]:
    """Returns the bytes of a prompt and the digests of its pieces.

    Raises:
        ValueError: `value` is not one that `written` returns.
    """
    size, colon, hexadecimal = value.partition(":")
    width = 2 * DIGEST
    well_formed = colon and size.isascii() and size.isdigit() and len(size) < 16 and not len(hexadecimal) % width
    pieces = [hexadecimal[at : at + width] for at in range(0, len(hexadecimal), width)]
    if not well_formed or len(pieces) > MAX_PIECES or len(pieces) * PIECE > int(size):
        raise ValueError("must be a prompt's bytes and the digests of its pieces")
    return int(size), tuple([_number(one) for one in pieces])


def _number(text: str) -> int:
    if not all(one in "0123456789abcdef" for one in text):
        raise ValueError("must have digests in hexadecimal")
    return int(text, 16)
