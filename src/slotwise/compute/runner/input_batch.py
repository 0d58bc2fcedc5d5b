"""From a plan's rows to one flat, ragged batch.

The slot table mirrors in the runner what the scheduler keeps per slot: known tokens and block table.  A plan's
`released_slots`, `new_requests`, `freed_blocks`, `expired_blocks`, `new_blocks` and `drafts` alone update it, so a plan
never carries what the runner has.

Block tables are on the host; tokens are on the device.  A sampled token is written there and read by the next step in
the order in which work is enqueued, so a step can be built while the tokens it continues are still being computed, and
a plan made ahead refers to the tokens that are there when it runs.

Each cache group has block tables of its own.  Entries that are behind a group's window name the null block.

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

from slotwise.compute.kernels.interface import GroupTables, RaggedBatch
from slotwise.compute.runner.slots import SlotListener
from slotwise.compute.runner.staging import sender, viewer
from slotwise.core.record import FREED, PROPOSED, StepPlan

CPU = torch.device("cpu")


def is_plain_decode(plan: StepPlan) -> bool:
    """Whether each row of a step has one token and samples the next, as in nearly every step."""
    return max(plan.counts) == 1 == min(plan.num_logits) and not plan.padding


class GatheredBatch(NamedTuple):
    """A plan on the device."""

    batch: RaggedBatch
    targets: Tensor  # [samples] int64, where in the token table the token after each row of logits belongs


class SlotTable(SlotListener):
    """Known tokens and block table of every slot.

    Args:
        num_slots: `max_num_seqs`.
        max_tokens: `max_model_len`.
        block_size: tokens a block holds.
        null_block: a block without any request's tokens.
        device: of batches.
        group_of_layer: the cache group of each layer; (): there is one group.
    """

    def __init__(
        self, num_slots: int, max_tokens: int, block_size: int, null_block: int, device: torch.device = CPU,
        group_of_layer: tuple[int, ...] = (),
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
        self.num_groups = max(group_of_layer, default=0) + 1
        self.group_of_layer = group_of_layer if self.num_groups > 1 else ()
        self._tables = np.zeros((self.num_groups, num_slots, -(-max_tokens // block_size)), np.int32)
        self._ends = np.zeros((self.num_groups, num_slots), np.int64)  # blocks in the tables, with freed ones
        self._firsts = np.zeros((self.num_groups, num_slots), np.int64)  # freed blocks at their beginning
        self._send = sender(device)

    @property
    def num_slots(self) -> int:
        return self._tables.shape[1]

    @property
    def table_width(self) -> int:
        """Blocks of the longest sequence."""
        return self._tables.shape[2]

    def blocks(self, slot: int) -> np.ndarray:
        """The slot's block table in the first group, `[blocks]` int32: valid until the next plan is applied."""
        return self._tables[0, slot, : self._ends[0, slot]]

    def apply(self, plan: StepPlan) -> None:
        """Apply released slots, new requests, blocks and drafts.  Call in the order of the plans, once per plan."""
        for slot in plan.released_slots:
            self._ends[:, slot] = self._firsts[:, slot] = 0
        if plan.new_requests:
            known = self._send([np.array(request.tokens, np.int64) for request in plan.new_requests], ())
            for request, tokens in zip(plan.new_requests, known, strict=True):
                first = request.slot * self._stride
                self._known[first : first + len(tokens)] = self._view(tokens)
        for slot, group, num_blocks in plan.freed_blocks:
            self._ends[group, slot] -= num_blocks
        for slot, group, num_blocks in plan.expired_blocks:
            self._expire(slot, group, num_blocks)
        for slot, group, blocks in plan.new_blocks:
            held = self._ends[group, slot]
            self._tables[group, slot, held : held + len(blocks)] = blocks
            self._ends[group, slot] = held + len(blocks)
            if blocks[0] == FREED:
                self._expire(slot, group, blocks.count(FREED))
        if plan.drafts:
            self._draft(plan)

    def _expire(self, slot: int, group: int, num_blocks: int) -> None:
        """The first blocks that are left in a table are freed."""
        first = self._firsts[group, slot]
        self._tables[group, slot, first : first + num_blocks] = self.null_block
        self._firsts[group, slot] = first + num_blocks

    def _draft(self, plan: StepPlan) -> None:
        """Write drafts after the known tokens; sampled tokens overwrite the drafts that are not accepted."""
        rows = [row for row, drafts in enumerate(plan.drafts) if drafts and drafts[0] != PROPOSED]
        sent = self._send([np.array(plan.drafts[row], np.int64) for row in rows], ()) if rows else []
        for row, drafts in zip(rows, sent, strict=True):
            first = plan.slots[row] * self._stride + plan.starts[row] + 1
            self._tokens[first : first + len(drafts)] = drafts

    def append(self, targets: Tensor, tokens: Tensor) -> None:
        """Add sampled tokens to the known ones; a failed row has -1, and gets token 0, which is never returned."""
        self._known[self._view(targets)] = self._view(tokens).clip(min=0)

    def learn(self, slot: int, start: int, tokens: Sequence[int]) -> None:
        """Make tokens known that another rank has sampled, at positions from `start` on."""
        first = slot * self._stride + start
        self._tokens[first : first + len(tokens)] = torch.tensor(tokens, dtype=torch.int64)

    def known(self, slot: int, start: int, end: int) -> Tensor:
        """The slot's tokens at positions from `start` until `end`, int64, on the device."""
        first = slot * self._stride
        return self._tokens[first + start : first + end]

    def gather(self, plan: StepPlan) -> GatheredBatch:
        """The plan's rows laid end to end, then their padding.  `plan` has at least one row."""
        if is_plain_decode(plan):
            return self._decoded(plan)
        slots = np.array(plan.slots, np.int64)
        starts = np.array(plan.starts, np.int64)
        counts = np.array(plan.counts, np.int64)
        slot_of, positions = _laid_out(slots, starts, counts)
        blocks, offsets = np.divmod(positions, self.block_size)
        width = -(-int((starts + counts).max()) // self.block_size)
        rows = _BatchColumns(
            slot_of * self._stride + positions, positions,
            self._tables[:, slot_of, blocks] * self._block_size + offsets, counts, starts + counts,
            self._tables[:, slots, :width])
        wanted = np.array(plan.num_logits, np.int64)
        behind = np.repeat(np.cumsum(wanted), wanted) - 1 - np.arange(int(wanted.sum()))  # of its row, still to come
        sample_at = np.repeat(np.cumsum(counts), wanted) - 1 - behind
        targets = np.repeat(slots * self._stride + starts + counts, wanted) - behind
        if any(plan.padding):
            rows = rows.followed_by(self._padding(starts + counts, np.array(plan.padding, np.int64)))
        firsts = np.zeros(len(rows.counts) + 1, np.int32)
        np.cumsum(rows.counts, out=firsts[1:])
        return self._sent(rows, (int(rows.counts.max()), firsts), sample_at, targets)

    def _decoded(self, plan: StepPlan) -> GatheredBatch:
        """The batch of a plain decode step."""
        rows = self._decode_columns(plan)
        every = self._every[: len(plan.slots) + 1]
        return self._sent(rows, (1, every.astype(np.int32)), every[:-1], rows.sources + 1)

    def write_decode(self, plan: StepPlan, longs: np.ndarray, contexts: np.ndarray, tables: np.ndarray) -> Tensor:
        """Write the batch of a plain decode step over the first rows of arrays on the host; returns the targets.

        Args:
            longs: `[2 + groups, rows]`, token ids, positions, and places in the cache of each group.
            contexts: `[rows]`.
            tables: `[groups, rows, blocks]`.
        """
        rows, number = self._decode_columns(plan), len(plan.slots)
        longs[0, :number] = self._known[rows.sources]
        longs[1, :number] = rows.positions
        longs[2:, :number] = rows.places
        contexts[:number] = rows.contexts
        tables[:, :number, : rows.tables.shape[2]] = rows.tables
        return torch.from_numpy(rows.sources + 1)

    def _decode_columns(self, plan: StepPlan) -> _BatchColumns:
        slots, starts = np.array(plan.slots, np.int64), np.array(plan.starts, np.int64)
        blocks, width = starts // self._block_size, max(plan.starts) // self.block_size + 1
        offsets = starts - blocks * self._block_size
        return _BatchColumns(
            slots * self._stride + starts, starts, self._tables[:, slots, blocks] * self._block_size + offsets,
            self._every[1 : len(slots) + 1], starts + 1, self._tables[:, slots, :width])

    def _sent(
        self, rows: _BatchColumns, queries: tuple[int, np.ndarray], sample_at: np.ndarray, targets: np.ndarray,
    ) -> GatheredBatch:
        """Args: queries: tokens of the longest row, and where each row starts."""
        longest, firsts = queries
        all_places, all_tables = np.ascontiguousarray(rows.places), np.ascontiguousarray(rows.tables)
        sources, positions, sampled, places, *columns = self._send(
            (rows.sources, rows.positions, sample_at, targets, *all_places),
            (firsts, rows.contexts.astype(np.int32), *all_tables))
        slot_mapping, *others = columns[: self.num_groups]
        query_starts, context_lens, tables, *other_tables = columns[self.num_groups :]
        return GatheredBatch(RaggedBatch(
            token_ids=self._tokens.index_select(0, sources), positions=positions, slot_mapping=slot_mapping,
            query_starts=query_starts, context_lens=context_lens, block_tables=tables, sample_at=sampled,
            max_query_len=longest, max_context_len=int(rows.contexts.max()),
            groups=tuple(map(GroupTables, others, other_tables)), group_of_layer=self.group_of_layer), places)

    def _padding(self, starts: np.ndarray, counts: np.ndarray) -> _BatchColumns:
        """Rows of `counts` padding tokens from positions `starts` on; rows without any are left out."""
        starts, counts = starts[counts > 0], counts[counts > 0]
        _, positions = _laid_out(starts, starts, counts)
        width = -(-int((starts + counts).max()) // self.block_size)
        places = self.null_block * self._block_size + positions % self.block_size
        return _BatchColumns(
            np.full(len(positions), self._nothing), positions, np.tile(places, (self.num_groups, 1)), counts,
            starts + counts, np.full((self.num_groups, len(counts), width), self.null_block, np.int32))


class _BatchColumns(NamedTuple):
    """Columns of a ragged batch: three with an entry for each token, then three with one for each row."""

    sources: np.ndarray  # indices in the token table
    positions: np.ndarray
    places: np.ndarray  # [groups, tokens], in the cache
    counts: np.ndarray
    contexts: np.ndarray
    tables: np.ndarray  # [groups, rows, width]

    def followed_by(self, other: _BatchColumns) -> _BatchColumns:
        width = max(self.tables.shape[2], other.tables.shape[2])
        tables = [np.pad(each, ((0, 0), (0, 0), (0, width - each.shape[2]))) for each in (self.tables, other.tables)]
        sources, positions, places, counts, contexts = (
            np.concatenate(pair, axis=-1) for pair in zip(self[:-1], other[:-1], strict=True))
        return _BatchColumns(sources, positions, places, counts, contexts, np.concatenate(tables, axis=1))


def _laid_out(slots: np.ndarray, starts: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Slot and position of every token, `[tokens]` each."""
    if int(counts.max()) == 1:
        return slots, starts
    firsts = np.cumsum(counts) - counts
    return np.repeat(slots, counts), np.arange(int(counts.sum())) + np.repeat(starts - firsts, counts)
