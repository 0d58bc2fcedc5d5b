"""Products, embedding and head as layers."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from slotwise.compute.kernels.interface import Kernels
from slotwise.compute.kernels.reference import ReferenceKernels
from slotwise.compute.model.layers.embedding_and_head import EndOptions, LMHead, read_ends
from slotwise.compute.model.layers.linear import Linear
from slotwise.compute.model.layers.mlp import GatedMLP
from slotwise.compute.model.layers.rank_weights import WeightSource


@pytest.fixture
def weights() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    shapes = {"q.weight": (8, 16), "q.bias": (8,), "k.weight": (4, 16), "k.bias": (4,), "m.gate_proj.weight": (24, 16),
              "m.up_proj.weight": (24, 16), "m.down_proj.weight": (16, 24)}
    return {name: torch.randn(shape) for name, shape in shapes.items()}


def source(weights: dict[str, torch.Tensor], kernels: Kernels, kind: torch.dtype = torch.float32) -> WeightSource:
    return WeightSource(lambda *names: torch.cat([weights[name] for name in names]), kernels, kind)


def test_parts_are_stacked_in_their_order(weights: dict[str, torch.Tensor], kernels: Kernels) -> None:
    linear = Linear(source(weights, kernels), {"q": 8, "k": 4}, 16, bias=True)
    x = torch.randn(5, 16)
    parts = [F.linear(x, weights[f"{name}.weight"], weights[f"{name}.bias"]) for name in "qk"]
    torch.testing.assert_close(linear(x), torch.cat(parts, -1), atol=1e-4, rtol=1e-4)
    assert (linear.parts, linear.inputs, linear.outputs) == ({"q": 8, "k": 4}, 16, 12)
    assert linear.bytes == 4 * (12 * 16 + 12)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_gates_are_activated(activation: str, weights: dict[str, torch.Tensor], kernels: Kernels) -> None:
    mlp = GatedMLP(source(weights, kernels), "m", (16, 24), activation=activation)
    x = torch.randn(5, 16)
    gate, up = (F.linear(x, weights[f"m.{name}_proj.weight"]) for name in ("gate", "up"))
    gate = F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")
    expected = F.linear(gate * up, weights["m.down_proj.weight"])
    torch.testing.assert_close(mlp(x), expected, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_a_scaled_embedding_shares_its_table_unscaled_with_the_head(kind: torch.dtype) -> None:
    table, ids, x = torch.randn(10, 16).to(kind), torch.tensor([3, 0, 3]), torch.randn(2, 16).to(kind)
    given = source({"model.embed_tokens.weight": table}, ReferenceKernels(), kind)
    scale = torch.tensor(16**0.5 * 1.1, dtype=kind)
    embedding, head = read_ends(given, 10, 16, EndOptions(tied=True, scale=scale.item(), soft_cap=2.0))
    assert torch.equal(embedding(ids), table[ids] * scale)  # as a step would scale it
    plain = F.linear(x, table)
    torch.testing.assert_close(head(x).float(), 2 * torch.tanh(plain.float() / 2), atol=0.01, rtol=0.01)
    assert torch.equal(LMHead(given, table)(x), plain)
