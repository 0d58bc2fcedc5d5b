"""The oracle itself, against torch's dense operators."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from support.paged import Layer, distance, rotary

from slotwise.compute.kernels.interface import AttentionShape, QKNorm
from slotwise.compute.kernels.reference import ReferenceKernels

KERNELS = ReferenceKernels()


@pytest.mark.parametrize("soft_cap", [0.0, 0.7])
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("has_biases", [False, True])
@pytest.mark.parametrize("window", [0, 3])
def test_attention_is_the_formula_over_gathered_pages(window, soft_cap, has_sinks, has_biases):
    """Of every option, alone and together, written out for one query at a time."""
    shape = AttentionShape(4, 2, 16, 0.25, window, soft_cap, has_biases=has_biases)
    layer = Layer(shape, 4, torch.float32, [(3, 9), (1, 6)], has_sinks=has_sinks)
    batch = layer.batch()
    cache, query = layer.filled_cache(KERNELS), layer.query(batch)
    actual = KERNELS.attention(query, cache, batch, shape, layer.sinks, layer.biases).view(4, 4, 16)
    for token, (row, position) in enumerate([(0, 6), (0, 7), (0, 8), (1, 5)]):
        seen = torch.arange(max(0, position - window + 1) if window else 0, position + 1)
        keys, values = (t[batch.block_tables[row, seen // 4].long(), seen % 4] for t in (cache.keys, cache.values))
        for head in range(4):
            scores = keys[:, head // 2] @ query[token, head] * 0.25
            scores = soft_cap * (scores / soft_cap).tanh() if soft_cap else scores
            scores = scores + layer.biases[head, seen] if has_biases else scores
            powers = scores.exp()
            total = powers.sum() + (layer.sinks[head].exp() if has_sinks else 0.0)
            assert distance(actual[token, head], powers / total @ values[:, head // 2]) < 1e-5


@pytest.mark.parametrize("window", [0, 3, 40])
def test_attention_is_dense_attention_over_gathered_pages(window):
    layer = Layer(AttentionShape(6, 2, 16, 0.25, window), 4, torch.float32, [(5, 23)])
    batch = layer.batch()
    cache, query = layer.filled_cache(KERNELS), layer.query(batch)
    places = torch.arange(23)
    keys, values = (t[batch.block_tables[0, places // 4].long(), places % 4].transpose(0, 1)
                    for t in (cache.keys, cache.values))
    back = torch.arange(18, 23)[:, None] - places
    visible = (back >= 0) & (back < (window or 23))
    expected = F.scaled_dot_product_attention(
        query.transpose(0, 1), keys, values, attn_mask=visible, scale=0.25, enable_gqa=True
    )
    actual = KERNELS.attention(query, cache, batch, layer.shape)
    assert distance(actual, expected.transpose(0, 1).flatten(1)) < 1e-6


def test_rotary_store_rotates_halves_and_fills_the_slots():
    layer = Layer(AttentionShape(2, 1, 8, 1.0), 4, torch.float32, [(6, 6)])
    batch = layer.batch()
    cache = KERNELS.allocate_cache(layer.num_blocks, 4, layer.shape, torch.float32)
    qkv = layer.random(6, 4 * 8)
    query = KERNELS.rotary_store(qkv, rotary(8, 6), batch, cache, layer.shape, None)
    heads = qkv.view(6, 4, 8)
    angles = torch.arange(6)[:, None] * 10000.0 ** -(torch.arange(4) / 4)
    turned = torch.view_as_real(
        torch.complex(heads[..., :4], heads[..., 4:]) * torch.polar(torch.ones(6, 4), angles)[:, None]
    )
    expected = torch.cat((turned[..., 0], turned[..., 1]), -1)
    slots = batch.slot_mapping
    assert distance(query, expected[:, :2]) < 1e-6
    assert distance(cache.keys.flatten(0, 1)[slots], expected[:, 2:3]) < 1e-6
    assert torch.equal(cache.values.flatten(0, 1)[slots], heads[:, 3:])


def test_query_and_key_norms_come_before_the_rotation():
    layer = Layer(AttentionShape(2, 1, 8, 1.0), 4, torch.float32, [(3, 3)])
    batch = layer.batch()
    norm = QKNorm(query=torch.rand(8), key=torch.rand(8), eps=1e-6)
    qkv = layer.random(3, 4 * 8)
    heads = qkv.view(3, 4, 8).clone()
    heads[:, :2] = F.rms_norm(heads[:, :2], (8,), norm.query, 1e-6)
    heads[:, 2] = F.rms_norm(heads[:, 2], (8,), norm.key, 1e-6)
    caches = [KERNELS.allocate_cache(layer.num_blocks, 4, layer.shape, torch.float32) for _ in range(2)]
    inside = KERNELS.rotary_store(qkv, rotary(8, 3), batch, caches[0], layer.shape, norm)
    before = KERNELS.rotary_store(heads.flatten(1), rotary(8, 3), batch, caches[1], layer.shape, None)
    assert distance(inside, before) < 1e-6
    assert distance(caches[0].keys, caches[1].keys) < 1e-6


def test_norms_of_queries_and_keys_may_span_all_heads():
    layer = Layer(AttentionShape(2, 1, 8, 1.0), 4, torch.float32, [(3, 3)])
    batch = layer.batch()
    norm = QKNorm(query=torch.rand(16), key=torch.rand(8), eps=1e-6)
    qkv = layer.random(3, 4 * 8)
    normed = torch.cat((F.rms_norm(qkv[:, :16], (16,), norm.query, 1e-6),
                        F.rms_norm(qkv[:, 16:24], (8,), norm.key, 1e-6),
                        qkv[:, 24:]), dim=1)
    caches = [KERNELS.allocate_cache(layer.num_blocks, 4, layer.shape, torch.float32) for _ in range(2)]
    inside = KERNELS.rotary_store(qkv, rotary(8, 3), batch, caches[0], layer.shape, norm)
    before = KERNELS.rotary_store(normed, rotary(8, 3), batch, caches[1], layer.shape, None)
    assert distance(inside, before) < 1e-6
    assert distance(caches[0].keys, caches[1].keys) < 1e-6


def test_norms_and_activation_are_torchs():
    x, residual, weight = torch.randn(5, 24), torch.randn(5, 24), torch.rand(24)
    total = x + residual
    assert distance(KERNELS.rms_norm(x, weight, 1e-5), F.rms_norm(x, (24,), weight, 1e-5)) < 1e-6
    assert distance(KERNELS.add_rms_norm(x, residual, weight, 1e-5), F.rms_norm(total, (24,), weight, 1e-5)) < 1e-6
    assert torch.equal(residual, total)
    assert KERNELS.add(x, residual) is residual and torch.equal(residual, total + x)
    assert distance(KERNELS.silu_mul(x), F.silu(x[:, :12]) * x[:, 12:]) < 1e-6
    assert distance(KERNELS.gelu_mul(x), F.gelu(x[:, :12], approximate="tanh") * x[:, 12:]) < 1e-6
    assert distance(KERNELS.rms_norm(x, weight, 1e-5, 1.0), F.rms_norm(x, (24,), weight + 1, 1e-5)) < 1e-6


def test_a_soft_cap_bounds_numbers_and_hides_no_other():
    x = torch.tensor([[0.0, 1.0, -3.0, 1e30, float("inf"), float("-inf"), float("nan")]])
    expected = torch.tensor([[0.0, 0.924234, -1.810297, 2.0, float("inf"), float("-inf"), float("nan")]])
    torch.testing.assert_close(KERNELS.soft_cap(x, 2.0), expected, equal_nan=True)
