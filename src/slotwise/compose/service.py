"""One served model in the API process: its engine, its supervisor and what answers requests.  No torch here."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
from collections.abc import AsyncIterator
from dataclasses import replace

from tqdm import tqdm

from slotwise.compose.cores import Cores
from slotwise.compose.garbage import settle
from slotwise.compose.launch import ChildProcess, launch_engine
from slotwise.compose.sampling_defaults import announce
from slotwise.compose.served_model import ServedModel
from slotwise.engine.client import EngineClient
from slotwise.engine.config import EngineConfig
from slotwise.engine.messages import EngineInfo, Loading
from slotwise.engine.refusals import EngineError
from slotwise.engine.sleep import Sleep
from slotwise.engine.supervisor import Supervisor
from slotwise.errors import printable
from slotwise.observe import lines, step_time
from slotwise.observe.load import report
from slotwise.observe.log_file import LogFile
from slotwise.observe.traces import Traces
from slotwise.server.api_errors import ApiError
from slotwise.server.app import build_api
from slotwise.server.checkpoint_workers import Template
from slotwise.server.context import Api
from slotwise.server.parsers.output_format import OutputFormat
from slotwise.server.settings import ServerSettings
from slotwise.text.chat_source import ChatTemplateError

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
    bar = _LoadingBar(settings.log_format)
    engine_client, started = EngineClient(bar), list[ChildProcess]()
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
        longest = info.limits.max_model_len if info.has_head else None
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
    reporting = [asyncio.create_task(report(api.observers.metrics))] if settings.log_stats else []
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
