"""From a plan's rows to one flat, ragged batch.

The slot table mirrors in the runner what the scheduler keeps per slot: known tokens and block table.  A plan's
`released_slots`, `new_requests`, `freed_blocks`, `new_blocks` and `drafts` alone update it, so a plan never carries
what the runner has.

Block tables are on the host; tokens are on the device.  A sampled token is written there and read by the next step in
the order in which work is enqueued, so a step can be built while the tokens it continues are still being computed, and
a plan made ahead refers to the tokens that are there when it runs.

Padding becomes rows of its own behind the real ones.  They continue the row they pad, so they cost what a longer prompt
would, but they write to the null block and read from it, and their results are not used:

    plan row     counts 3, padding 2
    batch        [ a0 a1 a2 ] ... [ p3 p4 ]     positions 3 and 4, every block of the second row is the null block
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from slotwise.core.step import PROPOSED, StepPlan
from slotwise.kernels.interface import RaggedBatch
from slotwise.runner.staging import sender, viewer

CPU = torch.device("cpu")


class Step(NamedTuple):
    """A plan on the device."""

    batch: RaggedBatch
    targets: Tensor  # [samples] int64, places in the token table of the tokens that follow each row of logits


class SlotTable:
    """Known tokens and block table of every slot.

    Args:
        num_slots: `max_num_seqs`.
        max_tokens: `max_model_len`.
        block_size: tokens a block holds.
        null_block: a block without any request's tokens.
        device: of batches.
    """

    def __init__(
        self, num_slots: int, max_tokens: int, block_size: int, null_block: int, device: torch.device = CPU,
    ) -> None:
        self.block_size = block_size
        self._block_size = np.int64(block_size)  # tables are int32, places in the cache may exceed it
        self.null_block = null_block
        self._stride = max_tokens + 1  # the last token of the longest sequence is written and never computed
        self._nothing = num_slots * self._stride  # the place of the padding token
        self._tokens = torch.zeros(self._nothing + 1, dtype=torch.int64, device=device)
        self._view = viewer(device)
        self._known = self._view(self._tokens)
        self._every = np.arange(num_slots + 1)
        self._tables = np.zeros((num_slots, -(-max_tokens // block_size)), np.int32)
        self._num_blocks = [0] * num_slots
        self._send = sender(device)

    @property
    def num_slots(self) -> int:
        return len(self._tables)

    @property
    def table_width(self) -> int:
        """Blocks of the longest sequence."""
        return self._tables.shape[1]

    def blocks(self, slot: int) -> np.ndarray:
        """The slot's block table, `[blocks]` int32: valid until the next plan is applied."""
        return self._tables[slot, : self._num_blocks[slot]]

    def apply(self, plan: StepPlan) -> None:
        """Apply released slots, new requests, blocks and drafts.  Call in the order of the plans, once per plan."""
        for slot in plan.released_slots:
            self._num_blocks[slot] = 0
        if plan.new_requests:
            known = self._send([np.array(join.tokens, np.int64) for join in plan.new_requests], ())
            for join, tokens in zip(plan.new_requests, known, strict=True):
                first = join.slot * self._stride
                self._tokens[first : first + len(tokens)] = tokens
        for slot, _, num_blocks in plan.freed_blocks:
            self._num_blocks[slot] -= num_blocks
        for slot, _, blocks in plan.new_blocks:
            held = self._num_blocks[slot]
            self._tables[slot, held : held + len(blocks)] = blocks
            self._num_blocks[slot] = held + len(blocks)
        if plan.drafts:
            self._draft(plan)

    def _draft(self, plan: StepPlan) -> None:
        """Write drafts behind the known tokens; those not accepted are overwritten by the tokens sampled instead."""
        rows = [row for row, drafts in enumerate(plan.drafts) if drafts and drafts[0] != PROPOSED]
        sent = self._send([np.array(plan.drafts[row], np.int64) for row in rows], ()) if rows else []
        for row, drafts in zip(rows, sent, strict=True):
            first = plan.slots[row] * self._stride + plan.starts[row] + 1
            self._tokens[first : first + len(drafts)] = drafts

    def append(self, targets: Tensor, tokens: Tensor) -> None:
        """Add sampled tokens to the known ones; a failed row has -1, and gets token 0, which is never returned."""
        self._known[self._view(targets)] = self._view(tokens.clamp(min=0))

    def learn(self, slot: int, start: int, tokens: Sequence[int]) -> None:
        """Make tokens known that another rank has sampled, at positions from `start` on."""
        first = slot * self._stride + start
        self._tokens[first : first + len(tokens)] = torch.tensor(tokens, dtype=torch.int64)

    def known(self, slot: int, start: int, end: int) -> Tensor:
        """The slot's tokens at positions from `start` until `end`, int64, on the device."""
        first = slot * self._stride
        return self._tokens[first + start : first + end]

    def gather(self, plan: StepPlan) -> Step:
        """The plan's rows laid end to end, then their padding.  `plan` has at least one row."""
        slots = np.array(plan.slots, np.int64)
        starts = np.array(plan.starts, np.int64)
        if max(plan.counts) == 1 == min(plan.num_logits) and not plan.padding:
            return self._decoded(slots, starts)
        counts = np.array(plan.counts, np.int64)
        slot_of, positions = _laid_out(slots, starts, counts)
        blocks, offsets = np.divmod(positions, self.block_size)
        width = -(-int((starts + counts).max()) // self.block_size)
        rows = _Rows(
            slot_of * self._stride + positions, positions, self._tables[slot_of, blocks] * self._block_size
            + offsets, counts, starts + counts, self._tables[slots, :width])
        wanted = np.array(plan.num_logits, np.int64)
        behind = np.repeat(np.cumsum(wanted), wanted) - 1 - np.arange(int(wanted.sum()))  # of its row, still to come
        sample_at = np.repeat(np.cumsum(counts), wanted) - 1 - behind
        targets = np.repeat(slots * self._stride + starts + counts, wanted) - behind
        if any(plan.padding):
            rows = rows.followed_by(self._padding(starts + counts, np.array(plan.padding, np.int64)))
        firsts = np.zeros(len(rows.counts) + 1, np.int32)
        np.cumsum(rows.counts, out=firsts[1:])
        return self._sent(rows, (int(rows.counts.max()), firsts), sample_at, targets)

    def _decoded(self, slots: np.ndarray, starts: np.ndarray) -> Step:
        """The batch of a plain decode step, which nearly every step is: each row has one token and samples the next."""
        contexts, blocks = starts + 1, starts // self.block_size
        sources = slots * self._stride + starts
        places = self._tables[slots, blocks] * self._block_size + (starts - blocks * self.block_size)
        width = -(-int(contexts.max()) // self.block_size)
        every = self._every[: len(slots) + 1]
        rows = _Rows(sources, starts, places, every[1:], contexts, self._tables[slots, :width])
        return self._sent(rows, (1, every.astype(np.int32)), every[:-1], sources + 1)

    def _sent(self, rows: _Rows, queries: tuple[int, np.ndarray], sample_at: np.ndarray, targets: np.ndarray) -> Step:
        """Args: queries: tokens of the longest row, and where each row starts."""
        longest, firsts = queries
        sources, positions, slot_mapping, sampled, places, query_starts, context_lens, tables = self._send(
            (rows.sources, rows.positions, rows.places, sample_at, targets),
            (firsts, rows.contexts.astype(np.int32), rows.tables))
        return Step(RaggedBatch(
            token_ids=self._tokens.index_select(0, sources), positions=positions, slot_mapping=slot_mapping,
            query_starts=query_starts, context_lens=context_lens, block_tables=tables, sample_at=sampled,
            max_query_len=longest, max_context_len=int(rows.contexts.max())), places)

    def _padding(self, starts: np.ndarray, counts: np.ndarray) -> _Rows:
        """Rows of `counts` padding tokens from positions `starts` on; rows without any are left out."""
        starts, counts = starts[counts > 0], counts[counts > 0]
        _, positions = _laid_out(starts, starts, counts)
        width = -(-int((starts + counts).max()) // self.block_size)
        return _Rows(
            np.full(len(positions), self._nothing), positions,
            self.null_block * self._block_size + positions % self.block_size, counts, starts + counts,
            np.full((len(counts), width), self.null_block, np.int32))


class _Rows(NamedTuple):
    """Columns of a ragged batch: three of `[tokens]`, then three of `[rows]`."""

    sources: np.ndarray  # indices in the token table
    positions: np.ndarray
    places: np.ndarray
    counts: np.ndarray
    contexts: np.ndarray
    tables: np.ndarray  # [rows, width]

    def followed_by(self, other: _Rows) -> _Rows:
        width = max(self.tables.shape[1], other.tables.shape[1])
        tables = [np.pad(rows.tables, ((0, 0), (0, width - rows.tables.shape[1]))) for rows in (self, other)]
        columns = [np.concatenate(pair) for pair in zip(self[:-1], other[:-1], strict=True)]
        return _Rows._make((*columns, np.concatenate(tables)))


def _laid_out(slots: np.ndarray, starts: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Slot and position of every token, `[tokens]` each."""
    if int(counts.max()) == 1:
        return slots, starts
    firsts = np.cumsum(counts) - counts
    return np.repeat(slots, counts), np.arange(int(counts.sum())) + np.repeat(starts - firsts, counts)
