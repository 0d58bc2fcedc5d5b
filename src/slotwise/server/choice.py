"""One choice of a response: the engine's tokens, turned into text, ended by stop strings."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import NamedTuple

from slotwise.core.plan import TokenLogprobs
from slotwise.engine.service import AT_THE_END, Chunk, Generation
from slotwise.server.errors import from_ending
from slotwise.text.continuation import Continuation


class Piece(NamedTuple):
    """What came since the last piece.  The last one has a finish reason."""

    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs]
    finish_reason: str | None


class Choice:
    """One continuation of one prompt."""

    def __init__(self, index: int, generation: Generation, continuation: Continuation) -> None:
        self.index = index
        self.generation = generation
        self.continuation = continuation

    @property
    def num_tokens(self) -> int:
        return self.continuation.num_tokens

    async def pieces(self, interval: int) -> AsyncIterator[Piece]:
        """All pieces: the first as soon as there is a token, then one for each `interval` tokens.

        Raises:
            ApiError: the engine refused the request or failed.
        """
        async for chunk in self.generation:
            yield (piece := self._read(chunk))
            if piece.finish_reason is not None:
                return
            self.generation.interval = interval

    async def whole(self) -> Piece:
        """Everything in one piece.  Nobody wakes up for a token unless stop strings are to be looked for.

        Raises:
            ApiError: the engine refused the request or failed.
        """
        if not self.continuation.looks_for_stops:
            self.generation.interval = AT_THE_END
        pieces = [piece async for piece in self.pieces(self.generation.interval)]
        return Piece(
            "".join(piece.text for piece in pieces),
            [token for piece in pieces for token in piece.token_ids],
            [entry for piece in pieces for entry in piece.logprobs],
            pieces[-1].finish_reason)

    def _read(self, chunk: Chunk) -> Piece:
        continuation, reason = self.continuation, chunk.finish_reason
        if reason in ("rejected", "error"):
            raise from_ending(reason, chunk.message)
        tokens = list(chunk.token_ids)
        before = continuation.num_tokens
        terminators = tokens[-1:] if reason == "stop" else []  # an end or stop token; never shown
        text = continuation.feed(tokens[: len(tokens) - len(terminators)])
        if reason is not None and continuation.stop_reason is None:
            text += continuation.end(terminators)
        if continuation.stop_reason is not None:
            self.generation.finish("stop")
            reason = "stop"
        kept = continuation.num_tokens - before
        return Piece(text, tokens[:kept], list(chunk.logprobs[:kept]), reason)
