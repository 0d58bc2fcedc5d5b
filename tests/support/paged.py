"""Ragged steps over a paged cache, for holding one implementation against another."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

from slotwise.compute.kernels.interface import AttentionShape, Kernels, LayerCache, RaggedBatch

Row = tuple[int, int]  # query_len, context_len
HEAD_DIMS = (16, 24, 32, 64, 80, 96, 128)


@dataclass(frozen=True)
class Layer:
    """A geometry and everything one layer's attention would be given."""

    shape: AttentionShape
    block_size: int
    kind: torch.dtype
    rows: list[Row]
    seed: int = 0
    has_sinks: bool = False

    @property
    def sinks(self) -> Tensor | None:
        """One for each head, some far above the scores and some far below."""
        return torch.linspace(-20.0, 20.0, self.shape.num_heads) if self.has_sinks else None

    @property
    def biases(self) -> Tensor | None:
        """ALiBi's: of each head a slope times the position."""
        longest = max(context for _, context in self.rows)
        slopes = torch.linspace(0.01, 0.5, self.shape.num_heads)
        return slopes[:, None] * torch.arange(longest) if self.shape.has_biases else None

    @property
    def num_blocks(self) -> int:
        return 3 + sum(-(-context // self.block_size) for _, context in self.rows)

    def tables(self) -> Tensor:
        """Shuffled blocks; places past a row's context point at a block of nobody's."""
        order = torch.randperm(self.num_blocks, generator=torch.Generator().manual_seed(self.seed)).int()
        width = 2 + max(-(-context // self.block_size) for _, context in self.rows)
        tables = order[-1].repeat(len(self.rows), width)
        taken = 0
        for row, (_, context) in enumerate(self.rows):
            count = -(-context // self.block_size)
            tables[row, :count] = order[taken : taken + count]
            taken += count
        return tables

    def batch(self, rows: list[Row] | None = None, keep: list[int] | None = None) -> RaggedBatch:
        """The step of `rows` (the layer's own unless given), or of those in `keep` alone, in that order."""
        tables = self.tables()
        chosen = keep if keep is not None else range(len(self.rows))
        rows = [(rows or self.rows)[i] for i in chosen]
        tables = tables[list(chosen)]
        positions = [torch.arange(context - query, context) for query, context in rows]
        slots = [
            table[place // self.block_size].long() * self.block_size + place % self.block_size
            for table, place in zip(tables, positions, strict=True)
        ]
        starts = torch.tensor([0, *(query for query, _ in rows)]).cumsum(0)
        return RaggedBatch(
            token_ids=torch.zeros(int(starts[-1]), dtype=torch.int64),
            positions=torch.cat(positions),
            slot_mapping=torch.cat(slots),
            query_starts=starts.int(),
            context_lens=torch.tensor([context for _, context in rows]).int(),
            block_tables=tables,
            sample_at=starts[1:] - 1,
            max_query_len=max(query for query, _ in rows),
            max_context_len=max(context for _, context in rows),
        )

    def random(self, *size: int) -> Tensor:
        """The same numbers for the same seed and size."""
        return torch.randn(*size, generator=torch.Generator().manual_seed(self.seed)).to(self.kind)

    def filled_cache(self, kernels: Kernels, poison: float = 0.0) -> LayerCache:
        """A cache that holds every row's whole context, and `poison` in every place that belongs to nobody."""
        shape = self.shape
        cache = kernels.allocate_cache(self.num_blocks, self.block_size, shape, self.kind)
        for tensor in kernels.cache_pieces(cache):
            if tensor.is_floating_point():
                tensor.fill_(poison)
            else:  # bytes, four of which may be a scale
                tensor.fill_(0 if poison == 0 else -1)  # a NaN
        whole = self.batch([(context, context) for _, context in self.rows])
        qkv = self.random(len(whole.positions), (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim)
        kernels.rotary_store(qkv, rotary(shape.head_dim, whole.max_context_len), whole, cache, shape, None)
        return cache

    def query(self, batch: RaggedBatch) -> Tensor:
        """Queries of a step."""
        return self.random(len(batch.positions), self.shape.num_heads, self.shape.head_dim)


def rotary(head_dim: int, positions: int) -> Tensor:
    """Cosines and sines `[positions, head_dim]`."""
    frequencies = 10000.0 ** -(torch.arange(head_dim // 2) / (head_dim // 2))
    angles = torch.arange(positions)[:, None] * frequencies
    return torch.cat((angles.cos(), angles.sin()), dim=1)


def distance(actual: Tensor, expected: Tensor) -> float:
    """Norm of the difference over the norm of what was expected; NaN where either holds one."""
    return float((actual.float() - expected.float()).norm() / expected.float().norm().clamp_min(1e-30))


@st.composite
def layers(draw, rows, head_dims=HEAD_DIMS, soft_caps=(0.0, 0.0, 1.5, 50.0)):
    """A layer of any geometry with the given kind of rows."""
    head_dim = draw(st.sampled_from(head_dims))
    kv_heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 8))
    window, soft_cap = draw(st.sampled_from([0, 1, 7, 64, 300, 5000])), draw(st.sampled_from(soft_caps))
    return Layer(
        AttentionShape(kv_heads * group, kv_heads, head_dim, head_dim**-0.5, window, soft_cap,
                       is_causal=draw(st.sampled_from([True, True, False]))),
        draw(st.sampled_from([1, 4, 16, 48, 64, 128])),
        draw(st.sampled_from([torch.float32, torch.bfloat16])),
        draw(st.lists(rows, min_size=1, max_size=5)),
        draw(st.integers(0, 1000)),
        draw(st.booleans()),
    )


decodes = st.one_of(st.integers(1, 700), st.integers(1000, 2100)).map(lambda context: (1, context))
chunks = st.tuples(st.integers(2, 90), st.integers(0, 400)).map(lambda row: (row[0], row[0] + row[1]))
