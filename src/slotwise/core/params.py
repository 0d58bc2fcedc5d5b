"""What a client may ask of one generation.  Field names and defaults are vLLM's."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import isfinite

MAX_STOP_STRINGS = 64
MAX_STOP_LENGTH = 1024
MAX_STOP_TOKEN_IDS = 256
MAX_LOGPROBS = 20
MAX_LOGIT_BIAS = 1024
MAX_N = 128


class InvalidParams(ValueError):
    """A sampling parameter out of range.  `param` names the field, the message says what would be right."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(f"{param}: {message}")
        self.param = param


def _require(param: str, *, holds: bool, message: str) -> None:
    if not holds:
        raise InvalidParams(param, message)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to continue one prompt.

    Raises:
        InvalidParams: a field is out of range; nothing is clamped silently.
    """

    n: int = 1  # continuations of the same prompt
    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0  # keep the smallest set of tokens whose probabilities sum to this
    top_k: int = 0  # keep the k most probable tokens; 0 or -1: all
    min_p: float = 0.0  # drop tokens less probable than this share of the most probable one
    max_tokens: int | None = 16  # None: as many as fit the model's context
    min_tokens: int = 0  # end and stop tokens cannot be sampled before this many
    stop: tuple[str, ...] = ()  # strings that end the text; not part of it
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None  # the same seed gives the same tokens, whatever the batch
    logprobs: int | None = None  # None: none; k: the sampled token's and the k most probable ones'
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("stop", "stop_token_ids"):
            value = getattr(self, name)
            object.__setattr__(self, name, (value,) if isinstance(value, (str, int)) else tuple(value or ()))
        self._check_numbers()
        self._check_lengths()

    def _check_numbers(self) -> None:
        floats = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
        for name in floats:
            _require(name, holds=isfinite(getattr(self, name)), message="must be a finite number")
        _require("temperature", holds=0 <= self.temperature <= 100, message="must be between 0 and 100")
        _require("top_p", holds=0 < self.top_p <= 1, message="must be above 0 and at most 1")
        _require("min_p", holds=0 <= self.min_p <= 1, message="must be between 0 and 1")
        _require("top_k", holds=self.top_k >= -1, message="must be 0 or -1 (all tokens) or positive")
        _require("repetition_penalty", holds=0 < self.repetition_penalty <= 100, message="must be above 0, at most 100")
        for name in ("presence_penalty", "frequency_penalty"):
            _require(name, holds=-2 <= getattr(self, name) <= 2, message="must be between -2 and 2")
        _require("n", holds=1 <= self.n <= MAX_N, message=f"must be between 1 and {MAX_N}")
        top = self.max_tokens
        _require("max_tokens", holds=top is None or top >= 1, message="must be at least 1")
        _require("min_tokens", holds=0 <= self.min_tokens <= (top or self.min_tokens),
                 message="must be between 0 and max_tokens")
        _require("seed", holds=self.seed is None or -(2**63) <= self.seed < 2**63, message="must fit 64 bits")
        _require("logprobs", holds=self.logprobs is None or 0 <= self.logprobs <= MAX_LOGPROBS,
                 message=f"must be between 0 and {MAX_LOGPROBS}")

    def _check_lengths(self) -> None:
        _require("stop", holds=len(self.stop) <= MAX_STOP_STRINGS, message=f"at most {MAX_STOP_STRINGS} strings")
        _require("stop", holds=all(0 < len(s) <= MAX_STOP_LENGTH for s in self.stop),
                 message=f"each string must have 1 to {MAX_STOP_LENGTH} characters")
        _require("stop_token_ids", holds=len(self.stop_token_ids) <= MAX_STOP_TOKEN_IDS,
                 message=f"at most {MAX_STOP_TOKEN_IDS} ids")
        _require("logit_bias", holds=len(self.logit_bias) <= MAX_LOGIT_BIAS, message=f"at most {MAX_LOGIT_BIAS} tokens")
        _require("logit_bias", holds=all(-100 <= b <= 100 for b in self.logit_bias.values()),
                 message="each bias must be between -100 and 100")
