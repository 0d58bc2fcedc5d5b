"""From prompts and parameters to requests and outputs: what `LLM` and `AsyncLLM` share."""

from __future__ import annotations

import random
import time
from array import array
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache
from pathlib import Path
from sys import byteorder
from typing import Any, NamedTuple

from slotwise.compose.model_defaults import announce, read_defaults, read_pooling
from slotwise.core.params import EMBED, InvalidParams, PoolingSpec, SamplingSpec
from slotwise.core.record import TokenLogprobs
from slotwise.core.request import RequestSpec
from slotwise.engine.messages import UNSUBMITTED, Add, EngineInfo
from slotwise.offline.arguments import Arguments
from slotwise.offline.inputs import ParsedPrompt
from slotwise.offline.outputs import (
    ClassificationOutput,
    ClassificationRequestOutput,
    CompletionOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    PooledRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    RequestMetrics,
    RequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
    by_token,
)
from slotwise.offline.sampling_params import PoolingParams, RequestOutputKind, SamplingParams
from slotwise.text.chat_source import find_chat_template, find_tool_template
from slotwise.text.chat_template import ChatTemplate
from slotwise.text.conversation import RESERVED_VARIABLES, InvalidMessages, OpenEnd, check_messages
from slotwise.text.grammar_check import check
from slotwise.text.stop_strings import Continuation, VisibleTokens
from slotwise.text.tokenizer import NO_MARKS, Tokenizer, spellings

BASE_SPEC = RequestSpec((), SamplingSpec(max_tokens=None))  # of the base model, with no wishes


class OfflineRequest:
    """A prompt and its continuations.

    Args:
        output: without continuations.
        spec: of the first continuation; the next ones have the next seeds.
        eos_ids: the model's end tokens.
    """

    def __init__(self, output: RequestOutput, params: SamplingParams, spec: RequestSpec, tokenizer: Tokenizer,
                 eos_ids: Collection[int]) -> None:
        self.output = output
        self.kind = params.output_kind
        self.interval = params.stream_interval or 1
        self.text_of = tokenizer.token_text
        self._spec, engine_params = spec, spec.params
        stop_ids = set(engine_params.stop_token_ids).difference(() if engine_params.ignore_eos else eos_ids)
        shown = VisibleTokens(stop=params.include_stop_str_in_output, special=not params.skip_special_tokens)
        self.choices = []
        for index in range(engine_params.n):
            text = Continuation(tokenizer, output.prompt_token_ids, engine_params.stop, engine_params.min_tokens,
                                shown) if params.detokenize else None
            completion = CompletionOutput(index)
            if engine_params.logprobs is not None:
                completion.logprobs, completion.cumulative_logprob = [], 0.0
            self.choices.append(OfflineChoice(self, completion, text, stop_ids))
        output.outputs = [choice.completion for choice in self.choices]
        output.prompt_logprobs = None if engine_params.prompt_logprobs is None else [None]

    def add(self, choice: OfflineChoice, name: str, request_id: int = UNSUBMITTED) -> Add:
        """The command that starts a continuation, under a name that is unique among the unfinished ones."""
        index, spec = choice.completion.index, self._spec
        return Add(request_id, replace(
            spec, params=spec.params.of_choice(index), seed=(spec.seed + index) % 2**64), name=name)

    def read_prompt(self, start: int, entries: Sequence[TokenLogprobs]) -> None:
        """Adds entries of the prompt's tokens from position `start + 1` on; known ones, computed again, are ignored."""
        known, ids = self.output.prompt_logprobs, self.output.prompt_token_ids
        if known is not None and len(known) < len(ids):
            first = len(known)
            known += [by_token(token, entry, self.text_of) for token, entry in zip(
                ids[first:], entries[first - 1 - start :], strict=False)]

    def snapshot(self, choices: Iterable[OfflineChoice]) -> RequestOutput:
        """An output of these continuations as they are now, that no later token changes."""
        outputs = [choice.pop() if self.kind is RequestOutputKind.DELTA else choice.copy() for choice in choices]
        return replace(self.output, outputs=outputs, metrics=replace(self.output.metrics))

    def raise_errors(self) -> None:
        """Raises RuntimeError with the first message of a continuation that failed."""
        for choice in self.choices:
            if choice.error:
                raise RuntimeError(choice.error)


