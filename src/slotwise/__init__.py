"""Slotwise serves language models with continuous batching: the batch is rebuilt at every forward pass."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if sys.version_info < (3, 11):  # noqa: UP036  (a checkout runs under any: `python3.10 -m slotwise`)
    told = f"Slotwise needs Python 3.11 or newer, and this is {sys.version.split()[0]}"
    if sys.argv[0] == "-m":
        sys.exit(told)
    raise ImportError(told)

from slotwise.version import __version__ as __version__

__all__ = ["LLM", "AsyncEngineArgs", "AsyncLLM", "AsyncLLMEngine", "ClassificationOutput",
           "ClassificationRequestOutput", "CompletionOutput", "EmbeddingOutput", "EmbeddingRequestOutput", "EngineArgs",
           "LoRARequest", "Logprob", "PoolingOutput", "PoolingParams", "PoolingRequestOutput", "PromptType",
           "RequestOutput", "RequestOutputKind", "SamplingParams", "ScoringOutput", "ScoringRequestOutput",
           "StructuredOutputsParams", "TextPrompt", "TokensPrompt"]

if TYPE_CHECKING:
    from slotwise.offline.arguments import AsyncEngineArgs, EngineArgs
    from slotwise.offline.async_llm import AsyncLLM, AsyncLLMEngine
    from slotwise.offline.inputs import PromptType, TextPrompt, TokensPrompt
    from slotwise.offline.llm import LLM
    from slotwise.offline.lora_requests import LoRARequest
    from slotwise.offline.outputs import (
        ClassificationOutput,
        ClassificationRequestOutput,
        CompletionOutput,
        EmbeddingOutput,
        EmbeddingRequestOutput,
        Logprob,
        PoolingOutput,
        PoolingRequestOutput,
        RequestOutput,
        ScoringOutput,
        ScoringRequestOutput,
    )
    from slotwise.offline.sampling_params import (
        PoolingParams,
        RequestOutputKind,
        SamplingParams,
        StructuredOutputsParams,
    )

_HOMES = {
    "LLM": "slotwise.offline.llm",
    "LoRARequest": "slotwise.offline.lora_requests",
    **dict.fromkeys(("AsyncLLM", "AsyncLLMEngine"), "slotwise.offline.async_llm"),
    **dict.fromkeys(("AsyncEngineArgs", "EngineArgs"), "slotwise.offline.arguments"),
    **dict.fromkeys(("PromptType", "TextPrompt", "TokensPrompt"), "slotwise.offline.inputs"),
    **dict.fromkeys(("ClassificationOutput", "ClassificationRequestOutput", "CompletionOutput", "EmbeddingOutput",
                     "EmbeddingRequestOutput", "Logprob", "PoolingOutput", "PoolingRequestOutput", "RequestOutput",
                     "ScoringOutput", "ScoringRequestOutput"), "slotwise.offline.outputs"),
    "PoolingParams": "slotwise.offline.sampling_params",
    **dict.fromkeys(("RequestOutputKind", "SamplingParams", "StructuredOutputsParams"),
                    "slotwise.offline.sampling_params"),
}


def __getattr__(name: str) -> Any:
    """Imports a name on first use, so that the API process and the simulator do not load torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'slotwise' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
