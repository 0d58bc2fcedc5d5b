"""Request bodies: OpenAI's fields and vLLM's extensions.

Types are strict.  Unknown fields are ignored, as OpenAI-compatible servers do; known fields that are not supported and
would change the meaning of the answer are refused by name.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from http import HTTPStatus
from typing import Annotated, Any, TypeVar

import msgspec

from slotwise.core.params import BIAS, MAX_STOP_LENGTH, RANGES, TOKEN_ID, InvalidParams, SamplingParams
from slotwise.core.ranges import INT64, Range
from slotwise.core.slo import PRIORITIES
from slotwise.server import body_precheck
from slotwise.server.errors import ApiError, bad_request, from_decoding, from_params

MAX_NAME = 200  # characters of a name that an error repeats
Int = Annotated[int, msgspec.Meta(ge=-INT64, le=INT64)]


def _within(allowed: Range) -> msgspec.Meta:
    """A range that `SamplingParams` checks, as `/openapi.json` describes it."""
    return msgspec.Meta(ge=allowed.least, le=allowed.most)


Temperature = Annotated[float, _within(RANGES["temperature"])]
TopP = Annotated[float, _within(RANGES["top_p"])]
MinP = Annotated[float, _within(RANGES["min_p"])]
Penalty = Annotated[float, _within(RANGES["presence_penalty"])]
RepetitionPenalty = Annotated[float, _within(RANGES["repetition_penalty"])]
Choices = Annotated[int, _within(RANGES["n"])]
TopK = Annotated[int, _within(RANGES["top_k"])]
Seed = Annotated[int, _within(RANGES["seed"])]
OneOrMore = Annotated[int, _within(RANGES["max_tokens"])]
NoneOrMore = Annotated[int, _within(RANGES["min_tokens"])]
Logprobs = Annotated[int, _within(RANGES["logprobs"])]
TokenId = Annotated[int, _within(TOKEN_ID)]
Bias = Annotated[float, _within(BIAS)]
Stop = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_STOP_LENGTH)]
Priority = Annotated[int, msgspec.Meta(ge=PRIORITIES[0], le=PRIORITIES[-1])]
Milliseconds = Annotated[float, msgspec.Meta(ge=0.1, le=3_600_000)]
Seconds = Annotated[float, msgspec.Meta(ge=0.001, le=86400)]
Salt = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
User = Annotated[str, msgspec.Meta(max_length=512)]
Prompt = str | list[str | Int | list[Int]]
NOTHING: tuple[Any, ...] = (None, False, 0, "", [], {})
NEUTRAL: dict[str, tuple[Any, ...]] = {  # values without effect, where they differ from NOTHING
    "response_format": (None, {"type": "text"}), "modalities": (None, ["text"]), "tool_choice": (None, "none", "auto"),
    "skip_special_tokens": (None, True), "spaces_between_special_tokens": (None, True), "length_penalty": (None, 1.0),
}


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None  # a last event with the token counts
    continuous_usage_stats: bool | None = None  # the token counts in every event


class Unsupported(msgspec.Struct, kw_only=True):
    """Fields that would change the answer if they were supported."""

    response_format: Any = None
    structured_outputs: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    use_beam_search: Any = None
    length_penalty: Any = None
    truncate_prompt_tokens: Any = None
    include_stop_str_in_output: Any = None
    skip_special_tokens: Any = None
    spaces_between_special_tokens: Any = None
    bad_words: Any = None
    allowed_token_ids: Any = None
    return_token_ids: Any = None
    return_tokens_as_token_ids: Any = None


class Generate(Unsupported, kw_only=True):
    """The fields of both endpoints.  None stands for a field's default."""

    model: str | None = None  # the served model's name, by default
    stream: bool | None = None  # send server-sent events, one or more tokens each
    stream_options: StreamOptions | None = None  # only with `stream`
    request_id: str | None = None  # the id of the response, and of the request in logs and queries
    service_tier: str | None = None  # `auto`, `default`, or one of the server's own: docs/tiers.md
    priority: Priority | None = None  # lower is earlier; None: its tier's
    ttft_ms: Milliseconds | None = None  # objective, milliseconds to the first token; None: its tier's
    tpot_ms: Milliseconds | None = None  # objective, milliseconds between two tokens; None: its tier's
    user: User | None = None  # the tenant, where the server has no keys
    queue_timeout: Seconds | None = None  # seconds to its first slot; the server's own bound holds as well
    cache_salt: Salt | None = None  # cached prefixes are shared only among requests of one key and one salt
    n: Choices | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    min_p: MinP | None = None
    max_tokens: OneOrMore | None = None
    min_tokens: NoneOrMore | None = None
    stop: Stop | list[Stop] | None = None
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool | None = None
    seed: Seed | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: RepetitionPenalty | None = None
    logit_bias: dict[TokenId, Bias] | None = None
    prompt_logprobs: Logprobs | None = None  # entries of each token of the prompt; not in a stream
    explain: bool | None = None  # the response contains where its time went
    bench_output_tokens: OneOrMore | list[OneOrMore] | None = None  # forced output length; a list: of each prompt

    def refuse_unsupported(self) -> None:
        """Raises ApiError for an unsupported field."""
        for name, neutral in unsupported_fields(type(self)).items():
            if getattr(self, name) not in neutral:
                raise bad_request(f"{name} is not supported", name, "unsupported_parameter")
        if self.stream_options is not None and not self.stream:
            raise bad_request("stream_options: only allowed when stream is true", "stream_options")
        if self.prompt_logprobs is not None and self.stream:
            raise bad_request("prompt_logprobs: not available when stream is true", "prompt_logprobs")

    def forced_lengths(self, num_prompts: int) -> list[int]:
        """For each prompt, the output length that a benchmark forces; 0: none.

        Raises:
            ApiError: there are not as many lengths as prompts.
        """
        asked = self.bench_output_tokens
        if not isinstance(asked, list):
            return [asked or 0] * num_prompts
        if len(asked) != num_prompts:
            raise bad_request(f"bench_output_tokens: {len(asked)} lengths for {num_prompts} prompts",
                              "bench_output_tokens")
        return asked

    def sampling_params(self, max_tokens: int | None, logprobs: int | None) -> SamplingParams:
        """Raises ApiError for a value out of range."""
        names = ("n", "temperature", "top_p", "top_k", "min_p", "min_tokens", "stop", "stop_token_ids", "ignore_eos",
                 "seed", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "prompt_logprobs")
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        try:
            return SamplingParams(max_tokens=max_tokens, logprobs=logprobs, **given)
        except InvalidParams as error:
            raise from_params(error) from error


