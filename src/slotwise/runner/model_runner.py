"""The executor on a real model: updates blocks and slots, runs the ragged batch, samples.

`submit` only enqueues where the device is asynchronous, and `collect` waits for the oldest step.  Nothing between them
reads what the device computes: sampled tokens go to the token table there, and to the host by a separate copy.

    host     submit n+1 │ collect n │ commit n, plan n+2 │ submit n+2 │ ...
    device   ... step n ──────────────► step n+1 ─────────────────────────► step n+2
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import torch

from slotwise.core.step import StepPlan, StepResult
from slotwise.kernels.interface import LayerCache
from slotwise.model.decoder import Decoder
from slotwise.runner.graphs import DecodeGraphs
from slotwise.runner.input_batch import SlotTable
from slotwise.runner.kv_offload import HostBlocks
from slotwise.runner.sampling.interface import Drawn, Sampling
from slotwise.runner.staging import Event, event_of


class DeviceLostError(RuntimeError):
    """The device has failed and is lost to this process; a new process may be able to use it."""


class _Enqueued(NamedTuple):
    """A step enqueued on the device."""

    plan: StepPlan
    drawn: Drawn | None  # None: no row samples
    done: Event

    def result(self) -> StepResult:
        """The result of the step; waits for it."""
        self.done.synchronize()
        plan = self.plan
        if self.drawn is None:
            return StepResult(plan.step, ((),) * plan.num_rows)
        sampled = self.drawn.read()
        rows = [row for row, samples in enumerate(plan.samples) if samples]
        tokens: list[tuple[int, ...]] = [()] * plan.num_rows
        for row, token in zip(rows, sampled.tokens, strict=True):
            tokens[row] = (token,)
        failed = tuple([rows[index] for index in sampled.failed])
        for row in failed:
            tokens[row] = ()
        return StepResult(plan.step, tuple(tokens), self._align(rows, sampled.logprobs), failed)

    def _align(self, rows: list[int], logprobs: Sequence) -> tuple:
        """Log-probabilities by row of the plan; () when no row has any."""
        if not any(logprobs):
            return ()
        aligned: list[tuple] = [()] * self.plan.num_rows
        for row, found in zip(rows, logprobs, strict=True):
            aligned[row] = (found,) if found else ()
        return tuple(aligned)


class ModelRunner:
    """Runs plans in order, starting each when it is submitted (see `engine.executor.Executor`).

    Args:
        caches: one per layer, made by the decoder's kernels.
        slots: known tokens and block tables.
        sampler: per-slot sampling state.
        host_blocks: copies of blocks in host memory.
    """

    def __init__(
        self, decoder: Decoder, caches: Sequence[LayerCache], slots: SlotTable, sampler: Sampling,
        host_blocks: HostBlocks,
    ) -> None:
        self._decoder = decoder
        self._caches = caches
        self._slots = slots
        self._sampler = sampler
        self._host_blocks = host_blocks
        self._decode_graphs = DecodeGraphs(decoder, caches, slots)
        self._outcomes: deque[_Enqueued | Exception] = deque()
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
        try:
            for join in plan.new_requests:
                self._sampler.join(join)
            self._outcomes.append(self._enqueue(plan))
        except Exception as error:  # raised when this step is collected; the next one must still find its slots
            self._outcomes.append(error)

    def collect(self) -> StepResult:
        outcome = self._outcomes.popleft()
        try:
            if isinstance(outcome, Exception):
                raise outcome
            return outcome.result()
        except torch.AcceleratorError as error:
            self._lost = error
            raise

    def _enqueue(self, plan: StepPlan) -> _Enqueued:
        drawn = self._compute(plan) if plan.slots else None
        done = event_of(self._decoder.kernels.device)
        done.record()
        return _Enqueued(plan, drawn, done)

    def _compute(self, plan: StepPlan) -> Drawn | None:
        batch, targets = self._slots.gather(plan)
        self._decoder.reach(batch.max_context_len)
        logits = self._decode_graphs.logits(batch)
        if logits is None:
            logits = self._decoder.logits(self._decoder.hidden(batch, self._caches))
        if not len(logits):
            return None
        rows = [row for row, samples in enumerate(plan.samples) if samples]
        slots = [plan.slots[row] for row in rows]
        ends = [plan.starts[row] + plan.counts[row] for row in rows]
        drawn = self._sampler.sample(logits, slots, ends)
        self._slots.append(targets, drawn.column)
        return drawn
