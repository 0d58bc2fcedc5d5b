"""What holds where a request says nothing: the model's own defaults, as far as the operator keeps them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from slotwise.core.params import CLASSIFY, SIGMOID, SOFTMAX, InvalidParams, PoolingSpec

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
    """The defaults of a model, what it gives, and why it does not give vectors."""

    params: PoolingSpec = field(default_factory=PoolingSpec)  # of vectors
    leaves_type: bool = False  # neither the model's files nor the operator name a pooling type: the family's holds
    objection: str = ""  # why vectors would be wrong; "": they are not
    is_declared: bool = False  # the model's files say that it makes vectors
    labels: tuple[str, ...] = ()  # the names of what a head of labels computes, in order; (): there is no such head
    activation: str = ""  # of the labels' numbers, unless a request has none; as `PoolingSpec.activation`
    dimensions: tuple[int, ...] = ()  # numbers to which vectors may be cut; (): to any number
    prompts: Mapping[str, str] = field(default_factory=dict)  # by name, what a text to embed begins with
    prompt_name: str = ""  # of the prompt of a text whose request names none; "": it has none

    @property
    def label_objection(self) -> str:
        """Why the model does not classify; "" if it does."""
        return "" if self.labels else "this model does not classify: its checkpoint has no head of labels"

    def of_family(self, pooling_type: str) -> PoolingDefaults:
        """The defaults of a model whose family pools so where nothing else is named."""
        return replace(self, params=replace(self.params, pooling_type=pooling_type)) if self.leaves_type else self

    def chosen(self, dimensions: int | None, *, normalize: bool | None) -> PoolingSpec:
        """The parameters of a request for a vector; None: the default.

        Raises:
            InvalidParams: the model was not trained for vectors of so many dimensions.
        """
        own = self.params
        if dimensions is not None and self.dimensions and dimensions not in self.dimensions:
            raise InvalidParams("dimensions", f"must be one of those that the model was trained for: "
                                f"{', '.join(map(str, self.dimensions))}")
        return replace(own, dimensions=own.dimensions if dimensions is None else dimensions,
                       normalize=own.normalize if normalize is None else normalize)

    def classifying(self, *, is_activated: bool | None = None) -> PoolingSpec:
        """The parameters of a request for the numbers of labels; None: activated as the checkpoint says.

        Raises:
            InvalidParams: the model has no labels.
        """
        if self.label_objection:
            raise InvalidParams("model", self.label_objection)
        default = self.activation or (SOFTMAX if len(self.labels) > 1 else SIGMOID)
        chosen = self.activation if is_activated is None else default if is_activated else ""
        return PoolingSpec(self.params.pooling_type, normalize=False, task=CLASSIFY, activation=chosen)

    def prompted(self, text: str, name: str | None = None) -> str:
        """A text with the prompt of this name before it; None: with the default one.

        Raises:
            InvalidParams: there is no such prompt.
        """
        chosen = self.prompt_name if name is None else name
        if chosen and chosen not in self.prompts:
            known = f"must be one of {', '.join(self.prompts)}" if self.prompts else "the checkpoint has no prompts"
            raise InvalidParams("prompt_name", f"{known}, not {chosen!r:.40}")
        return self.prompts[chosen] + text if chosen else text
