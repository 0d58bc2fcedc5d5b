"""Prompts of the offline API, under the path that vLLM's users know."""

from __future__ import annotations

from slotwise.offline.inputs import PromptType, TextPrompt, TokensPrompt

__all__ = ["PromptType", "TextPrompt", "TokensPrompt"]
