"""Results of the offline API, under the path that vLLM's users know."""

from __future__ import annotations

from slotwise.offline.outputs import (
    CompletionOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    Logprob,
    RequestMetrics,
    RequestOutput,
)

__all__ = [
    "CompletionOutput", "EmbeddingOutput", "EmbeddingRequestOutput", "Logprob", "RequestMetrics", "RequestOutput"]
