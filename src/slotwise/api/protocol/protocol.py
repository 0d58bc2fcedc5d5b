"""Request bodies: OpenAI's fields and vLLM's extensions.

Types are strict, but that an integral float is an integer.  A known field is obeyed, accepted with the values that
change nothing, or refused by name (see `unsupported.py`); an unknown one is ignored, and a header of the response
names it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, Literal

import msgspec

from slotwise.api.http.api_errors import bad_request, from_params
from slotwise.api.protocol.decoding import MAX_FIELD
from slotwise.api.protocol.unsupported import Unsupported, refuse
from slotwise.core.params import (
    BIAS,
    MAX_ALLOWED_TOKENS,
    MAX_STOP_LENGTH,
    MAX_STOP_STRINGS,
    PARAMETERS,
    RANGES,
    TOKEN_ID,
    InvalidParams,
    PoolingSpec,
    SamplingSpec,
)
from slotwise.core.request import RequestSpec
from slotwise.core.scheduler_limits import PRIORITIES, SLO
from slotwise.core.setting_fields import INT64, Range, whole
from slotwise.text.conversation import MAX_MESSAGES, RESERVED_VARIABLES

Int = Annotated[int, msgspec.Meta(ge=-INT64, le=INT64)]


def _within(allowed: Range) -> msgspec.Meta:
    """A range that `SamplingSpec` checks, as `/openapi.json` describes it."""
    return msgspec.Meta(ge=allowed.least, le=allowed.most)


Temperature = Annotated[float, _within(RANGES["temperature"])]
TopP = Annotated[float, _within(RANGES["top_p"])]
TopK = Annotated[int, _within(RANGES["top_k"])]
Seed = Annotated[int, _within(RANGES["seed"])]
OneOrMore = Annotated[int, _within(RANGES["max_tokens"])]
Length = Annotated[int, _within(whole(1))]
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
AllowedTokens = Annotated[list[TokenId], msgspec.Meta(min_length=1, max_length=MAX_ALLOWED_TOKENS)]
BadWords = Annotated[list[Stop], msgspec.Meta(max_length=MAX_STOP_STRINGS)]
Hint = Annotated[str, msgspec.Meta(max_length=512)]
TemplateSource = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_FIELD)]
KeptTokens = Annotated[int, msgspec.Meta(ge=-1, le=INT64)]
Budget = Annotated[int, msgspec.Meta(ge=-1, le=INT64)]
CacheRetention = Literal["in_memory", "in-memory", "5m", "1h", "24h"]
RETENTIONS = {"5m": 300.0, "1h": 3600.0, "24h": 86_400.0}  # seconds; the others stand for the server's own order
SWITCHES = ("enable_thinking", "thinking")  # templates' variables that turn reasoning on or off
EFFORTS = ("reasoning_effort", "thinking_effort", "reasoning_strength")  # those that say how much a model reasons
MODES = ("thinking_mode", "thinking_option")  # those that turn reasoning on or off by a word
WORDS = {True: ("enabled", "on"), False: ("disabled", "off", "no_think", "none")}  # of them
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
TransferName = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
Port = Annotated[int, msgspec.Meta(ge=1, le=65535)]


class KVTransferParams(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Where a prompt's blocks come from, or that they are to be sent.  None stands for a field left out."""

    do_remote_decode: bool | None = None  # compute the prompt, and keep its blocks for another engine
    do_remote_prefill: bool | None = None  # another engine computes the prompt
    transfer_id: TransferName | None = None  # the same in both requests; by default the producer makes one up
    remote_engine_id: TransferName | None = None  # of the producer; changes nothing
    remote_host: TransferName | None = None  # of the producer
    remote_port: Port | None = None  # of the producer
    remote_block_ids: None = None  # of the vLLM connectors that have it


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None  # a last event with the token counts
    continuous_usage_stats: bool | None = None  # the token counts in every event
    include_obfuscation: bool | None = None  # nothing but false: events are not padded to hide their lengths


class TextPart(msgspec.Struct):
    """A part of a predicted output."""

    type: Literal["text"]
    text: str


class PredictedOutput(msgspec.Struct):
    """What the output is expected to be, as OpenAI's predicted outputs."""

    type: Literal["content"]
    content: str | Annotated[list[TextPart], msgspec.Meta(max_length=MAX_MESSAGES)]

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join([part.text for part in self.content])


