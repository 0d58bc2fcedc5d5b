"""Orca: the batch changes at every iteration, but memory is reserved for the longest answer a request may give.

Yu et al., OSDI 2022: iteration-level scheduling, selective batching, whole prompts, first come first served.  `Inline`
differs from it in memory alone: what is reserved and never used keeps others out.
"""

from __future__ import annotations

from slotwise.batching.continuous import Inline
from slotwise.core.request import Request


class Orca(Inline):
    in_strict_order = True

    def reserve(self, request: Request) -> int:
        """Prompt and max_tokens; the last token sampled is never computed and needs no place."""
        return request.end - 1
