"""The offline API: continues many prompts with continuous batching in this process.

    llm = LLM()                                   # the built-in model
    llm.generate(["def fibonacci(n):"], SamplingParams(temperature=0.2, max_tokens=64))

Arguments, methods and outputs are those of vLLM's `LLM`: docs/reference/fields.md says what becomes of each argument.
"""

from __future__ import annotations

import gc
import itertools
import math
import operator
import threading
import time
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from tqdm import tqdm

from slotwise.compose.engine_builder import load
from slotwise.compute.runner import memory_budget
from slotwise.core.params import CLASSIFY, EMBED
from slotwise.core.record import StepRecord
from slotwise.core.scheduler_limits import SLO
from slotwise.engine.engine import Engine
from slotwise.engine.executor import AdapterStore
from slotwise.engine.messages import EngineInfo, Finish
from slotwise.errors import CheckpointError
from slotwise.offline.arguments import Arguments, EngineArgs, VllmMethods, check_call
from slotwise.offline.frontend import (
    BASE_SPEC,
    NUMBERS,
    PROBABILITIES,
    RAW,
    SCORE,
    VECTOR,
    Frontend,
    OfflineChoice,
    OfflinePooled,
    OfflineRequest,
    OfflineTokenizer,
    PooledOutput,
    template_variables,
)
from slotwise.offline.inputs import ParsedPrompt, PromptType, as_batch, parsed
from slotwise.offline.lora_requests import BASE, HeldAdapter, LoRARequest, OfflineAdapters
from slotwise.offline.outputs import (
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    PoolingRequestOutput,
    RequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)
from slotwise.offline.sampling_params import PoolingParams, SamplingParams
from slotwise.platform.progress_bar import ProgressBar

if TYPE_CHECKING:
    from slotwise.engine.messages import Command
    from slotwise.observe.metrics import Metrics
    from slotwise.observe.offline import Metric, Recording

LEVELS = (1, 2)


class OfflineEngine:
    """Used by one thread at a time, which holds the lock of its `LLM`.

    Args:
        event_log: a file that is written; empty: none.

    Raises:
        CheckpointError, ConfigError: one line that says what is wrong and what to do.
    """

    def __init__(self, arguments: Arguments, event_log: str | Path) -> None:
        if event_log:
            from slotwise.observe import log_file

            log_file.check(event_log)
        self._config, self._shows_progress = arguments.config, arguments.shows_progress
        self._recording: Recording | None = None
        self.metrics: Metrics | None = None
        self.level = 0  # of its sleep; 0: awake
        self._start()
        if event_log or arguments.log_stats:
            from slotwise.observe.offline import Recording

            file = log_file.LogFile(event_log) if event_log else None
            if file is not None:
                weakref.finalize(self, file.close)
            self._recording = Recording(self.info, file)
            self.metrics = self._recording.metrics(arguments.name) if arguments.log_stats else None

    def _start(self) -> None:
        with ProgressBar(is_wanted=self._shows_progress) as bar:
            loaded = load(self._config, bar)
            engine, self.info = loaded.engine(self._config, bar)
        self._engine: Engine | None = engine
        self.adapters: AdapterStore | None = loaded.adapters

    @property
    def has_work(self) -> bool:
        """As `Engine.has_work`."""
        return self._engine is not None and self._engine.has_work

    @property
    def _awake(self) -> Engine:
        """Raises RuntimeError while it sleeps."""
        if self.level or self._engine is None:
            raise RuntimeError("the model is asleep: call wake_up()")
        return self._engine

    # -- requests ------------------------------------------------------------------------------------------------

    def handle(self, command: Command) -> None:
        """As `Engine.handle`.  Raises RuntimeError while it sleeps."""
        engine = self._awake
        if self._recording is not None:
            self._recording.commanded(command)
        engine.handle(command)

    def wait(self) -> float:
        """Seconds, as `Engine.wait`."""
        return self._awake.wait()

    def step(self) -> StepRecord:
        """As `Engine.step`."""
        record = self._awake.step()
        if self._recording is not None:
            self._recording.stepped(record)
        return record

    def remove_stored(self) -> None:
        """Removes all blocks on disk.  Raises RuntimeError during a sleep at level 2, when there is no engine."""
        if self._config.kv_disk is not None:
            if self._engine is None:
                raise RuntimeError("blocks on disk cannot be removed while the model is asleep: call wake_up()")
            self._engine.remove_stored()()

    # -- sleep ---------------------------------------------------------------------------------------------------

    def sleep(self, level: int) -> None:
        """Gives memory back; no request may be unfinished.  Does nothing if it sleeps at this level already.

        Raises:
            ValueError: there is no such level, or this engine has none, or it sleeps at another one.
        """
        if level not in LEVELS:
            raise ValueError(f"level: 1 or 2, not {level!r:.40}")
        if self.level:
            if level != self.level:
                raise ValueError(f"level: the model sleeps at level {self.level}; wake it up first")
            return
        if level == 1 and (objection := self._awake.give_back()):
            raise ValueError(f"level: {objection}; level 2 gives everything back")
        if level == 2:
            if self._config.enable_lora:
                raise ValueError("level: 2 would lose the adapters that are loaded; level 1 keeps them")
            self._engine = None
            gc.collect()
            memory_budget.give_back()
        self.level = level

    def wake_up(self) -> None:
        """Ends a sleep.

        Raises:
            CheckpointError: the model's files have changed meanwhile.
        """
        if self.level == 2:
            before = self.info
            self._config = replace(self._config, max_model_len=before.limits.max_model_len)
            self._start()
            if self.info.identity != before.identity:
                self._engine, self.info = None, before
                raise CheckpointError("the checkpoint has changed since the start: make another LLM")
            if self._recording is not None:
                self._recording.started(self.info)
        self.level = 0