class CompletionRequest(Generate, kw_only=True):
    prompt: Prompt  # a text or its token ids; a list: several, each with its own choices
    logprobs: Logprobs | None = None  # return this many log-probabilities for each token, and the token's own
    suffix: Any = None
    echo: Any = None
    best_of: OneOrMore | None = None  # at most `n`
    prompt_embeds: Any = None

    def refuse_unsupported(self) -> None:
        super().refuse_unsupported()
        if self.best_of is not None and self.best_of > (self.n or 1):
            raise bad_request("best_of: more than n is not supported", "best_of", "unsupported_parameter")


class ChatRequest(Generate, kw_only=True):
    messages: list[dict[str, Any]]  # each has a `role` and a `content`: a text, or parts of type `text`
    max_completion_tokens: OneOrMore | None = None  # OpenAI's newer name of `max_tokens`
    logprobs: bool | None = None  # return the log-probability of each token
    top_logprobs: Logprobs | None = None  # only with `logprobs`: those of this many of the most probable tokens, too
    add_generation_prompt: bool | None = None  # the template begins the answer; by default it does
    chat_template_kwargs: dict[str, Any] | None = None  # further variables of the template
    tools: Any = None
    tool_choice: Any = None
    functions: Any = None
    function_call: Any = None
    modalities: Any = None
    audio: Any = None
    chat_template: Any = None
    continue_final_message: Any = None
    documents: Any = None
    web_search_options: Any = None

    def refuse_unsupported(self) -> None:
        if self.tool_choice == "none":  # tools are listed, and must not be called
            self.tools = None
        super().refuse_unsupported()
        if self.top_logprobs is not None and not self.logprobs:
            raise bad_request("top_logprobs: only allowed when logprobs is true", "top_logprobs")


