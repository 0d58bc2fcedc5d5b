"""The API process: runs the server, starts its engine process, and exchanges the model that is served.  No torch here.

    read, check │ drain │ end its engine │ start the other's ──► its requests are taken
     (the old model serves)              │ it does not start ──► start the old one's again

Two models are never in memory together: a machine that serves a model has rarely room for two.  What can be found
wrong without reading weights is found before the old model is disturbed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import msgspec
import uvloop

from slotwise.api.admin.admin import capabilities
from slotwise.api.admin.html.link_page import USES
from slotwise.api.app import ROUTES, build_api
from slotwise.api.asgi import App
from slotwise.api.generate.checkpoint_workers import Template
from slotwise.api.generate.context import Api
from slotwise.api.http.api_errors import ApiError
from slotwise.api.http_server import greeting, listen, serve
from slotwise.api.limits.server_settings import ServerSettings
from slotwise.api.parsers.parser_table import OutputFormat, output_format
from slotwise.compose.launch import ChildProcess, Cores, launch_engine, settle
from slotwise.compose.load_check import check
from slotwise.compose.model_defaults import announce, read_defaults, read_pooling
from slotwise.compute.model.model_registry import NAMES, find
from slotwise.engine.client import EngineClient
from slotwise.engine.config import EngineConfig, ModelOptions
from slotwise.engine.messages import EngineInfo
from slotwise.engine.refusals import EngineError
from slotwise.engine.sleep import Sleep
from slotwise.engine.supervisor import Supervisor
from slotwise.errors import OneLineError, printable
from slotwise.observe import lines
from slotwise.observe import step_time_store as step_time
from slotwise.observe.log_file import LogFile
from slotwise.observe.metrics import report
from slotwise.observe.traces import Traces
from slotwise.platform.progress_bar import ProgressBar
from slotwise.text.chat_source import ChatTemplateError, find_chat_template, find_tool_template
from slotwise.text.tokenizer import Tokenizer


class ServedModel(NamedTuple):
    """A model as its files describe it; no weights."""

    config: EngineConfig
    settings: ServerSettings
    tokenizer: Tokenizer
    template: str | None  # the source of its chat template
    tool_template: str | None  # of that for conversations with tools, where it has one

    def output_format(self, *, ignores_tools: bool) -> OutputFormat:
        """How its outputs are parsed.  Raises ValueError.  Args: ignores_tools: the template does."""
        settings = self.settings
        return output_format(
            settings.tool_call_parser, settings.reasoning_parser, settings.enable_auto_tool_choice,
            self.tool_template or self.template or "", self.tokenizer.special_by_text, ignores_tools=ignores_tools)


def read_model(config: EngineConfig, settings: ServerSettings, options: ModelOptions) -> ServedModel:
    """Reads what `config.model` needs to be served.

    Raises:
        OSError, TokenizerError, ChatTemplateError, ConfigError: one line that says what is wrong.
    """
    tokenizer = Tokenizer.load(config.model)
    model = ServedModel(config, settings, tokenizer, find_chat_template(config.model, options.chat_template),
                        find_tool_template(config.model, options.chat_template))
    model.output_format(ignores_tools=True)  # a parser that does not fit is reported before anything starts
    return model


def read_other(before: ServedModel, options: ModelOptions, path: str, name: str) -> ServedModel:
    """Reads another model, to be served with the options of the first.

    Args:
        path: or one of `NAMES`, whose model is downloaded where it is missing.
        name: by which clients ask for it; "": one of the options, else its own.

    Raises:
        OSError, CheckpointError, TokenizerError, ChatTemplateError, ConfigError: one line that says what is wrong.
    """
    found = find(path)
    config = replace(before.config, model=str(found.path))
    settings = replace(
        before.settings.named((name,) if name else options.served_model_name, found.name, found.aliases),
        sampling_defaults=read_defaults(config, options.override_generation_config),
        pooling_defaults=read_pooling(config.model, options.pooler_config))
    return read_model(config, settings, options)


logger = logging.getLogger(__name__)


@contextlib.asynccontextmanager
async def service(
    model: ServedModel, cores: Cores, first: ChildProcess | None = None, before: Api | None = None,
) -> AsyncIterator[Api]:
    """Starts an engine and yields what answers requests once it is ready; ends all of it afterwards.

    Args:
        first: an engine process that loads the model already.
        before: of the model that was served until now, whose clients go on.

    Raises:
        OSError, ChatTemplateError, EngineError, TracesError: one line that says what is wrong.
    """
    config, settings = model.config, model.settings
    traces = Traces(endpoint, settings.served_model_name) if (endpoint := settings.otlp_traces_endpoint) else None
    bar = ProgressBar(is_wanted=settings.log_format == lines.TEXT)
    engine_client, started = EngineClient(lambda loading: bar(*msgspec.structs.astuple(loading))), list[ChildProcess]()
    if before is not None:
        engine_client.hopeless = before.engine.client.hopeless

    def launch(last: EngineInfo | None) -> ChildProcess:
        if last is None and first is not None:
            started.append(first)
        else:
            with cores.lent():
                started.append(launch_engine(_like(config, last), settings.log_format, settings.engine_environment))
        return started[-1]

    supervisor = Supervisor(engine_client, launch, settings.engine_timeout)
    chat: Template | None = None
    try:
        supervisor.launch()
        chat, form = await chat_of(model)  # the engine is loading meanwhile
        with bar:
            info = await supervisor.ready()
        settings = replace(settings, pooling_defaults=settings.pooling_defaults.of_family(info.pooling_type))
        longest = None if info.generation_objection else info.limits.max_model_len
        announce(settings.sampling_defaults, longest)  # now: a start that fails says one line
        if form.tools or form.reasoning:
            logger.info("tool calls are parsed as %s, reasoning as %s", form.tools or "text", form.reasoning or "text")
        cores.leave_to(started[-1].process.pid)
        with step_time.kept(config, info) as step_times:
            api = build_api(
                engine_client, model.tokenizer, chat, settings, step_times, form,
                Sleep(engine_client, supervisor), before)
            await _load_adapters(api)
            settle()
            async with _observed(api, traces, settings):
                yield api
    finally:
        if chat is not None:
            chat.close()
        await supervisor.end()


async def chat_of(model: ServedModel) -> tuple[Template | None, OutputFormat]:
    """The model's chat template, compiled within its limits, and how its outputs are parsed; None: it has none.

    Raises:
        ChatTemplateError: it does not compile, or calls are demanded of a template that does not tell how its model
            writes them.
    """
    chat, ignores_tools = None, False
    try:
        if model.template:
            chat = Template(model.template, model.tokenizer.special_tokens, for_tools=model.tool_template)
            await chat.check()
            ignores_tools = await chat.ignores_tools()
            with contextlib.suppress(ApiError, ChatTemplateError):  # each request that asks will fail with the reason
                await chat.variables("")
        return chat, model.output_format(ignores_tools=ignores_tools)
    except BaseException as error:
        if chat is not None:
            chat.close()
        if isinstance(error, ValueError) and not isinstance(error, ChatTemplateError):
            raise ChatTemplateError(str(error)) from error
        raise


async def _load_adapters(api: Api) -> None:
    """Loads the adapters of `--lora-modules`.  Raises EngineError for one that cannot be served."""
    for module in api.settings.lora_modules:
        try:
            await api.engine.models.load(module)
        except ApiError as error:
            raise EngineError(f"--lora-modules {printable(module.name)}: {error}") from error


@contextlib.asynccontextmanager
async def _observed(api: Api, traces: Traces | None, settings: ServerSettings) -> AsyncIterator[None]:
    """Runs traces, the load report and the event log while the model is served."""
    if traces is not None:
        api.observers.trace(traces)
    reporting = [asyncio.create_task(report(api.observers.metrics))] if not settings.disable_log_stats else []
    try:
        with (LogFile(settings.event_log, overwrite=settings.overwrite_event_log) if settings.event_log
              else contextlib.nullcontext()) as file:
            if file is not None:
                api.observers.recorder.write_to(file)
            yield
            api.observers.batched_observer.flush()
    finally:
        for task in reporting:
            task.cancel()
        api.close()
        if traces is not None:
            await asyncio.to_thread(traces.close)


def _like(config: EngineConfig, last: EngineInfo | None) -> EngineConfig:
    """Returns the config of an engine after `last`: requests are validated against the first one's max_model_len."""
    return config if last is None else replace(config, max_model_len=last.limits.max_model_len)


