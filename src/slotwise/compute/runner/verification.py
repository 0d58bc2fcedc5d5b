"""Verification of drafts: a row yields the tokens that it would have sampled without them.

    positions    s      s+1    s+2                 last token, then drafts
    logits       ■      ■      ■
    sampled      d1     x                          d1 is the draft, x is not: two tokens, and the third is not drawn

The token behind each position is drawn with the request's own parameters, history and random number of that output, as
in a step without drafts.  While it equals the draft, the next position's logits are also those of a step without
drafts, so every request's tokens are the same with and without.  One draw serves all positions of most rows.  Where
earlier outputs change a request's logits, it serves the first position; the later ones follow, one draw each, while the
drafts are right.

A recurrent state that has advanced over a wrong draft cannot go back.  So a step leaves the states of rows with drafts
unchanged (`RaggedBatch.on_trial`) and keeps what each layer would advance them by; after the verification they advance
over the accepted tokens:

    before the step    state s
    the step           state s            computes s + 1 and three drafts on trial
    one is accepted    state s + 2        over the last token and the draft that is right
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from slotwise.compute.kernels.interface import GroupTables, LayerCache, RaggedBatch
from slotwise.compute.kernels.reference import FAILED
from slotwise.compute.model.layer_groups import by_layer
from slotwise.compute.model.layers.attention import StateAdvance
from slotwise.compute.runner.input_batch import SlotTable
from slotwise.compute.runner.prompt_results import PendingEntries, PendingVectors, workspace_rows
from slotwise.compute.runner.sampling.sampler import PendingTokens, SampledTokens, Sampling
from slotwise.compute.runner.staging import event_of, rows_of
from slotwise.core.record import StepPlan, StepResult, TokenLogprobs


class DraftedStates:
    """The states of a step's rows with drafts.

    Args:
        batch: of `plan`.
        caches: one per layer.

    Attributes:
        batch: as it is to be computed.
        advances: takes the step's layers with recurrent states.
    """

    def __init__(self, plan: StepPlan, batch: RaggedBatch, caches: Sequence[LayerCache]) -> None:
        flags = [len(drafts) for drafts in plan.drafts]
        flags += [0] * (len(batch.context_lens) - len(flags))  # of padding
        self.batch = replace(batch, on_trial=torch.tensor(flags, dtype=torch.int32))
        self.advances: list[StateAdvance] = []
        self._caches = caches
        self._rows = [row for row, drafts in enumerate(plan.drafts) if drafts]

    def settle(self, tokens: Sequence[tuple[int, ...]]) -> None:
        """Advance the states over the accepted tokens; `tokens` has what each row of the plan yields."""
        rows = [row for row in self._rows if tokens[row]]
        if rows:
            batch, at = _narrowed(self.batch, rows, [len(tokens[row]) for row in rows])
            views = by_layer(batch, len(self._caches))
            for layer, again in self.advances:
                again(at, views[layer], self._caches[layer])


def _narrowed(batch: RaggedBatch, rows: Sequence[int], counts: Sequence[int]) -> tuple[RaggedBatch, Tensor]:
    """The first `counts` tokens of `rows` of a batch, and their places in it."""
    firsts, every = batch.query_starts.tolist(), torch.tensor(rows)
    at = torch.cat([torch.arange(firsts[row], firsts[row] + count) for row, count in zip(rows, counts, strict=True)])
    dropped = [firsts[row + 1] - firsts[row] - count for row, count in zip(rows, counts, strict=True)]
    starts = torch.tensor([0, *counts]).cumsum(0)
    return replace(
        batch, token_ids=batch.token_ids[at], positions=batch.positions[at], slot_mapping=batch.slot_mapping[at],
        query_starts=starts.int(), context_lens=batch.context_lens[every] - torch.tensor(dropped, dtype=torch.int32),
        block_tables=batch.block_tables[every], sample_at=starts[1:] - 1, max_query_len=max(counts), on_trial=None,
        groups=tuple([GroupTables(group.slot_mapping[at], group.block_tables[every]) for group in batch.groups])), at


class OfPrompts(NamedTuple):
    """What a step has computed of prompts in addition to keys and values."""

    described: Sequence[PendingEntries] = ()
    pooled: Sequence[PendingVectors] = ()


NOTHING = OfPrompts()


class RowTokens:
    """What the rows of a plan sampled, in one draw or in several."""

    def __init__(self, plan: StepPlan) -> None:
        self._plan = plan
        self.tokens: list[tuple[int, ...]] = [()] * plan.num_rows
        self._logprobs: list[tuple[TokenLogprobs, ...]] = [()] * plan.num_rows
        self._failed: list[int] = []
        self._ended: set[int] = set()  # rows that take no further token

    def add(self, rows: Sequence[int], sampled: SampledTokens) -> None:
        """Add a draw: tokens of `rows` of the plan, each row's in order.

        A row takes no token after one that is not its draft.  Nor after a position without a sound distribution, which
        fails the row if it is the first, and else is left to the next step.
        """
        if not (self._plan.drafts or sampled.failed or sampled.logprobs):  # nearly every step
            for row, token in zip(rows, sampled.tokens, strict=True):
                self.tokens[row] = (token,)
            return
        logprobs = sampled.logprobs or [None] * len(rows)
        for row, token, entry in zip(rows, sampled.tokens, logprobs, strict=True):
            if self.is_open(row) and token == FAILED:
                self._ended.add(row)
                if not self.tokens[row]:
                    self._failed.append(row)
            elif self.is_open(row):
                drafts = self._plan.drafts[row] if self._plan.drafts else ()
                if drafts[len(self.tokens[row]) :][:1] != (token,):
                    self._ended.add(row)
                self.tokens[row] += (token,)
                self._logprobs[row] += () if entry is None else (entry,)

    def is_open(self, row: int) -> bool:
        """Whether all drafts so far were right, and a token may follow."""
        return row not in self._ended

    def result(self, of_prompts: OfPrompts = NOTHING) -> StepResult:
        """The step's result, with what it has computed of prompts."""
        logprobs = tuple(self._logprobs) if any(self._logprobs) else ()
        rows = range(self._plan.num_rows)
        found = {one.row: one.read() for one in of_prompts.described}
        prompts = tuple([found.get(row, ()) for row in rows]) if found else ()
        vectors: dict[int, bytes] = {}
        for some in of_prompts.pooled:
            vectors |= some.read()
        pooled = tuple([vectors.get(row, b"") for row in rows]) if vectors else ()
        failed = sorted([*self._failed, *(row for row, vector in vectors.items() if not vector)])
        return StepResult(self._plan.step, tuple(self.tokens), logprobs, tuple(failed), prompts, pooled)


