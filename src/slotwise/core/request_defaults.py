"""What holds where a request says nothing: the model's own defaults, as far as the operator keeps them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from slotwise.core.params import PoolingSpec

NAMES = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens")


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """The fields have the names and ranges of `SamplingParams`; None: its own default."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_tokens: int | None = None
    max_tokens_limit: int | None = None  # no request of a server gets more output tokens, whatever it names
    source: str = ""  # where they come from, for people
    ignored: tuple[str, ...] = ()  # fields of the source that would change answers, and are not implemented

    @property
    def given(self) -> dict[str, Any]:
        """Those that are set, by name."""
        return {name: value for name in NAMES if (value := getattr(self, name)) is not None}

    @property
    def of_sampling(self) -> dict[str, Any]:
        """Those that are set and do not bound the length."""
        return {name: value for name, value in self.given.items() if name != "max_tokens"}

    def limited(self, max_tokens: int | None) -> int | None:
        """What a request gets that names `max_tokens`; None stays None."""
        if max_tokens is None or self.max_tokens_limit is None:
            return max_tokens
        return min(max_tokens, self.max_tokens_limit)


@dataclass(frozen=True, slots=True)
class PoolingDefaults:
    """The defaults of a model, or why it gives no vectors."""

    params: PoolingSpec = field(default_factory=PoolingSpec)
    objection: str = ""  # why vectors would be wrong; "": they are not

    def chosen(self, dimensions: int | None, *, normalize: bool | None) -> PoolingSpec:
        """The parameters of a request; None: the default."""
        own = self.params
        return PoolingSpec(
            own.pooling_type, own.dimensions if dimensions is None else dimensions,
            own.normalize if normalize is None else normalize)
