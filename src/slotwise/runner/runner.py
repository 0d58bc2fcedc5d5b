"""The executor on a real model: slots brought up to date, one forward pass over the ragged batch, one sampling."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch

from slotwise.core.plan import StepPlan, StepResult
from slotwise.kernels.base import LayerCache
from slotwise.model.decoder import Decoder
from slotwise.runner.batch import SlotTable
from slotwise.runner.decode import DecodeSteps
from slotwise.runner.sampler import Sampler


class Runner:
    """Obeys plans in order, computing each when it is submitted (see `engine.executor.Executor`).

    Args:
        caches: one a layer, made by the decoder's kernels.
        slots: known tokens and block tables.
        sampler: per-slot sampling state.
    """

    def __init__(self, decoder: Decoder, caches: Sequence[LayerCache], slots: SlotTable, sampler: Sampler) -> None:
        self._decoder = decoder
        self._caches = caches
        self._slots = slots
        self._sampler = sampler
        self._decode_steps = DecodeSteps(decoder, caches, slots.num_slots, slots.table_width)
        self._outcomes: deque[StepResult | Exception] = deque()

    def submit(self, plan: StepPlan) -> None:
        self._slots.apply(plan)
        for slot in plan.leaves:
            self._sampler.leave(slot)
        try:
            for join in plan.joins:
                self._sampler.join(join)
            self._outcomes.append(self._compute(plan))
        except Exception as error:  # told to whoever collects this step; the next one must still find its slots
            self._outcomes.append(error)

    def collect(self) -> StepResult:
        outcome = self._outcomes.popleft()
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    @torch.inference_mode()
    def _compute(self, plan: StepPlan) -> StepResult:
        if not plan.slots:
            return StepResult(plan.step, ())
        batch = self._slots.gather(plan)
        logits = self._decode_steps.logits(batch)
        if logits is None:
            logits = self._decoder.logits(self._decoder.hidden(batch, self._caches))
        if not len(logits):
            return StepResult(plan.step, ((),) * plan.num_rows)
        return self._sample(plan, logits)

    def _sample(self, plan: StepPlan, logits: torch.Tensor) -> StepResult:
        rows = [row for row, samples in enumerate(plan.samples) if samples]
        slots = [plan.slots[row] for row in rows]
        ends = [plan.starts[row] + plan.counts[row] for row in rows]
        sampled = self._sampler.sample(logits, slots, ends)
        tokens: list[tuple[int, ...]] = [()] * plan.num_rows
        for index, (row, slot, end, token) in enumerate(zip(rows, slots, ends, sampled.tokens, strict=True)):
            if index not in sampled.failed:
                tokens[row] = (token,)
                self._slots.append(slot, end, token)
        failed = tuple(rows[index] for index in sampled.failed)
        return StepResult(plan.step, tuple(tokens), self._align(plan, rows, sampled.logprobs), failed)

    @staticmethod
    def _align(plan: StepPlan, rows: list[int], logprobs: Sequence) -> tuple:
        """Log-probabilities by row of the plan; () when nobody asked for any."""
        if not any(logprobs):
            return ()
        aligned: list[tuple] = [()] * plan.num_rows
        for row, found in zip(rows, logprobs, strict=True):
            aligned[row] = (found,) if found else ()
        return tuple(aligned)