OWN = ("max_tokens", "logprobs", "prompt_logprobs")  # have types of their own here


def _sampling_fields() -> Iterator[tuple[str, Any, None]]:
    """The sampling parameters that are numbers or switches, as `SamplingSpec` declares them."""
    for name, declared in PARAMETERS.items():
        kind: Any = bool if declared.type == "bool" else None
        if declared.range is not None:
            kind = Annotated[declared.range.kind, _within(declared.range)]
        if kind is not None and name not in OWN:
            yield name, kind | None, None


class RequestFields(msgspec.Struct, kw_only=True):
    """The fields of every request that the engine runs.  None stands for a field's default.

    To add one, add it here and to `RequestSpec`, and set it in `Generate.spec`: every route then takes it.
    """

    model: str | None = None  # the served model's name, by default
    request_id: str | None = None  # the id of the response, and of the request in logs and queries
    service_tier: str | None = None  # `auto`, `default`, or one of the server's own: docs/tiers.md
    priority: Priority | None = None  # of the policy `priority`: lower is earlier; None: its tier's
    ttft_ms: Milliseconds | None = None  # objective, milliseconds to the first token or vector; None: its tier's
    queue_timeout: Seconds | None = None  # seconds to its first slot; the server's own bound holds as well
    cache_salt: Salt | None = None  # cached prefixes are shared only among requests of one key and one salt


class GenerationFields(RequestFields, kw_only=True):
    """The fields of every request that generates tokens."""

    stream: bool | None = None  # send server-sent events, one or more tokens each
    tpot_ms: Milliseconds | None = None  # objective, milliseconds between two tokens; None: its tier's
    retain: Seconds | None = None  # seconds for which its prompt stays cached, or X-Retain: docs/reference/eviction.md
    kv_transfer_params: KVTransferParams | None = None  # its prompt travels between engines: docs/disaggregation.md


def joined(name: str, base: type, fields: Iterable[tuple[str, Any, None]], module: str) -> Any:
    """Returns `base` with further optional fields: msgspec's structs have one base with fields."""
    own = {field.name for field in msgspec.structs.fields(base)}
    return msgspec.defstruct(
        name, [field for field in fields if field[0] not in own], bases=(base,), module=module, kw_only=True)


def optional_fields(kind: type) -> Iterator[tuple[str, Any, None]]:
    """The fields of a struct, all of which are optional, as `joined` takes them."""
    return ((field.name, field.type, None) for field in msgspec.structs.fields(kind))


SamplingFields: Any = joined(
    "SamplingFields", GenerationFields, [*_sampling_fields(), *optional_fields(Unsupported)], __name__)


