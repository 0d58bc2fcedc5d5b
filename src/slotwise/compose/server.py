"""Builds and runs the server: an engine process, and in this process its HTTP service.  No torch here."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import replace

import uvloop
from tqdm import tqdm

from slotwise.compose.cores import Cores
from slotwise.compose.garbage import settle
from slotwise.compose.launch import ChildProcess, launch_engine
from slotwise.compose.sampling_defaults import announce
from slotwise.engine.client import EngineClient
from slotwise.engine.config import EngineConfig
from slotwise.engine.messages import EngineInfo, Loading
from slotwise.engine.supervisor import Supervisor
from slotwise.observe import lines, step_time
from slotwise.observe.load import report
from slotwise.observe.log_file import LogFile
from slotwise.observe.traces import Traces
from slotwise.server.app import build_app
from slotwise.server.context import Api
from slotwise.server.output_parsing import output_format
from slotwise.server.serve import listen, serve
from slotwise.server.settings import ServerSettings
from slotwise.server.templates import Template
from slotwise.text.chat_source import find_chat_template, find_tool_template
from slotwise.text.tokenizer import Tokenizer

MB = 1e6  # bytes

logger = logging.getLogger(__name__)


def run_server(
    config: EngineConfig, settings: ServerSettings, address: tuple[str, int], template: str | None, first: ChildProcess,
) -> int:
    """Serves until a signal arrives; returns the exit status.

    Args:
        address: host and port; port 0: any free port.
        template: a chat template's file; None: the model's own.
        first: an engine process started with `config`; it ends with the server.

    Raises:
        OSError, TokenizerError, ChatTemplateError, EngineError, TracesError: one line that says what is wrong, before
            anything is served.
    """
    lines.set_up(settings.log_format)
    try:
        with listen(*address) as listener, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_serve(config, settings, listener, template, first))
    finally:
        first.kill()


async def _serve(
    config: EngineConfig, settings: ServerSettings, listener: socket.socket, template: str | None, first: ChildProcess,
) -> int:
    bar = _LoadingBar(settings.log_format)
    traces = Traces(endpoint, settings.served_model_name) if (endpoint := settings.otlp_traces_endpoint) else None
    engine_client, cores = EngineClient(bar), Cores()

    def launch(last: EngineInfo | None) -> ChildProcess:
        if last is None:
            return first
        with cores.lent():
            return launch_engine(_like(config, last), settings.log_format, settings.engine_environment)

    supervisor = Supervisor(engine_client, launch, settings.engine_timeout)
    chat: Template | None = None
    try:
        supervisor.launch()
        tokenizer = Tokenizer.load(config.model)
        source = find_chat_template(config.model, template)
        for_tools = find_tool_template(config.model, template)
        form = output_format(settings.tool_call_parser, settings.reasoning_parser, settings.enable_auto_tool_choice,
                             for_tools or source or "", tokenizer.special_by_text)
        if form.tools or form.reasoning:
            logger.info("tool calls are parsed as %s, reasoning as %s", form.tools or "text", form.reasoning or "text")
        if source:
            chat = Template(source, tokenizer.special_tokens, for_tools=for_tools)
            await chat.check()  # the engine is loading meanwhile
        with bar:
            info = await supervisor.ready()
        announce(settings.sampling_defaults)  # now: a start that fails says one line
        cores.leave_to(first.process.pid)
        with step_time.kept(config, info) as step_times:
            app = build_app(engine_client, tokenizer, chat, settings, step_times, form)
            settle()
            async with _observed(app.api, traces, settings):
                await serve(app, listener, lambda url: _greet(url, info, settings, time.monotonic() - first.started))
    finally:
        if chat is not None:
            chat.close()
        await supervisor.end()
    return 1 if engine_client.hopeless.is_set() else 0


@contextlib.asynccontextmanager
async def _observed(api: Api, traces: Traces | None, settings: ServerSettings) -> AsyncIterator[None]:
    """Runs traces, the load report and the event log while the server runs."""
    if traces is not None:
        api.trace(traces)
    reporting = [asyncio.create_task(report(api.metrics))] if settings.log_stats else []
    try:
        with (LogFile(settings.event_log, overwrite=settings.overwrite_event_log) if settings.event_log
              else contextlib.nullcontext()) as file:
            if file is not None:
                api.recorder.write_to(file)
            yield
            api.batched_observer.flush()
    finally:
        for task in reporting:
            task.cancel()
        api.close()
        if traces is not None:
            await asyncio.to_thread(traces.close)


def _like(config: EngineConfig, last: EngineInfo) -> EngineConfig:
    """Returns the config of a replacement engine: requests are validated against the first one's max_model_len."""
    return replace(config, max_model_len=last.limits.max_model_len)


