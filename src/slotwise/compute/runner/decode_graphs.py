"""Decode steps, captured once and run again.

Most steps are alike: every row computes one token and samples the next.  They differ only in the contents of the batch.
So the batch has a fixed place in memory, and the kernels of a step are captured for each number of rows, or for some
numbers that padding rows fill up to; Python then starts a step of the model once instead of once for every kernel.
Nothing is captured before the first step that needs it, and that step is computed as it is captured: there is no wait
for the other sizes.

    rows              [ a  b  c ]
    captured for 4    [ a  b  c  · ]     · one token of context, in the null block

Drafts are further tokens of a row, with logits of their own.  Where kernels read from memory which tokens belong to a
row, a graph serves every step with as many rows and tokens, however the drafts are spread.

    captured for 3 rows and 5 tokens    [ a  b  b1 b2 c ], [ a  a1 b  b1 c ] and others
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from slotwise.compute.kernels.interface import Graph, GroupTables, Kernels, LayerCache, RaggedBatch
from slotwise.compute.model.decoder import StepDecoder
from slotwise.compute.runner.input_batch import SlotTable, is_plain_decode
from slotwise.compute.runner.staging import viewer
from slotwise.core.record import StepPlan

MAX_GRAPHS = 512  # at about 100 kB each
MAX_TOKENS = 128  # of a step with drafts


class _Size(NamedTuple):
    """What all steps that one graph serves have in common."""

    rows: int
    tokens: int
    context: int  # the longest
    is_adapted: bool  # a row has an adapter


def num_graphs(kernels: Kernels, max_rows: int, longest: int, *, drafts: bool, adapters: bool) -> int:
    """The most graphs that `DecodeGraphs` captures for up to `max_rows` rows of up to `longest` tokens of context."""
    counts = {(rows, rows) for rows in range(1, max_rows + 1)}
    if drafts and kernels.records_drafts:
        counts |= {(rows, tokens) for rows in range(1, min(max_rows, MAX_TOKENS) + 1)
                   for tokens in range(rows, MAX_TOKENS + 1)}
    sizes = set()
    for rows, tokens in counts:
        context = 1
        while context <= longest and (size := kernels.graph_size(tokens, context))[0]:
            sizes.add((rows + size[0] - tokens, *size))
            context = size[1] + 1
    return min(MAX_GRAPHS, (1 + adapters) * len(sizes))


class DecodeGraphs:
    """Captures and runs decode steps; one caller at a time.

    Args:
        caches: one per layer, made by the decoder's kernels.
        slots: known tokens and block tables.
        forward: what is captured, from a batch to its result; None: the logits of `decoder`.
    """

    def __init__(
        self, decoder: StepDecoder, caches: Sequence[LayerCache], slots: SlotTable,
        forward: Callable[[RaggedBatch], Tensor] | None = None,
    ) -> None:
        kernels = decoder.kernels
        self._forward = forward or (lambda batch: decoder.logits(decoder.hidden(batch, caches)))
        rows = max(kernels.graph_size(rows, 1)[0] for rows in range(1, slots.num_slots + 1))
        tokens = max(rows, MAX_TOKENS if kernels.records_drafts else 0)
        device = kernels.device
        self._decoder = decoder
        self._graphs: OrderedDict[_Size, Graph] = OrderedDict()
        self._can_record = True
        self._is_on_host = device.type == "cpu"
        self._slots = slots
        self._null_block = slots.null_block
        self._null_place = slots.null_block * slots.block_size
        self._max_rows = slots.num_slots
        groups = slots.num_groups
        self._group_of_layer = slots.group_of_layer
        # Token ids, positions, and cache places of each group.
        self._longs = torch.zeros(2 + groups, tokens, dtype=torch.int64, device=device)
        self._contexts = torch.zeros(rows, dtype=torch.int32, device=device)
        self._tables = torch.zeros(groups, rows, slots.table_width, dtype=torch.int32, device=device)
        self._starts = torch.zeros(rows + 1, dtype=torch.int32, device=device)
        self._view = viewer(device)
        self._views = self._view(self._longs), self._view(self._contexts), self._view(self._tables)
        self._view_of_starts = self._view(self._starts)
        self._every = self._view(torch.arange(tokens + 1, dtype=torch.int32, device=device))
        self._places = torch.arange(tokens, device=device)

    def repeat(self, plan: StepPlan) -> tuple[Tensor, Tensor] | None:
        """Logits of a plain decode step of a size that was captured, as `logits` returns them, and its targets.

        The batch is written where the graph reads it.  None for any other step, and for a batch that is not on the
        host.
        """
        if not self._is_on_host or not is_plain_decode(plan):
            return None
        rows, longest = len(plan.slots), max(plan.starts) + 1
        size = _Size(rows, *self._decoder.kernels.graph_size(rows, longest), self._decoder.is_adapted)
        graph = self._graphs.get(size)
        if graph is None or size.tokens != rows:
            return None
        self._decoder.reach(longest)
        targets = self._slots.write_decode(plan, *self._views)
        self._view_of_starts[: rows + 1] = self._every[: rows + 1]
        self._graphs.move_to_end(size)
        return graph.run(), targets

    def logits(self, batch: RaggedBatch) -> Tensor | None:
        """Logits of a step that only decodes, `[tokens, vocab]`, valid until the next; None for any other step.

        With `forward` its result in their place.
        """
        rows, tokens, kernels = len(batch.context_lens), len(batch.token_ids), self._decoder.kernels
        if not self._can_record or len(batch.sample_at) != tokens or rows > self._max_rows:
            return None
        if tokens > rows and not kernels.records_drafts:
            return None
        padded, longest = kernels.graph_size(tokens, batch.max_context_len)
        if not 0 < padded <= len(self._places):
            return None
        size = _Size(rows + padded - tokens, padded, longest, self._decoder.is_adapted)
        self._take_in(batch, size)
        graph = self._graphs.get(size)
        if graph is not None:
            self._graphs.move_to_end(size)
            logits = graph.run()
            return logits if padded == tokens else logits[:tokens]
        captured = self._record(size)
        return None if captured is None else captured[:tokens]

    def _take_in(self, batch: RaggedBatch, size: _Size) -> None:
        (rows, width), tokens = batch.block_tables.shape, len(batch.token_ids)
        view, (longs, contexts, tables), starts = self._view, self._views, self._view_of_starts
        groups = GroupTables(batch.slot_mapping, batch.block_tables), *batch.groups
        columns = batch.token_ids, batch.positions, *(group.slot_mapping for group in groups)
        for place, column in zip(longs, columns, strict=True):
            place[:tokens] = view(column)
        contexts[:rows] = view(batch.context_lens)
        starts[: rows + 1] = view(batch.query_starts)
        for table, group in zip(tables, groups, strict=True):
            table[:rows, :width] = view(group.block_tables)
        if size.rows > rows:  # clears what an earlier step left there
            longs[:2, tokens : size.tokens] = 0
            longs[2:, tokens : size.tokens] = self._null_place
            contexts[rows : size.rows] = 1
            starts[rows + 1 : size.rows + 1] = self._every[tokens + 1 : size.tokens + 1]
            tables[:, rows : size.rows, 0] = self._null_block

    def _record(self, size: _Size) -> Tensor | None:
        rows, tokens, longest, _ = size
        token_ids, positions, slot_mapping, *others = self._longs[:, :tokens]
        tables, *other_tables = self._tables[:, :rows]
        batch = RaggedBatch(
            token_ids, positions, slot_mapping, self._starts[: rows + 1], self._contexts[:rows], tables,
            self._places[:tokens], max_query_len=1 + tokens - rows, max_context_len=longest,
            groups=tuple(map(GroupTables, others, other_tables)), group_of_layer=self._group_of_layer)
        graph = self._decoder.kernels.record(lambda: self._forward(batch))
        if graph is None:
            self._can_record = False
            return None
        self._graphs[size] = graph
        if len(self._graphs) > MAX_GRAPHS:
            self._graphs.popitem(last=False)
        return graph.result
