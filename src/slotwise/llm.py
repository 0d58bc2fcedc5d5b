"""The offline API: continues many prompts with continuous batching in this process.

    llm = LLM()                                   # the built-in model
    llm.generate(["def fibonacci(n):"], SamplingParams(temperature=0.2, max_tokens=64))
"""

from __future__ import annotations

import itertools
import operator
import random
import threading
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from slotwise import builtin
from slotwise.compose.engine import build_engine
from slotwise.compose.sampling_defaults import announce, read_defaults
from slotwise.core.params import SamplingParams
from slotwise.core.step import TokenLogprobs
from slotwise.engine.config import EngineConfig
from slotwise.engine.engine import Engine
from slotwise.engine.messages import Add, Finish, RowEnd, StepRecord
from slotwise.model.locate import locate
from slotwise.outputs import CompletionOutput, RequestMetrics, RequestOutput
from slotwise.text.chat_template import load_chat_template
from slotwise.text.continuation import Continuation
from slotwise.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from slotwise.observe.offline import Logged

Prompt = str | Mapping[str, Sequence[int]] | Sequence[int]
Params = SamplingParams | Sequence[SamplingParams]


class LLM:
    """A model and its engine.  Several threads may use it: one computes at a time, for the requests of all.

    Args:
        model: a checkpoint's folder or a hub id; by default the built-in model.
        event_log: a file to which the event log is written (see observe.event_log); an older event log is replaced,
            any other file is refused; empty: none.
        generation_config: where defaults of sampling come from: `auto`, the model's generation_config.json; `vllm`,
            nowhere; else such a file, or its folder.
        override_generation_config: fields of a generation_config.json that replace those; None stands for neutral.
        settings: any field of `engine.config.EngineConfig`.

    Raises:
        CheckpointError, TokenizerError, ConfigError: one line that says what is wrong and what to do.
    """

    def __init__(
        self, model: str | None = None, *, event_log: str | Path = "", generation_config: str = "auto",
        override_generation_config: Mapping[str, Any] | None = None, **settings: Any,
    ) -> None:
        self._config = EngineConfig.of(
            model=str(locate(model or builtin.path())), generation_config=generation_config, **settings)
        self.sampling_defaults = read_defaults(self._config, override_generation_config)
        announce(self.sampling_defaults)
        if event_log:
            from slotwise.observe import log_file  # needs msgspec, which may not be installed

            log_file.check(event_log)
        engine, self.info = build_engine(self._config)
        self._engine: Engine | Logged = engine
        if event_log:
            from slotwise.observe.offline import Logged

            file = log_file.LogFile(event_log)
            weakref.finalize(self, file.close)
            self._engine = Logged(engine, self.info, file)
        self.tokenizer = Tokenizer.load(self._config.model)
        self._seeds = random.Random(self._config.seed)
        self._names = itertools.count()
        self._readers: dict[str, _Reader] = {}  # of all unfinished requests: a step serves every call's
        # Guards engine, seeds and readers.  Reentrant: a step may collect an abandoned iteration, which then ends here.
        self._lock = threading.RLock()

    def get_default_sampling_params(self) -> SamplingParams:
        """The parameters of a call without any: the model's own, as far as `generation_config` keeps them."""
        return self.sampling_defaults.params()

    def generate(
        self, prompts: Prompt | Sequence[Prompt], sampling_params: Params | None = None, *, use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Continues every prompt and returns the results in the order of the prompts.

        Args:
            prompts: strings, lists of token ids, or `{"prompt_token_ids": [...]}`; one or many.
            sampling_params: one for all prompts, or one for each; by default `get_default_sampling_params()`.

        Raises:
            ValueError: a prompt that can never run, or parameters that do not match; no request was started.
        """
        batch = _as_batch(prompts)
        params = _as_params(sampling_params, len(batch))
        jobs = [self._job(prompt, wanted) for prompt, wanted in zip(batch, params, strict=True)]
        self._run(jobs, show_progress=use_tqdm)
        return [job.output for job in jobs]

    def chat(
        self, messages: Sequence[Any], sampling_params: Params | None = None, *, use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answers one conversation, or each of several, through the model's chat template."""
        conversations = [messages] if messages and isinstance(messages[0], Mapping) else messages
        return self.generate([self.template(c) for c in conversations], sampling_params, use_tqdm=use_tqdm)

    def template(self, conversation: Sequence[Mapping[str, Any]]) -> list[int]:
        """Returns the token ids of a conversation, rendered with the model's chat template.

        Raises:
            ChatTemplateError, ValueError: the template refuses these messages, or the model has none.
        """
        template = load_chat_template(self._config.model, self.tokenizer.special_tokens)
        if template is None:
            raise ValueError(f"{self._config.model} has no chat template: use generate")
        return self.tokenizer.encode(template.render(conversation), add_special_tokens=False)

    def _job(self, prompt: Prompt, wanted: SamplingParams | None) -> _Job:
        text = prompt if isinstance(prompt, str) else None
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else _token_ids(prompt)
        params = wanted or self._defaults_after(len(ids))
        params.check_vocabulary(self.info.vocab_size, self.info.eos_token_ids)
        objection = self.info.limits.objection(len(ids), params.max_tokens)
        if not objection and not all(0 <= token < self.info.vocab_size for token in ids):
            objection = f"a prompt holds token ids outside the vocabulary of {self.info.vocab_size}"
        if objection:
            raise ValueError(objection)
        metrics = RequestMetrics(time.monotonic())
        output = RequestOutput(str(next(self._names)), text, ids, [], finished=False, metrics=metrics)
        return _Job(output, params, self.tokenizer)

    def _defaults_after(self, num_prompt: int) -> SamplingParams:
        """The default parameters, with `max_tokens` as far as it fits after so many tokens."""
        params, limits = self.get_default_sampling_params(), self.info.limits
        left = max(1, min(limits.max_model_len, limits.cache_tokens + 1) - num_prompt)
        return replace(params, max_tokens=min(params.max_tokens or left, left))

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[str]:
        """Continues one prompt and yields its text as it comes.  `n` must be 1.

        Raises:
            ValueError: the prompt can never run.
        """
        job = self._job(prompt, sampling_params)
        if len(job.readers) != 1:
            raise ValueError("stream() yields one continuation: leave n at 1")
        shown = 0
        for _ in self._steps([job]):
            text = job.output.outputs[0].text
            if len(text) > shown:
                yield text[shown:]
                shown = len(text)

    def _run(self, jobs: Sequence[_Job], *, show_progress: bool) -> None:
        total = sum(len(job.readers) for job in jobs)
        with tqdm(total=total, disable=not show_progress, unit="request", desc="Generating") as bar:
            for num_ended in self._steps(jobs):
                bar.update(num_ended)

    def _steps(self, jobs: Sequence[_Job]) -> Iterator[int]:
        """Runs steps until every job has ended; yields how many continuations ended in each step.

        Continuations still running when the iteration stops, for instance by an interrupt, are aborted.
        """
        own = [reader for job in jobs for reader in job.readers]
        with self._lock:
            self._add(jobs)
        try:
            while own:
                time.sleep(self._engine.wait())  # without the lock, so that other threads can add requests
                with self._lock:
                    if any(reader.request_id in self._readers for reader in own):
                        self._deliver(self._engine.step())
                    before, own = len(own), [reader for reader in own if reader.request_id in self._readers]
                yield before - len(own)
            for job in jobs:
                job.raise_errors()
        finally:
            with self._lock:
                for reader in own:
                    self._readers.pop(reader.request_id, None)
                    self._engine.handle(Finish(reader.request_id, "abort"))

    def _add(self, jobs: Sequence[_Job]) -> None:
        for job in jobs:
            base = self._seeds.getrandbits(63) if job.params.seed is None else job.params.seed
            for reader in job.readers:
                seed = (base + reader.completion.index) % 2**64
                self._engine.handle(Add(reader.request_id, job.output.prompt_token_ids, reader.params, seed))
                self._readers[reader.request_id] = reader

    def _deliver(self, record: StepRecord) -> None:
        now = record.ended_ns * 1e-9
        ends = {end.request_id: end for end in record.ended}
        for row, (request_id, tokens) in enumerate(zip(record.request_ids, record.token_ids, strict=True)):
            reader = self._readers.get(request_id)
            if reader is None or not tokens:
                continue
            end = ends.get(request_id)
            reader.take(tokens, record.logprobs[row] if record.logprobs else (), now, reason=end.reason if end else "")
            if reader.completion.stop_reason is not None:
                self._engine.handle(Finish(request_id, "stop"))
        for request_id, start, entries in zip(record.request_ids, record.starts, record.prompt_logprobs, strict=False):
            if entries and (reader := self._readers.get(request_id)) is not None:
                reader.read_prompt(start, entries)
        for end in record.ended:
            if reader := self._readers.pop(end.request_id, None):
                reader.end(end, now)


class _Job:
    """A prompt and the readers of its continuations."""

    def __init__(self, output: RequestOutput, params: SamplingParams, tokenizer: Tokenizer) -> None:
        self.output = output
        self.params = params
        output.outputs = [CompletionOutput(index) for index in range(params.n)]
        output.prompt_logprobs = None if params.prompt_logprobs is None else [None]
        self.readers = [_Reader(self, completion, tokenizer) for completion in output.outputs]

    def raise_errors(self) -> None:
        """Raises RuntimeError with the first message of a continuation that failed."""
        for reader in self.readers:
            if reader.error:
                raise RuntimeError(reader.error)


class _Reader:
    """Turns one continuation's tokens into text as they come."""

    def __init__(self, job: _Job, completion: CompletionOutput, tokenizer: Tokenizer) -> None:
        self._job = job
        self.completion = completion
        self.request_id = f"{job.output.request_id}-{completion.index}"
        self.params = params = job.params.of_choice(completion.index)
        self.error = ""  # why it ended, if it failed
        self._text = Continuation(tokenizer, job.output.prompt_token_ids, params.stop, params.min_tokens)

    def read_prompt(self, start: int, entries: Sequence[TokenLogprobs]) -> None:
        """Adds entries of the prompt's tokens from position `start + 1` on; known ones, computed again, are ignored."""
        known = self._job.output.prompt_logprobs
        if known is not None:
            known += entries[len(known) - 1 - start :]

    def take(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs], now: float, *, reason: str) -> None:
        """Adds a step's tokens."""
        completion, metrics = self.completion, self._job.output.metrics
        if completion.stop_reason is not None:
            return
        metrics.first_token_time = metrics.first_token_time or now
        text, kept = self._text.read(tokens, reason)
        completion.text += text
        completion.token_ids += tokens[:kept]
        completion.logprobs += logprobs[:kept]
        completion.stop_reason = self._text.stop_reason

    def end(self, end: RowEnd, now: float) -> None:
        completion, output = self.completion, self._job.output
        completion.finish_reason = "stop" if completion.stop_reason is not None else end.reason
        self.error = end.message
        output.metrics.finished_time = now
        output.finished = all(completion.finish_reason for completion in output.outputs)