class _LoadingBar:
    """A progress bar of the engine's loading, shown on a terminal."""

    def __init__(self, log_format: str) -> None:
        watched = sys.stderr.isatty() and log_format == lines.TEXT
        self._bar = tqdm(desc="Loading", unit="B", unit_scale=True, leave=False, disable=not watched)

    def __call__(self, progress: Loading) -> None:
        self._bar.total = progress.total
        self._bar.set_description(f"Loading {progress.stage}", refresh=False)
        self._bar.update(progress.done - self._bar.n)

    def __enter__(self) -> _LoadingBar:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()


def _places(info: EngineInfo) -> str:
    """What computes, as text."""
    ranks, stages = info.tensor_parallel_size * info.pipeline_parallel_size, info.pipeline_parallel_size
    if ranks == 1:
        return info.device
    return f"{info.device}, {ranks} ranks" + (f" in {stages} stages" if stages > 1 else "")


def _greet(url: str, info: EngineInfo, settings: ServerSettings, seconds: float) -> None:
    """Reports the budget: three lines of text on stdout, or one JSON line on stderr with all the numbers."""
    limits, used, name = info.limits, info.memory, settings.served_model_name
    if settings.log_format == lines.JSON:
        lines.tell(logger, f"ready on {url}", {
            "url": url, "model": name, "device": info.device,
            "tensor_parallel_size": info.tensor_parallel_size,
            "pipeline_parallel_size": info.pipeline_parallel_size, "dtype": info.dtype,
            "quantization": info.quantization, "product_path": info.product_path, "cache_dtype": info.cache_dtype,
            "batch_invariant": info.batch_invariant,
            "seconds": round(seconds, 1), "slots": limits.max_num_seqs, "blocks": limits.num_blocks,
            "block_size": limits.block_size, "max_num_batched_tokens": limits.max_num_batched_tokens,
            "max_model_len": limits.max_model_len, "weights_bytes": used.weights, "cache_bytes": used.cache,
            "workspace_bytes": used.workspace, "graph_bytes": used.graphs, "host_bytes": used.host,
            "runtime_bytes": used.runtime, "memory_bytes": used.total})
        return
    captured = f", {used.graphs / MB:,.0f} MB for captured steps" if used.graphs else ""
    evicted = f", {used.host / MB:,.0f} MB of host memory for evicted blocks" if used.host else ""
    print(
        f"{name} on {_places(info)} ({info.weights}, {info.product_path} products): {limits.max_num_seqs} slots, "
        f"{limits.num_blocks} blocks of {limits.block_size} tokens, steps of up to {limits.max_num_batched_tokens} "
        f"tokens, sequences of up to {limits.max_model_len}\n"
        f"Memory at most: {used.weights / MB:,.0f} MB of weights, {used.cache / MB:,.0f} MB of cache "
        f"({info.cache_dtype}), {used.workspace / MB:,.0f} MB for a step, {used.runtime / MB:,.0f} MB for the runtime"
        f"{captured}{evicted}\n"
        f"Ready after {seconds:.1f} s on {url}  (try {url}/v1/models)", flush=True)
