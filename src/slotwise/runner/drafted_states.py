"""Recurrent states while drafts are verified: they advance once it is known which drafts are right.

A state that has advanced over a wrong draft cannot go back.  So a step leaves those of rows with drafts what they are
(`RaggedBatch.on_trial`), and keeps what each layer would advance them by; behind the verification they advance over the
accepted tokens.

    before the step    state s
    the step           state s            computes s + 1 and three drafts on trial
    one is accepted    state s + 2        over the last token and the draft that is right
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from slotwise.core.step import StepPlan
from slotwise.kernels.interface import GroupTables, LayerCache, RaggedBatch
from slotwise.model.cache_groups import by_layer
from slotwise.model.decoder import Advanced


class DraftedStates:
    """The states of a step's rows with drafts.

    Args:
        batch: of `plan`.
        caches: one per layer.

    Attributes:
        batch: as it is to be computed.
        advanced: takes the step's layers with recurrent states.
    """

    def __init__(self, plan: StepPlan, batch: RaggedBatch, caches: Sequence[LayerCache]) -> None:
        flags = [len(drafts) for drafts in plan.drafts]
        flags += [0] * (len(batch.context_lens) - len(flags))  # of padding
        self.batch = replace(batch, on_trial=torch.tensor(flags, dtype=torch.int32))
        self.advanced: list[Advanced] = []
        self._caches = caches
        self._rows = [row for row, drafts in enumerate(plan.drafts) if drafts]

    def settle(self, tokens: Sequence[tuple[int, ...]]) -> None:
        """Advance the states over what is accepted; `tokens` are those that each row of the plan yields."""
        rows = [row for row in self._rows if tokens[row]]
        if rows:
            batch, at = _part(self.batch, rows, [len(tokens[row]) for row in rows])
            views = by_layer(batch, len(self._caches))
            for layer, again in self.advanced:
                again(at, views[layer], self._caches[layer])


def _part(batch: RaggedBatch, rows: Sequence[int], counts: Sequence[int]) -> tuple[RaggedBatch, Tensor]:
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
