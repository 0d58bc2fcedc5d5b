"""Adapters of an engine in a process of its own: loaded beside its steps, forgotten between two of them.

    LoadAdapter(number, path)   ─►  a thread reads and packs it  ─►  AdapterLoaded(number, objection)
    UnloadAdapter(number)       ─►  forgotten when no request has it

Numbers are never used again, so no cached prefix of another adapter is found under one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from slotwise.engine.messages import AdapterLoaded, LoadAdapter
from slotwise.engine.refusals import AdapterError


class AdapterStore(Protocol):
    """The adapters of a model.

    Attributes:
        num_places: adapters that fit at the same time.
    """

    num_places: int

    def load(self, number: int, folder: Path) -> None:
        """Loads an adapter; on any thread, beside steps.  Raises an exception, with one line, if it cannot be."""
        ...

    def unload(self, number: int) -> None:
        """Forgets a loaded adapter, which no request has; on the thread of the steps."""
        ...


class AdapterLoads:
    """The API process' side: which adapters the attached engine has, and which it loads."""

    def __init__(self) -> None:
        self._loaded: set[int] = set()
        self._pending: dict[int, asyncio.Future[str]] = {}

    def __contains__(self, number: int) -> bool:
        return number in self._loaded

    async def load(self, number: int, path: str, send: Callable[[LoadAdapter], None]) -> str:
        """Returns a digest of the loaded adapter's files.

        Raises:
            AdapterError: it cannot be loaded.
            Exception: that of `send`, or the one given to `give_up`.
        """
        send(LoadAdapter(number, path))
        answer = self._pending[number] = asyncio.get_running_loop().create_future()
        return await asyncio.shield(answer)

    def answered(self, report: AdapterLoaded) -> None:
        """Completes a load, which its caller may have left."""
        answer = self._pending.pop(report.number)
        if not report.objection:
            self._loaded.add(report.number)
            answer.set_result(report.digest)
        else:
            answer.set_exception(AdapterError(report.objection))
            answer.exception()  # or asyncio logs it where its caller has left

    def forget(self, number: int) -> None:
        """The engine is told to forget an adapter: no request may name it any more."""
        self._loaded.discard(number)

    def give_up(self, why: Exception) -> None:
        """The engine is lost, with its adapters."""
        self._loaded.clear()
        for answer in self._pending.values():
            answer.set_exception(why)
            answer.exception()
        self._pending.clear()
