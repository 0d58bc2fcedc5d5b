"""The executor on a real model: updates blocks and slots, runs the ragged batch, samples.

`submit` only enqueues where the device is asynchronous, and `collect` waits for the oldest step.  Nothing between them
reads what the device computes: sampled tokens go to the token table there, and to the host by a separate copy.  A step
with drafts is the exception: whether a draft is accepted decides what is sampled next (`verification.py`).

    host     submit n+1 │ collect n │ commit n, plan n+2 │ submit n+2 │ ...
    device   ... step n ──────────────► step n+1 ─────────────────────────► step n+2


Executors of a model whose layers are divided into stages (`kernels/group.py`).

    stage 0    layers of n │ layers of n + 1 │ head of n, sample │ layers of n + 2 │ head of n + 1, sample │ ...
    stage 1                │ layers of n ────────────► │ layers of n + 1 ────────────► │ ...

A stage computes plans in order.  The first one computes a plan's end, too: when the plan is collected, and by then
later plans may have given its slots to other requests.  So the end has known tokens, block tables and sampling state of
its own, to which it applies each plan as late as that.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from slotwise.core.step import StepPlan, StepResult
from slotwise.kernels.interface import LayerCache, RaggedBatch
from slotwise.model.decoder import Decoder, Returned
from slotwise.runner.decode_graphs import DecodeGraphs
from slotwise.runner.draft_model_runner import DraftModelRunner, DraftProposal
from slotwise.runner.input_batch import SlotTable
from slotwise.runner.kv_blocks import HostBlocks
from slotwise.runner.prompt_results import PooledPrompts, PromptLogprobs, describe, rows_at_a_time
from slotwise.runner.sampling.grammar_masks import Masks
from slotwise.runner.sampling.sampler import PendingTokens, Sampling
from slotwise.runner.slots import LoraSlots
from slotwise.runner.staging import Event, event_of, sender
from slotwise.runner.verification import NOTHING, DraftedStates, OfPrompts, RowTokens, verify


class DeviceLostError(RuntimeError):
    """The device has failed and is lost to this process; a new process may be able to use it."""


class _Enqueued(NamedTuple):
    """A step enqueued on the device."""

    plan: StepPlan
    drawn: PendingTokens | None  # None: no row samples
    of_prompts: OfPrompts
    proposal: DraftProposal | None  # of a draft model
    done: Event

    def result(self) -> StepResult:
        """The result of the step; waits for it."""
        self.done.synchronize()
        outcome = RowTokens(self.plan)
        if self.drawn is not None:
            outcome.add([row for row, wanted in enumerate(self.plan.num_logits) if wanted], self.drawn.read())
        return outcome.result(self.of_prompts)


class _Verified(NamedTuple):
    """A step with drafts, which was computed as it was submitted."""

    plan: StepPlan
    outcome: RowTokens
    of_prompts: OfPrompts
    proposal: DraftProposal | None

    def result(self) -> StepResult:
        return self.outcome.result(self.of_prompts)


class _Computed(NamedTuple):
    """What the model gives for a plan."""

    plan: StepPlan  # with the logits alone that tokens are drawn from
    logits: Tensor  # [sum of num_logits, vocab]
    targets: Tensor  # [sum of num_logits], where their tokens belong
    of_prompts: OfPrompts = NOTHING
    states: DraftedStates | None = None  # None: no row with a recurrent state has drafts


class ModelRunner:
    """Runs plans in order, starting each when it is submitted (see `engine.executor.Executor`).

    Args:
        caches: one per layer, made by the decoder's kernels.
        slots: known tokens and block tables.
        sampler: per-slot sampling state.
        host_blocks: copies of blocks in host memory; None: no plan has any.
        masks: of the requests with a grammar, which the sampler reads.
        draft_model: proposes the drafts that a plan leaves to the executor.
    """

    def __init__(
        self, decoder: Decoder | Returned, caches: Sequence[LayerCache], slots: SlotTable, sampler: Sampling,
        host_blocks: HostBlocks | None = None, masks: Masks | None = None, draft_model: DraftModelRunner | None = None,
    ) -> None:
        self._decoder = decoder
        self._caches = caches
        self._slots = slots
        self._sampler = sampler
        self._host_blocks = host_blocks
        self._masks = masks
        self._draft_model = draft_model
        self._adapters = None if decoder.adapters is None else LoraSlots(decoder.adapters, slots.num_slots)
        self._decode_graphs = DecodeGraphs(decoder, caches, slots)
        self._prompts = PromptLogprobs(slots)
        self._pools = PooledPrompts()
        self._send = sender(decoder.kernels.device)
        self._outcomes: deque[_Enqueued | _Verified | Exception] = deque()
        self._lost: Exception | None = None  # the device's failure

    @torch.inference_mode()
    def submit(self, plan: StepPlan) -> None:
        """Raises DeviceLostError after a step in which the device failed; `collect` raises other failures."""
        if self._lost is not None:
            raise DeviceLostError(f"the device is lost: {self._lost}") from self._lost
        if self._host_blocks is not None:
            self._host_blocks.save(plan.saves)
            self._host_blocks.load(plan.loads)
        self._slots.apply(plan)
        if self._adapters is not None:
            self._adapters.apply(plan)
        if self._draft_model is not None:
            self._draft_model.apply(plan)
        for slot in plan.released_slots:
            self._sampler.leave(slot)
            self._prompts.leave(slot)
            self._pools.leave(slot)
            if self._masks is not None:
                self._masks.leave(slot)
        try:
            for join in plan.new_requests:
                self._sampler.join(join)
                self._prompts.join(join)
                self._pools.join(join)
                if self._masks is not None:
                    self._masks.join(join)
            self._outcomes.append(self._enqueue(plan))
        except Exception as error:  # raised when this step is collected; the next one must still find its slots
            self._outcomes.append(error)

    def collect(self) -> StepResult:
        outcome = self._outcomes.popleft()
        try:
            if isinstance(outcome, Exception):
                raise outcome
            result = outcome.result()
            if outcome.proposal is not None:
                result = result._replace(drafts=outcome.proposal.drafts, proposing=outcome.proposal.proposing)
            return self._recorded(outcome.plan, result) if self._masks is not None else result
        except torch.AcceleratorError as error:
            self._lost = error
            raise

    def _recorded(self, plan: StepPlan, result: StepResult) -> StepResult:
        """Record a step's tokens in the masks; returns the result with what these force, and object to."""
        assert self._masks is not None
        self._masks.record(plan, result.tokens)
        if forced := self._masks.forced(plan, result.tokens):
            result = result._replace(forced=forced)
        if not result.failed:
            return result
        objections = tuple([self._masks.objection(plan.slots[row]) for row in result.failed])
        return result._replace(objections=objections) if any(objections) else result

    def begin_masks(self, plan: StepPlan) -> None:
        """Begin to fill the masks of a plan, beside its forward pass."""
        if self._masks is not None and self._masks.are_in(plan):
            earlier = [outcome for outcome in self._outcomes if not isinstance(outcome, Exception)]
            drawn = plan._replace(num_logits=tuple(self._prompts.num_drawn(plan)))
            self._masks.begin(drawn, lambda: [(one.plan, one.result().tokens) for one in earlier])

    def _enqueue(self, plan: StepPlan) -> _Enqueued | _Verified:
        device, drawn, of_prompts = self._decoder.kernels.device, None, NOTHING
        proposal = None
        if self._draft_model is not None and plan.has_proposed:
            proposal = self._draft_model.propose(plan, self.begin_masks)
            plan = plan.with_drafts(proposal.drafts)
        if plan.slots:
            self.begin_masks(plan)
            computed = self._compute(plan)
            plan, of_prompts = computed.plan, computed.of_prompts
            if plan.drafts:
                outcome = verify(plan, computed.logits, computed.targets, self._sampler, self._slots, device)
                if computed.states is not None:
                    computed.states.settle(outcome.tokens)
                return _Verified(plan, outcome, of_prompts, proposal)
            drawn = self._sample(computed)
        done = event_of(device)
        done.record()
        return _Enqueued(plan, drawn, of_prompts, proposal, done)

    def _compute(self, plan: StepPlan) -> _Computed:
        """Run the model; describe or pool what the plan contains of prompts that are to be."""
        batch, targets = self._slots.gather(plan)
        if self._adapters is not None:
            self._adapters.assign(plan)
        self._decoder.reach(batch.max_context_len)
        states = None
        if plan.drafts and isinstance(self._decoder, Decoder) and self._decoder.config.recurrent is not None:
            states = DraftedStates(plan, batch, self._caches)
        if self._prompts.are_in(plan) or self._pools.are_in(plan):
            return self._read_prompts(plan, targets, self._hidden(batch, states))._replace(states=states)
        logits = self._decode_graphs.logits(batch) if states is None else None
        if logits is None:
            logits = self._decoder.logits(self._hidden(batch, states))
        return _Computed(plan, logits, targets, states=states)

    def _hidden(self, batch: RaggedBatch, states: DraftedStates | None) -> Tensor:
        if states is None:
            return self._decoder.hidden(batch, self._caches)
        assert isinstance(self._decoder, Decoder)
        return self._decoder.hidden(states.batch, self._caches, states.advances)

    def _read_prompts(self, plan: StepPlan, targets: Tensor, hidden: Tensor) -> _Computed:
        """Describe and pool prompts; the logits are those that tokens are drawn from."""
        decoder, prompts = self._decoder, self._prompts
        at_a_time = rows_at_a_time(self._slots.num_slots)
        described = describe(prompts.rows(plan, hidden), decoder.logits, self._sampler, at_a_time)
        pooled = self._pools.add(plan, hidden)
        num_drawn = [0 if self._pools.holds(slot) else drawn
                     for slot, drawn in zip(plan.slots, prompts.num_drawn(plan), strict=True)]
        ends = accumulate(plan.num_logits)
        places = [place for end, drawn in zip(ends, num_drawn, strict=True) for place in range(end - drawn, end)]
        (at,) = self._send([np.array(places, np.int64)], ())
        return _Computed(
            plan._replace(num_logits=tuple(num_drawn)), decoder.logits(hidden.index_select(0, at)),
            targets.index_select(0, at), OfPrompts(described, pooled))

    def _sample(self, computed: _Computed) -> PendingTokens | None:
        plan, logits, targets = computed.plan, computed.logits, computed.targets
        if not len(logits):
            return None
        rows = [row for row, wanted in enumerate(plan.num_logits) if wanted]
        slots = [plan.slots[row] for row in rows]
        ends = [plan.starts[row] + plan.counts[row] for row in rows]
        drawn = self._sampler.sample(logits, slots, ends)
        self._slots.append(targets, drawn.column)
        return drawn


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
        self._adapters = None if decoder.adapters is None else LoraSlots(decoder.adapters, slots.num_slots)
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
    proposal: DraftProposal | None  # of a draft model


class FirstStageRunner:
    """Runs plans on the first stage as they are submitted, and their ends as they are collected.

    Args:
        returned: computes what follows the last stage.
        draft_model: proposes the drafts that a plan leaves to the executor, by the slots of this stage.
    """

    def __init__(self, stage: StageRunner, returned: ModelRunner, draft_model: DraftModelRunner | None = None) -> None:
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
