"""The generations that a client's engine has not ended.

    live       ─► ended by a step's record
    live       ─► leaving: finished in this process ─► confirmed by a step's record

Every generation ends exactly once, also when the engine is lost.
"""

from __future__ import annotations

import asyncio

from slotwise.engine.delivery import deliver
from slotwise.engine.generation import Generation
from slotwise.engine.messages import StepOutputs, StepRecord


class LiveGenerations:
    """Unfinished generations by request, and the requests finished in this process that the engine still has."""

    def __init__(self) -> None:
        self._live: dict[int, Generation] = {}
        self._leaving: dict[int, tuple[str, str]] = {}  # -> name and reason
        self._names: set[str] = set()  # of both; unnamed requests have none
        self._idle = asyncio.Event()  # none is unfinished
        self._idle.set()

    @property
    def num_live(self) -> int:
        """Unfinished generations."""
        return len(self._live)

    def __len__(self) -> int:
        """Requests that the engine has."""
        return len(self._live) + len(self._leaving)

    def has_name(self, name: str) -> bool:
        return name in self._names

    def add(self, generation: Generation) -> None:
        self._live[generation.request_id] = generation
        if generation.name:
            self._names.add(generation.name)
        self._idle.clear()

    def finish(self, generation: Generation, reason: str) -> None:
        """Ends an unfinished generation before the engine does."""
        self._forget(generation.request_id)
        self._leaving[generation.request_id] = (generation.name, reason)
        generation.end(reason)

    def deliver(self, outputs: StepOutputs) -> None:
        """Gives the outputs of a part of a step to the generations."""
        deliver(self._live, outputs)

    def stepped(self, record: StepRecord) -> None:
        """Gives the outputs of a step to the generations, and ends those that it ends."""
        live = self._live
        deliver(live, record)
        for request_id, num_cached in zip(record.admitted, record.cached, strict=True):
            if (generation := live.get(request_id)) is not None:
                generation.moved_ns = record.started_ns
                if generation.num_cached < 0:
                    generation.num_cached = num_cached
        for request_id, _ in record.preempted:
            if (generation := live.get(request_id)) is not None:
                generation.moved_ns = record.started_ns
        for row in record.ended:
            if (generation := live.get(row.request_id)) is not None:
                self._forget(row.request_id)
                self._names.discard(generation.name)
                generation.end(row.reason, row.message)
            elif (left := self._leaving.pop(row.request_id, None)) is not None:
                self._names.discard(left[0])

    async def end_within(self, timeout: float) -> None:
        """Waits up to `timeout` seconds for the unfinished generations, then aborts them."""
        try:
            await asyncio.wait_for(self._idle.wait(), timeout)
        except TimeoutError:
            for generation in list(self._live.values()):
                generation.finish("abort")

    def lost(self, message: str) -> dict[int, str]:
        """Ends all with an error, for the engine is lost.  Returns the requests that it had, and why each ended."""
        lost = dict.fromkeys(self._live, "error") | {number: reason for number, (_, reason) in self._leaving.items()}
        for generation in self._live.values():
            generation.end("error", message)
        self._live.clear()
        self._leaving.clear()
        self._names.clear()
        self._idle.set()
        return lost

    def _forget(self, request_id: int) -> None:
        del self._live[request_id]
        if not self._live:
            self._idle.set()
