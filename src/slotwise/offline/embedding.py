"""Vectors of the offline API: a prompt in, an `EmbeddingRequestOutput` out."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from sys import byteorder

from slotwise.core.params import PoolingParams, SamplingParams
from slotwise.core.request import RequestSpec
from slotwise.core.step import TokenLogprobs
from slotwise.engine.messages import Add
from slotwise.offline.residents import BASE, Held
from slotwise.outputs import EmbeddingOutput, EmbeddingRequestOutput

NO_TOKENS = SamplingParams(max_tokens=None)


class EmbeddingJob:
    """A prompt and its vector.  It has the methods of `offline.job.Job` and of its one `Choice`."""

    index = 0
    met_stop_string = False

    def __init__(self, output: EmbeddingRequestOutput, pooling: PoolingParams, salt: str = "",
                 adapter: Held = BASE) -> None:
        self.output = output
        self.error = ""  # why it ended, if it failed
        self._pooling = pooling
        self._salt = salt
        self._adapter = adapter

    @property
    def job(self) -> EmbeddingJob:
        return self

    @property
    def choices(self) -> list[EmbeddingJob]:
        return [self]

    def add(self, name: str, request_id: int) -> Add:
        """The command that starts it, under a name that is unique among the unfinished ones."""
        return Add(request_id, RequestSpec(
            tuple(self.output.prompt_token_ids), NO_TOKENS, salt=self._salt, pooling=self._pooling,
            adapter=self._adapter.number, adapter_name=self._adapter.name), name=name)

    def take(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs], now: float, reason: str = "") -> None:
        """Never called: nothing is sampled."""

    def read_prompt(self, start: int, entries: Sequence[TokenLogprobs]) -> None:
        """Never called: no log-probabilities are computed."""

    def pool(self, vector: bytes) -> None:
        """Sets the vector: float32, little-endian."""
        numbers = array("f", vector)
        if byteorder == "big":
            numbers.byteswap()
        self.output.outputs = EmbeddingOutput(numbers.tolist())

    def end(self, reason: str, message: str, now: float) -> None:
        self.error = message
        self.output.finished = True
        self.output.metrics.finished_time = now

    def raise_errors(self) -> None:
        """Raises RuntimeError if it failed."""
        if self.error:
            raise RuntimeError(self.error)
