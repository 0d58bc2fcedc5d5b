"""Errors in checkpoints, in one line that says what to do."""

from __future__ import annotations

from slotwise.errors import OneLineError


class CheckpointError(OneLineError):
    """The checkpoint cannot be served.  The message is one line, fit for a command line or an API error."""
