"""Sampling and pooling parameters of the offline API, with the names, defaults and methods of vLLM's classes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, fields
from enum import Enum
from typing import Any

from slotwise.compat.vllm import ANY, SAMPLING, is_neutral
from slotwise.core.params import MAX_BIAS, MAX_STOP_LENGTH, Grammar, InvalidParams, SamplingSpec
from slotwise.core.setting_fields import Range, whole
from slotwise.errors import nearest
from slotwise.text.structured_output import StructuredOutputError, of_structured_outputs

DEFAULT = SamplingSpec()
INTERVAL: Range = whole(1)
NEUTRAL: dict[str, tuple[Any, ...]] = SAMPLING | {  # in addition to None
    "flat_logprobs": (False,), "skip_reading_prefix_cache": (False,), "extra_args": ({},), "skip_clone": ANY,
    "output_text_buffer_length": (0,), "thinking_token_budget": (-1,),
}
INSTEAD = {  # what to do for another value
    "skip_reading_prefix_cache": "give the prompt a cache_salt of its own",
    "use_beam_search": "set n, and choose among the outputs by cumulative_logprob",
    "logits_processors": "logit_bias, allowed_token_ids and bad_words change logits",
    "truncate_prompt_tokens": "give token ids, as many as wanted",
}


class RequestOutputKind(Enum):
    """What each output of `AsyncLLM.generate` holds."""

    CUMULATIVE = 0  # all tokens so far
    DELTA = 1  # the tokens since the output before
    FINAL_ONLY = 2  # all tokens; there is one output, at the end


@dataclass(slots=True)
class StructuredOutputsParams:
    """What an output must match: one of the constraints.  docs/structured-output.md has the details."""

    json: str | dict[str, Any] | None = None  # a JSON schema
    regex: str | None = None  # a regular expression, which matches the whole output
    choice: list[str] | None = None  # some texts
    grammar: str | None = None  # a grammar in Lark's syntax
    json_object: bool | None = None  # any JSON object
    disable_fallback: bool = False  # changes nothing
    disable_any_whitespace: bool = False  # there is no white space between JSON's symbols
    disable_additional_properties: bool = False  # not supported: a schema says this itself
    whitespace_pattern: str | None = None  # a regular expression for the white space between JSON's symbols
    structural_tag: str | None = None  # JSON: free text with tags, whose contents match schemas


@dataclass(kw_only=True, slots=True)
class SamplingParams:
    """Sampling parameters of one prompt.  They may be changed, and are checked when they are made and when used.

    None stands for a field's default, but for `max_tokens`.  The engine's parameters are declared in `core/params.py`,
    which says what each does.  Fields of type Any are not supported: `NEUTRAL` has the
    values that are accepted.

    Raises:
        InvalidParams: a value is out of range, not supported, or of an unknown name.
    """

    n: int = DEFAULT.n
    presence_penalty: float = DEFAULT.presence_penalty
    frequency_penalty: float = DEFAULT.frequency_penalty
    repetition_penalty: float = DEFAULT.repetition_penalty
    temperature: float = DEFAULT.temperature
    top_p: float = DEFAULT.top_p
    top_k: int = DEFAULT.top_k
    min_p: float = DEFAULT.min_p
    seed: int | None = DEFAULT.seed  # the same seed gives the same tokens, whatever the batch; -1 stands for None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = None  # texts that the output never contains, as they are tokenized by themselves
    bad_words_token_ids: Sequence[Sequence[int]] | None = None
    ignore_eos: bool = DEFAULT.ignore_eos
    max_tokens: int | None = DEFAULT.max_tokens
    min_tokens: int = DEFAULT.min_tokens
    logprobs: int | None = DEFAULT.logprobs
    prompt_logprobs: int | None = DEFAULT.prompt_logprobs
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    detokenize: bool = True  # outputs have a text; without one there are no stop strings
    skip_special_tokens: bool = True  # special tokens have no text
    include_stop_str_in_output: bool = False  # the text ends with the stop string, not before it
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE  # of AsyncLLM
    stream_interval: int | None = None  # tokens of each output of AsyncLLM after the first, if more than the engine's
    best_of: int | None = None  # equal to `n`
    structured_outputs: StructuredOutputsParams | None = None  # what the output must match
    guided_decoding: StructuredOutputsParams | None = None  # its older name
    watermarking: Any = None
    prompt_logprob_token_ids: Any = None
    prompt_logprob_start: Any = None
    logprob_token_ids: Any = None
    flat_logprobs: Any = False
    spaces_between_special_tokens: Any = True
    skip_clone: Any = False
    output_text_buffer_length: Any = 0
    extra_args: Any = None
    skip_reading_prefix_cache: Any = None
    thinking_token_budget: Any = None
    repetition_detection: Any = None
    routed_experts_prompt_start: Any = 0
    trace_decode_token_ids: Any = None
    logits_processors: Any = None
    truncate_prompt_tokens: Any = None
    use_beam_search: Any = None
    length_penalty: Any = None

    def __new__(cls, *arguments: Any, **given: Any) -> SamplingParams:
        for name in given:
            if name not in NAMES:
                near = nearest(name, NAMES)
                raise InvalidParams(name, "there is no such parameter" + f"; did you mean {near}?" * bool(near))
        return object.__new__(cls)

    def __post_init__(self) -> None:
        for one in fields(self):
            if getattr(self, one.name) is None and one.name != "max_tokens":
                setattr(self, one.name, one.default)
        for name in ("stop", "stop_token_ids", "bad_words"):
            value = getattr(self, name)
            setattr(self, name, [value] if name == "stop" and isinstance(value, str) else _listed(name, value))
        for name in ("logprobs", "prompt_logprobs"):
            setattr(self, name, 1 if getattr(self, name) is True else getattr(self, name))
        self.seed = None if self.seed == -1 else self.seed
        self.for_engine()

    @classmethod
    def from_optional(cls, **given: Any) -> SamplingParams:
        """The parameters given; the keys of `logit_bias` may be texts, as in JSON, and its values are clamped."""
        if biases := given.get("logit_bias"):
            given["logit_bias"] = {int(token): min(MAX_BIAS, max(-MAX_BIAS, bias)) for token, bias in biases.items()}
        return cls(**given)

    def clone(self) -> SamplingParams:
        """A copy that shares no list with this one."""
        return deepcopy(self)

    def for_engine(self, bad_words: Iterable[Sequence[int]] = ()) -> SamplingSpec:
        """What the engine needs of these parameters.

        Args:
            bad_words: the token ids of `bad_words`.

        Raises:
            InvalidParams: as when they are made.
        """
        for name, accepted in UNSUPPORTED.items():
            if not is_neutral(getattr(self, name), accepted):
                raise InvalidParams(name, f"is not supported; {INSTEAD.get(name, 'leave it out')}")
        for name, kind in (("detokenize", bool), ("skip_special_tokens", bool), ("include_stop_str_in_output", bool),
                           ("ignore_eos", bool), ("output_kind", RequestOutputKind)):
            if not isinstance(getattr(self, name), kind):
                raise InvalidParams(name, f"must be a {kind.__name__}, not {getattr(self, name)!r:.40}")
        if self.stream_interval is not None and (wrong := INTERVAL.objection(self.stream_interval)):
            raise InvalidParams("stream_interval", wrong)
        if self.best_of not in (None, self.n):
            raise InvalidParams("best_of", "only the value of n is supported; choose among n by cumulative_logprob")
        if self.stop and not self.detokenize:
            raise InvalidParams("stop", "needs detokenize, for stop strings are looked for in the text")
        words = _listed("bad_words", self.bad_words)
        if not all(isinstance(word, str) and 0 < len(word) <= MAX_STOP_LENGTH for word in words):
            raise InvalidParams("bad_words", f"each must be a string of 1 to {MAX_STOP_LENGTH} characters")
        given = {name: getattr(self, name) for name in SHARED if getattr(self, name) is not None}
        given["grammar"] = self.grammar()
        given["bad_words_token_ids"] = [*bad_words, *(self.bad_words_token_ids or ())]
        return SamplingSpec(**given | {"max_tokens": self.max_tokens})

    def grammar(self) -> Grammar | None:
        """What the output must match.  Raises InvalidParams."""
        grammars = [_constraint(name, getattr(self, name)) for name in ("structured_outputs", "guided_decoding")]
        if None not in grammars:
            raise InvalidParams("guided_decoding", "not available with structured_outputs")
        return grammars[0] or grammars[1]


def _constraint(name: str, value: Any) -> Grammar | None:
    """The grammar of `structured_outputs`.  Raises InvalidParams."""
    if not isinstance(value, StructuredOutputsParams | Mapping | None):
        raise InvalidParams(name, f"must be a StructuredOutputsParams, not {value!r:.40}")
    fields_of_value = asdict(value) if isinstance(value, StructuredOutputsParams) else value or {}
    try:
        return of_structured_outputs(fields_of_value, name)
    except StructuredOutputError as error:
        raise InvalidParams(name, str(error).removeprefix(f"{name}: ")) from error


def _listed(name: str, value: Any) -> list[Any]:
    """A list of its own.  Raises InvalidParams for a value that is none."""
    if isinstance(value, str | bytes):
        raise InvalidParams(name, f"must be a list, not {value!r:.40}")
    try:
        return list(value or ())
    except TypeError:
        raise InvalidParams(name, f"must be a list, not {value!r:.40}") from None


NAMES = tuple(one.name for one in fields(SamplingParams))
SHARED = tuple(one.name for one in fields(SamplingSpec) if one.name in NAMES)
UNSUPPORTED = {one.name: NEUTRAL.get(one.name, ()) for one in fields(SamplingParams) if one.type == "Any"}


@dataclass(slots=True)
class PoolingParams:
    """How a prompt becomes a vector; None: as the checkpoint and `pooler_config` say."""

    dimensions: int | None = None  # the first so many numbers are kept
    use_activation: bool | None = None  # the vector is normalized, once it is cut
    normalize: bool | None = None  # the older name of `use_activation`

    @property
    def normalizes(self) -> bool | None:
        return self.normalize if self.use_activation is None else self.use_activation
