"""From a plan's rows to one flat, ragged batch.

The slot table mirrors on the runner's side what the scheduler keeps per slot: known tokens and block table.  It is
brought up to date by a plan's `leaves`, `joins` and `grants` alone, so a plan never carries what the runner has.

Padding becomes rows of its own behind the real ones.  They continue the row they pad, so they cost what a longer prompt
would, but they write to the null block and read from it, and nobody asks for what they yield:

    plan row     counts 3, padding 2
    batch        [ a0 a1 a2 ] ... [ p3 p4 ]     positions 3 and 4, every block of the second row is the null block
"""

from __future__ import annotations

from typing import NamedTuple

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
        null_block: a block that holds nobody's tokens.
    """

    def __init__(self, num_slots: int, max_tokens: int, block_size: int, null_block: int) -> None:
        self.block_size = block_size
        self._null_block = null_block
        self._tokens = np.zeros((num_slots, max_tokens), np.int64)
        self._tables = np.zeros((num_slots, -(-max_tokens // block_size)), np.int32)
        self._num_blocks = [0] * num_slots

    @property
    def num_slots(self) -> int:
        return len(self._tables)

    @property
    def table_width(self) -> int:
        """Blocks of the longest sequence."""
        return self._tables.shape[1]

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
        """The plan's rows laid end to end, then their padding.  `plan` has at least one row."""
        slots = np.array(plan.slots, np.int64)
        starts = np.array(plan.starts, np.int64)
        counts = np.array(plan.counts, np.int64)
        slot_of, positions = _laid_out(slots, starts, counts)
        blocks, offsets = np.divmod(positions, self.block_size)
        width = -(-int((starts + counts).max()) // self.block_size)
        rows = _Rows(
            self._tokens[slot_of, positions], positions, self._tables[slot_of, blocks] * np.int64(self.block_size)
            + offsets, counts, starts + counts, self._tables[slots, :width])
        sample_at = np.cumsum(counts)[list(plan.samples)] - 1
        if any(plan.padding):
            rows = rows.followed_by(self._padding(starts + counts, np.array(plan.padding, np.int64)))
        return rows.as_batch(sample_at)

    def _padding(self, starts: np.ndarray, counts: np.ndarray) -> _Rows:
        """Rows of `counts` tokens of nothing from positions `starts` on; rows without any are left out."""
        starts, counts = starts[counts > 0], counts[counts > 0]
        _, positions = _laid_out(starts, starts, counts)
        width = -(-int((starts + counts).max()) // self.block_size)
        return _Rows(
            np.zeros(len(positions), np.int64), positions,
            self._null_block * np.int64(self.block_size) + positions % self.block_size, counts, starts + counts,
            np.full((len(counts), width), self._null_block, np.int32))


class _Rows(NamedTuple):
    """Columns of a ragged batch in the making: three of `[tokens]`, then three of `[rows]`."""

    token_ids: np.ndarray
    positions: np.ndarray
    places: np.ndarray
    counts: np.ndarray
    contexts: np.ndarray
    tables: np.ndarray  # [rows, width]

    def followed_by(self, other: _Rows) -> _Rows:
        width = max(self.tables.shape[1], other.tables.shape[1])
        tables = [np.pad(rows.tables, ((0, 0), (0, width - rows.tables.shape[1]))) for rows in (self, other)]
        columns = [np.concatenate(pair) for pair in zip(self[:-1], other[:-1], strict=True)]
        return _Rows(*columns, np.concatenate(tables))

    def as_batch(self, sample_at: np.ndarray) -> RaggedBatch:
        query_starts = np.zeros(len(self.counts) + 1, np.int32)
        np.cumsum(self.counts, out=query_starts[1:])
        return RaggedBatch(
            token_ids=torch.from_numpy(self.token_ids),
            positions=torch.from_numpy(self.positions),
            slot_mapping=torch.from_numpy(self.places),
            query_starts=torch.from_numpy(query_starts),
            context_lens=torch.from_numpy(self.contexts.astype(np.int32)),
            block_tables=torch.from_numpy(self.tables),
            sample_at=torch.from_numpy(sample_at),
            max_query_len=int(self.counts.max()),
            max_context_len=int(self.contexts.max()),
        )


def _laid_out(slots: np.ndarray, starts: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Slot and position of every token, `[tokens]` each."""
    if int(counts.max()) == 1:
        return slots, starts
    firsts = np.cumsum(counts) - counts
    return np.repeat(slots, counts), np.arange(int(counts.sum())) + np.repeat(starts - firsts, counts)
