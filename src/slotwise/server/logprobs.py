"""Log-probabilities in OpenAI's two shapes.  One object serves one choice."""

from __future__ import annotations

from math import isfinite
from typing import Any, Protocol

from slotwise.core.step import TokenLogprobs
from slotwise.server.choice import Delta
from slotwise.text.tokenizer import Tokenizer

LEAST = -9999.0  # JSON has no infinity; vLLM writes this for an impossible token


class LogprobFormat(Protocol):
    def __init__(self, tokenizer: Tokenizer) -> None: ...

    def of(self, piece: Delta) -> dict[str, Any]: ...


class CompletionLogprobs:
    """`/v1/completions`: parallel lists; offsets count characters of the tokens' own texts."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._offset = 0

    def of(self, piece: Delta) -> dict[str, Any]:
        texts = [self._tokenizer.token_text(token) for token in piece.token_ids]
        offsets = []
        for text in texts:
            offsets.append(self._offset)
            self._offset += len(text)
        return {
            "text_offset": offsets,
            "tokens": texts,
            "token_logprobs": [_finite(entry.logprob) for entry in piece.logprobs],
            "top_logprobs": [self._top(text, entry) for text, entry in zip(texts, piece.logprobs, strict=False)],
        }

    def _top(self, sampled: str, entry: TokenLogprobs) -> dict[str, float]:
        """The most probable tokens and the sampled one; of tokens with equal text, the most probable."""
        top: dict[str, float] = {}
        for token, logprob in zip(entry.top_ids, entry.top_logprobs, strict=True):
            top.setdefault(self._tokenizer.token_text(token), _finite(logprob))
        top.setdefault(sampled, _finite(entry.logprob))
        return top


class ChatLogprobs:
    """`/v1/chat/completions`: an object for each token, with its bytes."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def of(self, piece: Delta) -> dict[str, Any]:
        content = []
        for token, entry in zip(piece.token_ids, piece.logprobs, strict=False):
            top = zip(entry.top_ids, entry.top_logprobs, strict=True)
            content.append(self._token(token, entry.logprob) | {"top_logprobs": [self._token(*one) for one in top]})
        return {"content": content, "refusal": None}

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        data = self._tokenizer.token_bytes(token)
        return {"token": data.decode("utf-8", errors="replace"), "logprob": _finite(logprob), "bytes": list(data)}


def _finite(logprob: float) -> float:
    return logprob if isfinite(logprob) else LEAST
