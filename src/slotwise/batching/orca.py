"""Orca: the batch changes at every iteration, but cache is reserved for the longest output of a request.

Yu et al., OSDI 2022: iteration-level scheduling, selective batching, whole prompts, first come first served.  `Inline`
differs only in memory: capacity that Orca reserves and never uses keeps other requests waiting.
"""

from __future__ import annotations

from slotwise.batching.continuous import Inline
from slotwise.core.request import Request


class Orca(Inline):
    in_strict_order = True

    def reserve(self, request: Request) -> int:
        """Prompt and max_tokens; the last sampled token is never computed and needs no capacity."""
        return request.end - 1
