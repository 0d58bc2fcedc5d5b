"""Batching disciplines: when a request may join a batch, how its prompt is computed, and when it may leave.

**Continuous batching**: waiting requests take free slots at the next step.  Iteration-level scheduling after Orca (Yu
et al., OSDI 2022) over vLLM's paged KV cache (Kwon et al., SOSP 2023).  Three classes differ in what a prompt does to
decoding rows:

    step           1        2        3        4
    Chunked        d d p    d d p    d d p    d d d      chunks run with decode: steps stay short
    Inline         d d P    d d d                        the whole prompt with decode: one long step
    PromptsAlone          P        d d d                        decode pauses while prompts run

**Orca**: the batch changes at every iteration, but cache is reserved for the longest output of a request.  `Inline`
differs only in memory: capacity that Orca reserves and never uses keeps other requests waiting.

**Request-level batching**: the baselines that continuous batching replaced.

    slot 0   P d d d d d d d d d ┐         P prompt, padded to the longest of its group
    slot 1   P d d H H H H H H H ├ all     d decode
    slot 2   P d d d d H H H H H ┘ return  H held: ended, computed again, output held until the batch has ended

The baselines use the same scheduler, executor and kernels, for padding and held rows too.  Two simplifications favor
them: a decoding row attends to its own context rather than to a padded one, as in FasterTransformer, and a static batch
takes all waiting requests when the previous one has ended, so that the last few requests never wait for a full batch.
"""

from __future__ import annotations

from collections.abc import Sequence

from slotwise.core.interfaces import Gate, View
from slotwise.core.reasons import BATCH_RUNNING, NO_SLOT, ONE_AT_A_TIME, WINDOW_OPEN
from slotwise.core.request import Request
from slotwise.core.scheduler_limits import SchedulerLimits


class Inline:
    """A prompt is computed whole, next to decoding rows.  The token budget ends admission, and cuts no prompt."""

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


class PromptsAlone(Inline):
    """Decode pauses while prompts run, as in the first engines with a paged KV cache."""

    prompts_alone = True


class Orca(Inline):
    """First come, first served; whole prompts; every request reserves its maximum.  Yu et al., OSDI 2022."""

    in_strict_order = True

    def reserve(self, request: Request) -> int:
        """Prompt and max_tokens; the last sampled token is never computed and needs no capacity."""
        return request.max_len - 1


class OneAtATime(Orca):
    """No batching: requests run alone, in order of arrival."""

    def gate(self, view: View, now: float) -> Gate:
        return Gate(1 - view.num_running, ONE_AT_A_TIME)


class Static(Orca):
    """Requests that wait when a batch has ended form the next batch.

    Args:
        batch_size: maximum number of requests in a batch.
    """

    leaves_together = True

    def __init__(self, batch_size: int) -> None:
        self._batch_size = batch_size

    def gate(self, view: View, now: float) -> Gate:
        if view.num_running:
            return Gate(0, BATCH_RUNNING)
        return Gate(min(self._batch_size, view.max_num_seqs), BATCH_RUNNING)

    def budget(self, limits: SchedulerLimits) -> int:
        """A batch starts whole, however many tokens its prompts have."""
        return self._batch_size * limits.max_model_len

    def padding(self, counts: Sequence[int]) -> tuple[int, ...]:
        longest = max(counts)
        return tuple([longest - count for count in counts])


class Dynamic(Static):
    """As Static, but a batch starts when it is full or when its first request has waited `max_wait`.

    Args:
        max_wait: seconds.
    """

    def __init__(self, batch_size: int, max_wait: float) -> None:
        super().__init__(batch_size)
        self._max_wait = max_wait

    def gate(self, view: View, now: float) -> Gate:
        closes_at = view.oldest_arrival + self._max_wait
        if not view.num_running and view.num_waiting < self._batch_size and now < closes_at:
            return Gate(0, WINDOW_OPEN, closes_at)
        return super().gate(view, now)