class OfflineChoice:
    """One continuation: turns its tokens into text as they come.

    Args:
        text: None where only token ids are wanted.
        stop_ids: stop tokens of the request that are not end tokens of the model.
    """

    def __init__(self, job: OfflineRequest, completion: CompletionOutput, text: Continuation | None,
                 stop_ids: Collection[int]) -> None:
        self.job = job
        self.completion = completion
        self.error = ""  # why it ended, if it failed
        self._text = text
        self._stop_ids = stop_ids

    @property
    def index(self) -> int:
        return self.completion.index

    def add(self, name: str, request_id: int) -> Add:
        """As that of the job."""
        return self.job.add(self, name, request_id)

    @property
    def met_stop_string(self) -> bool:
        return self._text is not None and self._text.stop_reason is not None

    @property
    def looks_for_stops(self) -> bool:
        return self._text is not None and self._text.looks_for_stops

    def take(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs], now: float, reason: str = "") -> None:
        """Adds tokens that came at `now`; none behind a stop string.

        Args:
            reason: why these are the last.
        """
        if self.met_stop_string:
            return
        completion = self.completion
        text, kept = self._text.read(tokens, reason) if self._text is not None else ("", len(tokens))
        completion.text += text
        completion.token_ids += tokens[:kept]
        if completion.logprobs is not None and completion.cumulative_logprob is not None:
            for token, entry in zip(tokens[:kept], logprobs, strict=False):
                completion.logprobs.append(by_token(token, entry, self.job.text_of))
                completion.cumulative_logprob += entry.logprob
        if kept:
            self.job.output.metrics.generated(kept, now)
        if self.met_stop_string and self._text is not None:
            completion.stop_reason = self._text.stop_reason
        elif reason == "stop" and tokens and tokens[-1] in self._stop_ids:
            completion.stop_reason = tokens[-1]

    def end(self, reason: str, message: str, now: float) -> None:
        """Args: message: why it failed, if it did."""
        output = self.job.output
        self.completion.finish_reason = "stop" if self.met_stop_string else reason
        self.error = message
        output.finished = all(choice.completion.finished() for choice in self.job.choices)
        output.metrics.finished_time = now if output.finished else 0.0

    def copy(self) -> CompletionOutput:
        one = self.completion
        logprobs = None if one.logprobs is None else list(one.logprobs)
        return replace(one, token_ids=list(one.token_ids), logprobs=logprobs)

    def pop(self) -> CompletionOutput:
        """What came since the last call; the sum of log-probabilities remains that of all."""
        one, self.completion = self.completion, replace(self.completion, text="", token_ids=[])
        if one.logprobs is not None:
            self.completion.logprobs = []
        return one


class OfflinePooled:
    """A prompt and what is made of it.  It has the methods of `OfflineRequest` and of its one `OfflineChoice`.

    Args:
        made: the output's `outputs`, of the numbers that the engine gives.
    """

    index = 0
    met_stop_string = False

    def __init__(
        self, output: PooledRequestOutput, spec: RequestSpec, made: Callable[[list[float]], object],
    ) -> None:
        self.output = output
        self.error = ""  # why it ended, if it failed
        self._spec = spec
        self._made = made

    @property
    def job(self) -> OfflinePooled:
        return self

    @property
    def choices(self) -> list[OfflinePooled]:
        return [self]

    def add(self, name: str, request_id: int) -> Add:
        """The command that starts it, under a name that is unique among the unfinished ones."""
        return Add(request_id, self._spec, name=name)

    def take(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs], now: float, reason: str = "") -> None:
        """Never called: nothing is sampled."""

    def read_prompt(self, start: int, entries: Sequence[TokenLogprobs]) -> None:
        """Never called: no log-probabilities are computed."""

    def pool(self, vector: bytes) -> None:
        """Sets the numbers: float32, little-endian."""
        numbers = array("f", vector)
        if byteorder == "big":
            numbers.byteswap()
        self.output.outputs = self._made(numbers.tolist())

    def end(self, reason: str, message: str, now: float) -> None:
        self.error = message
        self.output.finished = True
        self.output.metrics.finished_time = now

    def raise_errors(self) -> None:
        """Raises RuntimeError if it failed."""
        if self.error:
            raise RuntimeError(self.error)


RAW = "raw"  # what `LLM.reward` gives: the numbers of labels, not activated


class PooledOutput(NamedTuple):
    """How outputs are made of the numbers that an engine gives."""

    request: type[PooledRequestOutput]
    empty: Callable[[], object]
    of_numbers: Callable[[list[float]], object]


