"""The interface of observers of an engine service: metrics, the event log, admission control."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from slotwise.engine.messages import Command, EngineInfo, StepRecord


class Observer:
    """Notified of engines, requests, commands and steps; a subclass overrides the methods it needs.

    Times are monotonic nanoseconds on the engine's clock.
    """

    def started(self, info: EngineInfo) -> None:
        """An engine is ready; it holds no requests."""

    def arrived(self, request_id: int, num_prompt: int, now_ns: int) -> None:
        """A generation was accepted."""

    def refused(self, kind: str) -> None:
        """A generation was refused."""

    def commanded(self, command: Command, now_ns: int) -> None:
        """A command, `Add` included, was sent; called in the order in which the engine handles them."""

    def stepped(self, record: StepRecord) -> None:
        """A step record arrived."""

    def sent(self, request_id: int, first_ns: int, last_ns: int, num_events: int) -> None:
        """A complete response was written to the socket, as `num_events` events."""

    def lost(self, message: str, now_ns: int) -> None:
        """The engine is lost, for the reason `message`.  A record with the end of every request follows."""
