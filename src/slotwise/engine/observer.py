"""Who listens to an engine service: metrics, the event log, the door."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from slotwise.engine.messages import Command, EngineInfo, StepRecord


class Observer:
    """Told of engines, requests, commands and steps; whoever listens overrides what it wants to hear of.

    Times are monotonic nanoseconds, on one clock with the engine's.
    """

    def started(self, info: EngineInfo) -> None:
        """An engine is ready, and nobody lives in it."""

    def arrived(self, request_id: str, num_prompt: int, now_ns: int) -> None:
        """A generation was let in."""

    def refused(self, kind: str) -> None:
        """Somebody was not."""

    def commanded(self, command: Command, now_ns: int) -> None:
        """Sent to the engine: heard of in the order in which the engine takes them in, those that let in included."""

    def stepped(self, record: StepRecord) -> None:
        """The engine tells what it did."""

    def sent(self, request_id: str, first_ns: int, last_ns: int, num_events: int) -> None:
        """A response to it was given to the socket whole, in so many pieces."""

    def lost(self, message: str, now_ns: int) -> None:
        """The engine is gone, why.  A record of everybody's end follows."""
