"""Norms, activation, and what writes the cache, against the reference."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cuda_device import DEVICE, EXAMPLES, KERNELS, geometry
from support.cuda_ragged import REFERENCE, moved
from support.paged import Layer, distance, rotary

from slotwise.compute.kernels.interface import ACTIVATIONS, AttentionShape, LayerNormWeights, QKNorm, SharedNorm

KINDS = [torch.float32, torch.bfloat16, torch.float16]
# Norm of the difference over norm.  Of bfloat16 the interpreter cuts off up to 2^-7, of a sum and again of its norm.
CLOSE = {torch.float32: 1e-6, torch.bfloat16: 8e-3 if DEVICE == "cuda" else 1.6e-2, torch.float16: 1e-3}
FLOATS = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: str(kind).removeprefix("torch."))


def numbers(kind: torch.dtype, *size: int) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(sum(size))).to(kind)


def same(kind: torch.dtype, ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Bit for bit, but for the interpreter's rounding of bfloat16."""
    if kind == torch.bfloat16 and DEVICE == "cpu":
        return distance(ours, theirs) < CLOSE[kind]
    return torch.equal(ours.cpu(), theirs)


@settings(max_examples=16 * EXAMPLES, deadline=None)
@given(st.sampled_from(KINDS), st.integers(1, 3), geometry(st.integers(1, 1500), 1, 576, 4095, 4096))
def test_norms_and_activation(kind, tokens, size):
    x, residual, weight = numbers(kind, tokens, size), numbers(kind, tokens, size), numbers(kind, size)
    ours, theirs = residual.to(DEVICE), residual.clone()
    x_there, weight_there = x.to(DEVICE), weight.to(DEVICE)
    close = CLOSE[kind]
    assert distance(KERNELS.rms_norm(x_there, weight_there, 1e-5).cpu(), REFERENCE.rms_norm(x, weight, 1e-5)) < close
    actual = KERNELS.add_rms_norm(x_there, ours, weight_there, 1e-5)
    assert distance(actual.cpu(), REFERENCE.add_rms_norm(x, theirs, weight, 1e-5)) < close
    assert same(kind, ours, theirs)
    assert KERNELS.add(x_there, ours) is ours
    assert same(kind, ours, REFERENCE.add(x, theirs))
    gate_up = numbers(kind, tokens, 2 * size) * 5
    assert distance(KERNELS.silu_mul(gate_up.to(DEVICE)).cpu(), REFERENCE.silu_mul(gate_up)) < close
    gate, up = gate_up.float().chunk(2, -1)  # for a negative gate 1 + tanh cancels, and only roundings may be left
    off = (KERNELS.gelu_mul(gate_up.to(DEVICE)).cpu().float() - REFERENCE.gelu_mul(gate_up).float()).norm()
    assert off < close * (gate * up).norm()
    assert distance(KERNELS.soft_cap(x.to(DEVICE), 2.0).cpu(), REFERENCE.soft_cap(x, 2.0)) < close
    offset = KERNELS.rms_norm(x.to(DEVICE), weight.to(DEVICE), 1e-5, 1.0).cpu()
    assert distance(offset, REFERENCE.rms_norm(x, weight, 1e-5, 1.0)) < close


@settings(max_examples=12 * EXAMPLES, deadline=None)
@given(st.sampled_from(KINDS), st.integers(1, 3), st.integers(1, 700), st.booleans(), st.booleans(),
       st.sampled_from(ACTIVATIONS))
def test_layer_norm_and_activations(kind, tokens, size, has_weight, has_bias, activation):
    x, residual = numbers(kind, tokens, 2 * size) + 1, numbers(kind, tokens, 2 * size)
    norm = LayerNormWeights(numbers(kind, 2 * size) if has_weight else None,
                            numbers(kind, 2 * size) if has_bias else None, 1e-5, 1.0)
    there = norm._replace(**{name: part.to(DEVICE) for name in ("weight", "bias")
                             if (part := getattr(norm, name)) is not None})
    ours, theirs, x_there = residual.to(DEVICE), residual.clone(), x.to(DEVICE)
    pairs = [(KERNELS.layer_norm(x_there, there), REFERENCE.layer_norm(x, norm)),
             (KERNELS.layer_norm(x_there, there, ours), REFERENCE.layer_norm(x, norm, theirs)), (ours, theirs)]
    pairs += [(KERNELS.activate(x_there, activation, is_gated=gated), REFERENCE.activate(x, activation, is_gated=gated))
              for gated in (False, True)]
    for actual, expected in pairs:
        assert (actual.cpu().float() - expected.float()).norm() <= 2 * CLOSE[kind] * (expected.float().norm() + 1)


