"""Decode steps, recorded once and run again.

Most steps are alike: every row computes one token and samples the next.  All that differs from one to another is what
stands in the batch.  So the batch has a place of its own in memory, and the kernels of a step are recorded for each
number of rows; Python then starts a step of the model once instead of once for every kernel.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import torch
from torch import Tensor

from slotwise.kernels.base import LayerCache, RaggedBatch, Recording
from slotwise.model.decoder import Decoder

MAX_ROWS = 128  # in larger steps starting the kernels is nothing beside running them
MAX_RECORDINGS = 512  # at about 100 kB
SHORTEST = 256  # tokens of context that recordings make room for, then twice as many, and so on


class DecodeSteps:
    """Records and runs decode steps; one caller at a time.

    Args:
        caches: one a layer, made by the decoder's kernels.
        num_slots: most rows of a step.
        table_width: blocks of the longest sequence.
    """

    def __init__(self, decoder: Decoder, caches: Sequence[LayerCache], num_slots: int, table_width: int) -> None:
        rows = min(num_slots, MAX_ROWS)
        self._decoder = decoder
        self._caches = caches
        self._recordings: OrderedDict[tuple[int, int], Recording] = OrderedDict()
        self._max_rows = rows
        self._longs = torch.zeros(3, rows, dtype=torch.int64)  # token ids, positions, places in the cache
        self._contexts = torch.zeros(rows, dtype=torch.int32)
        self._tables = torch.zeros(rows, table_width, dtype=torch.int32)
        self._starts = torch.arange(rows + 1, dtype=torch.int32)
        self._places = torch.arange(rows)

    def logits(self, batch: RaggedBatch) -> Tensor | None:
        """Logits of a decode step, `[rows, vocab]`, good until the next; None for any other step."""
        rows = len(batch.context_lens)
        if batch.max_query_len > 1 or len(batch.sample_at) != rows or rows > self._max_rows:
            return None
        self._take_in(batch)
        longest = max(SHORTEST, 1 << (batch.max_context_len - 1).bit_length())
        recording = self._recordings.get((rows, longest))
        if recording is not None:
            self._recordings.move_to_end((rows, longest))
            return recording.run()
        return self._record(rows, longest)

    def _take_in(self, batch: RaggedBatch) -> None:
        rows, width = batch.block_tables.shape
        for place, column in zip(self._longs, (batch.token_ids, batch.positions, batch.slot_mapping), strict=True):
            place[:rows] = column
        self._contexts[:rows] = batch.context_lens
        self._tables[:rows, :width] = batch.block_tables

    def _record(self, rows: int, longest: int) -> Tensor | None:
        token_ids, positions, slot_mapping = self._longs[:, :rows]
        batch = RaggedBatch(
            token_ids, positions, slot_mapping, self._starts[: rows + 1], self._contexts[:rows], self._tables[:rows],
            self._places[:rows], max_query_len=1, max_context_len=longest)
        decoder = self._decoder
        recording = decoder.kernels.record(lambda: decoder.logits(decoder.hidden(batch, self._caches)))
        if recording is None:
            self._max_rows = 0
            return None
        self._recordings[rows, longest] = recording
        if len(self._recordings) > MAX_RECORDINGS:
            self._recordings.popitem(last=False)
        return recording.result
