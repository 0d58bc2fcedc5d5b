"""The bytes of each token.

Byte-level vocabularies (GPT-2 and after: Llama 3, Qwen, SmolLM) write a byte as one printable character; SentencePiece
vocabularies (Llama 2, Mistral) write a space as "▁" and a byte without a token of its own as "<0x0A>".  In both, a text
is the concatenation of its tokens' bytes, so that decoding is a table look-up and an incremental UTF-8 decoder.
"""

from __future__ import annotations

import json
import re
from typing import Any

import tokenizers

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_STEPS = ("Replace", "ByteFallback", "Fuse")  # SentencePiece's decoder, with or without Strip at its end


def _printable_bytes() -> dict[str, int]:
    """GPT-2's code: printable bytes stand for themselves, the others for characters from 256 on."""
    printing = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printing]
    return {chr(byte): byte for byte in printing} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _printable_bytes()


class TokenBytes(dict[int, bytes]):
    """Token id to bytes, filled on demand; unknown ids are empty, as in `tokenizers`' own decoding."""

    drops_leading_space = False  # the first token of a text loses the space that encoding put before it

    def __init__(self, inner: tokenizers.Tokenizer) -> None:
        super().__init__()
        self._inner = inner

    def __missing__(self, token_id: int) -> bytes:
        token = self._inner.id_to_token(token_id)
        if token is None:
            return b""  # not kept: the number of unknown ids is unbounded
        self[token_id] = data = self._bytes_of(token)
        return data

    def first(self, token_id: int) -> bytes:
        """The bytes of a token that begins a text."""
        return self[token_id]

    def _bytes_of(self, token: str) -> bytes:
        raise NotImplementedError


class ByteLevelTokenBytes(TokenBytes):
    def _bytes_of(self, token: str) -> bytes:
        try:
            return bytes(map(_BYTE_OF.__getitem__, token))
        except KeyError:
            return token.encode()  # an added token, written as it is


class SentencePieceTokenBytes(TokenBytes):
    def __init__(self, inner: tokenizers.Tokenizer, space: str, *, has_bytes: bool, drops_leading_space: bool) -> None:
        super().__init__(inner)
        self._space, self._has_bytes = space, has_bytes
        self.drops_leading_space = drops_leading_space

    def first(self, token_id: int) -> bytes:
        data = self[token_id]
        return data[1:] if self.drops_leading_space and data.startswith(b" ") else data

    def _bytes_of(self, token: str) -> bytes:
        byte = _BYTE.fullmatch(token) if self._has_bytes else None
        return bytes([int(byte[1], 16)]) if byte else token.replace(self._space, " ").encode()


def token_bytes_of(inner: tokenizers.Tokenizer) -> TokenBytes | None:
    """The table of `inner`; None when its decoder does more than concatenate (WordPiece, CTC, ...)."""
    state = json.loads(inner.decoder.__getstate__()) if inner.decoder else {}
    steps = state["decoders"] if state.get("type") == "Sequence" else [state]
    kinds = [step.get("type", "") for step in steps]
    if kinds == ["ByteLevel"]:
        return ByteLevelTokenBytes(inner)
    if kinds == ["Metaspace"]:
        space, drops = steps[0]["replacement"], steps[0]["prepend_scheme"] != "never"
        return SentencePieceTokenBytes(inner, space, has_bytes=False, drops_leading_space=drops)
    return _fused_token_bytes(inner, steps, kinds)


def _fused_token_bytes(inner: tokenizers.Tokenizer, steps: list[dict[str, Any]], kinds: list[str]) -> TokenBytes | None:
    strip = steps.pop() if kinds[-1] == "Strip" else None
    if tuple(kinds[:3]) != _STEPS or len(steps) != 3 or steps[0]["content"] != " ":
        return None
    if strip and (strip["content"], strip["start"], strip["stop"]) != (" ", 1, 0):
        return None
    space = steps[0]["pattern"].get("String")
    return SentencePieceTokenBytes(inner, space, has_bytes=True,
                                   drops_leading_space=strip is not None) if space else None
