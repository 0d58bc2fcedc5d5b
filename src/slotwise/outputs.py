"""Results of the offline API.  Names are vLLM's."""

from __future__ import annotations

from dataclasses import dataclass, field

from slotwise.core.step import TokenLogprobs


@dataclass(slots=True)
class CompletionOutput:
    """One continuation."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str = ""  # stop, length, abort, error
    stop_reason: str | None = None  # the stop string that ended it
    logprobs: list[TokenLogprobs] = field(default_factory=list)  # empty unless requested


@dataclass(slots=True)
class RequestMetrics:
    """Seconds on the engine's monotonic clock."""

    arrival_time: float
    first_token_time: float = 0.0
    finished_time: float = 0.0


@dataclass(slots=True)
class RequestOutput:
    """A prompt and its `n` continuations."""

    request_id: str
    prompt: str | None  # None when the prompt was given as token ids
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
    prompt_logprobs: list[TokenLogprobs | None] | None = None  # by token, None for the first; None unless requested
