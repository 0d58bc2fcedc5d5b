"""Slotwise serves language models with continuous batching: the batch is rebuilt at every forward pass."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["LLM", "CompletionOutput", "RequestOutput", "SamplingParams"]

if TYPE_CHECKING:
    from slotwise.core.params import SamplingParams
    from slotwise.llm import LLM
    from slotwise.outputs import CompletionOutput, RequestOutput

_HOMES = {
    "LLM": "slotwise.llm",
    "SamplingParams": "slotwise.core.params",
    "CompletionOutput": "slotwise.outputs",
    "RequestOutput": "slotwise.outputs",
}


def __getattr__(name: str) -> Any:
    """Imports a name on first use, so that the API process and the simulator do not load torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'slotwise' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
