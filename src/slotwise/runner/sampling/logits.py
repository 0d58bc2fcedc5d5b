"""Edits of a request's logits before a token is chosen: banned ends, bias, penalties.

The order is vLLM's: end tokens are banned before `min_tokens`, the bias is added, then the repetition penalty (over
prompt and output; Keskar et al., "CTRL", 2019) scales and the frequency and presence penalties (over the output only;
OpenAI's) are subtracted.  Only the entries concerned are edited, so the cost follows the request, not the vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from slotwise.core.params import SamplingParams
from slotwise.core.step import NewRequest


class LogitEdits:
    """The edits of one request.  Tokens outside the vocabulary have no logit and are ignored."""

    def __init__(self, join: NewRequest, vocab_size: int) -> None:
        params = join.params
        biased = [token for token in params.logit_bias if 0 <= token < vocab_size]
        self._bias_ids = np.array(biased, dtype=np.int64)
        self._bias = np.array([params.logit_bias[token] for token in biased], dtype=np.float32)
        self._ends = np.array([token for token in join.stop_ids if 0 <= token < vocab_size], dtype=np.int64)
        self._min_tokens = params.min_tokens
        self._penalties = Penalties(join, vocab_size) if has_penalties(params) else None

    def apply(self, logits: np.ndarray, num_outputs: int) -> None:
        """Edit `logits [vocab]` float32 in place for the token that follows `num_outputs` outputs.

        Raises:
            ValueError: earlier outputs were neither in the `NewRequest` nor recorded.
        """
        if num_outputs < self._min_tokens:
            logits[self._ends] = -np.inf
        logits[self._bias_ids] += self._bias
        if self._penalties is not None:
            self._penalties.forget_after(num_outputs)
            self._penalties.apply(logits)

    def record(self, token: int) -> None:
        """Record `token` as the next output."""
        if self._penalties is not None:
            self._penalties.record(token)


def has_penalties(params: SamplingParams) -> bool:
    """Whether earlier tokens change the logits."""
    return params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0


class Penalties:
    """The distinct tokens of a request, and how often it produced each."""

    def __init__(self, join: NewRequest, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._repetition = np.float32(join.params.repetition_penalty)
        self._frequency = np.float32(join.params.frequency_penalty)
        self._presence = np.float32(join.params.presence_penalty)
        self._places: dict[int, int] = {}  # column of each distinct token
        self._ids = np.empty(64, dtype=np.int64)
        self._counts = np.zeros(64, dtype=np.int32)  # occurrences in the output
        self._in_prompt = np.zeros(64, dtype=bool)
        self._outputs: list[int] = []
        prompt = self._places_of(join.tokens[: join.num_prompt])  # may grow the columns
        self._in_prompt[prompt] = True
        for token in join.tokens[join.num_prompt :]:
            self.record(token)

    def record(self, token: int) -> None:
        self._outputs.append(token)
        places = self._places_of((token,))
        self._counts[places] += 1

    def forget_after(self, num_outputs: int) -> None:
        """Remove outputs of a step that failed and is run again."""
        if num_outputs > len(self._outputs):
            raise ValueError(f"a token is wanted after {num_outputs} outputs, of which {len(self._outputs)} are known")
        while len(self._outputs) > num_outputs:
            self._counts[self._places_of((self._outputs.pop(),))] -= 1

    def apply(self, logits: np.ndarray) -> None:
        """Penalise `logits [vocab]` in place."""
        used = len(self._places)
        ids, counts = self._ids[:used], self._counts[:used]
        values = logits[ids]
        scaled = np.where(values > 0, values / self._repetition, values * self._repetition)
        values = np.where(self._in_prompt[:used] | (counts > 0), scaled, values)
        logits[ids] = values - self._frequency * counts.astype(np.float32) - self._presence * (counts > 0)

    def _places_of(self, tokens: Iterable[int]) -> list[int]:
        """Columns of tokens; new ones are added at the end."""
        places: list[int] = []
        for token in tokens:
            if 0 <= token < self._vocab_size:
                place = self._places.setdefault(token, len(self._places))
                if place == len(self._ids):
                    self._grow()
                self._ids[place] = token
                places.append(place)
        return places

    def _grow(self) -> None:
        room = len(self._ids)
        self._ids = np.concatenate([self._ids, np.empty(room, dtype=np.int64)])
        self._counts = np.concatenate([self._counts, np.zeros(room, dtype=np.int32)])
        self._in_prompt = np.concatenate([self._in_prompt, np.zeros(room, dtype=bool)])
