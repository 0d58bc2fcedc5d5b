"""A layer of compressed attention over a paged cache, for any kernels."""

from __future__ import annotations

import torch
from hypothesis import strategies as st
from torch import Tensor

from slotwise.compute.kernels.interface import (
    Kernels,
    LatentNorm,
    LatentShape,
    LayerCache,
    PackedLatentProducts,
    RaggedBatch,
)

SHAPE = LatentShape(3, 40, 8, 20, 12, 0.2, has_neighbors=True)
BLOCKS, POSITIONS = 160, 1500


class Layer:
    """A layer over a cache whose blocks hold NaN where nothing was written."""

    def __init__(self, kernels: Kernels, shape: LatentShape, kind: torch.dtype, block_size: int) -> None:
        self.kernels, self.shape, self.block_size, self.device = kernels, shape, block_size, kernels.device
        draw = self._draw = torch.Generator().manual_seed(0)
        self.key_up, self.value_up = (
            (torch.randn(shape.num_heads, size, shape.rank, generator=draw) / shape.rank**0.5).to(self.device, kind)
            for size in (shape.nope_dim, shape.value_dim))
        self.norm = LatentNorm((1 + 0.1 * torch.randn(shape.rank, generator=draw)).to(self.device), 1e-6)
        angles = torch.outer(torch.arange(POSITIONS).float(), 0.1 ** torch.arange(shape.rope_dim // 2))
        self.rotary = torch.cat((angles.cos(), angles.sin()), dim=1).to(self.device)
        self.products: PackedLatentProducts = kernels.latent_products(self.key_up, self.value_up)
        self.cache: LayerCache = kernels.allocate_cache(BLOCKS, block_size, shape, kind)
        for piece in kernels.cache_pieces(self.cache):
            piece.view(torch.int8).fill_(-1)
        self._kind = kind
        self._free = torch.randperm(BLOCKS, generator=draw).tolist()
        self._blocks: dict[int, list[int]] = {}
        self._done: dict[int, int] = {}

    def tokens(self, number: int) -> tuple[Tensor, Tensor]:
        """Queries and compressed keys and values of so many new tokens."""
        shape = self.shape
        sizes = shape.num_heads * shape.query_dim, shape.width
        query, compressed = (torch.randn(number, size, generator=self._draw).to(self.device, self._kind)
                             for size in sizes)
        return query, compressed

    def step(self, rows: list[tuple[int, tuple[Tensor, Tensor]]]) -> list[Tensor]:
        """Computes new tokens of each row, which is known by a number."""
        counts, positions, slots, contexts = [], [], [], []
        for row, (query, _) in rows:
            first, blocks = self._done.get(row, 0), self._blocks.setdefault(row, [])
            contexts.append(first + len(query))
            while len(blocks) * self.block_size < contexts[-1]:
                blocks.append(self._free.pop())
            places = range(first, contexts[-1])
            counts.append(len(query))
            positions += places
            slots += [blocks[at // self.block_size] * self.block_size + at % self.block_size for at in places]
            self._done[row] = contexts[-1]
        tables = torch.full((len(rows), max(len(self._blocks[row]) for row, _ in rows) + 1), -1, dtype=torch.int32)
        for table, (row, _) in zip(tables, rows, strict=True):
            table[: len(self._blocks[row])] = torch.tensor(self._blocks[row])
        starts = torch.tensor([0, *counts]).cumsum(0)
        batch = RaggedBatch(*(column.to(self.device) for column in (
            torch.zeros(len(positions), dtype=torch.int64), torch.tensor(positions), torch.tensor(slots), starts.int(),
            torch.tensor(contexts).int(), tables, starts[1:] - 1)), max(counts), max(contexts))
        query, compressed = (torch.cat([given[part] for _, given in rows]) for part in (0, 1))
        query = self.kernels.latent_store(
            query.clone(), compressed, self.rotary, batch, self.cache, self.shape, self.norm)
        out = self.kernels.latent_attention(query, self.cache, batch, self.shape, self.products)
        return list(out.split(counts))

    def run(self, chunks: list[list[int]]) -> Tensor:
        """Each list holds the tokens of a row's chunks, computed in as many steps; returns all results."""
        given, results = [[self.tokens(count) for count in counts] for counts in chunks], []
        for turn in range(max(map(len, chunks))):
            rows = [(row, parts[turn]) for row, parts in enumerate(given) if turn < len(parts)]
            results += self.step(rows)
        return torch.cat(results)


SHAPES = st.builds(
    lambda heads, rank, half, nope, value, neighbors: LatentShape(heads, rank, 2 * half, nope, value, 0.2, neighbors),
    st.integers(1, 5), st.sampled_from([5, 16, 40, 72]), st.integers(1, 9), st.integers(1, 70), st.integers(1, 70),
    st.booleans())
