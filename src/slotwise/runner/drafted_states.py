"""Recurrent states while drafts are verified: what drafts that turn out wrong did to them is undone.

A step advances a row's states over its drafts, too (`kernels/delta.py`).  The states before it are copied, and what
each layer advanced them by is kept; where not all drafts are accepted, the copies are put back and advanced again, over
the accepted tokens alone.

    before the step    state s            copied
    the step           state s + 1 + 3    three drafts
    one is accepted    state s            put back
                       state s + 2        over the last token and the draft that is right
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from slotwise.core.step import StepPlan
from slotwise.kernels.interface import GroupTables, LayerCache, RaggedBatch
from slotwise.model.cache_groups import by_layer
from slotwise.model.decoder import Advanced, Decoder


class DraftedStates:
    """The states of a step's rows with drafts.

    Args:
        caches: one per layer.
        batch: of `plan`.
    """

    def __init__(self, decoder: Decoder, caches: Sequence[LayerCache], plan: StepPlan, batch: RaggedBatch,
                 block_size: int) -> None:
        self.advanced: list[Advanced] = []  # by the layers of the step
        self._decoder = decoder
        self._caches = caches
        self._plan = plan
        self._batch = batch
        self._last = {row: (plan.starts[row] - 1) // block_size  # in a row's table: the block of the token before it
                      for row, drafts in enumerate(plan.drafts) if drafts}
        self._copies = {layer: [piece.index_select(0, blocks) for piece in self._pieces(layer)]
                        for layer, blocks in self._blocks([*self._last]).items()}

    def settle(self, tokens: Sequence[tuple[int, ...]]) -> None:
        """Undo what wrong drafts did; `tokens` are those that each row of the plan yields."""
        wrong = [row for row in self._last if 0 < len(tokens[row]) < self._plan.counts[row]]
        if not wrong:
            return
        places = torch.tensor([[*self._last].index(row) for row in wrong])
        for layer, blocks in self._blocks(wrong).items():
            for piece, copy in zip(self._pieces(layer), self._copies[layer], strict=True):
                piece.index_copy_(0, blocks, copy.index_select(0, places))
        batch, at = _part(self._batch, wrong, [len(tokens[row]) for row in wrong])
        views = by_layer(batch, self._decoder.config.num_layers)
        for one in self.advanced:
            one.again(at, views[one.layer], self._caches[one.layer])

    def _blocks(self, rows: Sequence[int]) -> dict[int, Tensor]:
        """By layer with a state, the blocks that held the states of `rows` before the step."""
        views, config = by_layer(self._batch, self._decoder.config.num_layers), self._decoder.config
        entries = rows, [self._last[row] for row in rows]
        return {layer: view.block_tables[entries].long() for layer, view in enumerate(views) if config.has_state(layer)}

    def _pieces(self, layer: int) -> tuple[Tensor, ...]:
        return self._decoder.kernels.cache_pieces(self._caches[layer])


def _part(batch: RaggedBatch, rows: Sequence[int], counts: Sequence[int]) -> tuple[RaggedBatch, Tensor]:
    """The first `counts` tokens of `rows` of a batch, and their places in it."""
    firsts, every = batch.query_starts.tolist(), torch.tensor(rows)
    at = torch.cat([torch.arange(firsts[row], firsts[row] + count) for row, count in zip(rows, counts, strict=True)])
    dropped = [firsts[row + 1] - firsts[row] - count for row, count in zip(rows, counts, strict=True)]
    starts = torch.tensor([0, *counts]).cumsum(0)
    return replace(
        batch, token_ids=batch.token_ids[at], positions=batch.positions[at], slot_mapping=batch.slot_mapping[at],
        query_starts=starts.int(), context_lens=batch.context_lens[every] - torch.tensor(dropped, dtype=torch.int32),
        block_tables=batch.block_tables[every], sample_at=starts[1:] - 1, max_query_len=max(counts),
        groups=tuple([GroupTables(group.slot_mapping[at], group.block_tables[every]) for group in batch.groups])), at
