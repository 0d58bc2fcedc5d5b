"""Why an engine could not start, or a generation was not."""

from __future__ import annotations

CHANGED = "the checkpoint has changed since the start: restart the server"


class EngineError(RuntimeError):
    """The engine could not start; the message is one line for a person."""


class CheckpointChanged(EngineError):
    """A replacement engine has another model than the first: the requests were checked against the first one's."""

    def __init__(self) -> None:
        super().__init__(CHANGED)


class Refused(Exception):
    """A generation that was not started.  `kind` is one of the constants below."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message


class AdapterError(ValueError):
    """An adapter cannot be loaded; the message is one line for a person."""


DRAINING = "draining"
SHUTTING_DOWN = "the server is shutting down and takes no new requests"  # the message of DRAINING
PAUSED = "paused"
ENGINE_DEAD = "engine_dead"
QUEUE_FULL = "queue_full"
TOO_MANY_QUERIES = "too_many_questions"
DUPLICATE_ID = "duplicate_id"
NOT_REMOVED = "not_removed"
ADAPTER_LOADING = "adapter_loading"
