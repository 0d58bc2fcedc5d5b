"""Verification of drafts: a row yields the tokens that it would have sampled without them.

    positions    s      s+1    s+2                 last token, then drafts
    logits       ■      ■      ■
    sampled      d1     x                          d1 is the draft, x is not: two tokens, and the third is not drawn

The token behind each position is drawn with the request's own parameters, history and random number of that output, as
in a step without drafts.  While it equals the draft, the next position's logits are those of a step without drafts,
too, so every request's tokens are the same with and without.  All rows draw their first token together, then those
whose draft was right the second, and so on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from slotwise.core.step import StepPlan, StepResult, TokenLogprobs
from slotwise.runner.input_batch import SlotTable
from slotwise.runner.pooling import Pooled
from slotwise.runner.prompt_logprobs import Described
from slotwise.runner.sampling.params import Sampled, Sampling
from slotwise.runner.staging import event_of


class OfPrompts(NamedTuple):
    """What a step has computed of prompts beside their keys and values."""

    described: Sequence[Described] = ()
    pooled: Sequence[Pooled] = ()


NOTHING = OfPrompts()


class Outcome:
    """What the rows of a plan sampled, in one draw or in several."""

    def __init__(self, plan: StepPlan) -> None:
        self._plan = plan
        self.tokens: list[tuple[int, ...]] = [()] * plan.num_rows
        self._logprobs: list[tuple[TokenLogprobs, ...]] = [()] * plan.num_rows
        self._failed: list[int] = []

    def add(self, rows: Sequence[int], sampled: Sampled) -> None:
        """Add a draw: one token for each of `rows` of the plan.  A row that failed has no tokens, of any draw."""
        for row, token in zip(rows, sampled.tokens, strict=True):
            self.tokens[row] += (token,)
        for row, entry in zip(rows, sampled.logprobs, strict=False):
            if entry is not None:
                self._logprobs[row] += (entry,)
        for index in sampled.failed:
            self._failed.append(rows[index])
            self.tokens[rows[index]] = self._logprobs[rows[index]] = ()

    def result(self, of_prompts: OfPrompts = NOTHING) -> StepResult:
        """The step's result, with what it has computed of prompts."""
        logprobs = tuple(self._logprobs) if any(self._logprobs) else ()
        rows = range(self._plan.num_rows)
        found = {one.row: one.read() for one in of_prompts.described}
        prompts = tuple([found.get(row, ()) for row in rows]) if found else ()
        vectors = {one.row: one.read() for one in of_prompts.pooled}
        pooled = tuple([vectors.get(row, b"") for row in rows]) if vectors else ()
        failed = sorted([*self._failed, *(row for row, vector in vectors.items() if not vector)])
        return StepResult(self._plan.step, tuple(self.tokens), logprobs, tuple(failed), prompts, pooled)


def verify(
    plan: StepPlan, logits: Tensor, targets: Tensor, sampler: Sampling, slots: SlotTable, device: torch.device,
) -> Outcome:
    """Draw the tokens of a plan with drafts, and make them known.  Waits for the device.

    Args:
        logits: `[sum of num_logits, vocab]`, the rows of each row of the plan together.
        targets: `[sum of num_logits]`, the place in the token table of the token behind each.
    """
    firsts = (np.cumsum(plan.num_logits) - plan.num_logits).tolist()
    rows = [row for row, wanted in enumerate(plan.num_logits) if wanted]
    outcome, drawn = Outcome(plan), 0
    while rows:
        at = torch.tensor([firsts[row] + drawn for row in rows], device=device)
        ends = [plan.starts[row] + plan.counts[row] - plan.num_logits[row] + 1 + drawn for row in rows]
        draw = sampler.sample(logits.index_select(0, at), [plan.slots[row] for row in rows], ends)
        slots.append(targets.index_select(0, at), draw.column)
        done = event_of(device)
        done.record()
        done.synchronize()
        outcome.add(rows, draw.read())
        rows = [row for row in rows
                if len(plan.drafts[row]) > drawn and outcome.tokens[row][drawn:] == (plan.drafts[row][drawn],)]
        drawn += 1
    return outcome
