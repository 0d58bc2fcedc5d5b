"""From a plan's rows to one flat, ragged batch.

The slot table mirrors on the runner's side what the scheduler keeps per slot: known tokens and block table.  It is
brought up to date by a plan's `leaves`, `joins` and `grants` alone, so a plan never carries what the runner has.
"""

from __future__ import annotations

import numpy as np
import torch

from slotwise.core.plan import StepPlan
from slotwise.kernels.base import RaggedBatch


class SlotTable:
    """Known tokens and block table of every slot.

    Args:
        num_slots: `max_num_seqs`.
        max_tokens: `max_model_len`.
        block_size: tokens a block holds.
    """

    def __init__(self, num_slots: int, max_tokens: int, block_size: int) -> None:
        self.block_size = block_size
        self._tokens = np.zeros((num_slots, max_tokens), np.int64)
        self._tables = np.zeros((num_slots, -(-max_tokens // block_size)), np.int32)
        self._num_blocks = [0] * num_slots

    def apply(self, plan: StepPlan) -> None:
        """Take in who left, who joined and which blocks were granted.  In the order of the plans, each exactly once."""
        for slot in plan.leaves:
            self._num_blocks[slot] = 0
        for join in plan.joins:
            self._tokens[join.slot, : len(join.tokens)] = join.tokens
        for slot, blocks in plan.grants:
            held = self._num_blocks[slot]
            self._tables[slot, held : held + len(blocks)] = blocks
            self._num_blocks[slot] = held + len(blocks)

    def append(self, slot: int, position: int, token: int) -> None:
        """A sampled token becomes the slot's known token at `position`."""
        if position < self._tokens.shape[1]:  # the last one a sequence may have is never computed
            self._tokens[slot, position] = token

    def gather(self, plan: StepPlan) -> RaggedBatch:
        """The plan's rows laid end to end.  `plan` has at least one row."""
        slots = np.array(plan.slots, np.int64)
        starts = np.array(plan.starts, np.int64)
        counts = np.array(plan.counts, np.int64)
        contexts = starts + counts
        query_starts = np.zeros(len(slots) + 1, np.int32)
        np.cumsum(counts, out=query_starts[1:])
        total, longest = int(query_starts[-1]), int(counts.max())
        if longest == 1:
            slot_of, positions = slots, starts
        else:
            slot_of = np.repeat(slots, counts)
            positions = np.arange(total) + np.repeat(starts - query_starts[:-1], counts)
        blocks, offsets = np.divmod(positions, self.block_size)
        most = int(contexts.max())
        width = -(-most // self.block_size)
        return RaggedBatch(
            token_ids=torch.from_numpy(self._tokens[slot_of, positions]),
            positions=torch.from_numpy(positions),
            slot_mapping=torch.from_numpy(self._tables[slot_of, blocks] * np.int64(self.block_size) + offsets),
            query_starts=torch.from_numpy(query_starts),
            context_lens=torch.from_numpy(contexts.astype(np.int32)),
            block_tables=torch.from_numpy(self._tables[slots, :width]),
            sample_at=torch.from_numpy(query_starts[1:][list(plan.samples)].astype(np.int64) - 1),
            max_query_len=longest,
            max_context_len=most,
        )
