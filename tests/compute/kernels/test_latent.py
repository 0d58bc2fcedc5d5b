"""Compressed attention of the CPU against the reference, and the reference against plain attention over every head."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.latent_layer import BLOCKS, SHAPE, SHAPES, Layer
from support.paged import distance
from torch import Tensor

from slotwise.compute.kernels.checked import CheckedKernels
from slotwise.compute.kernels.cpu.kernels import CpuKernels
from slotwise.compute.kernels.interface import LatentShape
from slotwise.compute.kernels.reference import ReferenceKernels

CPU, REFERENCE = CheckedKernels(CpuKernels(threads=2)), CheckedKernels(ReferenceKernels())
@settings(max_examples=10, deadline=None)
@given(SHAPES, st.sampled_from([torch.float32, torch.bfloat16]), st.sampled_from([1, 16, 80]),
       st.lists(st.lists(st.integers(1, 30), min_size=1, max_size=3), min_size=1, max_size=3))
def test_chunks_of_rows_in_company(shape, kind, block_size, chunks):
    if sum(map(sum, chunks)) // block_size + len(chunks) > BLOCKS:
        block_size = 16
    done = [Layer(kernels, shape, kind, block_size).run(chunks) for kernels in (CPU, REFERENCE)]
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
    alone = Layer(CPU, shape, kind, 16)  # its heads are divided among the threads
    alone.step([(0, tuple(part[:40] for part in tokens))])
    (found,) = alone.step([(0, tuple(part[40:41] for part in tokens))])
    assert torch.equal(found, expected[40:41])


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
