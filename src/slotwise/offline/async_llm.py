"""The offline API for asyncio: requests stream while others run, from an engine in a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncGenerator, Coroutine, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from slotwise.compose.launch import ChildProcess, launch_engine
from slotwise.core.scheduler_limits import SLO
from slotwise.engine.client import EngineClient
from slotwise.engine.config import ConfigError
from slotwise.engine.generation import AT_THE_END, Chunk, Generation
from slotwise.engine.messages import EngineInfo
from slotwise.engine.refusals import EngineError, Refused
from slotwise.engine.sleep import Sleep
from slotwise.engine.supervisor import Supervisor
from slotwise.observe import lines
from slotwise.observe.batched_observer import BatchedObserver
from slotwise.observe.metrics import Metrics, report
from slotwise.observe.recorder import Recorder
from slotwise.observe.ring import Ring
from slotwise.offline.arguments import Arguments, EngineArgs, VllmMethods, check_call
from slotwise.offline.frontend import BASE_SPEC, Frontend, OfflineChoice, OfflineRequest, OfflineTokenizer
from slotwise.offline.inputs import PromptType, parsed
from slotwise.offline.lora_requests import AsyncAdapters, LoRARequest
from slotwise.offline.outputs import RequestOutput
from slotwise.offline.sampling_params import RequestOutputKind, SamplingParams
from slotwise.platform.progress_bar import ProgressBar

MAX_LIVE = 1 << 16  # unfinished continuations
FAILED = ("rejected", "timeout", "shed", "error")  # reasons of an end that are exceptions here


class AsyncLLM(VllmMethods):
    """A model and its engine, for the coroutines of one event loop: that of the first request.

    The engine process begins to load at once, and is replaced when it is lost.  With `disable_log_stats=False` a line
    about the load is logged every ten seconds while there is some.

    Args:
        model, arguments: as those of `LLM`, without `event_log`.

    Raises:
        CheckpointError, TokenizerError, ConfigError: one line that says what is wrong and what to do.
    """

    def __init__(self, model: str | Path | None = None, **arguments: Any) -> None:
        self._arguments = Arguments.of(model, arguments)
        if self._arguments.event_log:
            raise ConfigError("event_log is an argument of LLM; slotwise serve writes event logs, too")
        self._frontend = Frontend(self._arguments)
        self._bar = ProgressBar(is_wanted=self._arguments.shows_progress)
        self._client = EngineClient(lambda loading: self._bar(*msgspec.structs.astuple(loading)), MAX_LIVE)
        config = self._arguments.config
        self._adapters = AsyncAdapters(self._client, config.max_cpu_loras if config.enable_lora else 0)
        self._client.observers.append(self._adapters)
        self._supervisor = Supervisor(self._client, self._launch)
        self._supervisor.launch()
        self._sleep = Sleep(self._client, self._supervisor)
        self._reporting: asyncio.Task[None] | None = None
        self._starting: asyncio.Task[EngineInfo] | None = None
        self._changing = set[asyncio.Task[None]]()  # sleeps and wake-ups, one of them at work
        self._running: dict[str, list[Generation]] = {}  # by the caller's id
        self._numbers = itertools.count()

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> AsyncLLM:
        return cls(**vars(engine_args))

    def get_tokenizer(self) -> OfflineTokenizer:
        """The tokenizer, with methods of transformers' tokenizers."""
        return OfflineTokenizer(self._frontend)

    async def check_health(self) -> None:
        """Raises EngineError if no request can be served; waits until the engine has started."""
        await self._ready()
        if not self._client.healthy:
            raise EngineError(self._client.trouble)

    async def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """As that of `LLM`.  Raises EngineError: blocks stay on disk."""
        check_call({"reset_connector": reset_connector})
        self._frontend.reset_prefix_cache()
        if self._arguments.config.kv_disk is not None:
            await self._ready()
            try:
                await self._client.remove_stored()
            except Refused as refused:
                raise EngineError(refused.message) from refused
        return True

    async def generate(
        self, prompt: PromptType, sampling_params: SamplingParams | None, request_id: str, *,
        prompt_text: str | None = None, lora_request: LoRARequest | None = None, priority: int = 0, **more: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Continues one prompt, and yields its output as `sampling_params.output_kind` says.

        With several continuations an output holds those that have news.  Leaving the iteration aborts the request.

        Args:
            request_id: unique among unfinished requests.
            prompt_text: the text that token ids stand for, repeated in the outputs.
            lora_request: its adapter, which is loaded during the steps of others; needs `enable_lora`.
            priority: lower is earlier, where the policy has priorities.
            more: arguments of vLLM's that are not supported; None is accepted.

        Raises:
            ValueError: the prompt can never run, parameters are not valid, the id is in use, or its adapter cannot be
                loaded.
            EngineError: the engine cannot start, is lost, or failed.
        """
        check_call(more)
        info = await self._ready()
        one = parsed(prompt)
        one = one._replace(text=prompt_text or one.text)
        try:
            async with self._adapters.held(lora_request) as adapter:
                if isinstance(sampling_params, SamplingParams):  # others are refused by `job`
                    await asyncio.to_thread(self._frontend.check_grammar, sampling_params)
                spec = replace(
                    BASE_SPEC, slo=SLO(priority=priority), adapter=adapter.number, adapter_name=adapter.name)
                job = self._frontend.job(info, one, sampling_params, request_id, spec)
                async with contextlib.aclosing(self._outputs(job, request_id)) as outputs:
                    async for output in outputs:
                        yield output
        except Refused as refused:
            raise EngineError(refused.message) from refused

    async def _outputs(self, job: OfflineRequest, request_id: str) -> AsyncGenerator[RequestOutput, None]:
        """Runs a job, and yields its outputs.  Leaving the iteration aborts it."""
        if request_id in self._running:
            raise ValueError(f"a request named {request_id!r:.100} is unfinished")
        streams = self._running[request_id] = []
        try:
            for choice in job.choices:
                streams.append(self._client.submit(job.add(choice, f"{request_id}-{next(self._numbers)}")))
            interval = max(job.interval, self._arguments.stream_interval)
            async with contextlib.aclosing(_changes(job, streams, interval)) as changes:
                async for changed in changes:
                    if job.kind is not RequestOutputKind.FINAL_ONLY:
                        yield job.snapshot(changed)
            if job.kind is RequestOutputKind.FINAL_ONLY:
                yield job.snapshot(job.choices)
        finally:
            del self._running[request_id]
            for stream in streams:
                stream.finish("abort")

    def encode(self, *arguments: object, **given: object) -> NoReturn:
        """vLLM's name of pooling, which `LLM` alone has."""
        raise NotImplementedError("AsyncLLM.encode is not supported: LLM.encode makes vectors and probabilities")

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """Ends requests: their last outputs have the finish reason `abort`.  Unknown ids are ignored."""
        for name in [request_id] if isinstance(request_id, str) else request_id:
            for stream in self._running.get(name, ()):
                stream.finish("abort")

    async def sleep(self, level: int = 1, **more: Any) -> None:
        """As that of `LLM`.  It goes on if it is cancelled."""
        check_call(more)
        await self._ready()
        if self._running:
            raise ValueError("the model cannot sleep: requests are unfinished")
        await self._to_its_end(self._fall_asleep(level))

    async def _fall_asleep(self, level: int) -> None:
        try:
            await self._sleep.fall_asleep(level, timeout=0)
        finally:  # a sleep that fails may have lost the memory of cached prefixes, too
            self._frontend.reset_prefix_cache()

    async def wake_up(self, tags: None = None) -> None:
        """As that of `LLM`.  It goes on if it is cancelled.  Raises EngineError: no engine starts; it sleeps on."""
        check_call({"tags": tags})
        await self._ready()
        await self._to_its_end(self._sleep.wake_up())

    async def _to_its_end(self, change: Coroutine[Any, Any, None]) -> None:
        """Makes a change that goes on if the caller is cancelled: half of one would leave no engine, or two."""
        task = asyncio.create_task(change)
        self._changing.add(task)
        task.add_done_callback(self._changing.discard)
        await asyncio.shield(task)

    async def is_sleeping(self) -> bool:
        """Whether `sleep` was called, and `wake_up` not yet."""
        return bool(self._sleep.level)

    def shutdown(self, timeout: float | None = None) -> None:
        """Ends the engine process at once; unfinished requests fail."""
        self._client.draining = True
        with contextlib.suppress(RuntimeError):  # the event loop is closed, and all of its tasks have ended
            self._supervisor.kill()
            if self._reporting is not None:
                self._reporting.cancel()

    async def _ready(self) -> EngineInfo:
        """Waits until the engine is ready.  Raises EngineError, also where another event loop has started it."""
        if self._starting is None:
            self._starting = asyncio.create_task(self._start())
        if self._starting.get_loop() is not asyncio.get_running_loop():
            raise EngineError("an AsyncLLM belongs to the event loop of its first request: make one for this loop")
        return await asyncio.shield(self._starting)

    async def _start(self) -> EngineInfo:
        with self._bar:
            info = await self._supervisor.ready()
        if self._arguments.log_stats:
            recorder = Recorder(Ring(capacity=1))
            recorder.started(info)
            recorder.add_reader(metrics := Metrics(self._arguments.name, info, recorder.timelines))
            self._client.observers.append(BatchedObserver([recorder, metrics]))
            self._reporting = asyncio.create_task(report(metrics))
        return info

    def _launch(self, last: EngineInfo | None) -> ChildProcess:
        config = self._arguments.config
        like = config if last is None else replace(config, max_model_len=last.limits.max_model_len)
        return launch_engine(like, lines.TEXT)


AsyncLLMEngine = AsyncLLM


async def _changes(
    job: OfflineRequest, streams: Sequence[Generation], interval: int,
) -> AsyncGenerator[list[OfflineChoice], None]:
    """Reads the streams of all continuations; yields the continuations that have changed.

    Args:
        interval: tokens of each change after the first.
    """
    final = job.kind is RequestOutputKind.FINAL_ONLY
    sources = dict(zip(streams, job.choices, strict=True))
    for stream, choice in sources.items():
        stream.interval = AT_THE_END if final and not choice.looks_for_stops else 1
    waiting = {asyncio.ensure_future(anext(stream)): stream for stream in streams}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            changed = []
            for task in [task for task in waiting if task in done]:
                stream = waiting.pop(task)
                _read(job, sources[stream], stream, task.result())
                changed.append(sources[stream])
                if not final:
                    stream.interval = interval
                if not sources[stream].completion.finished():
                    waiting[asyncio.ensure_future(anext(stream))] = stream
            yield changed
    finally:
        for task in waiting:
            task.cancel()


def _read(job: OfflineRequest, choice: OfflineChoice, stream: Generation, chunk: Chunk) -> None:
    """Adds a chunk to its continuation.  Raises EngineError for one that failed, and ValueError for one rejected."""
    output, now, reason = job.output, time.monotonic(), chunk.finish_reason or ""
    if reason in FAILED:
        raise (ValueError if reason == "rejected" else EngineError)(chunk.message or f"the request ended: {reason}")
    if output.num_cached_tokens is None and stream.num_cached >= 0:
        output.num_cached_tokens, output.metrics.scheduled_ts = stream.num_cached, stream.moved_ns * 1e-9
    if stream.prompt_logprobs:
        job.read_prompt(0, stream.prompt_logprobs)
    choice.take(chunk.token_ids, chunk.logprobs, now, reason)
    if choice.met_stop_string:
        stream.finish("stop")
    if reason or choice.met_stop_string:
        choice.end(reason, "", now)
