"""Continuous batching: waiting requests take free slots at the next step.

Iteration-level scheduling after Orca (Yu et al., OSDI 2022) over vLLM's paged KV cache (Kwon et al., SOSP 2023).  The
three classes differ in what a prompt does to decoding rows:

    step           1        2        3        4
    Chunked        d d p    d d p    d d p    d d d      chunks run beside decode: steps stay short
    Inline         d d P    d d d                        the whole prompt beside decode: one long step
    Alone          P        d d d                        decode pauses while prompts run
"""

from __future__ import annotations

from collections.abc import Sequence

from slotwise.core.interfaces import Gate, View
from slotwise.core.limits import SchedulerLimits
from slotwise.core.reasons import NO_SLOT
from slotwise.core.request import Request


class Inline:
    """A prompt is computed whole, beside decoding rows.  The token budget ends admission, and cuts no prompt."""

    prompts_alone = False
    leaves_together = False
    in_strict_order = False

    def gate(self, view: View, now: float) -> Gate:
        return Gate(view.max_num_seqs - view.num_running, NO_SLOT)

    def reserve(self, request: Request) -> int:
        """Capacity for the known tokens: no further block is needed until the first token."""
        return len(request.tokens)

    def budget(self, limits: SchedulerLimits) -> int:
        return limits.max_num_batched_tokens

    def chunk(self, wanted: int, left: int) -> int:
        return wanted

    def padding(self, counts: Sequence[int]) -> tuple[int, ...]:
        return ()


class Chunked(Inline):
    """Chunked prefill: prompts are split into chunks that fill what decode leaves of the token budget.

    Sarathi-Serve (Agrawal et al., OSDI 2024).

    Args:
        longest: maximum chunk, in tokens; 0: what the budget leaves.
    """

    def __init__(self, longest: int = 0) -> None:
        self._longest = longest

    def chunk(self, wanted: int, left: int) -> int:
        return max(1, min(wanted, left, self._longest or left))


class Alone(Inline):
    """Decode pauses while prompts run, as in the first engines with a paged KV cache."""

    prompts_alone = True