class TokenizeRequest(msgspec.Struct, kw_only=True):
    model: str | None = None  # the served model's name, by default
    prompt: str | None = None  # a text; either this or `messages`
    messages: list[dict[str, Any]] | None = None  # a conversation, rendered with the chat template
    add_special_tokens: bool | None = None  # by default the tokenizer adds its tokens to a text
    add_generation_prompt: bool | None = None  # the template begins the answer; by default it does
    return_token_strs: bool | None = None  # return each token as the tokenizer's string, too


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    model: str | None = None  # the served model's name, by default
    tokens: list[Int]  # ids of the vocabulary


class AbortRequest(msgspec.Struct, kw_only=True):
    """One name or several: an `X-Request-Id`, a `request_id`, or the `id` of a response."""

    request_id: str | None = None  # one name; either this or `request_ids`
    request_ids: list[str] | None = None  # several names

    def names(self) -> list[str]:
        """Raises ApiError for no name, or for too many."""
        if (self.request_id is None) == (self.request_ids is None):
            raise bad_request("give either request_id or request_ids", "request_ids")
        names = [self.request_id] if self.request_id is not None else self.request_ids or []
        if len(names) > body_precheck.MAX_ABORTS:
            raise bad_request(f"request_ids: at most {body_precheck.MAX_ABORTS} at once", "request_ids")
        return names


Body = TypeVar("Body", CompletionRequest, ChatRequest, TokenizeRequest, DetokenizeRequest, AbortRequest)
_DECODERS: dict[type, msgspec.json.Decoder[Any]] = {
    kind: msgspec.json.Decoder(kind)
    for kind in (CompletionRequest, ChatRequest, TokenizeRequest, DetokenizeRequest, AbortRequest)
}
_OBJECT = msgspec.json.Decoder(dict[str, msgspec.Raw])


@cache
def unsupported_fields(kind: type[Generate]) -> dict[str, tuple[Any, ...]]:
    """Fields of type Any, which are not supported, each with the values that are accepted."""
    names = [field.name for field in msgspec.structs.fields(kind) if field.type is Any]
    return {name: NEUTRAL.get(name, NOTHING) for name in names}


def decode(kind: type[Body], body: bytes) -> Body:
    """The body as a `kind`.  Raises ApiError, with the field at fault as its `param`."""
    with _decoding(body):
        decoded: Body = _DECODERS[kind].decode(
            body_precheck.trimmed(kind, body) if len(body) > body_precheck.LARGE else body)
    return decoded


def decode_object(body: bytes) -> dict[str, Any]:
    """The fields of a JSON object.  Raises ApiError for any other body, with the field at fault as its `param`."""
    with _decoding(body):
        fields = _OBJECT.decode(body)
    return {name: _value(name, raw) for name, raw in fields.items()}


def _value(name: str, raw: msgspec.Raw) -> Any:
    try:
        return msgspec.json.decode(raw)
    except (ValueError, RecursionError) as error:
        raise bad_request(f"{name[:MAX_NAME]}: {error}", name[:MAX_NAME]) from error


@contextmanager
def _decoding(body: bytes) -> Iterator[None]:
    gc.disable()  # JSON has no cycles; the collector would scan a hostile body's hundred thousand lists
    try:
        yield
    except (ValueError, RecursionError) as error:
        raise from_decoding(error, body) from error
    finally:
        gc.enable()


def check_model(asked: str | None, names: Sequence[str]) -> None:
    """Raises ApiError for a name that is none of the served model's."""
    if asked is not None and asked not in names:
        served = " or ".join(map(repr, names))
        message = f"the model {asked[:MAX_NAME]!r} does not exist; this server has {served}"
        raise ApiError(HTTPStatus.NOT_FOUND, message, "model", "model_not_found")
