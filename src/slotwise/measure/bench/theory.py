"""The theory of disciplines: decode steps computed from the output lengths, without an engine.

Everything is queued before the first step, prompts fit the step they join in, and a request of L output tokens takes
part in L steps: its first token comes with its prompt's step.

    static, 2 slots, lengths 4 1 2 2        continuous, the same lengths
    slot 0  A A A A C C                     slot 0  A A A A .
    slot 1  B . . . D D   6 steps           slot 1  B C C D D   5 steps

Iteration-level scheduling after Orca (Yu et al., OSDI 2022): a freed slot is refilled at the next step, which is list
scheduling (Graham, 1969) of the lengths on the slots.
"""

from __future__ import annotations

import heapq
import statistics
from collections.abc import Callable, Sequence


def one_at_a_time_steps(lengths: Sequence[int], slots: int = 1) -> int:
    """Decode steps when each request runs alone, however many slots there are."""
    return sum(lengths)


def static_steps(lengths: Sequence[int], slots: int) -> int:
    """Decode steps of groups of `slots` in order of arrival, each as long as its longest member."""
    return sum(max(lengths[first : first + slots]) for first in range(0, len(lengths), slots))


def continuous_steps(lengths: Sequence[int], slots: int) -> int:
    """Decode steps when the next request in the queue takes the first free slot."""
    free_at = [0] * slots  # a heap: the step from which each slot is free
    for length in lengths:
        heapq.heapreplace(free_at, free_at[0] + length)
    return max(free_at)


DECODE_STEPS: dict[str, Callable[[Sequence[int], int], int]] = {
    "one_at_a_time": one_at_a_time_steps, "static": static_steps, "dynamic": static_steps, "orca": continuous_steps,
    "continuous": continuous_steps,
}
"""By discipline, where every slot can be filled: with the whole workload queued and enough cache for all slots."""


def step_ratio(lengths: Sequence[int], slots: int) -> float:
    """Decode steps of static over continuous batching for these lengths; 1.0 when they are all the same."""
    return static_steps(lengths, slots) / continuous_steps(lengths, slots)


def coefficient_of_variation(lengths: Sequence[int]) -> float:
    """Standard deviation over mean: 0 for fixed lengths, 1 for exponential ones."""
    return statistics.pstdev(lengths) / statistics.fmean(lengths)
