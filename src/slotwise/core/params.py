"""Sampling parameters of a request.  Field names and defaults are vLLM's.

A parameter is declared here once: type, default, range and help.  Its check, its field in the HTTP protocol
(`api/protocol/protocol.py`), the docs and the default of the offline class (`slotwise.SamplingParams`, which names it
for type checkers) follow from the declaration; the sampler obeys it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from slotwise.core.setting_fields import INT64, Range, setting, settings_of

JSON_SCHEMA, REGEX, LARK = "json_schema", "regex", "lark"
KINDS = (JSON_SCHEMA, REGEX, LARK)
MAX_BYTES = 256 << 10  # of a grammar's text
CLASSES = {r"\d": "[0-9]", r"\D": "[^0-9]", r"\w": "[0-9A-Za-z_]", r"\W": "[^0-9A-Za-z_]"}
_CLASS = re.compile(r"\\.|--|-(?=\\[dDwW])", re.DOTALL)  # or another escape; `--` is a difference of classes
GBNF = re.compile(r"(?:\s|#[^\n]*\n)*[\w-]+[ \t]*::=")  # its first rule, after comments


@dataclass(frozen=True, slots=True)
class Grammar:
    """A JSON schema, a regular expression or a grammar in the syntax of Lark or llama.cpp (GBNF).

    Raises:
        ValueError: the kind is not one of `KINDS`, or the text is too long.
    """

    kind: str
    text: str
    field: str = "structured_outputs"  # of the request, for messages

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"{self.field}: a grammar is one of {', '.join(KINDS)}, not {self.kind!r:.40}")
        if (size := len(self.text.encode(errors="replace"))) > MAX_BYTES:
            raise ValueError(f"{self.field}: {size} bytes are more than the {MAX_BYTES} that a grammar may have")


def in_ascii(pattern: str) -> str:
    r"""Returns a regular expression whose `\d` and `\w` are digits and letters of ASCII, as JSON schemas' are.

    `\D` and `\W` are all other characters.  A hyphen between a class and another character is itself.
    """
    return _CLASS.sub(lambda found: CLASSES.get(found[0], r"\-" if found[0] == "-" else found[0]), pattern)


def is_gbnf(text: str) -> bool:
    """Whether a grammar is in GBNF, the syntax of llama.cpp, and not in Lark's."""
    return GBNF.match(text) is not None


MAX_STOP_STRINGS = 64
MAX_STOP_LENGTH = 1024
MAX_STOP_TOKEN_IDS = 256
MAX_LOGPROBS = 20
MAX_LOGIT_BIAS = 1024
MAX_BIAS = 100.0
MAX_N = 128
MAX_ALLOWED_TOKENS = 4096
MAX_BAD_WORDS = 256  # sequences of tokens: a word may have several
MAX_BAD_WORD_TOKENS = 1024


TOKEN_ID = Range(0, INT64)
EMBED, CLASSIFY, LABELS = "embed", "classify", "labels"
POOLING_TASKS = (EMBED, CLASSIFY, LABELS)
LAST, MEAN, CLS, MAX = "last", "mean", "cls", "max"
WEIGHTED_MEAN, SQRT_MEAN = "weightedmean", "mean_sqrt_len_tokens"
POOLING_TYPES = (LAST, MEAN, CLS, MAX, WEIGHTED_MEAN, SQRT_MEAN)
SIGMOID, SOFTMAX = "sigmoid", "softmax"
ACTIVATIONS = ("", SIGMOID, SOFTMAX)
MAX_LABELS = 1024
DIMENSIONS = Range(1, 1 << 20, may_be_none=True)
BIAS = Range(-MAX_BIAS, MAX_BIAS, is_whole=False)


