"""The attention layer with every option against transformers' own module, in chunks and in company."""

from __future__ import annotations

import pytest
import torch
from support.paged import Layer
from torch import Tensor
from transformers import GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssAttention

from slotwise.compute.kernels.interface import AttentionShape, Kernels
from slotwise.compute.model.layers.attention import Attention, AttentionOptions, LayerStep
from slotwise.compute.model.layers.rank_weights import Listing, WeightSource
from slotwise.compute.model.layers.rope import Rope, rotary_table

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, WINDOW, TOKENS = 48, 6, 2, 16, 7, 40
ROPE = Rope(10_000.0)


def gpt_oss(layer_type: str) -> GptOssAttention:
    config = GptOssConfig(
        hidden_size=HIDDEN, num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, head_dim=HEAD_DIM,
        attention_bias=True, sliding_window=WINDOW, num_hidden_layers=1, layer_types=[layer_type])
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    module = GptOssAttention(config, layer_idx=0).eval()
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return module


def expected(module: GptOssAttention, x: Tensor, window: int) -> Tensor:
    """Of a whole sequence `x [tokens, hidden]`."""
    cosine, sine = rotary_table(ROPE, HEAD_DIM, 0, len(x)).chunk(2, dim=-1)
    back = torch.arange(len(x))[:, None] - torch.arange(len(x))
    hidden = (back < 0) | (back >= (window or len(x)))
    mask = torch.zeros(len(x), len(x)).masked_fill(hidden, float("-inf"))
    with torch.inference_mode():
        return module(x[None], (cosine[None], sine[None]), mask[None, None])[0][0]


@pytest.mark.parametrize(("layer_type", "window"), [("full_attention", 0), ("sliding_attention", WINDOW)])
def test_biases_sinks_and_windows_are_those_of_gpt_oss(layer_type: str, window: int, kernels: Kernels) -> None:
    module = gpt_oss(layer_type)
    weights = {f"self_attn.{name}": tensor.detach() for name, tensor in module.named_parameters()}
    shape = AttentionShape(HEADS, KV_HEADS, HEAD_DIM, HEAD_DIM**-0.5, window)
    options = AttentionOptions(qkv_bias=True, output_bias=True, sinks="sinks")
    source = WeightSource(lambda *names: torch.cat([weights[name] for name in names]), kernels, torch.float32)
    attention = Attention(source, "self_attn", shape, ROPE, HIDDEN, options)
    rotary, sequences = rotary_table(ROPE, HEAD_DIM, 0, TOKENS), torch.randn(2, TOKENS, HIDDEN)
    cache = kernels.allocate_cache(Layer(shape, 4, torch.float32, [(40, 40)] * 2).num_blocks, 4, shape, torch.float32)
    done = []
    for rows in ([(30, 30), (11, 11)], [(9, 39), (28, 39)], [(1, 40), (1, 40)]):  # a step: new tokens, context
        batch = Layer(shape, 4, torch.float32, [(40, 40)] * 2).batch(rows)
        x = torch.cat([sequences[row, end - count : end] for row, (count, end) in enumerate(rows)])
        attended = attention(x, LayerStep(0, batch, cache, {ROPE: rotary}, lambda rows: rows, []))
        done.append(attended.split([count for count, _ in rows]))
    for row, x in enumerate(sequences):
        actual = torch.cat([step[row] for step in done])
        torch.testing.assert_close(actual, expected(module, x, window), atol=2e-4, rtol=1e-3)


def test_sinks_are_listed_with_the_other_weights() -> None:
    listing = Listing(torch.bfloat16)
    shape = AttentionShape(HEADS, KV_HEADS, HEAD_DIM, 1.0)
    attention = Attention(listing, "at", shape, ROPE, HIDDEN, AttentionOptions(sinks="sinks"))
    assert listing.shapes == {
        "at.q_proj.weight": (96, 48), "at.k_proj.weight": (32, 48), "at.v_proj.weight": (32, 48),
        "at.o_proj.weight": (48, 96), "at.sinks": (6,)}
    assert attention.bytes == 2 * (160 * 48 + 96 * 48) + 4 * 6