def verify(
    plan: StepPlan, logits: Tensor, targets: Tensor, sampler: Sampling, slots: SlotTable, device: torch.device,
) -> RowTokens:
    """Draw the tokens of a plan with drafts, and make them known.  Waits for the device.

    Args:
        logits: `[sum of num_logits, vocab]`, the rows of each row of the plan together.
        targets: `[sum of num_logits]`, the place in the token table of the token behind each.
    """
    firsts = (np.cumsum(plan.num_logits) - plan.num_logits).tolist()
    wanted = [(row, positions) for row, positions in enumerate(plan.num_logits) if positions]
    in_order = {row for row, positions in wanted if positions > 1 and sampler.draws_in_order(plan.slots[row])}
    draws = [(row, place) for row, positions in wanted for place in range(1 if row in in_order else positions)]
    outcome, at_a_time = RowTokens(plan), workspace_rows(slots.num_slots)

    def enqueue(part: Sequence[tuple[int, int]]) -> PendingTokens:
        at = [firsts[row] + place for row, place in part]
        ends = [plan.starts[row] + plan.counts[row] - plan.num_logits[row] + 1 + place for row, place in part]
        drawn = sampler.sample(rows_of(logits, at), [plan.slots[row] for row, _ in part], ends)
        slots.append(rows_of(targets, at), drawn.column)  # what follows a wrong draft is overwritten in time
        return drawn

    while draws:
        parts = [draws[first : first + at_a_time] for first in range(0, len(draws), at_a_time)]
        results = [enqueue(part) for part in parts]
        done = event_of(device)
        done.record()
        done.synchronize()
        for part, drawn in zip(parts, results, strict=True):
            outcome.add([row for row, _ in part], drawn.read())
        draws = [(row, place + 1) for row, place in draws if row in in_order and outcome.is_open(row)]
    return outcome
