"""Executors of a model whose layers are divided into stages (`kernels/pipe.py`).

    stage 0    layers of n │ layers of n + 1 │ head of n, sample │ layers of n + 2 │ head of n + 1, sample │ ...
    stage 1                │ layers of n ────────────► │ layers of n + 1 ────────────► │ ...

A stage computes plans in order.  The first one computes a plan's end, too: when the plan is collected, and by then
later plans may have given its slots to other requests.  So the end has known tokens, block tables and sampling state of
its own, to which it applies each plan as late as that.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch

from slotwise.core.step import StepPlan, StepResult
from slotwise.engine.executor import Executor
from slotwise.kernels.interface import LayerCache
from slotwise.model.decoder import Decoder
from slotwise.runner.graphs import DecodeGraphs
from slotwise.runner.input_batch import SlotTable


class StageRunner:
    """Computes the layers of one stage.

    Args:
        caches: one per layer of the stage.
        slots: known tokens and block tables.
    """

    def __init__(self, decoder: Decoder, caches: Sequence[LayerCache], slots: SlotTable) -> None:
        self.slots = slots
        self._decoder = decoder
        self._caches = caches
        self._graphs = DecodeGraphs(decoder, caches, slots, lambda batch: decoder.hidden(batch, caches))

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> None:
        """Computes a plan's rows, and hands their hidden states on; all tokens that they continue are known."""
        self.slots.apply(plan)
        if plan.slots:
            batch, _ = self.slots.gather(plan)
            self._decoder.reach(batch.max_context_len)
            if self._graphs.logits(batch) is None:
                self._decoder.hidden(batch, self._caches)


class FirstStageRunner:
    """Runs plans on the first stage as they are submitted, and their ends as they are collected.

    Args:
        returned: computes what follows the last stage.
    """

    def __init__(self, stage: StageRunner, returned: Executor) -> None:
        self._stage = stage
        self._returned = returned
        self._submitted: deque[StepPlan | Exception] = deque()

    def submit(self, plan: StepPlan) -> None:
        try:
            self._stage.run(plan)
            self._submitted.append(plan)
        except Exception as error:  # raised when this step is collected
            self._submitted.append(error)

    def collect(self) -> StepResult:
        plan = self._submitted.popleft()
        if isinstance(plan, Exception):
            raise plan
        self._returned.submit(plan)
        return self._returned.collect()
