"""Serves one model after another behind one application.

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

from slotwise.compose.check import check
from slotwise.compose.cores import Cores
from slotwise.compose.launch import ChildProcess
from slotwise.compose.served_model import ModelOptions, ServedModel, read_other
from slotwise.compose.service import chat_of, service
from slotwise.engine.config import EngineConfig
from slotwise.engine.refusals import EngineError
from slotwise.engine.sleep import Sleep
from slotwise.errors import OneLineError
from slotwise.server.app import ROUTES
from slotwise.server.asgi import App
from slotwise.server.context import Api
from slotwise.server.settings import ServerSettings
from slotwise.text.chat_source import ChatTemplateError

EXCHANGED = "the model is being exchanged; try again later"

logger = logging.getLogger(__name__)


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
        """Serves the model at `path` in the place of the current one; returns its name.

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
        if not os.path.isabs(path) or not os.path.exists(path):
            raise ValueError("model: must be the absolute path of a checkpoint's folder or a GGUF file on this machine")
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