def _tensor(numbers: Sequence[float] = ()) -> PoolingOutput:
    import torch

    return PoolingOutput(torch.tensor(numbers, dtype=torch.float32))


def _score(numbers: Sequence[float]) -> ScoringOutput:
    return ScoringOutput(numbers[0])


NUMBERS = PooledOutput(PoolingRequestOutput, _tensor, _tensor)
VECTOR = PooledOutput(EmbeddingRequestOutput, EmbeddingOutput, EmbeddingOutput)
PROBABILITIES = PooledOutput(ClassificationRequestOutput, ClassificationOutput, ClassificationOutput)
SCORE = PooledOutput(ScoringRequestOutput, ScoringOutput, _score)


class Frontend:
    """Tokenizer, chat template and defaults of a model.  Raises ConfigError, CheckpointError, TokenizerError."""

    def __init__(self, arguments: Arguments) -> None:
        self._arguments = arguments
        self.defaults = read_defaults(arguments.config, arguments.override)
        announce(self.defaults)
        self.tokenizer = Tokenizer.load(arguments.config.model)
        self.pooling = read_pooling(arguments.config.model, arguments.pooler_config)
        self._seeds = random.Random(arguments.config.seed)
        self._resets = 0  # of the prefix cache: blocks of earlier prompts are never found

    def reset_prefix_cache(self) -> None:
        """Lets no later request find blocks that are cached now; they are evicted when blocks are needed."""
        self._resets += 1

    def default_params(self) -> SamplingParams:
        return SamplingParams(**self.defaults.given)

    def job(self, info: EngineInfo, prompt: ParsedPrompt, params: SamplingParams | None, request_id: str,
            spec: RequestSpec = BASE_SPEC) -> OfflineRequest:
        """A request that the engine can run.

        Args:
            spec: what the arguments of a call say, other than prompt and parameters.

        Raises:
            ValueError: the prompt can never run, or parameters are not valid; the message says why.
        """
        if info.generation_objection:
            raise ValueError(f"{info.generation_objection}; use LLM.{'classify' if info.num_labels else 'embed'}")
        ids = self.tokenizer.encode(prompt.text or "") if prompt.ids is None else prompt.ids
        wanted = params if params is not None else self._defaults_after(info, len(ids))
        if not isinstance(wanted, SamplingParams):
            raise ValueError(f"sampling_params must be slotwise.SamplingParams, not {type(wanted).__name__}")
        self.check_grammar(wanted)
        engine_params = wanted.for_engine(self._bad_words(wanted.bad_words or (), info.vocab_size))
        engine_params.check_vocabulary(info.vocab_size, info.eos_token_ids)
        self._check_prompt(info, ids, engine_params.max_tokens)
        seed = self._seeds.getrandbits(63) if engine_params.seed is None else engine_params.seed
        spec = replace(spec, prompt=tuple(ids), params=engine_params, seed=seed, salt=prompt.salt,
                       cache_generation=self._resets)
        metrics = RequestMetrics(time.monotonic())
        output = RequestOutput(request_id, prompt.text, ids, None, [], finished=False, metrics=metrics)
        return OfflineRequest(output, wanted, spec, self.tokenizer, info.eos_token_ids)

    def check_grammar(self, params: SamplingParams) -> None:
        """Raises InvalidParams for a grammar that a server refuses.  That may take seconds, for the first time."""
        grammar = params.grammar()
        if grammar and (objection := _objection(grammar.kind, grammar.text, self.tokenizer.special_texts)):
            raise InvalidParams(grammar.field, objection)

    def pooling_spec(self, info: EngineInfo, params: PoolingParams | None, task: str) -> PoolingSpec:
        """The parameters of a request for a vector (EMBED), for labels (CLASSIFY), or for their plain numbers (RAW).

        Raises:
            ValueError: the model gives no such thing, or parameters are not valid.
        """
        wanted = params if params is not None else PoolingParams()
        if not isinstance(wanted, PoolingParams):
            raise ValueError(f"pooling_params must be slotwise.PoolingParams, not {type(wanted).__name__}")
        defaults = self.pooling.of_family(info.pooling_type)
        if task != EMBED:
            if wanted.dimensions is not None:
                raise InvalidParams("dimensions", "is of vectors, and not of labels")
            return defaults.classifying(is_activated=False if task == RAW else wanted.normalizes)
        if defaults.objection:
            raise ValueError(f"this model gives no embeddings: {defaults.objection}")
        pooling = defaults.chosen(wanted.dimensions, normalize=wanted.normalizes)
        pooling.check_width(info.hidden_size)
        return pooling

    def pooled_prompts(self, prompts: Sequence[ParsedPrompt], task: str, most: int | None) -> list[ParsedPrompt]:
        """Prompts of which vectors or labels are wanted, as token ids.

        A text to embed begins with the checkpoint's default prompt.

        Args:
            most: tokens of each that are kept, the first ones and the special ones of a text; None: all.
        """
        texts = [prompt.text or "" for prompt in prompts if prompt.ids is None]
        encoded = iter(self.tokenizer.encode_batch(list(map(self.pooling.prompted, texts)) if task == EMBED else texts))

        def ids_of(prompt: ParsedPrompt) -> list[int]:
            ids, marks = (next(encoded), self.tokenizer.marks) if prompt.ids is None else (prompt.ids, NO_MARKS)
            return ids if most is None else marks.cut(ids, most, keeps_last=False)

        return [prompt._replace(ids=ids_of(prompt)) for prompt in prompts]

    def pooled_job(
        self, info: EngineInfo, prompt: ParsedPrompt, pooling: PoolingSpec, request_id: str,
        spec: RequestSpec = BASE_SPEC, made: PooledOutput = VECTOR,
    ) -> OfflinePooled:
        """One of `pooled_prompts`, as a request.

        Args:
            spec: as that of `job`.

        Raises:
            ValueError: the prompt can never run.
        """
        ids = prompt.ids or []
        self._check_prompt(info, ids, 0)
        output = made.request(request_id, made.empty(), ids, finished=False, metrics=RequestMetrics(time.monotonic()))
        spec = replace(spec, prompt=tuple(ids), pooling=pooling, salt=prompt.salt,
                       cache_generation=self._resets)
        return OfflinePooled(output, spec, made.of_numbers)

    def pairs(self, firsts: Sequence[ParsedPrompt], seconds: Sequence[ParsedPrompt], most: int | None,
              ) -> list[ParsedPrompt]:
        """Each text of `firsts` and one of `seconds`, as the tokenizer joins them.

        Args:
            most: tokens of a pair that are kept: the second text is cut; None: all.

        Raises:
            ValueError: a text is given as token ids, or leaves no place for the other one.
        """
        texts = [prompt.text for prompt in (*firsts, *seconds) if prompt.text is not None]
        if len(texts) < 2 * len(firsts):
            raise ValueError("a model that compares two texts needs texts, not token ids")
        ids, marks = self.tokenizer.encode_batch(texts, add_special_tokens=False), self.tokenizer.pair_marks
        found = []
        for prompt, first, second in zip(firsts, ids[: len(firsts)], ids[len(firsts) :], strict=True):
            places = len(second) if most is None else most - len(first) - marks.num_tokens
            if second and places < 1:
                raise ValueError(f"truncate_prompt_tokens: {most} tokens leave no place for a text next to one of "
                                 f"{len(first)} tokens")
            found.append(prompt._replace(text=None, ids=marks.pair(first, second[:places])))
        return found

    def _check_prompt(self, info: EngineInfo, ids: Sequence[int], max_tokens: int | None) -> None:
        """Raises ValueError for a prompt that can never run."""
        objection = info.limits.objection(len(ids), max_tokens)
        if not objection and not 0 <= min(ids) <= max(ids) < info.vocab_size:
            objection = f"a prompt holds token ids outside the vocabulary of {info.vocab_size}"
        if objection:
            raise ValueError(objection)

    def _defaults_after(self, info: EngineInfo, num_prompt: int) -> SamplingParams:
        """The default parameters, with `max_tokens` as far as it fits after so many tokens."""
        params, limits = self.default_params(), info.limits
        left = max(1, min(limits.max_model_len, limits.cache_tokens + 1) - num_prompt)
        params.max_tokens = min(params.max_tokens or left, left)
        return params

    def _bad_words(self, words: Sequence[str], vocab_size: int) -> list[list[int]]:
        found = [self.tokenizer.encode(text, add_special_tokens=False) for text in spellings(words)]
        return [ids for ids in found if ids and max(ids) < vocab_size]  # the model never generates the others

    def rendered(
        self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any], *, continues: bool = False,
        template: str | Path | None = None,
    ) -> ParsedPrompt:
        """A conversation as the chat template writes it.

        Args:
            variables: of the template.
            continues: the last message is left open.
            template: its text or its file; None: that of `LLM`, else the model's own.

        Raises:
            ChatTemplateError, ValueError: the template refuses these messages, or the model has none.
        """
        if not all(isinstance(message, Mapping) for message in messages):
            raise InvalidMessages("messages: each must be a dict with role and content", "messages")
        own = [dict(message) for message in messages]
        check_messages(own)
        source = self.chat_template if template is None else self._source(template)
        if template is None and self._arguments.chat_template is None and variables.get("tools"):
            source = self._tool_template or source
        if source is None:
            raise ValueError(f"{self._arguments.config.model} has no chat template: use generate")
        open_end = OpenEnd(own) if continues else None
        compiled = _compiled(source, tuple(self.tokenizer.special_tokens.items()))
        text = compiled.render(own if open_end is None else open_end.messages, continues, **variables)
        text = text if open_end is None else open_end.cut(text)
        return ParsedPrompt(text, self.tokenizer.encode(text, add_special_tokens=False))

    @cached_property
    def chat_template(self) -> str | None:
        """The source of the template of conversations without tools; None: the model has none."""
        return self._source(self._arguments.chat_template)

    @cached_property
    def _tool_template(self) -> str | None:
        return find_tool_template(self._arguments.config.model)

    def _source(self, template: str | Path | None) -> str | None:
        """The source of a template that is given as such, or as a file; None: the model's own."""
        if isinstance(template, str) and not {*"{}\n"}.isdisjoint(template):
            return template
        return find_chat_template(self._arguments.config.model, template)