Params = SamplingParams | Sequence[SamplingParams]
Adapted = LoRARequest | Sequence[LoRARequest | None] | None
Progress = bool | Callable[..., Any]
T = TypeVar("T")


class LLM(VllmMethods):
    """A model and its engine.  Several threads may use it: one computes at a time, for the requests of all.

    Args:
        model: a name that `slotwise pull` lists, a checkpoint's folder, a GGUF file or a hub id; by default the
            built-in model.
        event_log: a file to which the event log is written (see observe.event_log); an older event log is replaced,
            any other file is refused; empty: none.
        arguments: vLLM's, and any field of `engine.config.EngineConfig`; None stands for a default.

    Raises:
        CheckpointError, TokenizerError, ConfigError: one line that says what is wrong and what to do.
    """

    def __init__(self, model: str | Path | None = None, *, event_log: str | Path = "", **arguments: Any) -> None:
        self._arguments = Arguments.of(model, arguments | {"event_log": event_log})
        self._frontend = Frontend(self._arguments)
        self.sampling_defaults = self._frontend.defaults
        self.tokenizer = self._frontend.tokenizer
        self._engine = OfflineEngine(self._arguments, event_log)
        self._names = itertools.count()
        self._ids = itertools.count()  # of requests
        # Of all unfinished requests: a step serves every call's.
        self._choices: dict[int, OfflineChoice | OfflinePooled] = {}
        # Guards the engine and its requests.  Reentrant: a step may collect an abandoned iteration, which then ends.
        self._lock = threading.RLock()
        self._adapters = OfflineAdapters(self._engine.adapters, self._lock)

    @property
    def info(self) -> EngineInfo:
        """What the engine told of itself when it was ready."""
        return self._engine.info

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> LLM:
        return cls(**vars(engine_args))

    def get_tokenizer(self) -> OfflineTokenizer:
        """The tokenizer, with methods of transformers' tokenizers."""
        return OfflineTokenizer(self._frontend)

    def get_default_sampling_params(self) -> SamplingParams:
        """The parameters of a call without any: the model's own, as far as `generation_config` keeps them."""
        return self._frontend.default_params()

    def get_metrics(self) -> list[Metric]:
        """The metrics of docs/observability.md as they are now.

        Raises:
            RuntimeError: they are not counted.
        """
        if self._engine.metrics is None:
            raise RuntimeError("there are no metrics: start with LLM(disable_log_stats=False)")
        from slotwise.observe.offline import snapshot

        with self._lock:
            return snapshot(self._engine.metrics)

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Forgets cached prefixes, on disk as well: no later request finds them.

        Requests that run keep the blocks they have.
        """
        check_call({"reset_connector": reset_connector})
        with self._lock:
            self._frontend.reset_prefix_cache()
            self._engine.remove_stored()
        return True

    def sleep(self, level: int = 1) -> None:
        """Gives memory back until `wake_up`: that of the cache, and at level 2 that of the weights as well.

        Raises:
            ValueError: there is no such level, this engine has none, or requests are unfinished.
        """
        with self._lock:
            if self._choices:
                raise ValueError("the model cannot sleep: requests are unfinished")
            try:
                self._engine.sleep(level)
            finally:  # a sleep that was interrupted may have lost the memory of cached prefixes, too
                self._frontend.reset_prefix_cache()

    def wake_up(self, tags: None = None) -> None:
        """Ends a sleep, if there is one; after level 2 the weights are read again.  Until then no request can run.

        Raises:
            ValueError: `tags` are given: the whole model wakes up.
            CheckpointError: the model's files have changed meanwhile.
        """
        check_call({"tags": tags})
        with self._lock:
            self._engine.wake_up()

    def generate(
        self, prompts: PromptType | Sequence[PromptType], sampling_params: Params | None = None,
        use_tqdm: Progress = True, lora_request: Adapted = None, priority: int | Sequence[int] | None = None,
        **more: Any,
    ) -> list[RequestOutput]:
        """Continues every prompt and returns the results in the order of the prompts.

        Args:
            prompts: texts, lists of token ids, or dicts (see `inputs`); one or many.
            sampling_params: one for all prompts, or one for each; by default `get_default_sampling_params()`.
            use_tqdm: whether there is a progress bar; or what makes one, as tqdm does.
            lora_request: the adapter of all prompts, or one (or None) for each; needs `enable_lora`.
            priority: lower is earlier, where the policy has priorities; one for all prompts, or one for each.
            more: arguments of vLLM's that are not supported; None is accepted.

        Raises:
            ValueError: a prompt that can never run, or parameters that do not match; no request was started.
        """
        check_call(more)
        return self._generate(
            _all_parsed(prompts), sampling_params, use_tqdm, priority, lora_request)

    def _generate(self, prompts: Sequence[ParsedPrompt], sampling_params: Params | None, use_tqdm: Progress,
                  priority: int | Sequence[int] | None, lora_request: Adapted) -> list[RequestOutput]:
        params = _for_each("sampling_params", sampling_params, len(prompts))
        priorities = _for_each("priority", priority, len(prompts))
        with self._adapters.held(_for_each("lora_request", lora_request, len(prompts))) as adapters:
            jobs = [self._job(*each) for each in zip(prompts, params, priorities, adapters, strict=True)]
            self._run(jobs, use_tqdm, "Generating")
        return [job.output for job in jobs]

    def _run(self, jobs: Sequence[OfflineRequest] | Sequence[OfflinePooled], use_tqdm: Progress, told: str) -> None:
        """Runs all steps of these requests, with a progress bar."""
        make = use_tqdm if callable(use_tqdm) else partial(tqdm, disable=not use_tqdm)
        with make(total=sum(len(job.choices) for job in jobs), unit="request", desc=told) as bar:
            for num_ended in self._steps(jobs):
                bar.update(num_ended)

    def embed(
        self, prompts: PromptType | Sequence[PromptType], *, truncate_prompt_tokens: int | None = None,
        use_tqdm: Progress = True, pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        lora_request: Adapted = None, **more: Any,
    ) -> list[EmbeddingRequestOutput]:
        """Returns the vector of every prompt, in the order of the prompts.

        Args:
            prompts, use_tqdm, lora_request, more: as those of `generate`.
            truncate_prompt_tokens: the first so many tokens of each prompt are kept, and a text's special ones; -1: as
                many as the model takes.
            pooling_params: one for all prompts, or one for each; by default as checkpoint and `pooler_config` say.

        Raises:
            ValueError: as `generate`, or the checkpoint's vectors are made in a way that is not supported.
        """
        check_call(more)
        return self._pooled(
            _all_parsed(prompts), EMBED, VECTOR, pooling_params, lora_request, truncate_prompt_tokens, use_tqdm)

    def encode(
        self, prompts: PromptType | Sequence[PromptType],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None, *, pooling_task: str | None = None,
        truncate_prompt_tokens: int | None = None, use_tqdm: Progress = True, lora_request: Adapted = None, **more: Any,
    ) -> list[PoolingRequestOutput]:
        """Returns tensors: of vectors (`pooling_task="embed"`) or of labels (`"classify"`), by default what there is.

        Args:
            prompts, use_tqdm, lora_request, more: as those of `generate`.
            pooling_params, truncate_prompt_tokens: as those of `embed`.

        Raises:
            ValueError: as `embed`, or the task is another one.
        """
        check_call(more)
        task = pooling_task or (CLASSIFY if self._frontend.pooling.labels else EMBED)
        if task not in (EMBED, CLASSIFY):
            raise ValueError(f"pooling_task must be {EMBED} or {CLASSIFY}, not {task!r:.40}")
        return self._pooled(
            _all_parsed(prompts), task, NUMBERS, pooling_params, lora_request, truncate_prompt_tokens, use_tqdm)

    def classify(
        self, prompts: PromptType | Sequence[PromptType], *,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        truncate_prompt_tokens: int | None = None, use_tqdm: Progress = True, lora_request: Adapted = None, **more: Any,
    ) -> list[ClassificationRequestOutput]:
        """Returns the probabilities of the labels of every prompt.  Arguments and errors are those of `embed`."""
        check_call(more)
        return self._pooled(
            _all_parsed(prompts), CLASSIFY, PROBABILITIES, pooling_params, lora_request, truncate_prompt_tokens,
            use_tqdm)

    def reward(
        self, prompts: PromptType | Sequence[PromptType], *,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        truncate_prompt_tokens: int | None = None, use_tqdm: Progress = True, lora_request: Adapted = None, **more: Any,
    ) -> list[PoolingRequestOutput]:
        """Returns the numbers of a reward model's head for every prompt, as they are.  As `embed` otherwise."""
        check_call(more)
        return self._pooled(
            _all_parsed(prompts), RAW, NUMBERS, pooling_params, lora_request, truncate_prompt_tokens, use_tqdm)

    def score(
        self, data_1: PromptType | Sequence[PromptType], data_2: PromptType | Sequence[PromptType], *,
        truncate_prompt_tokens: int | None = None, use_tqdm: Progress = True,
        pooling_params: PoolingParams | None = None, lora_request: Adapted = None, **more: Any,
    ) -> list[ScoringRequestOutput]:
        """Returns how well texts belong together: one with each of several, or as many with as many, in pairs.

        A model with a head of one label reads each pair (a cross-encoder); of any other, the score is the cosine of two
        vectors.

        Raises:
            ValueError: as `embed`, or the numbers of texts differ.
        """
        check_call(more)
        first, second = _all_parsed(data_1), _all_parsed(data_2)
        first = first * len(second) if len(first) == 1 else first
        if len(first) != len(second):
            raise ValueError(f"{len(first)} texts and {len(second)} others: give one, or as many on both sides")
        if len(labels := self._frontend.pooling.labels) > 1:
            raise ValueError(f"this model has {len(labels)} labels, and a score needs one; use LLM.classify")
        if labels:
            pairs = self._frontend.pairs(first, second, self._num_kept(truncate_prompt_tokens))
            return self._pooled(pairs, CLASSIFY, SCORE, pooling_params, lora_request, truncate_prompt_tokens, use_tqdm)
        outputs = self._pooled([*first, *second], EMBED, VECTOR, pooling_params, lora_request, truncate_prompt_tokens,
                               use_tqdm)
        return [_compared(*each) for each in zip(outputs, outputs[len(first):], strict=False)]

    def _pooled(
        self, prompts: Sequence[ParsedPrompt], task: str, made: PooledOutput,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None, lora_request: Adapted, most: int | None,
        use_tqdm: Progress,
    ) -> list[Any]:
        """Vectors or labels of all prompts.  Args: most: see `_num_kept`."""
        each = _for_each("pooling_params", pooling_params, len(prompts))
        pooling = {number: self._frontend.pooling_spec(self.info, params, task)
                   for number, params in {id(params): params for params in each}.items()}
        with self._adapters.held(_for_each("lora_request", lora_request, len(prompts))) as adapters:
            specs = {number: replace(BASE_SPEC, adapter=number, adapter_name=name)
                     for number, name in {adapter.number: adapter.name for adapter in adapters}.items()}
            jobs = [self._frontend.pooled_job(
                self.info, prompt, pooling[id(params)], str(next(self._names)), specs[adapter.number], made)
                for prompt, params, adapter in zip(
                    self._frontend.pooled_prompts(prompts, task, self._num_kept(most)), each, adapters, strict=True)]
            self._run(jobs, use_tqdm, "Embedding" if task == EMBED else "Classifying")
        return [job.output for job in jobs]

    def _num_kept(self, most: int | None) -> int | None:
        """Tokens of each prompt that are kept.  Raises ValueError for a number out of range.

        Args:
            most: -1: as many as the model takes; None: all.
        """
        if most is not None and most != -1 and most < 1:
            raise ValueError(f"truncate_prompt_tokens must be -1 or at least 1, not {most}")
        return self.info.limits.max_model_len if most == -1 else most

    def chat(
        self, messages: Sequence[Any], sampling_params: Params | None = None, use_tqdm: Progress = True,
        lora_request: Adapted = None, priority: int | Sequence[int] | None = None,
        chat_template: str | Path | None = None,
        chat_template_content_format: str = "auto", add_generation_prompt: bool = True,
        continue_final_message: bool = False, tools: Sequence[Any] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None, **more: Any,
    ) -> list[RequestOutput]:
        """Answers one conversation, or each of several, through the chat template.

        Args:
            chat_template: a template or its file, in the place of the model's.
            continue_final_message: the answer continues the last message; needs `add_generation_prompt=False`.
            tools: the template's variable; a call in the answer stays text.
            chat_template_kwargs: further variables of the template.

        Raises:
            ChatTemplateError, ValueError: as `generate`, or a conversation that cannot be rendered.
        """
        check_call(more | {"chat_template_content_format": chat_template_content_format})
        variables = template_variables(
            chat_template_kwargs, tools, begins=add_generation_prompt, continues=continue_final_message)
        conversations = [messages] if messages and isinstance(messages[0], Mapping) else messages
        prompts = [self._frontend.rendered(one, variables, continues=continue_final_message, template=chat_template)
                   for one in conversations]
        return self._generate(prompts, sampling_params, use_tqdm, priority, lora_request)

    def template(self, conversation: Sequence[Mapping[str, Any]]) -> list[int]:
        """Returns the token ids of a conversation, rendered with the chat template.

        Raises:
            ChatTemplateError, ValueError: the template refuses these messages, or the model has none.
        """
        return self._frontend.rendered(conversation, {}).ids or []

    def _job(self, prompt: ParsedPrompt, params: SamplingParams | None, priority: int | None,
             adapter: HeldAdapter = BASE) -> OfflineRequest:
        spec = replace(BASE_SPEC, slo=SLO(priority=priority or 0), adapter=adapter.number, adapter_name=adapter.name)
        return self._frontend.job(self.info, prompt, params, str(next(self._names)), spec)

    def stream(self, prompt: PromptType, sampling_params: SamplingParams | None = None) -> Iterator[str]:
        """Continues one prompt and yields its text as it comes.  `n` must be 1.

        Raises:
            ValueError: the prompt can never run.
        """
        shown = 0
        for output in self.stream_outputs(prompt, sampling_params):
            text = output.outputs[0].text
            if len(text) > shown:
                yield text[shown:]
                shown = len(text)

    def stream_outputs(
        self, prompt: PromptType, sampling_params: SamplingParams | None = None,
    ) -> Generator[RequestOutput]:
        """Continues one prompt and yields its output after every step: one object, which grows.  `n` must be 1.

        An iteration that is closed aborts the request.

        Raises:
            ValueError: the prompt can never run.
        """
        job = self._job(parsed(prompt), sampling_params, None)
        if len(job.choices) != 1:
            raise ValueError("a stream has one continuation: leave n at 1")
        for _ in self._steps([job]):
            yield job.output

    def _steps(self, jobs: Sequence[OfflineRequest] | Sequence[OfflinePooled]) -> Iterator[int]:
        """Runs steps until every job has ended; yields how many continuations ended in each step.

        Continuations still running when the iteration stops, for instance by an interrupt, are aborted.
        """
        with self._lock:
            own: dict[int, OfflineChoice | OfflinePooled] = {
                next(self._ids): choice for job in jobs for choice in job.choices}
            for request_id, choice in own.items():
                name = f"{choice.job.output.request_id}-{choice.index}"
                self._engine.handle(choice.add(name, request_id))
            self._choices |= own
        try:
            while own:
                while (wait := self._engine.wait()) > 0:
                    time.sleep(wait)  # without the lock, so that other threads can add requests
                with self._lock:
                    if not own.keys().isdisjoint(self._choices):
                        self._deliver(self._engine.step())
                    before, own = len(own), {number: own[number] for number in own if number in self._choices}
                yield before - len(own)
            for job in jobs:
                job.raise_errors()
        finally:
            with self._lock:
                for request_id in own:
                    self._choices.pop(request_id, None)
                    self._engine.handle(Finish(request_id, "abort"))

    def _deliver(self, record: StepRecord) -> None:
        now = record.ended_ns * 1e-9
        for request_id, num_cached in record.admitted:
            if (choice := self._choices.get(request_id)) is not None and choice.job.output.num_cached_tokens is None:
                choice.job.output.num_cached_tokens = num_cached
                choice.job.output.metrics.scheduled_ts = record.started_ns * 1e-9
        reasons = {end.request_id: end.reason for end in record.ended}
        for row, (request_id, tokens) in enumerate(zip(record.plan.request_ids, record.tokens, strict=True)):
            choice = self._choices.get(request_id)
            if choice is None or not tokens:
                continue
            choice.take(tokens, record.logprobs[row] if record.logprobs else (), now, reasons.get(request_id, ""))
            if choice.met_stop_string:
                self._engine.handle(Finish(request_id, "stop"))
        for request_id, start, entries in zip(record.plan.request_ids, record.plan.starts,
                                              record.result.prompt_logprobs, strict=False):
            if entries and (choice := self._choices.get(request_id)) is not None:
                choice.job.read_prompt(start, entries)
        for request_id, vector in zip(record.plan.request_ids, record.result.pooled, strict=False):
            choice = self._choices.get(request_id)
            if vector and isinstance(choice, OfflinePooled):
                choice.pool(vector)
        for end in record.ended:
            if choice := self._choices.pop(end.request_id, None):
                choice.end(end.reason, end.message, now)


def _all_parsed(prompts: PromptType | Sequence[PromptType]) -> list[ParsedPrompt]:
    return [parsed(prompt) for prompt in as_batch(prompts)]


def _compared(one: EmbeddingRequestOutput, other: EmbeddingRequestOutput) -> ScoringRequestOutput:
    """The score of two texts: the cosine of their vectors."""
    first, second = one.outputs.embedding, other.outputs.embedding
    cosine = sum(map(operator.mul, first, second)) / (math.hypot(*first) * math.hypot(*second) or 1.0)
    return ScoringRequestOutput(one.request_id, ScoringOutput(cosine), one.prompt_token_ids + other.prompt_token_ids,
                                one.finished and other.finished, one.metrics, one.num_cached_tokens)


def _for_each(name: str, value: T | Sequence[T] | None, count: int) -> Sequence[T | None]:
    """One value for each of `count` prompts."""
    if value is None or not isinstance(value, Sequence):
        return [value] * count
    if len(value) != count:
        raise ValueError(f"{count} prompts but {len(value)} {name}: give one for all or one for each")
    return value
