"""Bodies of `/v1/embeddings`: OpenAI's fields and vLLM's extensions."""

from __future__ import annotations

from typing import Literal

import msgspec

from slotwise.server.protocol import (
    Generate,
    KeptTokens,
    Length,
    Milliseconds,
    Priority,
    Prompt,
    Salt,
    Seconds,
    User,
)


class EmbeddingRequest(msgspec.Struct, kw_only=True):
    input: Prompt  # a text or its token ids; a list: several, each with its own vector
    model: str | None = None  # the served model's name, by default
    encoding_format: Literal["float", "base64"] | None = None  # of vectors; base64: of float32, little-endian
    dimensions: Length | None = None  # the first so many numbers of each vector, then normalised
    normalize: bool | None = None  # vectors have length 1; by default as the checkpoint says, else true
    user: User | None = None  # the tenant, where the server has no keys
    request_id: str | None = None  # the id of the response, and of the request in logs and queries
    service_tier: str | None = None  # `auto`, `default`, or one of the server's own: docs/tiers.md
    priority: Priority | None = None  # lower is earlier; None: its tier's
    ttft_ms: Milliseconds | None = None  # objective, milliseconds to the vector; None: its tier's
    queue_timeout: Seconds | None = None  # seconds to its first slot; the server's own bound holds as well
    cache_salt: Salt | None = None  # cached prefixes are shared only among requests of one key and one salt
    add_special_tokens: bool | None = None  # by default the tokenizer's are added
    truncate_prompt_tokens: KeptTokens | None = None  # an input's tokens that are kept; -1: as many as fit
    truncation_side: Literal["left", "right"] | None = None  # where tokens are dropped; by default on the right

    def as_generate(self) -> Generate:
        """The fields that it shares with requests to generate."""
        return Generate(
            model=self.model, user=self.user, request_id=self.request_id, service_tier=self.service_tier,
            priority=self.priority, ttft_ms=self.ttft_ms, queue_timeout=self.queue_timeout,
            cache_salt=self.cache_salt, add_special_tokens=self.add_special_tokens,
            truncate_prompt_tokens=self.truncate_prompt_tokens, truncation_side=self.truncation_side or "right")
