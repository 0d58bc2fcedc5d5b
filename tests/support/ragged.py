"""Drives a decoder without an engine: owns a cache whose blocks are dealt out of order, and builds ragged batches."""

from __future__ import annotations

import random

import torch

from slotwise.compute.kernels.interface import RaggedBatch
from slotwise.compute.model.decoder import Decoder

Row = tuple[int, list[int]]  # which sequence, and the tokens it is given in this step


class Driver:
    """Sequences over one paged cache.  Blocks are handed out shuffled, so that tables must be followed."""

    def __init__(self, decoder: Decoder, *, num_blocks: int = 256, block_size: int = 16) -> None:
        self.decoder = decoder
        self.block_size = block_size
        self._caches = [
            decoder.kernels.allocate_cache(num_blocks, block_size, shape, decoder.config.dtype)
            for shape in decoder.layer_shapes
        ]
        self._free = random.Random(0).sample(range(num_blocks), num_blocks)
        self._tables: dict[int, list[int]] = {}
        self._lengths: dict[int, int] = {}

    def step(self, rows: list[Row], sample_at: list[int] | None = None) -> torch.Tensor:
        """Runs one step; logits `[samples, vocab]` of each row's last token, or of the flat indices asked for."""
        batch = self._batch(rows, sample_at)
        with torch.inference_mode():
            return self.decoder.logits(self.decoder.hidden(batch, self._caches))

    def greedy(self, prompts: list[list[int]], max_tokens: int, chunk: int = 10**9) -> list[list[int]]:
        """Continues all prompts at once, each given at most `chunk` tokens a step: chunks and decodes mix freely."""
        known = [list(prompt) for prompt in prompts]
        done = [0] * len(prompts)
        while True:
            rows = [
                (i, tokens[done[i] : done[i] + chunk])
                for i, tokens in enumerate(known) if len(tokens) < len(prompts[i]) + max_tokens
            ]
            if not rows:
                return [tokens[len(prompt) :] for tokens, prompt in zip(known, prompts, strict=True)]
            for i, tokens in rows:
                done[i] += len(tokens)
            ends = _ends(rows)
            sampling = [(i, end) for (i, _), end in zip(rows, ends, strict=True) if done[i] == len(known[i])]
            logits = self.step(rows, [end for _, end in sampling])
            for (i, _), token in zip(sampling, logits.argmax(-1).tolist(), strict=True):
                known[i].append(token)

    def _batch(self, rows: list[Row], sample_at: list[int] | None) -> RaggedBatch:
        positions, slots, starts = [], [], [0]
        for i, tokens in rows:
            table, first = self._tables.setdefault(i, []), self._lengths.get(i, 0)
            length = self._lengths[i] = first + len(tokens)
            while len(table) * self.block_size < length:
                table.append(self._free.pop())
            positions += range(first, length)
            slots += [table[p // self.block_size] * self.block_size + p % self.block_size for p in range(first, length)]
            starts.append(starts[-1] + len(tokens))
        tables = [self._tables[i] for i, _ in rows]
        width = max(map(len, tables))
        contexts = [self._lengths[i] for i, _ in rows]
        return RaggedBatch(
            token_ids=torch.tensor([token for _, tokens in rows for token in tokens]),
            positions=torch.tensor(positions),
            slot_mapping=torch.tensor(slots),
            query_starts=torch.tensor(starts, dtype=torch.int32),
            context_lens=torch.tensor(contexts, dtype=torch.int32),
            block_tables=torch.tensor([table + [0] * (width - len(table)) for table in tables], dtype=torch.int32),
            sample_at=torch.tensor(_ends(rows) if sample_at is None else sample_at, dtype=torch.int64),
            max_query_len=max(len(tokens) for _, tokens in rows),
            max_context_len=max(contexts),
        )


def _ends(rows: list[Row]) -> list[int]:
    """Flat index of each row's last token."""
    ends, end = [], -1
    for _, tokens in rows:
        end += len(tokens)
        ends.append(end)
    return ends
