"""`AsyncLLM` of the offline API, under the path that vLLM's users know."""

from __future__ import annotations

from slotwise.offline.async_llm import AsyncLLM, AsyncLLMEngine

__all__ = ["AsyncLLM", "AsyncLLMEngine"]