class Generate(SamplingFields, GenerationFields, kw_only=True):  # type: ignore[misc]
    """The fields of both endpoints.  None stands for a field's default."""

    stream_options: StreamOptions | None = None  # only with `stream`
    stream_interval: OneOrMore | None = None  # tokens of each event after the first, if more than the server's
    session_id: Hint | None = None  # its conversation's or agent's name, as the header X-Session-Id
    user: User | None = None  # the tenant, where the server has no keys
    best_of: OneOrMore | None = None  # nothing but the value of `n`
    max_tokens: NoneOrMore | None = None  # most output tokens; None: what fits; 0: only with echo or prompt_logprobs
    stop: Stop | list[Stop] | None = None  # texts before which the output ends; they may spell special tokens
    stop_token_ids: list[TokenId] | None = None
    include_stop_str_in_output: bool | None = None  # the text ends with the stop string, not before it
    logit_bias: dict[TokenId, Bias] | None = None
    allowed_token_ids: AllowedTokens | None = None
    bad_words: BadWords | None = None  # texts that the output never contains, as they are tokenized by themselves
    thinking_token_budget: Budget | None = None  # tokens of reasoning, then its closing tag; -1: any number
    response_format: dict[str, Any] | None = None  # what the output matches: docs/structured-output.md
    structured_outputs: dict[str, Any] | None = None  # vLLM's: json, regex, choice, grammar, ...
    guided_json: dict[str, Any] | str | None = None  # vLLM's older name of `structured_outputs.json`
    guided_regex: str | None = None  # vLLM's older name of `structured_outputs.regex`
    guided_choice: list[str] | None = None  # vLLM's older name of `structured_outputs.choice`
    guided_grammar: str | None = None  # vLLM's older name of `structured_outputs.grammar`
    prompt_logprobs: Logprobs | None = None  # entries of each token of the prompt; not in a stream
    skip_special_tokens: bool | None = None  # special tokens have no text; by default they have none
    return_token_ids: bool | None = None  # the response contains the ids of prompts and outputs
    return_tokens_as_token_ids: bool | None = None  # log-probabilities name a token `token_id:` and its id
    add_special_tokens: bool | None = None  # by default the tokenizer's are added to a prompt, and not to a chat
    truncate_prompt_tokens: KeptTokens | None = None  # tokens of a prompt to keep, special ones too; -1: all that fit
    truncation_side: Literal["left", "right"] | None = None  # where tokens are dropped; by default on the left
    echo: bool | None = None  # the prompt, or in a chat the assistant's last message, stands before the output
    prediction: PredictedOutput | None = None  # drafts are taken from it: the output is the same, and sooner there
    explain: bool | None = None  # the response contains where its time went
    bench_output_tokens: Length | list[Length] | None = None  # forced output length; a list: of each prompt

    def refuse_unsupported(self) -> None:
        """Raises ApiError for an unsupported field."""
        refuse(self)
        options = self.stream_options
        if not self.stream and options is not None and any(msgspec.structs.astuple(options)):
            raise bad_request("stream_options: only allowed when stream is true", "stream_options")
        if options is not None and options.include_obfuscation:
            raise bad_request("stream_options.include_obfuscation is not supported", "stream_options",
                              "unsupported_parameter")
        if self.prompt_logprobs is not None and self.stream:
            raise bad_request("prompt_logprobs: not available when stream is true", "prompt_logprobs")

    def length(self, param: str) -> tuple[int | None, bool]:
        """The most tokens to generate, as the field `param` says, and whether none of them are wanted.

        The engine generates at least one: a request for none asks for its prompt alone.

        Raises:
            ApiError: nothing of the prompt is wanted, either.
        """
        asked: int | None = getattr(self, param)
        if asked != 0:
            return asked, False
        if not self.echo and self.prompt_logprobs is None:
            raise bad_request(f"{param}: 0 is only allowed with echo or prompt_logprobs", param)
        if self.min_tokens:
            raise bad_request(f"min_tokens: must be between 0 and {param}", "min_tokens")
        return 1, True

    @property
    def num_prompt_logprobs(self) -> int | None:
        """Log-probabilities that the engine computes for each token of a prompt; None: not even the token's own."""
        return self.prompt_logprobs

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

    def spec(self, params: SamplingSpec, slo: SLO, pooling: PoolingSpec | None = None) -> RequestSpec:
        """What these fields say of each choice; the pipeline adds who asks, and what needs tokenizer or engine."""
        hint = RETENTIONS.get(getattr(self, "prompt_cache_retention", None) or "", 0.0)
        return RequestSpec(
            (), params, slo=slo, pooling=pooling, queue_timeout=self.queue_timeout or 0.0,
            session=self.session_id or getattr(self, "prompt_cache_key", None) or "", retain=self.retain or hint)

    def sampling_params(
        self, max_tokens: int | None, logprobs: int | None, others: Mapping[str, Any],
    ) -> SamplingSpec:
        """The parameters named, else those of `others`.  Raises ApiError for a value out of range."""
        given = {name: value for name in PARAMETERS
                 if name not in OWN and (value := getattr(self, name, None)) is not None}
        try:
            return SamplingSpec(max_tokens=max_tokens, logprobs=logprobs, prompt_logprobs=self.num_prompt_logprobs,
                                  **{**others, **given})
        except InvalidParams as error:
            raise from_params(error) from error


class CompletionRequest(Generate, kw_only=True):
    prompt: Prompt  # a text or its token ids; a list: several, each with its own choices
    logprobs: Logprobs | None = None  # return this many log-probabilities for each token, and the token's own
    suffix: str | None = None  # the output fills the gap before this text; of models with tokens for it

    def refuse_unsupported(self) -> None:
        super().refuse_unsupported()
        if self.suffix and (self.echo or self.truncate_prompt_tokens is not None):
            raise bad_request("suffix: not allowed with echo or truncate_prompt_tokens", "suffix")
        if self.echo and self.logprobs is not None:
            if self.stream:
                raise bad_request("echo: with logprobs not available when stream is true", "echo")
            if self.prompt_logprobs not in (None, self.logprobs):
                raise bad_request("prompt_logprobs: must be equal to logprobs with echo", "prompt_logprobs")

    @property
    def num_prompt_logprobs(self) -> int | None:
        return self.logprobs if self.echo and self.logprobs is not None else self.prompt_logprobs