class InvalidParams(ValueError):
    """A sampling parameter out of range.  `param` names the field, the message says what would be right."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(f"{param}: {message}")
        self.param = param


def _require(param: str, *, holds: bool, message: str) -> None:
    if not holds:
        raise InvalidParams(param, message)


def _checked(param: str, allowed: Range, value: object) -> int | float | None:
    try:
        return allowed.checked(value)
    except ValueError as error:
        raise InvalidParams(param, str(error)) from None


@dataclass(frozen=True, slots=True)
class PoolingSpec:
    """How a prompt becomes one vector.  Names are vLLM's.

        embed       the pooled hidden states, through the checkpoint's Dense modules, cut, normalized
        classify    the numbers of the checkpoint's labels, from the pooled hidden states, activated
        labels      log-probabilities of given tokens after the prompt, among all tokens of the vocabulary, and after
                    them that of the most probable token of all

    Raises:
        InvalidParams: a field is out of range.
    """

    # `last`, `cls`: the hidden state of the last token, of the first; `mean`, `max`: over all tokens; `weightedmean`:
    # with weights 1, 2, 3 ...; `mean_sqrt_len_tokens`: the sum divided by the square root of the number of tokens.
    pooling_type: str = LAST
    dimensions: int | None = None  # of `embed`: the first so many numbers of the vector are kept; None: all
    normalize: bool = True  # of `embed`: the vector, once it is cut, has length 1
    task: str = EMBED  # `embed`, `classify` or `labels`
    activation: str = ""  # of `classify`: `sigmoid` or `softmax` of the numbers; "": the numbers themselves
    label_ids: tuple[int, ...] = ()  # of `labels`: the tokens, in the order of the vector

    def __post_init__(self) -> None:
        for name, allowed in (("pooling_type", POOLING_TYPES), ("task", POOLING_TASKS), ("activation", ACTIVATIONS)):
            _require(name, holds=getattr(self, name) in allowed,
                     message=f"must be one of {', '.join(one or repr(one) for one in allowed)}")
        object.__setattr__(self, "dimensions", _checked("dimensions", DIMENSIONS, self.dimensions))
        object.__setattr__(self, "label_ids", tuple([
            _checked("label_ids", TOKEN_ID, token) for token in self.label_ids]))
        _require("label_ids", holds=(self.task == LABELS) == bool(self.label_ids) and len(self.label_ids) <= MAX_LABELS,
                 message=f"task {LABELS} needs 1 to {MAX_LABELS} tokens, and other tasks have none")

    @property
    def reads_all(self) -> bool:
        """Whether the hidden states of all tokens are needed, those of a cached prefix included."""
        return self.task != LABELS and self.pooling_type != LAST

    def check_width(self, width: int) -> None:
        """Raises InvalidParams for more dimensions than the `width` numbers that the model has."""
        _require("dimensions", holds=self.dimensions is None or self.dimensions <= width,
                 message=f"must be between 1 and {width}")

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raises InvalidParams for a label that is not a token of the model."""
        _require("label_ids", holds=all(token < vocab_size for token in self.label_ids),
                 message=f"token ids must be between 0 and {vocab_size - 1}")


@dataclass(frozen=True, slots=True)
class ThinkingBudget:
    """The most tokens of the reasoning that an output begins with."""

    num_tokens: int  # between the tokens that begin and end it; 0: it ends at once
    end_id: int  # the token that ends it
    begin_id: int | None = None  # the token that begins it; None: the first output is within it


