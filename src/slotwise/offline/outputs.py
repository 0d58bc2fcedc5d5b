"""Results of the offline API.  Names are vLLM's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from slotwise.core.record import TokenLogprobs


@dataclass(slots=True)
class Logprob:
    """A token's log-probability."""

    logprob: float
    rank: int | None = None  # 1: the most probable token
    decoded_token: str | None = None  # the text of the token by itself


def by_token(token: int, entry: TokenLogprobs, text_of: Callable[[int], str]) -> dict[int, Logprob]:
    """The log-probabilities at one position: of its own token, and of the most probable ones."""
    ranked = [(token, entry.logprob, entry.rank), *zip(entry.top_ids, entry.top_logprobs, count(1), strict=False)]
    return {one: Logprob(logprob, rank, text_of(one)) for one, logprob, rank in ranked}


@dataclass(slots=True)
class CompletionOutput:
    """One continuation."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None  # of all its tokens; None unless `logprobs` were requested
    logprobs: list[dict[int, Logprob]] | None = None  # by token; None unless requested
    finish_reason: str | None = None  # stop, length, abort, error; None: it is not finished
    stop_reason: int | str | None = None  # the stop string, or the id in `stop_token_ids`, that ended it

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestMetrics:
    """Seconds on the engine's monotonic clock; 0: not yet."""

    arrival_time: float
    scheduled_ts: float = 0.0  # when it got a slot
    first_token_ts: float = 0.0
    last_token_ts: float = 0.0
    finished_time: float = 0.0
    num_generation_tokens: int = 0  # of all continuations

    @property
    def first_token_time(self) -> float:
        """`first_token_ts` by its older name."""
        return self.first_token_ts

    @property
    def first_token_latency(self) -> float:
        """Seconds from the arrival to the first token; 0 before it."""
        return max(0.0, self.first_token_ts - self.arrival_time)

    def generated(self, num_tokens: int, now: float) -> None:
        """Counts tokens that came at `now`."""
        self.first_token_ts = self.first_token_ts or now
        self.last_token_ts = now
        self.num_generation_tokens += num_tokens


@dataclass(slots=True)
class RequestOutput:
    """A prompt and its `n` continuations."""

    request_id: str
    prompt: str | None  # the text; None where only token ids were given
    prompt_token_ids: list[int]
    prompt_logprobs: list[dict[int, Logprob] | None] | None  # by token, None for the first; None unless requested
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
    num_cached_tokens: int | None = None  # tokens of the prompt found in the prefix cache; None: it has no slot yet


@dataclass(slots=True)
class PoolingOutput:
    """The numbers of a prompt, as a tensor `[numbers]` of float32."""

    data: Any


@dataclass(slots=True)
class EmbeddingOutput:
    """A vector."""

    embedding: list[float] = field(default_factory=list)

    @property
    def hidden_size(self) -> int:
        return len(self.embedding)


@dataclass(slots=True)
class ClassificationOutput:
    """The probabilities of labels, in the order of the checkpoint's `id2label`."""

    probs: list[float] = field(default_factory=list)

    @property
    def num_classes(self) -> int:
        return len(self.probs)


@dataclass(slots=True)
class ScoringOutput:
    """How well two texts belong together."""

    score: float = 0.0


@dataclass(slots=True)
class PooledRequestOutput:
    """A prompt, or two, and what a model made of it."""

    request_id: str
    outputs: Any
    prompt_token_ids: list[int]
    finished: bool
    metrics: RequestMetrics
    num_cached_tokens: int | None = None  # tokens of the prompt found in the prefix cache; None: it has no slot yet


@dataclass(slots=True)
class PoolingRequestOutput(PooledRequestOutput):
    """A prompt and its numbers."""

    outputs: PoolingOutput


@dataclass(slots=True)
class EmbeddingRequestOutput(PooledRequestOutput):
    """A prompt and its vector."""

    outputs: EmbeddingOutput


@dataclass(slots=True)
class ClassificationRequestOutput(PooledRequestOutput):
    """A prompt and its labels."""

    outputs: ClassificationOutput


@dataclass(slots=True)
class ScoringRequestOutput(PooledRequestOutput):
    """Two texts and their score."""

    outputs: ScoringOutput
