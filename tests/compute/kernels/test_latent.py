"""Compressed attention of the CPU against the reference, and the reference against plain attention over every head."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.paged import distance
from torch import Tensor

from slotwise.compute.kernels.checked import CheckedKernels
from slotwise.compute.kernels.cpu.kernels import CpuKernels
from slotwise.compute.kernels.interface import (
    Kernels,
    LatentNorm,
    LatentShape,
    LayerCache,
    PackedLatentProducts,
    RaggedBatch,
)
from slotwise.compute.kernels.reference import ReferenceKernels

CPU, REFERENCE = CheckedKernels(CpuKernels(threads=2)), CheckedKernels(ReferenceKernels())
SHAPE = LatentShape(3, 40, 8, 20, 12, 0.2, has_neighbors=True)
BLOCKS, POSITIONS = 160, 1500


class Layer:
    """A layer over a cache whose blocks hold NaN where nothing was written."""

    def __init__(self, kernels: Kernels, shape: LatentShape, kind: torch.dtype, block_size: int) -> None:
        self.kernels, self.shape, self.block_size = kernels, shape, block_size
        draw = self._draw = torch.Generator().manual_seed(0)
        self.key_up, self.value_up = (
            (torch.randn(shape.num_heads, size, shape.rank, generator=draw) / shape.rank**0.5).to(kind)
            for size in (shape.nope_dim, shape.value_dim))
        self.norm = LatentNorm(1 + 0.1 * torch.randn(shape.rank, generator=draw), 1e-6)
        angles = torch.outer(torch.arange(POSITIONS).float(), 0.1 ** torch.arange(shape.rope_dim // 2))
        self.rotary = torch.cat((angles.cos(), angles.sin()), dim=1)
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
        query, compressed = (torch.randn(number, size, generator=self._draw).to(self._kind) for size in sizes)
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
        batch = RaggedBatch(
            torch.zeros(len(positions), dtype=torch.int64), torch.tensor(positions), torch.tensor(slots), starts.int(),
            torch.tensor(contexts).int(), tables, starts[1:] - 1, max(counts), max(contexts))
        query, compressed = (torch.cat([given[part] for _, given in rows]) for part in (0, 1))
        query = self.kernels.latent_store(
            query.clone(), compressed, self.rotary, batch, self.cache, self.shape, self.norm)
        out = self.kernels.latent_attention(query, self.cache, batch, self.shape, self.products)
        return list(out.split(counts))


SHAPES = st.builds(
    lambda heads, rank, half, nope, value, neighbors: LatentShape(heads, rank, 2 * half, nope, value, 0.2, neighbors),
    st.integers(1, 5), st.sampled_from([5, 16, 40, 72]), st.integers(1, 9), st.integers(1, 70), st.integers(1, 70),
    st.booleans())


@settings(max_examples=25, deadline=None)
@given(SHAPES, st.sampled_from([torch.float32, torch.bfloat16]), st.sampled_from([1, 16, 80]),
       st.lists(st.lists(st.integers(1, 30), min_size=1, max_size=3), min_size=1, max_size=3))
def test_chunks_of_rows_in_company(shape, kind, block_size, chunks):
    """Each list holds a row's chunks, computed in as many steps."""
    if sum(map(sum, chunks)) // block_size + len(chunks) > BLOCKS:
        block_size = 16
    done = []
    for kernels in (CPU, REFERENCE):
        layer, results = Layer(kernels, shape, kind, block_size), []
        given = [[layer.tokens(count) for count in counts] for counts in chunks]
        for turn in range(3):
            rows = [(row, parts[turn]) for row, parts in enumerate(given) if turn < len(parts)]
            results += layer.step(rows) if rows else []
        done.append(torch.cat(results))
    assert distance(*done) < (2e-5 if kind == torch.float32 else 2e-2)


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_a_position_has_the_same_bits_in_any_chunk_and_company(kind):
    """Over two segments of context, with heads enough for several tiles."""
    shape = dataclasses.replace(SHAPE, num_heads=20)
    whole, cut = (Layer(CPU, shape, kind, 16) for _ in range(2))
    tokens, other = whole.tokens(1100), whole.tokens(1100)
    (expected,) = whole.step([(0, tokens)])
    results = []
    for first, end in ((0, 1), (1, 33), (33, 1026), (1026, 1027), (1027, 1099), (1099, 1100)):
        company = [(1, tuple(part[first:end] for part in other))]
        results.append(cut.step([*company, (0, tuple(part[first:end] for part in tokens))])[1])
    assert torch.equal(torch.cat(results), expected)


def test_the_reference_is_plain_attention_over_keys_and_values_of_every_head():
    layer = Layer(REFERENCE, SHAPE, torch.float32, 16)
    query, compressed = layer.tokens(21)
    latent, key = compressed.split([SHAPE.rank, SHAPE.rope_dim], dim=1)
    latent = torch.nn.functional.rms_norm(latent, (SHAPE.rank,), layer.norm.weight, 1e-6)
    turn = torch.polar(torch.ones(21, SHAPE.rope_dim // 2), torch.outer(
        torch.arange(21).float(), 0.1 ** torch.arange(SHAPE.rope_dim // 2)))

    def turned(x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.contiguous().view(21, -1, SHAPE.rope_dim // 2, 2))
        return torch.view_as_real(pairs * turn[:, None]).flatten(2)

    heads = query.view(21, 3, SHAPE.query_dim)
    query = torch.cat((heads[..., : SHAPE.nope_dim], turned(heads[..., SHAPE.nope_dim :])), dim=-1)
    keys = torch.einsum("tr,hnr->htn", latent, layer.key_up)
    keys = torch.cat((keys, turned(key[:, None])[:, 0].expand(3, -1, -1)), dim=-1)
    values = torch.einsum("tr,hvr->htv", latent, layer.value_up)
    expected = torch.nn.functional.scaled_dot_product_attention(
        query.transpose(0, 1), keys, values, is_causal=True, scale=SHAPE.scale)
    (result,) = layer.step([(0, (heads.flatten(1), compressed))])
    assert distance(result, expected.transpose(0, 1).flatten(1)) < 1e-5


@pytest.mark.parametrize("kernels", [CPU, REFERENCE], ids=["cpu", "reference"])
def test_a_token_takes_the_bytes_of_the_paper(kernels):
    """512 + 64 numbers in each layer of DeepSeek-V2, of two bytes."""
    shape = LatentShape(128, 512, 64, 128, 128, 0.1, has_neighbors=True)
    assert kernels.cache_bytes_per_block(16, shape, torch.bfloat16) == 16 * (512 + 64) * 2


@pytest.mark.parametrize(("cached", "close"), [("int8", 0.02), ("fp8", 0.05)])
def test_narrow_caches_of_the_reference(cached, close):
    plain, narrow = (Layer(CheckedKernels(ReferenceKernels(kv_cache_dtype=name)), SHAPE, torch.float32, 16)
                     for name in ("auto", cached))
    tokens = plain.tokens(30)
    (expected,), (result,) = (layer.step([(0, tokens)]) for layer in (plain, narrow))
    assert 1e-4 < distance(result, expected) < close


def test_a_narrow_cache_is_refused_on_the_cpu():
    assert "kv_cache_dtype int8" in CpuKernels(threads=1, kv_cache_dtype="int8").refusal(SHAPE)