def _as_batch(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    single = isinstance(prompts, (str, Mapping)) or (bool(prompts) and isinstance(prompts[0], int))
    return [prompts] if single else prompts  # type: ignore[return-value, list-item]


def _as_params(params: Params | None, count: int) -> Sequence[SamplingParams | None]:
    if params is None or isinstance(params, SamplingParams):
        return [params] * count
    if len(params) != count:
        raise ValueError(f"{count} prompts but {len(params)} sampling_params: give one for all or one for each")
    return params


def _token_ids(prompt: Mapping[str, Sequence[int]] | Sequence[int]) -> list[int]:
    """The token ids of a prompt.  Raises ValueError for anything else; the message names the position."""
    name, ids = "a prompt", prompt
    if isinstance(prompt, Mapping):
        if "prompt_token_ids" not in prompt:
            raise ValueError("a prompt given as a dict needs prompt_token_ids")
        name, ids = "prompt_token_ids", prompt["prompt_token_ids"]
    if isinstance(ids, (str, bytes)) or not isinstance(ids, Iterable):
        raise ValueError(f"{name} must be a list of token ids, not {ids!r:.40}")
    return [_token_id(f"{name}[{position}]", token) for position, token in enumerate(ids)]


def _token_id(name: str, token: object) -> int:
    """A whole number of any library; a boolean counts as a number in Python, and here it is a mistake."""
    try:
        if not isinstance(token, bool):
            return operator.index(token)  # type: ignore[arg-type]
    except TypeError:
        pass
    raise ValueError(f"{name} must be a token id, a whole number, not {token!r:.40}")
