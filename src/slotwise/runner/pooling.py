"""Pooled prompts: from the hidden states of a prompt to one vector, which is the request's result.

    positions    0   1   2   3 │ 4   5        a prompt of 6 tokens in two chunks
    `last`                     │     ■        its hidden state
    `mean`       ■   ■   ■   ■ │ ■   ■        their sum, continued from chunk to chunk, divided by 6

Hidden states are those behind the last norm, as `transformers` returns them; sums and vectors are float32.  A sum is
kept behind each of the last few chunks: after a failed step the scheduler plans chunks again that were summed already.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from slotwise.core.params import PoolingParams
from slotwise.core.step import NewRequest, RowKind, StepPlan
from slotwise.runner.staging import to_host

MAX_SUMS = 4  # at most two chunks of a request are in flight, so that a failure undoes at most two
LEAST_LENGTH = 1e-12  # of a vector that is normalised; a shorter one is divided by this


class Pooled(NamedTuple):
    """A vector that is being copied from the device."""

    row: int  # of the plan
    vector: Tensor  # [dimensions] float32

    def read(self) -> bytes:
        """The vector's bytes; empty if a number is not finite.  Call when the device is done with the step."""
        return self.vector.numpy().astype("<f4").tobytes() if bool(self.vector.isfinite().all()) else b""


class _Pool:
    """One pooled request, and the sums of its hidden states."""

    def __init__(self, request: NewRequest, params: PoolingParams) -> None:
        self.num_prompt = request.num_prompt
        self.params = params
        self._sums: list[tuple[int, Tensor | None]] = [(0, None)]  # of the first so many positions

    def add(self, start: int, hidden: Tensor) -> None:
        """Add the hidden states, `[positions, hidden]`, of the positions from `start` on."""
        while self._sums[-1][0] > start:
            self._sums.pop()
        end, before = self._sums[-1]
        if end != start:
            raise RuntimeError(f"the hidden states before position {start} are not known")
        added = hidden.sum(0, dtype=torch.float32)
        self._sums = [*self._sums[1 - MAX_SUMS :], (start + len(hidden), added if before is None else before + added)]

    def vector(self, last: Tensor) -> Tensor:
        """The vector of the whole prompt.

        Args:
            last: `[hidden]`, the hidden state of its last token.
        """
        total = self._sums[-1][1]
        vector = last.float() if total is None else total / self.num_prompt
        vector = vector[: self.params.dimensions]
        return vector / vector.norm().clamp(min=LEAST_LENGTH) if self.params.normalize else vector


class Pools:
    """The pooled requests, by slot."""

    def __init__(self) -> None:
        self._pools: dict[int, _Pool] = {}

    def join(self, request: NewRequest) -> None:
        """Set the slot's request, new or resumed after preemption."""
        self._pools.pop(request.slot, None)
        if request.pooling is not None:
            self._pools[request.slot] = _Pool(request, request.pooling)

    def leave(self, slot: int) -> None:
        """Clear the slot."""
        self._pools.pop(slot, None)

    def are_in(self, plan: StepPlan) -> bool:
        """Whether `plan` has a row of a pooled request."""
        return bool(self._pools) and any(slot in self._pools for slot in plan.slots)

    def add(self, plan: StepPlan, hidden: Tensor) -> list[Pooled]:
        """Add a step's hidden states; returns the vectors of the prompts that it completes.

        Args:
            hidden: `[positions, hidden]`, of all positions of the plan where logits or hidden states are wanted.
        """
        found, end = [], 0
        for row, (slot, wanted) in enumerate(zip(plan.slots, plan.num_logits, strict=True)):
            end += wanted
            pool = self._pools.get(slot)
            if pool is None or not wanted or plan.kinds[row] is RowKind.DECODE:  # held: computed for nothing
                continue
            if pool.params.reads_all:
                pool.add(plan.starts[row], hidden[end - wanted : end])
            if plan.starts[row] + plan.counts[row] == pool.num_prompt:
                found.append(Pooled(row, to_host(pool.vector(hidden[end - 1]))))
        return found

    def holds(self, slot: int) -> bool:
        """Whether the slot's request is pooled: none of its rows samples."""
        return slot in self._pools
