"""The executor on a real model: updates blocks and slots, runs the ragged batch, samples.

`submit` only enqueues where the device is asynchronous, and `collect` waits for the oldest step.  Nothing between them
reads what the device computes: sampled tokens go to the token table there, and to the host by a separate copy.  A step
with drafts is the exception: whether a draft is accepted decides what is sampled next (`verification.py`).

    host     submit n+1 │ collect n │ commit n, plan n+2 │ submit n+2 │ ...
    device   ... step n ──────────────► step n+1 ─────────────────────────► step n+2
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from slotwise.core.step import Output, StepPlan, StepResult
from slotwise.kernels.interface import LayerCache
from slotwise.model.decoder import Decoder
from slotwise.runner.graphs import DecodeGraphs
from slotwise.runner.input_batch import SlotTable
from slotwise.runner.kv_offload import HostBlocks
from slotwise.runner.prompt_logprobs import Described, Prompts, describe, rows_at_a_time
from slotwise.runner.sampling.masks import Masks
from slotwise.runner.sampling.params import Drawn, Sampling
from slotwise.runner.staging import Event, event_of, sender
from slotwise.runner.verification import Outcome, verify


class DeviceLostError(RuntimeError):
    """The device has failed and is lost to this process; a new process may be able to use it."""


class _Enqueued(NamedTuple):
    """A step enqueued on the device."""

    plan: StepPlan
    drawn: Drawn | None  # None: no row samples
    described: list[Described]  # parts of prompts
    done: Event

    def result(self) -> StepResult:
        """The result of the step; waits for it."""
        self.done.synchronize()
        outcome = Outcome(self.plan)
        if self.drawn is not None:
            outcome.add([row for row, wanted in enumerate(self.plan.num_logits) if wanted], self.drawn.read())
        return outcome.result(self.described)


class _Verified(NamedTuple):
    """A step with drafts, which was computed as it was submitted."""

    plan: StepPlan
    outcome: Outcome
    described: list[Described]

    def result(self) -> StepResult:
        return self.outcome.result(self.described)


class _Computed(NamedTuple):
    """What the model gives for a plan."""

    plan: StepPlan  # with the logits alone that tokens are drawn from
    logits: Tensor  # [sum of num_logits, vocab]
    targets: Tensor  # [sum of num_logits], where their tokens belong
    described: list[Described]  # parts of prompts


class ModelRunner:
    """Runs plans in order, starting each when it is submitted (see `engine.executor.Executor`).

    Args:
        caches: one per layer, made by the decoder's kernels.
        slots: known tokens and block tables.
        sampler: per-slot sampling state.
        host_blocks: copies of blocks in host memory.
        masks: of the requests with a grammar, which the sampler reads.
    """

    def __init__(
        self, decoder: Decoder, caches: Sequence[LayerCache], slots: SlotTable, sampler: Sampling,
        host_blocks: HostBlocks, masks: Masks | None = None,
    ) -> None:
        self._decoder = decoder
        self._caches = caches
        self._slots = slots
        self._sampler = sampler
        self._host_blocks = host_blocks
        self._masks = masks
        self._decode_graphs = DecodeGraphs(decoder, caches, slots)
        self._prompts = Prompts(slots)
        self._send = sender(decoder.kernels.device)
        self._outcomes: deque[_Enqueued | _Verified | Exception] = deque()
        self._lost: Exception | None = None  # the device's failure

    @torch.inference_mode()
    def submit(self, plan: StepPlan) -> None:
        """Raises DeviceLostError after a step in which the device failed; `collect` raises other failures."""
        if self._lost is not None:
            raise DeviceLostError(f"the device is lost: {self._lost}") from self._lost
        self._host_blocks.save(plan.saves)
        self._host_blocks.load(plan.loads)
        self._slots.apply(plan)
        for slot in plan.released_slots:
            self._sampler.leave(slot)
            self._prompts.leave(slot)
            if self._masks is not None:
                self._masks.leave(slot)
        try:
            for join in plan.new_requests:
                if join.output is Output.POOLED:
                    raise NotImplementedError(f"{join.output.value} is not implemented by this executor")
                self._sampler.join(join)
                self._prompts.join(join)
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
            return self._recorded(outcome.plan, result) if self._masks is not None else result
        except torch.AcceleratorError as error:
            self._lost = error
            raise

    def _recorded(self, plan: StepPlan, result: StepResult) -> StepResult:
        """Record a step's tokens in the masks; returns the result, with their objections to rows that failed."""
        assert self._masks is not None
        self._masks.record(plan, result.tokens)
        if not result.failed:
            return result
        objections = tuple([self._masks.objection(plan.slots[row]) for row in result.failed])
        return result._replace(objections=objections) if any(objections) else result

    def _begin_masks(self, plan: StepPlan) -> None:
        """Begin to fill the masks of a plan, beside its forward pass."""
        if self._masks is not None and self._masks.are_in(plan):
            earlier = [outcome for outcome in self._outcomes if not isinstance(outcome, Exception)]
            described = self._prompts.without(plan)[0] if self._prompts.are_in(plan) else plan
            self._masks.begin(described, lambda: [(one.plan, one.result().tokens) for one in earlier])

    def _enqueue(self, plan: StepPlan) -> _Enqueued | _Verified:
        device, drawn, described = self._decoder.kernels.device, None, []
        if plan.slots:
            self._begin_masks(plan)
            computed = self._compute(plan)
            plan, described = computed.plan, computed.described
            if plan.drafts:
                outcome = verify(plan, computed.logits, computed.targets, self._sampler, self._slots, device)
                return _Verified(plan, outcome, described)
            drawn = self._sample(computed)
        done = event_of(device)
        done.record()
        return _Enqueued(plan, drawn, described, done)

    def _compute(self, plan: StepPlan) -> _Computed:
        """Run the model; describe what the plan contains of prompts that are to be described."""
        batch, targets = self._slots.gather(plan)
        self._decoder.reach(batch.max_context_len)
        if self._prompts.are_in(plan):
            return self._describe(plan, targets, self._decoder.hidden(batch, self._caches))
        logits = self._decode_graphs.logits(batch)
        if logits is None:
            logits = self._decoder.logits(self._decoder.hidden(batch, self._caches))
        return _Computed(plan, logits, targets, [])

    def _describe(self, plan: StepPlan, targets: Tensor, hidden: Tensor) -> _Computed:
        """Describe prompts; the logits are those that tokens are drawn from."""
        decoder, prompts = self._decoder, self._prompts
        at_a_time = rows_at_a_time(self._slots.num_slots)
        described = describe(prompts.rows(plan, hidden), decoder.logits, self._sampler, at_a_time)
        plan, places = prompts.without(plan)
        (at,) = self._send([np.array(places, np.int64)], ())
        return _Computed(plan, decoder.logits(hidden.index_select(0, at)), targets.index_select(0, at), described)

    def _sample(self, computed: _Computed) -> Drawn | None:
        plan, logits, targets, _ = computed
        if not len(logits):
            return None
        rows = [row for row, wanted in enumerate(plan.num_logits) if wanted]
        slots = [plan.slots[row] for row in rows]
        ends = [plan.starts[row] + plan.counts[row] for row in rows]
        drawn = self._sampler.sample(logits, slots, ends)
        self._slots.append(targets, drawn.column)
        return drawn
