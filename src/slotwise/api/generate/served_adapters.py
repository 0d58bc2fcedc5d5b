"""The adapters that are served, loaded and unloaded while the server runs, and the names by which clients may ask.

    load    name is free ─► the engine reads the files during its steps ─► requests may name it
    unload  no new request may name it ─► those that do end ─► the engine forgets it

A name that is loaded again is another adapter, under another number: it shares no cached prefix with the one before.
The next engine, when one is lost, loads all adapters again; one whose files have changed by then is dropped.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import time
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, TypeVar

from slotwise.api.http.api_errors import MODEL_NOT_FOUND, ApiError, bad_request, from_refusal
from slotwise.api.limits.server_settings import LoraModule, ServerSettings
from slotwise.engine.client import EngineClient
from slotwise.engine.messages import EngineInfo, Observer
from slotwise.engine.refusals import AdapterError, Refused
from slotwise.errors import printable

MAX_NAME = 200  # characters of a name, and of those that an error repeats
CONFIG = "adapter_config.json"

logger = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(slots=True, eq=False)
class ServedAdapter:
    """An adapter that requests may name."""

    module: LoraModule
    number: int  # the engine's
    digest: str  # of its files
    created: int = field(default_factory=lambda: int(time.time()))  # seconds since 1970
    num_users: int = 0  # exchanges with it
    is_unloaded: bool = False

    @property
    def name(self) -> str:
        return self.module.name


class ServedModels(Observer):
    """Finds models by name; loads and unloads adapters."""

    def __init__(self, engine_client: EngineClient, settings: ServerSettings) -> None:
        self._client = engine_client
        self.base_names = settings.model_names
        self._accepted = frozenset((*settings.model_names, *settings.model_aliases))
        self._adapters: dict[str, ServedAdapter] = {}
        self._loading: set[str] = set()  # names
        self._numbers = itertools.count(1)
        self._tasks: set[asyncio.Task[Any]] = set()

    @property
    def adapters(self) -> tuple[ServedAdapter, ...]:
        return tuple(self._adapters.values())

    @property
    def names(self) -> tuple[str, ...]:
        return (*self.base_names, *self._adapters)

    def adapter(self, name: str | None) -> ServedAdapter | None:
        """The adapter of a request that asks for this model; None: the base model.

        Raises:
            ApiError: there is no such model.
        """
        if name is None or name in self._accepted:
            return None
        if (adapter := self._adapters.get(name)) is not None:
            return adapter
        served = " or ".join(map(repr, self.names))
        served = served if len(served) <= MAX_NAME else f"{served[:MAX_NAME]} ..."
        raise ApiError(HTTPStatus.NOT_FOUND, f"the model {name[:MAX_NAME]!r} does not exist; this server has {served}",
                       "model", MODEL_NOT_FOUND)

    @contextmanager
    def held(self, name: str | None) -> Iterator[ServedAdapter | None]:
        """As `adapter`; within the context it stays in memory, whether it is unloaded meanwhile or not."""
        if (adapter := self.adapter(name)) is None:
            yield None
            return
        adapter.num_users += 1
        try:
            yield adapter
        finally:
            adapter.num_users -= 1
            self._release(adapter)

    async def load(self, module: LoraModule, *, in_place: bool = False) -> ServedAdapter:
        """Loads an adapter, which requests may name from then on.

        Args:
            in_place: it replaces one of the same name, which requests that have it keep.

        Raises:
            ApiError: the name is not free, there are too many, or it cannot be loaded.
        """
        self._check_name(module.name, in_place=in_place)
        self._loading.add(module.name)
        loading = self._spawn(self._load(module))  # goes on when its client leaves
        try:
            return await asyncio.shield(loading)
        except AdapterError as error:
            raise bad_request(f"lora_path: {error}", "lora_path", "adapter_not_loaded") from error
        except Refused as refused:
            raise from_refusal(refused) from refused

    def unload(self, name: str) -> ServedAdapter:
        """Takes the name from an adapter; requests that have it go on, and then its memory is free.

        Raises:
            ApiError: there is no such adapter.
        """
        if (adapter := self._adapters.pop(name, None)) is None:
            raise ApiError(HTTPStatus.NOT_FOUND, f"lora_name: there is no adapter {name[:MAX_NAME]!r}", "lora_name",
                           "adapter_not_found")
        self._retire(adapter)
        return adapter

    def started(self, info: EngineInfo) -> None:
        """The next engine is ready, and has no adapters yet."""
        if self._adapters:
            self._spawn(self._load_again())

    # -- one by one ----------------------------------------------------------------------------------------------

    def _check_name(self, name: str, *, in_place: bool) -> None:
        most = self._client.info.max_adapters
        if not most:
            raise bad_request("this server has no adapters: start it with --enable-lora", code="lora_not_enabled")
        if not name or len(name) > MAX_NAME or not name.isprintable():
            raise bad_request(f"lora_name: must be 1 to {MAX_NAME} characters that can be printed", "lora_name")
        if name in self._accepted:
            raise bad_request(f"lora_name: {name!r} is a name of the base model", "lora_name", "adapter_exists")
        if name in self._loading:
            raise bad_request(f"lora_name: {name!r} is being loaded", "lora_name", "adapter_exists")
        if name in self._adapters and not in_place:
            raise bad_request(f"lora_name: {name!r} is loaded already: unload it first, or set load_inplace",
                              "lora_name", "adapter_exists")
        if len(self._adapters) + len(self._loading) >= most:
            raise bad_request(f"lora_name: {most} adapters are loaded, and --max-cpu-loras allows no more: unload one, "
                              "or start with more", "lora_name", "too_many_adapters")

    def _spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(work)
        self._tasks.add(task)  # which keeps it alive
        task.add_done_callback(self._tasks.discard)
        return task

    async def _load(self, module: LoraModule) -> ServedAdapter:
        number, began = next(self._numbers), time.monotonic()
        try:
            if why := await asyncio.to_thread(missing, module.path):
                raise ApiError(HTTPStatus.NOT_FOUND, f"lora_path: {why}", "lora_path", "adapter_not_found")
            digest = await self._client.load_adapter(number, module.path)
            before = self._adapters.pop(module.name, None)
            adapter = self._adapters[module.name] = ServedAdapter(module, number, digest)
            if before is not None:
                self._retire(before)
        finally:
            self._loading.discard(module.name)
        logger.info("the adapter %s is loaded from %s after %.2f s", printable(module.name), printable(module.path),
                    time.monotonic() - began)
        return adapter

    async def _load_again(self) -> None:
        for adapter in self.adapters:
            objection = "its files have changed"
            try:
                digest = await self._client.load_adapter(adapter.number, adapter.module.path)
            except Refused:
                return  # this engine is lost, too
            except AdapterError as error:
                digest, objection = "", str(error)
            if digest != adapter.digest and not adapter.is_unloaded:
                logger.error("the adapter %s is no longer served: %s", printable(adapter.name), objection)
                self.unload(adapter.name)
            self._release(adapter)

    def _retire(self, adapter: ServedAdapter) -> None:
        adapter.is_unloaded = True
        self._release(adapter)

    def _release(self, adapter: ServedAdapter) -> None:
        """Lets the engine forget an adapter that is unloaded, when no exchange has it."""
        if adapter.is_unloaded and not adapter.num_users:
            self._client.unload_adapter(adapter.number)


def missing(path: str) -> str:
    """Why there is no adapter at a path; "" if there may be one.  Reads the disk."""
    if not os.path.isdir(path):
        return f"there is no folder {path[:MAX_NAME]!r}: adapters are read from local folders"
    if not os.path.isfile(os.path.join(path, CONFIG)):
        return f"{path[:MAX_NAME]!r} has no {CONFIG}: it is not a LoRA adapter in the format of PEFT"
    return ""
