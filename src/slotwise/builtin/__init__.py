"""The built-in model: a small Llama trained on Python's standard library, so that nothing need be downloaded.

`training/` in the repository makes it; NOTICE.md beside this file says what it is derived from.
"""

from __future__ import annotations

from pathlib import Path

NAME = "slotwise-builtin"  # by which clients ask for it


def path() -> Path:
    """The folder of the checkpoint, in Hugging Face's format."""
    return Path(__file__).parent
