"""The error in checkpoints, under the name that models and their callers import."""

from __future__ import annotations

from slotwise.errors import CheckpointError

__all__ = ["CheckpointError"]
