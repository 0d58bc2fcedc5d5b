"""The executors on a real model: a plan's slots and blocks, its ragged batch, the forward pass, and sampling.

`submit` only enqueues where the device is asynchronous, and `collect` waits for the oldest step.  Nothing between them
reads what the device computes: sampled tokens go to the token table there, and to the host by a separate copy.  A step
with drafts is the exception: whether a draft is accepted decides what is sampled next (`verification.py`).

    host     submit n+1 │ collect n │ commit n, plan n+2 │ submit n+2 │ ...
    device   ... step n ──────────────► step n+1 ─────────────────────────► step n+2

Where layers are divided into stages (`compute/kernels/group.py`), each stage computes plans in order:

    stage 0    layers of n │ layers of n + 1 │ head of n, sample │ layers of n + 2 │ head of n + 1, sample │ ...
    stage 1                │ layers of n ────────────► │ layers of n + 1 ────────────► │ ...

The first stage also computes the end of a plan, when the plan is collected; by then, later plans may have given its
slots to other requests.  So the end has a `ModelRunner` of its own, with its own token table and sampling state, to
which each plan is applied that late.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from slotwise.compute.kernels.interface import LayerCache, RaggedBatch
from slotwise.compute.model.decoder import Decoder, StepDecoder
from slotwise.compute.runner.decode_graphs import DecodeGraphs
from slotwise.compute.runner.input_batch import SlotTable
from slotwise.compute.runner.prompt_results import PooledPrompts, PromptLogprobs, describe, rows_at_a_time
from slotwise.compute.runner.sampling.sampler import PendingTokens, Sampling
from slotwise.compute.runner.slots import BlocksLostError, PrepareDraws, SlotListener, SlotListeners
from slotwise.compute.runner.staging import Event, event_of, sender
from slotwise.compute.runner.verification import NOTHING, DraftedStates, OfPrompts, RowTokens, verify
from slotwise.core.record import StepPlan, StepResult


class DeviceLostError(RuntimeError):
    """The device, or what its cache contained, is lost to this process; a new process may be able to use it."""


class _EnqueuedStep(NamedTuple):
    """A step enqueued on the device."""

    plan: StepPlan
    drawn: PendingTokens | None  # None: no row samples
    of_prompts: OfPrompts
    done: Event

    def result(self) -> StepResult:
        """The result of the step; waits for it."""
        self.done.synchronize()
        outcome = RowTokens(self.plan)
        if self.drawn is not None:
            outcome.add([row for row, wanted in enumerate(self.plan.num_logits) if wanted], self.drawn.read())
        return outcome.result(self.of_prompts)


class _VerifiedStep(NamedTuple):
    """A step with drafts, which was computed as it was submitted."""

    plan: StepPlan
    outcome: RowTokens
    of_prompts: OfPrompts

    def result(self) -> StepResult:
        return self.outcome.result(self.of_prompts)


class _ModelOutput(NamedTuple):
    """The model's output for a plan."""

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
        listeners: what else hears of each plan, after `slots` and before the sampler.
    """

    def __init__(
        self, decoder: StepDecoder, caches: Sequence[LayerCache], slots: SlotTable, sampler: Sampling,
        listeners: Iterable[SlotListener] = (),
    ) -> None:
        self._decoder = decoder
        self._caches = caches
        self._slots = slots
        self._sampler = sampler
        self._decode_graphs = DecodeGraphs(decoder, caches, slots)
        self._prompts = PromptLogprobs(slots)
        self._pools = PooledPrompts()
        self._listeners = SlotListeners([slots, *listeners, sampler, self._prompts, self._pools])
        self._send = sender(decoder.kernels.device)
        self._outcomes: deque[_EnqueuedStep | _VerifiedStep | Exception] = deque()
        self._lost: Exception | None = None  # why no later plan may be run

    @torch.inference_mode()
    def submit(self, plan: StepPlan) -> None:
        """Raises DeviceLostError after a step that lost the device or blocks; `collect` raises other failures."""
        if self._lost is not None:
            raise DeviceLostError(f"no step can follow: {self._lost}") from self._lost
        try:
            self._listeners.apply(plan)
            self._outcomes.append(self._enqueue(plan))
        except Exception as error:  # raised when this step is collected
            self._outcomes.append(error)
            if isinstance(error, BlocksLostError):
                self._lost = error

    def collect(self) -> StepResult:
        outcome = self._outcomes.popleft()
        try:
            if isinstance(outcome, Exception):
                raise outcome
            return self._listeners.complete(outcome.plan, outcome.result())
        except torch.AcceleratorError as error:
            self._lost = error
            raise

    def prepare_draws(self, plan: StepPlan) -> None:
        """Tell the listeners that tokens of a plan are about to be drawn, before its forward pass."""
        earlier = [outcome for outcome in self._outcomes if not isinstance(outcome, Exception)]
        self._listeners.prepare_draws(
            plan, self._prompts.num_drawn, lambda: [(one.plan, one.result().tokens) for one in earlier])

    def _enqueue(self, plan: StepPlan) -> _EnqueuedStep | _VerifiedStep:
        device, drawn, of_prompts = self._decoder.kernels.device, None, NOTHING
        plan = self._listeners.propose(plan, self.prepare_draws)
        if plan.slots:
            self.prepare_draws(plan)
            computed = self._compute(plan)
            plan, of_prompts = computed.plan, computed.of_prompts
            if plan.drafts:
                outcome = verify(plan, computed.logits, computed.targets, self._sampler, self._slots, device)
                if computed.states is not None:
                    computed.states.settle(outcome.tokens)
                return _VerifiedStep(plan, outcome, of_prompts)
            drawn = self._sample(computed)
        done = event_of(device)
        done.record()
        return _EnqueuedStep(plan, drawn, of_prompts, done)

    def _compute(self, plan: StepPlan) -> _ModelOutput:
        """Run the model; describe or pool the prompts whose log-probabilities or vectors were requested."""
        reads_prompts = self._prompts.are_in(plan) or self._pools.are_in(plan)
        self._listeners.compute(plan)
        if not reads_prompts and (repeated := self._decode_graphs.repeat(plan)) is not None:
            return _ModelOutput(plan, *repeated)
        batch, targets = self._slots.gather(plan)
        if reads_prompts and isinstance(self._decoder, Decoder) and (
                narrowed := self._pools.narrowed(plan)) is not None:
            plan, left = narrowed
            (at,) = self._send([np.array(left, np.int64)], ())
            batch = replace(batch, sample_at=batch.sample_at.index_select(0, at))
            targets = targets.index_select(0, at)
        self._decoder.reach(batch.max_context_len)
        has_trial = bool(plan.drafts) and self._decoder.has_states
        states = DraftedStates(plan, batch, self._caches) if has_trial else None
        if reads_prompts:
            return self._read_prompts(plan, targets, self._hidden(batch, states))._replace(states=states)
        logits = self._decode_graphs.logits(batch) if states is None else None
        if logits is None:
            logits = self._decoder.logits(self._hidden(batch, states))
        return _ModelOutput(plan, logits, targets, states=states)

    def _hidden(self, batch: RaggedBatch, states: DraftedStates | None) -> Tensor:
        if states is None:
            return self._decoder.hidden(batch, self._caches)
        return self._decoder.hidden(states.batch, self._caches, states.advances)

    def _read_prompts(self, plan: StepPlan, targets: Tensor, hidden: Tensor) -> _ModelOutput:
        """Describe and pool prompts; the output has only the logits that tokens are drawn from."""
        decoder, prompts = self._decoder, self._prompts
        at_a_time = rows_at_a_time(self._slots.num_slots)
        described = describe(prompts.rows(plan, hidden), decoder.logits, self._sampler, at_a_time)
        pooled = self._pools.add(plan, hidden, decoder, at_a_time)
        num_drawn = [0 if self._pools.holds(slot) else drawn
                     for slot, drawn in zip(plan.slots, prompts.num_drawn(plan), strict=True)]
        ends = accumulate(plan.num_logits)
        places = [place for end, drawn in zip(ends, num_drawn, strict=True) for place in range(end - drawn, end)]
        (at,) = self._send([np.array(places, np.int64)], ())
        return _ModelOutput(
            plan._replace(num_logits=tuple(num_drawn)), decoder.logits(hidden.index_select(0, at)),
            targets.index_select(0, at), OfPrompts(described, pooled))

    def _sample(self, computed: _ModelOutput) -> PendingTokens | None:
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
        listeners: what else hears of each plan, after `slots`.
    """

    def __init__(
        self, decoder: Decoder, caches: Sequence[LayerCache], slots: SlotTable, listeners: Iterable[SlotListener] = (),
    ) -> None:
        self._slots = slots
        self._decoder = decoder
        self._caches = caches
        self._listeners = SlotListeners([slots, *listeners])
        self._graphs = DecodeGraphs(decoder, caches, slots, lambda batch: decoder.hidden(batch, caches))

    def run(self, plan: StepPlan) -> None:
        """Apply a plan and compute it."""
        self.apply(plan)
        self.compute(plan)

    def apply(self, plan: StepPlan) -> None:
        """Take in a plan's requests and blocks."""
        self._listeners.apply(plan)

    @torch.inference_mode()
    def propose(self, plan: StepPlan, prepare_draws: PrepareDraws) -> StepPlan:
        """The plan with the drafts that it leaves to the executor.  A row that proposes has no token in flight."""
        return self._listeners.propose(plan, prepare_draws)

    @torch.inference_mode()
    def compute(self, plan: StepPlan) -> None:
        """Compute a plan's rows, and hand their hidden states on.  All tokens that they continue are known."""
        if plan.slots:
            batch, _ = self._slots.gather(plan)
            self._listeners.compute(plan)
            self._decoder.reach(batch.max_context_len)
            if self._graphs.logits(batch) is None:
                self._decoder.hidden(batch, self._caches)

    def complete(self, plan: StepPlan, result: StepResult) -> StepResult:
        """The result of a plan, with what the listeners add to it."""
        return self._listeners.complete(plan, result)


class FirstStageRunner:
    """Computes the first stage's layers of a plan when it is submitted, and its end when it is collected.

    Args:
        head: computes what follows the last stage.
    """

    def __init__(self, stage: StageRunner, head: ModelRunner) -> None:
        self._stage = stage
        self._head = head
        self._submitted: deque[StepPlan | Exception] = deque()

    def submit(self, plan: StepPlan) -> None:
        try:
            self._stage.apply(plan)
            plan = self._stage.propose(plan, self._head.prepare_draws)
            self._stage.compute(plan)
            self._submitted.append(plan)
        except Exception as error:  # raised when this step is collected
            self._submitted.append(error)

    def collect(self) -> StepResult:
        plan = self._submitted.popleft()
        if isinstance(plan, Exception):
            raise plan
        self._head.submit(plan)
        return self._stage.complete(plan, self._head.collect())
