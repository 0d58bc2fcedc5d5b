"""What a runner keeps for every slot: listeners, which hear of each plan.

    apply             released slots, new requests, blocks        every listener, in the order of the plans
    propose           the plan leaves drafts to the executor      a draft model
    prepare_draws     tokens are about to be drawn                masks of grammars
    compute           the rows are about to be computed           adapters
    complete          the step has a result                       masks of grammars, a draft model

Tokens and block tables (`input_batch.py`), copies in host memory (`kv_blocks.py`), samplers and masks (`sampling/`),
results of prompts (`prompt_results.py`) and a draft model (`draft_model_runner.py`) are listeners.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from slotwise.compute.kernels.interface import NO_ADAPTER
from slotwise.compute.model.lora_weights import LoraWeights
from slotwise.core.record import NewRequest, StepPlan, StepResult

PrepareDraws = Callable[[StepPlan], None]
NumDrawn = Callable[[StepPlan], Sequence[int]]
"""Of each row of a plan, from how many of its logits tokens are drawn."""
Earlier = Callable[[], Iterable[tuple[StepPlan, Sequence[Sequence[int]]]]]
"""Steps whose results are not collected yet, each with the tokens that its rows sampled.  Waits for the device."""


class BlocksLostError(RuntimeError):
    """The cache may lack blocks that the scheduler counts as computed."""


class SlotListener:
    """Keeps state of the request in each slot.  By default it ignores what it hears."""

    def apply(self, plan: StepPlan) -> None:
        """Take in what a plan changes.  Call once per plan, in the order of the plans."""
        for slot in plan.released_slots:
            self.leave(slot)
        for request in plan.new_requests:
            self.join(request)

    def join(self, request: NewRequest) -> None:
        """Set the slot's request, new or resumed after preemption."""

    def leave(self, slot: int) -> None:
        """Clear the slot."""

    def propose(self, plan: StepPlan, prepare_draws: PrepareDraws) -> StepPlan:
        """The plan with the drafts that it leaves to the executor; `prepare_draws` is called before each draw."""
        return plan

    def prepare_draws(self, plan: StepPlan, num_drawn: NumDrawn, earlier: Earlier) -> None:
        """Tokens of the plan are about to be drawn."""

    def compute(self, plan: StepPlan) -> None:
        """The plan's rows, whose drafts are known, are about to be computed."""

    def complete(self, plan: StepPlan, result: StepResult) -> StepResult:
        """The result of a plan, with what the listener adds to it."""
        return result


class SlotListeners:
    """The listeners of a runner, told in order."""

    def __init__(self, listeners: Iterable[SlotListener]) -> None:
        self._listeners = tuple(listeners)
        self._applying, self._proposing, self._preparing, self._computing, self._completing = (
            self._with(name) for name in ("apply", "propose", "prepare_draws", "compute", "complete"))

    def _with(self, name: str) -> tuple[SlotListener, ...]:
        """The listeners with a method of their own: a decode step calls no others."""
        own = getattr(SlotListener, name)
        return tuple([listener for listener in self._listeners if getattr(type(listener), name) is not own])

    def apply(self, plan: StepPlan) -> None:
        """Raises what a listener raised, once all have heard of the plan: the next plan must find their slots.

        Of several errors it raises the first BlocksLostError, after which there is no next plan.
        """
        failures = []
        for listener in self._listeners if plan.released_slots or plan.new_requests else self._applying:
            try:
                listener.apply(plan)
            except Exception as error:
                failures.append(error)
        if failures:
            raise next((error for error in failures if isinstance(error, BlocksLostError)), failures[0])

    def propose(self, plan: StepPlan, prepare_draws: PrepareDraws) -> StepPlan:
        for listener in self._proposing if plan.has_proposed else ():
            plan = listener.propose(plan, prepare_draws)
        return plan

    def prepare_draws(self, plan: StepPlan, num_drawn: NumDrawn, earlier: Earlier) -> None:
        for listener in self._preparing:
            listener.prepare_draws(plan, num_drawn, earlier)

    def compute(self, plan: StepPlan) -> None:
        for listener in self._computing:
            listener.compute(plan)

    def complete(self, plan: StepPlan, result: StepResult) -> StepResult:
        for listener in self._completing:
            result = listener.complete(plan, result)
        return result


class LoraSlots(SlotListener):
    """The adapter of every slot."""

    def __init__(self, adapters: LoraWeights, num_slots: int) -> None:
        self._adapters = adapters
        self._places = np.full(num_slots, NO_ADAPTER, np.int64)

    def join(self, request: NewRequest) -> None:
        adapter = request.spec.adapter
        self._places[request.slot] = self._adapters.place(adapter) if adapter else NO_ADAPTER

    def compute(self, plan: StepPlan) -> None:
        """Tell the products which adapter each token of the plan has; padding has none."""
        places = np.repeat(self._places[list(plan.slots)], plan.counts)
        self._adapters.rows.assign(np.pad(places, (0, sum(plan.padding)), constant_values=NO_ADAPTER).tolist())