EXCHANGED = "the model is being exchanged; try again later"


class Exchange:
    """Owns the service of the model that is served; ends it when its context ends.

    Args:
        model: the first one.
        first: an engine process that loads it already.
    """

    def __init__(self, model: ServedModel, options: ModelOptions, cores: Cores, first: ChildProcess) -> None:
        self._model = model
        self._options = options
        self._cores = cores
        self._first = first
        self._stack = contextlib.AsyncExitStack()  # of the current service

    async def __aenter__(self) -> App[Api]:
        """Starts the first service.  Raises what `service` raises."""
        api = await self._stack.enter_async_context(service(self._model, self._cores, self._first))
        api.engine.load_model = self.load
        self._app = App(api, ROUTES)
        return self._app

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def load(self, path: str, name: str) -> str:
        """Serves the model at `path`, or one of `NAMES`, in the place of the current one; returns its name.

        Args:
            name: by which clients ask for it; "": as at a start with this path.

        Raises:
            ValueError: it cannot be served, or not by this server; the current model was not disturbed.
            EngineError: it did not start; the current model is as it was before.
            Busy: another change is in progress.
        """
        api = self._app.api
        assert api.engine.sleep is not None
        async with api.engine.sleep.changing():
            if why := objection(self._model.config, self._model.settings):
                raise ValueError(f"model: {why}")
            model = await asyncio.to_thread(self._read, path, name)
            try:
                chat, _ = await chat_of(model)
            except ChatTemplateError as error:
                raise ValueError(f"model: {error}") from error
            if chat is not None:
                chat.close()
            await check(model.config, api.engine.sleep.held_bytes)
            await self._replace(api, api.engine.sleep, model)
        return model.settings.served_model_name

    def _read(self, path: str, name: str) -> ServedModel:
        """Raises ValueError."""
        if path not in NAMES and not (os.path.isabs(path) and os.path.exists(path)):
            raise ValueError("model: must be the absolute path of a checkpoint's folder or a GGUF file on this "
                             f"machine, or one of the names {', '.join(NAMES)}")
        try:
            return read_other(self._model, self._options, path, name)
        except (OneLineError, OSError, RuntimeError, ValueError) as error:
            raise ValueError(f"model: {error}") from error

    async def _replace(self, before: Api, sleep: Sleep, model: ServedModel) -> None:
        level, old = sleep.level, self._stack
        if level < 2:
            await sleep.rest(2, EXCHANGED, self._model.settings.shutdown_timeout)
        stack = contextlib.AsyncExitStack()
        try:
            api = await stack.enter_async_context(service(model, self._cores, before=before))
        except Exception as error:
            state = "sleeps at level 2"
            if level == 0:
                try:
                    await sleep.return_to_work()
                    state = "is served again"
                except EngineError as other:  # its files are gone, say
                    state = f"did not start again either, and sleeps at level 2 until POST /wake_up: {other}"
            if sleep.level:
                sleep.stay()
            raise EngineError(f"{error}; {self._model.settings.served_model_name} {state}") from error
        api.engine.load_model = self.load
        logger.info("%s is served in the place of %s", model.settings.served_model_name,
                    self._model.settings.served_model_name)
        self._app.api, self._stack, self._model, before.engine.is_over = api, stack, model, True
        await old.aclose()