@FLOATS
def test_large_gates_saturate(kind):
    gate_up = torch.tensor([[1e4, -1e4, 90.0, -90.0, 1.0, 1.0, 1.0, 1.0]]).to(kind)
    expected = torch.tensor([[1e4, 0.0, 90.0, 0.0]]).to(kind)
    torch.testing.assert_close(KERNELS.silu_mul(gate_up.to(DEVICE)).cpu(), expected)


@FLOATS
def test_products_and_embedding(kind):
    weight, bias, x = numbers(kind, 24, 40), numbers(kind, 24), numbers(kind, 5, 40)
    there = weight.to(DEVICE)
    expected = x.double() @ weight.double().T
    assert distance(KERNELS.head(there)(x.to(DEVICE)).cpu(), expected) < CLOSE[kind]
    assert distance(KERNELS.linear(there, bias.to(DEVICE))(x.to(DEVICE)).cpu(), expected + bias.double()) < CLOSE[kind]
    assert torch.equal(KERNELS.embed(there, torch.tensor([3, 3, 0], device=DEVICE)).cpu(), weight[[3, 3, 0]])


def test_no_tokens():
    nothing, weight = torch.empty(0, 8, device=DEVICE), torch.ones(8, device=DEVICE)
    assert KERNELS.rms_norm(nothing, weight, 1e-5).shape == (0, 8)
    assert KERNELS.add_rms_norm(nothing, nothing, weight, 1e-5).shape == (0, 8)
    assert KERNELS.silu_mul(nothing).shape == (0, 4)


@FLOATS
@pytest.mark.parametrize("head_dim", [24, 64, 80, 256])
@pytest.mark.parametrize(("with_norm", "together", "shared"), [
    (False, False, False), (True, False, False), (True, True, False), (True, True, True)])
def test_rotary_store(kind, head_dim, with_norm, together, shared):
    layer = Layer(AttentionShape(6, 2, head_dim, 1.0), 16, kind, [(2, 2), (1, 40), (1, 17)])
    batch = layer.batch()
    sizes = [6 * head_dim, 2 * head_dim] if together else [head_dim] * 2
    weights = [1 + layer.random(size) / 4 for size in sizes]
    elsewhere = torch.rand(len(batch.positions), 2) * 10 * head_dim
    ranks = SharedNorm(lambda own: own + elsewhere.to(own.device), (12 * head_dim, 3 * head_dim)) if shared else None
    norm = QKNorm(*weights, 1e-6, shared=ranks) if with_norm else None
    norm_there = QKNorm(*(weight.to(DEVICE) for weight in weights), 1e-6, shared=ranks) if with_norm else None
    qkv, table = layer.random(len(batch.positions), 10 * head_dim), rotary(head_dim, 64)
    ours, theirs = (k.allocate_cache(layer.num_blocks, 16, layer.shape, kind) for k in (KERNELS, REFERENCE))
    query = KERNELS.rotary_store(qkv.to(DEVICE), table.to(DEVICE), moved(batch), ours, layer.shape, norm_there)
    expected = REFERENCE.rotary_store(qkv, table, batch, theirs, layer.shape, norm)
    keys, values = (tensor.cpu() for tensor in ours.keys_and_values())
    assert distance(query.cpu(), expected) < CLOSE[kind]
    assert distance(keys, theirs.keys) < CLOSE[kind]
    assert torch.equal(keys == 0, theirs.keys == 0), "written where nothing was to be written"
    assert same(kind, values, theirs.values)


def test_values_are_stored_as_they_are():
    """However large: rotating a value and taking it back would not do."""
    layer = Layer(AttentionShape(1, 1, 16, 1.0), 4, torch.float32, [(1, 3)])
    batch, cache = layer.batch(), KERNELS.allocate_cache(layer.num_blocks, 4, layer.shape, torch.float32)
    qkv = torch.full((1, 48), float("inf"))
    KERNELS.rotary_store(qkv.to(DEVICE), rotary(16, 4).to(DEVICE), moved(batch), cache, layer.shape, None)
    _, values = cache.keys_and_values()
    assert values.flatten(0, 1)[batch.slot_mapping.to(DEVICE)].isposinf().all()


def test_bytes_of_a_block_are_what_the_cache_takes():
    shape = AttentionShape(9, 3, 64, 1.0)
    for kind in KINDS:
        storage = KERNELS.allocate_cache(10, 48, shape, kind).storage
        assert KERNELS.cache_bytes_per_block(48, shape, kind) * 10 == storage.numel() * kind.itemsize
