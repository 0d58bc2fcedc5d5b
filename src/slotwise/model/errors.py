"""What is wrong with a checkpoint, in one line that says what to do."""

from __future__ import annotations


class CheckpointError(Exception):
    """A checkpoint that cannot be served.  The message is one line, fit for a command line or an API error."""

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))
