"""Continuous batching: whoever waits takes a free slot at the next step.

Iteration-level scheduling after Orca (Yu et al., OSDI 2022), with prompts cut into chunks that run beside decode after
Sarathi-Serve (Agrawal et al., OSDI 2024).
"""

from __future__ import annotations

from slotwise.core.plan import NO_SLOT
from slotwise.core.request import Request
from slotwise.core.seams import Gate, View


class Continuous:
    """Anyone may join at any step that has a slot free."""

    def gate(self, view: View, now: float) -> Gate:
        return Gate(view.max_num_seqs - view.num_running, NO_SLOT)

    def reserve(self, request: Request) -> int:
        """Room for what is known: whoever joins needs no further block until its first token."""
        return len(request.tokens)