def objection(config: EngineConfig, settings: ServerSettings) -> str:
    """Why a server with these settings cannot serve another model; "" where it can."""
    if config.num_ranks > 1:
        return "a server with several ranks has one model: restart it"
    if config.enable_lora:
        return "a server with adapters has one model, which they belong to: restart it"
    if settings.event_log:
        return "an event log is of one model: restart the server with another file"
    return ""


MB = 1e6  # bytes


def run_server(
    config: EngineConfig, settings: ServerSettings, options: ModelOptions, first: ChildProcess,
) -> int:
    """Serves until a signal arrives; returns the exit status.

    Args:
        options: for each model that is served.
        first: an engine process started with `config`; it ends with the server.

    Raises:
        OSError, TokenizerError, ChatTemplateError, EngineError, TracesError: one line that says what is wrong, before
            anything is served.
    """
    lines.set_up(settings.log_format)
    try:
        with listen(settings.host, settings.port) as listener, \
                asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_serve(config, settings, listener, options, first))
    finally:
        first.kill()


async def _serve(
    config: EngineConfig, settings: ServerSettings, listener: socket.socket, options: ModelOptions,
    first: ChildProcess,
) -> int:
    model = read_model(config, settings, options)  # the engine is loading meanwhile
    async with Exchange(model, options, Cores(), first) as app:
        engine_client = app.api.engine.client
        able = capabilities(app.api.engine, app.api.settings, app.api.text)
        await serve(app, listener, lambda url: _greet(
            url, engine_client.info, settings, time.monotonic() - first.started, able))
    return 1 if engine_client.hopeless.is_set() else 0


def _places(info: EngineInfo) -> str:
    """What computes, as text."""
    ranks, stages = info.tensor_parallel_size * info.pipeline_parallel_size, info.pipeline_parallel_size
    if ranks == 1:
        return info.device
    return f"{info.device}, {ranks} ranks" + (f" in {stages} stages" if stages > 1 else "")


def _greet(url: str, info: EngineInfo, settings: ServerSettings, seconds: float, able: Sequence[str]) -> None:
    """Tells the address, the model and the budget: lines on stdout, or one JSON line on stderr with all the numbers.

    Args:
        able: what the model is capable of.
    """
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
    routes = "" if "completion" in able else (
        f"It does not generate: its routes are {', '.join(route for name, route in USES if name in able)}\n")
    print(
        f"{greeting(url, settings, seconds)}\n{routes}"
        f"{name} on {_places(info)} ({info.weights}, {info.product_path} products): {limits.max_num_seqs} slots, "
        f"{limits.num_blocks} blocks of {limits.block_size} tokens, steps of up to {limits.max_num_batched_tokens} "
        f"tokens, sequences of up to {limits.max_model_len}\n"
        f"Memory at most: {used.weights / MB:,.0f} MB of weights, {used.cache / MB:,.0f} MB of cache "
        f"({info.cache_dtype}), {used.workspace / MB:,.0f} MB for a step, {used.runtime / MB:,.0f} MB for the runtime"
        f"{captured}{evicted}", flush=True)
