"""Settings of speculative decoding, with vLLM's names: `--speculative-config '{"method": "ngram"}'`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from slotwise.core.setting_fields import check_settings, json_object, setting, settings_of, whole

AUTO, NGRAM, SUFFIX, PREDICTION, NONE = "auto", "ngram", "suffix", "prediction", "none"
DRAFT_MODEL = "draft_model"
METHODS = {  # and what drafts are taken from; with all but `none`, from the `prediction` of a request, too
    AUTO: "suffix where drafts change no token, as on a CPU; else prediction",
    NGRAM: "what followed the last tokens earlier in the request (prompt lookup)",
    SUFFIX: "as ngram, and recent outputs of the same tenant",
    PREDICTION: "the `prediction` of a request alone",
    DRAFT_MODEL: "a smaller model with the same vocabulary, `model`",
    NONE: "no drafts",
}
MAX_DRAFTS = 64  # of a row
NUM_DRAFTS = 16  # the default
LOOKUPS = ("prompt_lookup_min", "prompt_lookup_max")
LOOKUP = (3, 8)  # tokens of a match, least and most, where neither is given


@dataclass(frozen=True, slots=True)
class Speculation:
    """The settings; None stands for a default.

    Raises:
        ValueError: they are invalid or contradict each other; the message is one line.
    """

    method: str = setting(AUTO, "where drafts come from", choices=tuple(METHODS),
                          otherwise="draft_model if {model} is given, else auto")
    num_speculative_tokens: int | None = setting(
        None, "most drafts of a row; fewer where they do not pay", unit="tokens", range=whole(1, MAX_DRAFTS),
        otherwise=f"{NUM_DRAFTS}")
    prompt_lookup_min: int | None = setting(
        None, "tokens that must match, at least", unit="tokens", range=whole(1, 64),
        otherwise=f"as many as at most; {LOOKUP[0]} where neither is given")
    prompt_lookup_max: int | None = setting(
        None, "tokens that are looked up, at most", unit="tokens", range=whole(1, 64),
        otherwise=f"as many as at least; {LOOKUP[1]} where neither is given")
    model: str | None = setting(None, "the draft model: a checkpoint's folder, or a hub id")

    def __post_init__(self) -> None:
        check_settings(self)
        if self.method == DRAFT_MODEL and not (isinstance(self.model, str) and self.model):
            raise ValueError(f"method {DRAFT_MODEL} needs a model: a checkpoint's folder, or a hub id")
        if self.method != DRAFT_MODEL and self.model is not None:
            raise ValueError(f"model has no effect with method {self.method}, only with {DRAFT_MODEL}")
        for name in ("num_speculative_tokens", *LOOKUPS):
            value = getattr(self, name)
            if value is not None and (self.method == NONE or (self.method == DRAFT_MODEL and name in LOOKUPS)):
                raise ValueError(f"{name} has no effect with method {self.method}")
        shortest, longest = self.lookup
        if shortest > longest:
            raise ValueError(f"prompt_lookup_min {shortest} is more than prompt_lookup_max {longest}")

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Speculation:
        """Returns the settings of a JSON object.  Raises ValueError for an unknown name, too."""
        known = settings_of(cls)
        for name in given:
            if name not in known:
                raise ValueError(f"there is no key {name!r:.40}; there are {', '.join(known)}")
        return cls(**{"method": AUTO if given.get("model") is None else DRAFT_MODEL} | dict(given))

    @classmethod
    def read(cls, text: str) -> Speculation:
        """Reads the settings as JSON.  Raises ValueError."""
        return cls.of(json_object(text))

    def resolved(self, *, is_exact: bool) -> Speculation:
        """Returns the settings with the method that `auto` stands for.

        Args:
            is_exact: whether no row's logits depend on how many rows and drafts a step has.
        """
        return self if self.method != AUTO else replace(self, method=SUFFIX if is_exact else PREDICTION)

    @property
    def num_drafts(self) -> int:
        return self.num_speculative_tokens or NUM_DRAFTS

    @property
    def lookup(self) -> tuple[int, int]:
        """Least and most tokens of a match."""
        low, high = self.prompt_lookup_min, self.prompt_lookup_max
        if low is None and high is None:
            return LOOKUP
        return low or high or 1, high or low or 1