@dataclass(frozen=True, slots=True)
class SamplingSpec:
    """Sampling parameters of one prompt.

    Raises:
        InvalidParams: a field is out of range; nothing is clamped silently.
    """

    n: int = setting(1, "continuations of the same prompt", range=Range(1, MAX_N))
    temperature: float = setting(1.0, "divides the logits; 0: greedy", range=Range(0, 100, is_whole=False))
    # Logits are float32: the smallest `top_p` but 0 is one that float32 can tell from 0.
    top_p: float = setting(
        1.0, "keep the smallest set of tokens whose probabilities sum to this; 0: one token",
        range=Range(0, 1, is_whole=False, smallest=1e-30))
    top_k: int = setting(0, "keep the k most probable tokens; 0 or -1: all", range=Range(-1, INT64))
    min_p: float = setting(
        0.0, "drop tokens less probable than this share of the most probable one", range=Range(0, 1, is_whole=False))
    max_tokens: int | None = setting(
        16, "most output tokens; None: as many as fit the model's context", range=Range(1, INT64, may_be_none=True))
    min_tokens: int = setting(
        0, "end and stop tokens are masked until the output has this many", range=Range(0, INT64))
    stop: tuple[str, ...] = setting((), "strings that end the text, and are not part of it")
    stop_token_ids: tuple[int, ...] = setting((), "tokens that end the output, and are not part of the text")
    ignore_eos: bool = setting(False, "the model's end token does not end the output")
    seed: int | None = setting(
        None, "the same seed gives the same tokens, whatever the batch", range=Range(-INT64, INT64, may_be_none=True))
    logprobs: int | None = setting(
        None, "None: none; k: the sampled token's and the k most probable ones'",
        range=Range(0, MAX_LOGPROBS, may_be_none=True))
    prompt_logprobs: int | None = setting(
        None, "`logprobs` of each token of the prompt but the first", range=Range(0, MAX_LOGPROBS, may_be_none=True))
    presence_penalty: float = setting(
        0.0, "subtracted from the logit of each token that the output contains", range=Range(-2, 2, is_whole=False))
    frequency_penalty: float = setting(
        0.0, "subtracted once for each time that the output contains the token", range=Range(-2, 2, is_whole=False))
    # It divides and multiplies logits, and within its range none of them overflows float32.
    repetition_penalty: float = setting(
        1.0, "divides positive logits of tokens in prompt and output, multiplies negative ones",
        range=Range(0.01, 100, is_whole=False))
    logit_bias: dict[int, float] = setting(factory=dict, help="added to logits, by token id")
    allowed_token_ids: tuple[int, ...] = setting((), "only these tokens are generated; empty: all are")
    bad_words_token_ids: tuple[tuple[int, ...], ...] = setting(
        (), "sequences of tokens that the output never contains")
    grammar: Grammar | None = None  # what the output's text matches; its end ends the output
    thinking: ThinkingBudget | None = None  # after so many tokens of reasoning, its end is the only token

    def __post_init__(self) -> None:
        for name, allowed in RANGES.items():
            object.__setattr__(self, name, _checked(name, allowed, getattr(self, name)))
        top = self.max_tokens
        _require("min_tokens", holds=top is None or self.min_tokens <= top, message="must be between 0 and max_tokens")
        self._check_stops()
        self._check_masks()
        self._check_grammar()
        self._check_thinking()
        _require("logit_bias", holds=isinstance(self.logit_bias, dict), message="must be an object of token ids")
        _require("logit_bias", holds=len(self.logit_bias) <= MAX_LOGIT_BIAS, message=f"at most {MAX_LOGIT_BIAS} tokens")
        object.__setattr__(self, "logit_bias", {
            _checked("logit_bias", TOKEN_ID, token): _checked("logit_bias", BIAS, bias)
            for token, bias in self.logit_bias.items()})

    def _check_masks(self) -> None:
        allowed, words = self.allowed_token_ids or (), self.bad_words_token_ids or ()
        _require("allowed_token_ids", holds=isinstance(allowed, Iterable), message="must be a list")
        _require("bad_words_token_ids", message="must be a list of lists", holds=isinstance(words, Iterable) and all(
            isinstance(word, Iterable) for word in words))
        allowed, words = tuple(allowed), tuple(map(tuple, words))
        _require("allowed_token_ids", holds=len(allowed) <= MAX_ALLOWED_TOKENS,
                 message=f"at most {MAX_ALLOWED_TOKENS} ids")
        _require("bad_words_token_ids", holds=len(words) <= MAX_BAD_WORDS, message=f"at most {MAX_BAD_WORDS} lists")
        _require("bad_words_token_ids", holds=all(0 < len(word) <= MAX_BAD_WORD_TOKENS for word in words),
                 message=f"each must have 1 to {MAX_BAD_WORD_TOKENS} ids")
        object.__setattr__(self, "allowed_token_ids", tuple([
            _checked("allowed_token_ids", TOKEN_ID, token) for token in allowed]))
        object.__setattr__(self, "bad_words_token_ids", tuple([
            tuple([_checked("bad_words_token_ids", TOKEN_ID, token) for token in word]) for word in words]))

    def _check_grammar(self) -> None:
        """A grammar alone decides where the output ends, and must always leave a token."""
        if self.grammar is not None:
            for name in ("min_tokens", "ignore_eos", "allowed_token_ids", "bad_words_token_ids"):
                _require(name.removesuffix("_token_ids") if name.startswith("bad") else name,
                         holds=not getattr(self, name), message=f"not available with {self.grammar.field}")

    def _check_thinking(self) -> None:
        if (budget := self.thinking) is not None:
            for number in (budget.num_tokens, budget.end_id):
                _checked("thinking_token_budget", TOKEN_ID, number)
            _require("thinking_token_budget", message="the token that ends the reasoning is not allowed",
                     holds=(budget.end_id in (self.allowed_token_ids or (budget.end_id,))
                            and (budget.end_id,) not in self.bad_words_token_ids))

    def _check_stops(self) -> None:
        for name, kind in (("stop", str), ("stop_token_ids", int)):
            value = getattr(self, name)
            _require(name, holds=value is None or isinstance(value, (kind, Iterable)), message="must be a list")
            object.__setattr__(self, name, (value,) if isinstance(value, kind) else tuple(value or ()))
        _require("stop", holds=len(self.stop) <= MAX_STOP_STRINGS, message=f"at most {MAX_STOP_STRINGS} strings")
        _require("stop", holds=all(isinstance(s, str) and 0 < len(s) <= MAX_STOP_LENGTH for s in self.stop),
                 message=f"each must be a string of 1 to {MAX_STOP_LENGTH} characters")
        _require("stop_token_ids", holds=len(self.stop_token_ids) <= MAX_STOP_TOKEN_IDS,
                 message=f"at most {MAX_STOP_TOKEN_IDS} ids")
        object.__setattr__(self, "stop_token_ids", tuple([
            _checked("stop_token_ids", TOKEN_ID, token) for token in self.stop_token_ids]))

    def of_choice(self, index: int) -> SamplingSpec:
        """The parameters of one of the `n` continuations: the first one computes what belongs to their prompt."""
        return self if index == 0 or self.prompt_logprobs is None else replace(self, prompt_logprobs=None)

    def check_vocabulary(self, vocab_size: int, eos_token_ids: Iterable[int] = ()) -> None:
        """Raises InvalidParams for a token id that the model does not have, or where no first token is left."""
        for name, ids in (("stop_token_ids", self.stop_token_ids), ("logit_bias", self.logit_bias),
                          ("allowed_token_ids", self.allowed_token_ids),
                          ("thinking_token_budget", () if self.thinking is None else (self.thinking.end_id,)),
                          *[("bad_words_token_ids", word) for word in self.bad_words_token_ids]):
            _require(name, holds=all(token < vocab_size for token in ids),
                     message=f"token ids must be between 0 and {vocab_size - 1}")
        banned = {word[0] for word in self.bad_words_token_ids if len(word) == 1}
        if self.min_tokens:
            banned.update(self.stop_token_ids, () if self.ignore_eos else eos_token_ids)
        candidates = self.allowed_token_ids or range(vocab_size)
        _require("allowed_token_ids", holds=any(token not in banned for token in candidates),
                 message="min_tokens, stop_token_ids and bad_words leave none of the tokens that are allowed")


PARAMETERS = settings_of(SamplingSpec)
RANGES = {name: declared.range for name, declared in PARAMETERS.items() if declared.range is not None}
