"""Builds and runs the server: an engine process, and in this process the HTTP service over it.  No torch here."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace

import uvloop
from tqdm import tqdm

from slotwise.compose.launch import launch_engine
from slotwise.engine.config import EngineConfig
from slotwise.engine.messages import EngineInfo, Loading
from slotwise.engine.service import EngineService
from slotwise.model.locate import locate
from slotwise.server.app import App, build_app
from slotwise.server.serve import listen, serve
from slotwise.server.settings import ServerSettings
from slotwise.text.chat import load_chat_template
from slotwise.text.tokenizer import Tokenizer

ENGINE_EXIT = 10.0  # seconds the engine process gets to end once its channel is closed


def run_server(config: EngineConfig, settings: ServerSettings, address: tuple[str, int], template: str | None) -> int:
    """Serve until a signal comes; the exit status.

    Args:
        address: host and port; port 0 takes any free one.
        template: a chat template's file; None takes the model's own.

    Raises:
        OSError, CheckpointError, TokenizerError, EngineError: one line that says what is wrong, before anything is
            served.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    started = time.monotonic()
    config = replace(config, model=str(locate(config.model)))
    with listen(*address) as listener, _engine(config) as (service, loading):
        tokenizer = Tokenizer.load(config.model)
        chat = load_chat_template(config.model, tokenizer.special_tokens, template)

        async def run() -> None:
            with loading:
                info = await service.ready()
            app = build_app(service, tokenizer, chat, settings)
            await serve(app, listener, lambda url: _greet(url, info, app, time.monotonic() - started))

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(run())
    return 0 if not service.failure else 1


@contextlib.contextmanager
def _engine(config: EngineConfig) -> Iterator[tuple[EngineService, _LoadingBar]]:
    """The engine process, from its start to its end."""
    process, channel = launch_engine(config)
    bar = _LoadingBar()
    service = EngineService(channel, bar)
    try:
        yield service, bar
    finally:
        service.close()
        channel.close()
        try:
            process.wait(ENGINE_EXIT)
        except subprocess.TimeoutExpired:
            process.kill()


class _LoadingBar:
    """A progress bar for whoever waits for the engine at a terminal."""

    def __init__(self) -> None:
        self._bar = tqdm(desc="Loading", unit="B", unit_scale=True, leave=False, disable=not sys.stderr.isatty())

    def __call__(self, progress: Loading) -> None:
        self._bar.total = progress.total
        self._bar.set_description(f"Loading {progress.stage}", refresh=False)
        self._bar.update(progress.done - self._bar.n)

    def __enter__(self) -> _LoadingBar:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()


def _greet(url: str, info: EngineInfo, app: App, seconds: float) -> None:
    limits = info.limits
    print(
        f"{app.api.settings.served_model_name} on {info.device} ({info.dtype}): {limits.max_num_seqs} slots, "
        f"{limits.num_blocks} blocks of {limits.block_size} tokens, steps of up to {limits.max_num_batched_tokens} "
        f"tokens, sequences of up to {limits.max_model_len}\n"
        f"Ready after {seconds:.1f} s on {url}  (try {url}/v1/models)", flush=True)
