"""Request-level batching: the baselines that continuous batching replaced, on the same scheduler.

    slot 0   P d d d d d d d d d ┐         P prompt, padded to the longest of its group
    slot 1   P d d H H H H H H H ├ all     d decode
    slot 2   P d d d d H H H H H ┘ return  H held: ended, computed again, output held until the batch has ended

The baselines use the same executor and kernels, for padding and held rows too.  Two simplifications favour them: a
decoding row attends to its own context rather than to a padded one, as in FasterTransformer, and a static batch takes
all waiting requests when the previous one has ended, so that the last few requests never wait for a full batch.
"""

from __future__ import annotations

from collections.abc import Sequence

from slotwise.batching.orca import Orca
from slotwise.core.interfaces import Gate, View
from slotwise.core.limits import SchedulerLimits
from slotwise.core.reasons import BATCH_RUNNING, ONE_AT_A_TIME, WINDOW_OPEN


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
