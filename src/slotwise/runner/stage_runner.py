"""Executors of a model whose layers are divided into stages (`kernels/group.py`).

    stage 0    layers of n │ layers of n + 1 │ head of n, sample │ layers of n + 2 │ head of n + 1, sample │ ...
    stage 1                │ layers of n ────────────► │ layers of n + 1 ────────────► │ ...

A stage computes plans in order.  The first one computes a plan's end, too: when the plan is collected, and by then
later plans may have given its slots to other requests.  So the end has known tokens, block tables and sampling state of
its own, to which it applies each plan as late as that.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import torch

from slotwise.core.step import StepPlan, StepResult
from slotwise.kernels.interface import LayerCache
from slotwise.model.decoder import Decoder
from slotwise.runner.adapters import SlotAdapters
from slotwise.runner.draft_model import DraftModel, Proposal
from slotwise.runner.graphs import DecodeGraphs
from slotwise.runner.input_batch import SlotTable
from slotwise.runner.model_runner import ModelRunner


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
        self._adapters = None if decoder.adapters is None else SlotAdapters(decoder.adapters, slots.num_slots)
        self._graphs = DecodeGraphs(decoder, caches, slots, lambda batch: decoder.hidden(batch, caches))

    def run(self, plan: StepPlan) -> None:
        """Applies a plan and computes it."""
        self.apply(plan)
        self.compute(plan)

    def apply(self, plan: StepPlan) -> None:
        """Takes in a plan's requests and blocks."""
        self.slots.apply(plan)
        if self._adapters is not None:
            self._adapters.apply(plan)

    @torch.inference_mode()
    def compute(self, plan: StepPlan) -> None:
        """Computes a plan's rows, and hands their hidden states on; all tokens that they continue are known."""
        if plan.slots:
            batch, _ = self.slots.gather(plan)
            if self._adapters is not None:
                self._adapters.assign(plan)
            self._decoder.reach(batch.max_context_len)
            if self._graphs.logits(batch) is None:
                self._decoder.hidden(batch, self._caches)


class _Submitted(NamedTuple):
    """A plan whose layers on this stage are computed."""

    plan: StepPlan
    proposal: Proposal | None  # of a draft model


class FirstStageRunner:
    """Runs plans on the first stage as they are submitted, and their ends as they are collected.

    Args:
        returned: computes what follows the last stage.
        draft_model: proposes the drafts that a plan leaves to the executor, by the slots of this stage.
    """

    def __init__(self, stage: StageRunner, returned: ModelRunner, draft_model: DraftModel | None = None) -> None:
        self._stage = stage
        self._returned = returned
        self._draft_model = draft_model
        self._submitted: deque[_Submitted | Exception] = deque()

    def submit(self, plan: StepPlan) -> None:
        try:
            self._stage.apply(plan)
            submitted = self._with_drafts(plan)
            self._stage.compute(submitted.plan)
            self._submitted.append(submitted)
        except Exception as error:  # raised when this step is collected
            self._submitted.append(error)

    def collect(self) -> StepResult:
        submitted = self._submitted.popleft()
        if isinstance(submitted, Exception):
            raise submitted
        self._returned.submit(submitted.plan)
        result, proposal = self._returned.collect(), submitted.proposal
        return result if proposal is None else result._replace(drafts=proposal.drafts, proposing=proposal.proposing)

    @torch.inference_mode()
    def _with_drafts(self, plan: StepPlan) -> _Submitted:
        """The plan as it is executed: all tokens of a row that proposes were sampled before."""
        if self._draft_model is None:
            return _Submitted(plan, None)
        self._draft_model.apply(plan)
        if not plan.has_proposed:
            return _Submitted(plan, None)
        proposal = self._draft_model.propose(plan, self._returned.begin_masks)
        return _Submitted(plan.with_drafts(proposal.drafts), proposal)
