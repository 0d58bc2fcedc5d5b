"""From prompts and conversations to requests: what the offline API does before the engine."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from slotwise.compose.model_defaults import announce, read_defaults, read_pooling
from slotwise.core.params import InvalidParams
from slotwise.engine.messages import EngineInfo
from slotwise.inputs import Parsed
from slotwise.offline.arguments import Arguments
from slotwise.offline.embedding import EmbeddingJob
from slotwise.offline.job import Job
from slotwise.offline.residents import BASE, Held
from slotwise.outputs import EmbeddingOutput, EmbeddingRequestOutput, RequestMetrics, RequestOutput
from slotwise.pooling_params import PoolingParams
from slotwise.sampling_params import SamplingParams
from slotwise.text.chat_source import find_chat_template, find_tool_template
from slotwise.text.chat_template import ChatTemplate
from slotwise.text.conversation import RESERVED_VARIABLES, InvalidMessages, OpenEnd, check_messages
from slotwise.text.grammar_check import check
from slotwise.text.tokenizer import Tokenizer, spellings


class Frontend:
    """Tokenizer, chat template and defaults of a model.  Raises ConfigError, CheckpointError, TokenizerError."""

    def __init__(self, arguments: Arguments) -> None:
        self._arguments = arguments
        self.defaults = read_defaults(arguments.config, arguments.override)
        announce(self.defaults)
        self.tokenizer = Tokenizer.load(arguments.config.model)
        self.pooling = read_pooling(arguments.config.model, arguments.pooler_config)
        self._seeds = random.Random(arguments.config.seed)
        self._resets = 0  # of the prefix cache: blocks of earlier prompts have another salt, and are never found

    def reset_prefix_cache(self) -> None:
        """Lets no later request find blocks that are cached now; they are evicted when blocks are needed."""
        self._resets += 1

    def default_params(self) -> SamplingParams:
        return SamplingParams(**self.defaults.given)

    def job(self, info: EngineInfo, prompt: Parsed, params: SamplingParams | None, request_id: str,
            priority: int = 0, adapter: Held = BASE) -> Job:
        """A request that the engine can run.

        Raises:
            ValueError: the prompt can never run, or parameters are not valid; the message says why.
        """
        if info.generation_objection:
            raise ValueError(f"{info.generation_objection}; use LLM.embed")
        ids = self.tokenizer.encode(prompt.text or "") if prompt.ids is None else prompt.ids
        wanted = params if params is not None else self._defaults_after(info, len(ids))
        if not isinstance(wanted, SamplingParams):
            raise ValueError(f"sampling_params must be slotwise.SamplingParams, not {type(wanted).__name__}")
        self.check_grammar(wanted)
        engine_params = wanted.for_engine(self._bad_words(wanted.bad_words or (), info.vocab_size))
        engine_params.check_vocabulary(info.vocab_size, info.eos_token_ids)
        self._check_prompt(info, ids, engine_params.max_tokens)
        seed = self._seeds.getrandbits(63) if engine_params.seed is None else engine_params.seed
        salt = self._salt(prompt)
        metrics = RequestMetrics(time.monotonic())
        output = RequestOutput(request_id, prompt.text, ids, None, [], finished=False, metrics=metrics)
        return Job(
            output, wanted, engine_params, seed, self.tokenizer, info.eos_token_ids, salt, priority, adapter)

    def check_grammar(self, params: SamplingParams) -> None:
        """Raises InvalidParams for a grammar that a server refuses.  That may take seconds, for the first time."""
        grammar = params.grammar()
        if grammar and (objection := _objection(grammar.kind, grammar.text, self.tokenizer.special_texts)):
            raise InvalidParams(grammar.field, objection)

    def embedding_job(self, info: EngineInfo, prompt: Parsed, params: PoolingParams | None, request_id: str,
                      most: int | None, adapter: Held = BASE) -> EmbeddingJob:
        """A prompt whose vector is wanted.

        Args:
            most: tokens that are kept, the first ones; -1: as many as the model takes; None: all.

        Raises:
            ValueError: the model gives no vectors, the prompt can never run, or parameters are not valid.
        """
        if self.pooling.objection:
            raise ValueError(f"this model gives no embeddings: {self.pooling.objection}")
        wanted = params if params is not None else PoolingParams()
        if not isinstance(wanted, PoolingParams):
            raise ValueError(f"pooling_params must be slotwise.PoolingParams, not {type(wanted).__name__}")
        pooling = self.pooling.chosen(wanted.dimensions, normalize=wanted.normalizes)
        pooling.check_width(info.hidden_size)
        ids = self.tokenizer.encode(prompt.text or "") if prompt.ids is None else prompt.ids
        if most is not None:
            ids = ids[: info.limits.max_model_len if most == -1 else most]
        self._check_prompt(info, ids, 0)
        output = EmbeddingRequestOutput(
            request_id, EmbeddingOutput(), ids, finished=False, metrics=RequestMetrics(time.monotonic()))
        return EmbeddingJob(output, pooling, self._salt(prompt), adapter)

    def _salt(self, prompt: Parsed) -> str:
        return f"{self._resets}:{prompt.salt}" if self._resets or prompt.salt else ""

    def _check_prompt(self, info: EngineInfo, ids: Sequence[int], max_tokens: int | None) -> None:
        """Raises ValueError for a prompt that can never run."""
        objection = info.limits.objection(len(ids), max_tokens)
        if not objection and not all(0 <= token < info.vocab_size for token in ids):
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
    ) -> Parsed:
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
        source = self._template if template is None else self._source(template)
        if template is None and self._arguments.chat_template is None and variables.get("tools"):
            source = self._tool_template or source
        if source is None:
            raise ValueError(f"{self._arguments.config.model} has no chat template: use generate")
        open_end = OpenEnd(own) if continues else None
        compiled = _compiled(source, tuple(self.tokenizer.special_tokens.items()))
        text = compiled.render(own if open_end is None else open_end.messages, continues, **variables)
        text = text if open_end is None else open_end.cut(text)
        return Parsed(text, self.tokenizer.encode(text, add_special_tokens=False))

    @cached_property
    def _template(self) -> str | None:
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