class ChatRequest(Generate, kw_only=True):
    messages: list[dict[str, Any]]  # each has a `role` and a `content`: a text, or parts of type `text`
    max_completion_tokens: NoneOrMore | None = None  # OpenAI's newer name of `max_tokens`
    logprobs: bool | None = None  # return the log-probability of each token
    top_logprobs: Logprobs | None = None  # only with `logprobs`: those of this many of the most probable tokens, too
    add_generation_prompt: bool | None = None  # the template begins the answer; by default it does
    continue_final_message: bool | None = None  # the answer continues the last message; then none is begun
    chat_template: TemplateSource | None = None  # the template, where the server has `--trust-request-chat-template`
    chat_template_kwargs: dict[str, Any] | None = None  # further variables of the template
    documents: list[dict[str, Any]] | None = None  # the template's variable of this name
    reasoning_effort: Effort | None = None  # the template's variable, or those that turn reasoning on and off
    return_prompt_text: bool | None = None  # the response contains the conversation as the template wrote it
    metadata: dict[str, Any] | None = None  # changes nothing
    tools: list[dict[str, Any]] | None = None  # functions that the answer may call, with the schemas of arguments
    tool_choice: str | dict[str, Any] | None = None  # `auto`, `none`, `required`, or a function to call: docs/tools.md
    parallel_tool_calls: bool | None = None  # false: an answer has one call at most
    include_reasoning: bool | None = None  # false: reasoning is left out of the response
    prompt_cache_key: Hint | None = None  # names its session, where session_id does not
    prompt_cache_retention: CacheRetention | None = None  # a hint of how long its prompt stays cached
    safety_identifier: Hint | None = None  # changes nothing
    functions: Any = None
    function_call: Any = None
    modalities: Any = None
    audio: Any = None
    web_search_options: Any = None
    media_io_kwargs: Any = None
    mm_processor_kwargs: Any = None
    moderation: Any = None
    prompt_cache_options: Any = None
    store: Any = None
    verbosity: Any = None

    def refuse_unsupported(self) -> None:
        super().refuse_unsupported()
        if self.top_logprobs and not self.logprobs:
            raise bad_request("top_logprobs: only allowed when logprobs is true", "top_logprobs")
        if self.continue_final_message and self.add_generation_prompt:
            raise bad_request("continue_final_message: not allowed when add_generation_prompt is true",
                              "continue_final_message")

    def variables(self, read: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
        """The template's variables, except for the messages.

        Args:
            read: what is known of the variables that the template reads, as far as fields set them.

        Raises:
            ApiError: a variable is given that a field sets.
        """
        given = self.chat_template_kwargs or {}
        if not given.keys().isdisjoint(RESERVED_VARIABLES):
            raise bad_request("chat_template_kwargs: names a variable that the request sets", "chat_template_kwargs")
        begins = self.add_generation_prompt is not False and not self.continue_final_message
        variables: dict[str, Any] = {"add_generation_prompt": begins} | given
        if self.tools and self.tool_choice != "none":
            variables["tools"] = self.tools
        if self.documents is not None:
            variables["documents"] = self.documents
        if self.reasoning_effort is not None:
            variables = effort_variables(self.reasoning_effort, read) | variables
        if self.thinking_token_budget is not None and "thinking_budget" in read:
            variables = {"thinking_budget": self.thinking_token_budget} | variables
        return variables


def effort_variables(effort: Effort, read: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The variables by which a template is told how much a model reasons.  Args: read: see `ChatRequest.variables`."""
    thinks = effort != "none"
    variables: dict[str, Any] = {name: thinks for name in SWITCHES if name in read}
    for name in (*EFFORTS, *MODES):
        if name in read:
            values = read[name].get("values", ())
            word = next((word for word in WORDS[thinks] if word in values), effort)
            variables[name] = effort if name in EFFORTS and thinks else word
    return variables
