"""Decode steps, captured once and run again.

Most steps are alike: every row computes one token and samples the next.  They differ only in the contents of the batch.
So the batch has a fixed place in memory, and the kernels of a step are captured for each number of rows, or for some
numbers that padding rows fill up to; Python then starts a step of the model once instead of once for every kernel.
Nothing is captured before the first step that needs it, and that step is computed as it is captured: there is no wait
for the other sizes.

    rows              [ a  b  c ]
    captured for 4    [ a  b  c  · ]     · one token of context, in the null block
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import torch
from torch import Tensor

from slotwise.kernels.interface import Graph, LayerCache, RaggedBatch
from slotwise.model.decoder import Decoder
from slotwise.runner.input_batch import SlotTable
from slotwise.runner.staging import viewer

MAX_GRAPHS = 512  # at about 100 kB each


class DecodeGraphs:
    """Captures and runs decode steps; one caller at a time.

    Args:
        caches: one per layer, made by the decoder's kernels.
        slots: gives the number of slots and the null block.
    """

    def __init__(self, decoder: Decoder, caches: Sequence[LayerCache], slots: SlotTable) -> None:
        kernels = decoder.kernels
        rows = max(kernels.graph_size(rows, 1)[0] for rows in range(1, slots.num_slots + 1))
        device = kernels.device
        self._decoder = decoder
        self._caches = caches
        self._graphs: OrderedDict[tuple[int, int], Graph] = OrderedDict()
        self._can_record = True
        self._null_block = slots.null_block
        self._null_place = slots.null_block * slots.block_size
        self._max_rows = slots.num_slots
        self._longs = torch.zeros(3, rows, dtype=torch.int64, device=device)  # token ids, positions, cache places
        self._contexts = torch.zeros(rows, dtype=torch.int32, device=device)
        self._tables = torch.zeros(rows, slots.table_width, dtype=torch.int32, device=device)
        self._view = viewer(device)
        self._views = self._view(self._longs), self._view(self._contexts), self._view(self._tables)
        self._starts = torch.arange(rows + 1, dtype=torch.int32, device=device)
        self._places = torch.arange(rows, device=device)

    def logits(self, batch: RaggedBatch) -> Tensor | None:
        """Logits of a decode step, `[rows, vocab]`, valid until the next; None for any other step."""
        rows = len(batch.context_lens)
        if not self._can_record or batch.max_query_len > 1 or len(batch.sample_at) != rows or rows > self._max_rows:
            return None
        size = self._decoder.kernels.graph_size(rows, batch.max_context_len)
        if not size[0]:
            return None
        self._take_in(batch, size[0])
        graph = self._graphs.get(size)
        if graph is not None:
            self._graphs.move_to_end(size)
            logits = graph.run()
            return logits if size[0] == rows else logits[:rows]
        captured = self._record(size)
        return None if captured is None else captured[:rows]

    def _take_in(self, batch: RaggedBatch, padded: int) -> None:
        rows, width = batch.block_tables.shape
        view, (longs, contexts, tables) = self._view, self._views
        for place, column in zip(longs, (batch.token_ids, batch.positions, batch.slot_mapping), strict=True):
            place[:rows] = view(column)
        contexts[:rows] = view(batch.context_lens)
        tables[:rows, :width] = view(batch.block_tables)
        if padded > rows:  # clears what an earlier step left there
            longs[:2, rows:padded] = 0
            longs[2, rows:padded] = self._null_place
            contexts[rows:padded] = 1
            tables[rows:padded, 0] = self._null_block

    def _record(self, size: tuple[int, int]) -> Tensor | None:
        rows, longest = size
        token_ids, positions, slot_mapping = self._longs[:, :rows]
        batch = RaggedBatch(
            token_ids, positions, slot_mapping, self._starts[: rows + 1], self._contexts[:rows], self._tables[:rows],
            self._places[:rows], max_query_len=1, max_context_len=longest)
        decoder = self._decoder
        graph = decoder.kernels.record(lambda: decoder.logits(decoder.hidden(batch, self._caches)))
        if graph is None:
            self._can_record = False
            return None
        self._graphs[size] = graph
        if len(self._graphs) > MAX_GRAPHS:
            self._graphs.popitem(last=False)
        return graph.result
