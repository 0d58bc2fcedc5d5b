"""The adapters of a step's rows: each slot's, from the requests that join, and each token's, from its row."""

from __future__ import annotations

import numpy as np

from slotwise.core.step import StepPlan
from slotwise.kernels.low_rank import NO_ADAPTER
from slotwise.model.lora_weights import LoraWeights


class LoraSlots:
    """The adapter of every slot."""

    def __init__(self, adapters: LoraWeights, num_slots: int) -> None:
        self._adapters = adapters
        self._places = np.full(num_slots, NO_ADAPTER, np.int64)

    def apply(self, plan: StepPlan) -> None:
        """Take in the requests that join."""
        for join in plan.new_requests:
            self._places[join.slot] = self._adapters.place(join.spec.adapter) if join.spec.adapter else NO_ADAPTER

    def assign(self, plan: StepPlan) -> None:
        """Tell the products which adapter each token of the plan has; padding has none."""
        places = np.repeat(self._places[list(plan.slots)], plan.counts)
        self._adapters.rows.assign(np.pad(places, (0, sum(plan.padding)), constant_values=NO_ADAPTER).tolist())
