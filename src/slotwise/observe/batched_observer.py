"""Passes events to observers in batches, up to `DELAY` late.

Between two steps other work fills the processor's caches, so folding a single record takes several times as long as
folding one of many; and work of the API process during a step slows the step.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from slotwise.core.record import StepRecord
from slotwise.engine.messages import Observer

if TYPE_CHECKING:
    from slotwise.engine.messages import Command, EngineInfo

DELAY = 0.25  # seconds
MOST = 256  # pending events that force a flush, which takes some ten milliseconds

logger = logging.getLogger(__name__)


class BatchedObserver(Observer):
    """Passes on all events in order; used within an event loop.

    Call `flush` before reading the state of `observers`.
    """

    def __init__(self, observers: Sequence[Observer]) -> None:
        self.observers = list(observers)
        self._pending: list[tuple[str, tuple[Any, ...]]] = []
        self._timer: asyncio.TimerHandle | None = None  # set while events are pending

    def arrived(self, request_id: int, num_prompt: int, now_ns: int) -> None:
        self._keep("arrived", request_id, num_prompt, now_ns)

    def commanded(self, command: Command, now_ns: int) -> None:
        self._keep("commanded", command, now_ns)

    def stepped(self, record: StepRecord) -> None:
        self._keep("stepped", record)

    def sent(self, request_id: int, first_ns: int, last_ns: int, num_events: int) -> None:
        self._keep("sent", request_id, first_ns, last_ns, num_events)

    def started(self, info: EngineInfo) -> None:
        self._keep("started", info)
        self.flush()

    def refused(self, kind: str) -> None:
        self._keep("refused", kind)

    def lost(self, message: str, now_ns: int) -> None:
        self._keep("lost", message, now_ns)
        self.flush()

    def _keep(self, name: str, *arguments: Any) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(DELAY, self.flush)
        self._pending.append((name, arguments))
        if len(self._pending) >= MOST:
            self.flush()

    def flush(self) -> None:
        """Passes on all pending events."""
        if self._timer is not None:
            self._timer.cancel()  # else another flush would follow
            self._timer = None
        pending, self._pending = self._pending, []
        for observer in self.observers:
            for name, arguments in pending:
                try:
                    getattr(observer, name)(*arguments)
                except Exception:  # an observer's failure must not end the service
                    logger.exception("an observer failed")