def template_variables(
    given: Mapping[str, Any] | None, tools: Sequence[Any] | None, *, begins: bool, continues: bool,
) -> dict[str, Any]:
    """The variables of a chat template, as the arguments of `LLM.chat` say.  Raises ValueError for contradictions."""
    if begins and continues:
        raise ValueError("continue_final_message: not allowed when add_generation_prompt is true")
    if taken := [name for name in given or {} if name in RESERVED_VARIABLES]:
        raise ValueError(f"chat_template_kwargs: {taken[0]} is an argument of its own, or cannot be set")
    return {"add_generation_prompt": begins, "tools": tools or None, **(given or {})}


@lru_cache(256)
def _objection(kind: str, text: str, special: tuple[str, ...]) -> str:
    return check(kind, text, special)


@lru_cache(4)
def _compiled(source: str, special_tokens: tuple[tuple[str, str], ...]) -> ChatTemplate:
    return ChatTemplate(source, dict(special_tokens))


class OfflineTokenizer:
    """Encodes and decodes texts, and applies the chat template."""

    def __init__(self, frontend: Frontend) -> None:
        self._frontend = frontend
        self._tokenizer = frontend.tokenizer

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        return {"input_ids": self.encode(text, add_special_tokens)}

    def decode(self, token_ids: int | Sequence[int], skip_special_tokens: bool = False) -> str:
        ids = [token_ids] if isinstance(token_ids, int) else token_ids
        return self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    def apply_chat_template(
        self, conversation: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None = None,
        chat_template: str | Path | None = None, add_generation_prompt: bool = False,
        continue_final_message: bool = False, tokenize: bool = True, **variables: Any,
    ) -> str | list[int]:
        """A conversation as the chat template writes it, or its token ids.

        Raises:
            ChatTemplateError, ValueError: the template refuses these messages, or the model has none.
        """
        chosen = template_variables(variables, tools, begins=add_generation_prompt, continues=continue_final_message)
        found = self._frontend.rendered(conversation, chosen, continues=continue_final_message, template=chat_template)
        return (found.ids or []) if tokenize else (found.text or "")

    @property
    def chat_template(self) -> str | None:
        """The source of the chat template; None: the model has none."""
        return self._frontend.chat_template

    @property
    def eos_token_id(self) -> int | None:
        return self._id_of("eos_token")

    @property
    def bos_token_id(self) -> int | None:
        return self._id_of("bos_token")

    @property
    def vocab_size(self) -> int:
        return self._tokenizer.vocab_size

    def _id_of(self, name: str) -> int | None:
        text = self._tokenizer.special_tokens.get(name)
        return None if text is None else self._tokenizer.inner.token_to_id(text)
