"""Roofline: the lower bound of a step's time on a machine.

The roofline (Williams, Waterman and Patterson, 2009): a step cannot be faster than its bytes at the machine's
bandwidth, nor than its operations at the machine's rate.  Both come from the step's plan, so the bound accounts for
every row, chunk and context.

    a step    bytes       all weights once, and the keys and values of every row's context
              operations  two for each weight and token, the head's only for rows that sample; four for each pair of a
                          query and a key, head and dimension
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Cost(NamedTuple):
    """The least that a step must read and compute."""

    bytes: int
    operations: int


@dataclass(frozen=True, slots=True)
class Machine:
    """Measured peak rates."""

    bytes_per_second: float  # of memory reads
    operations_per_second: float  # of large matrix products


@dataclass(frozen=True, slots=True)
class Roofline:
    """A model on a machine."""

    machine: Machine
    weight_bytes: int  # of all weights that a step reads, quantised or not
    position_bytes: int  # keys and values of one position, in all layers
    token_weights: int  # weights that each token is multiplied by
    head_weights: int  # weights that each sampling row is multiplied by in addition
    pair_operations: int  # operations of a query and a key, in all layers

    def cost(self, starts: Sequence[int], counts: Sequence[int], num_sampled: int) -> Cost:
        """Returns the cost of rows that compute `counts` tokens from positions `starts`; padding is not counted."""
        computed, contexts = sum(counts), sum(starts) + sum(counts)
        pairs = contexts
        if computed > len(counts):
            pairs = sum([count * start + count * (count + 1) // 2 for start, count in zip(starts, counts, strict=True)])
        return Cost(
            self.weight_bytes + contexts * self.position_bytes,
            2 * (computed * self.token_weights + num_sampled * self.head_weights) + pairs * self.pair_operations)

    def seconds(self, cost: Cost) -> float:
        """Returns the larger of the memory and the compute bound, in seconds."""
        machine = self.machine
        return max(cost.bytes / machine.bytes_per_second, cost.operations / machine.operations_per_second)
