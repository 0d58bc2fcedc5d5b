"""DiffLlama (2024): Llama with differential attention (Ye et al., "Differential Transformer", 2024).

    out = (1 - first) * norm(softmax(q1 @ k1) @ v - factor * softmax(q2 @ k2) @ v)

of each pair of heads, whose values v are as wide as two heads.  Kernels have values as wide as keys, so keys are stored
twice, next to each half of the values: the cache has twice the heads.
"""

from __future__ import annotations

import functools
import math
from dataclasses import replace

import torch
from torch import Tensor

from slotwise.compute.model.families import llama
from slotwise.compute.model.families.llama import LlamaLayer
from slotwise.compute.model.fields import Fields
from slotwise.compute.model.layers.attention import LayerStep, refuse_ranks
from slotwise.compute.model.layers.embedding_and_head import EndOptions
from slotwise.compute.model.layers.linear import Linear
from slotwise.compute.model.layers.mlp import GatedMLP
from slotwise.compute.model.layers.norm import NormOptions, RMSNorm
from slotwise.compute.model.layers.rank_weights import WeightSource
from slotwise.compute.model.model_config import ConfigDefaults, ModelConfig
from slotwise.compute.model.network import Network, TokenMixer, read_network


def configure(fields: Fields) -> ModelConfig:
    config = llama.configure(fields, ConfigDefaults(norm_eps=1e-5))
    if config.num_kv_heads % 2:
        raise fields.error("num_key_value_heads", f"must be even, not {config.num_kv_heads}")
    layers = config.num_layers
    return replace(config, mlp_bias=False, query_heads=(2 * config.num_heads,) * layers,
                   layer_heads=((2 * config.num_kv_heads, config.head_dim),) * layers)


class DifferentialAttention:
    """The attention called `name` of layer `index`."""

    def __init__(self, config: ModelConfig, source: WeightSource, name: str, index: int) -> None:
        refuse_ranks(source, "differential attention")
        hidden, size, self._heads = config.hidden_size, config.head_dim, config.num_heads
        self._kernels, self.shape, self.ropes = source.kernels, config.attention_shape(index), (config.ropes[index],)
        query, key = config.num_heads * size, config.num_kv_heads * size
        parts = {f"{name}.q_proj": query, f"{name}.k_proj": key, f"{name}.v_proj": key}
        self.qkv = Linear(source, parts, hidden, bias=config.qkv_bias)
        self.output = Linear(source, {f"{name}.o_proj": hidden}, query, bias=config.output_bias)
        factors = [source.floats({f"{name}.lambda_{part}": (size,)}) for part in ("q1", "k1", "q2", "k2")]
        first = 0.8 - 0.6 * math.exp(-0.3 * index)
        one, two = (left @ right for left, right in (factors[:2], factors[2:]))
        self._difference = functools.partial(
            _difference, config.num_heads, one.exp() - two.exp() + first, 1 - first, config.norm_eps)
        self._doubled = functools.partial(_doubled, config.num_heads, config.num_kv_heads)
        self.bytes = self.qkv.bytes + self.output.bytes + 4 * size * source.dtype.itemsize

    def __call__(self, x: Tensor, step: LayerStep) -> Tensor:
        """`[tokens, hidden] -> [kept tokens, hidden]`."""
        out = self._kernels.attention(self.store(x, step), step.cache, step.batch, self.shape)
        return self.output(step.kept(self._kernels.rowwise(self._difference, out)))

    def store(self, x: Tensor, step: LayerStep) -> Tensor:
        """Write keys and values to the cache; returns the queries `[tokens, 2 * heads, head_dim]`."""
        qkv = self.qkv(x).view(len(x), -1, self.shape.head_dim)
        doubled = self._kernels.rowwise(self._doubled, qkv)
        return self._kernels.rotary_store(
            doubled.view(len(x), -1), step.rotary[self.ropes[0]], step.batch, step.cache, self.shape, None)


def _doubled(heads: int, kv_heads: int, qkv: Tensor) -> Tensor:
    """Queries, keys and values `[tokens, heads + 2 * kv_heads, head_dim]` with each half of the values."""
    query, key, value = qkv.split([heads, kv_heads, kv_heads], dim=1)
    first, second = value.chunk(2, dim=1)
    return torch.cat((query, query, key, key, first, first, second, second), dim=1)


def _difference(heads: int, factor: Tensor, share: float, eps: float, out: Tensor) -> Tensor:
    """The difference of each pair of heads `[tokens, heads * head_dim]`, normed, of what both halves yield."""
    first, second = out.view(len(out), 2, heads, -1).transpose(1, 2).flatten(2).float().chunk(2, dim=1)
    x = (first - factor * second).double()
    normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return (share * normed).to(out.dtype).flatten(1)


class DiffLlamaLayer(LlamaLayer):
    """Llama's layer with this attention."""

    attention: TokenMixer

    def __init__(self, config: ModelConfig, source: WeightSource, index: int) -> None:
        at, hidden, norms = f"model.layers.{index}", config.hidden_size, NormOptions(config.norm_eps)
        self.attention_norm = RMSNorm(source, f"{at}.input_layernorm", hidden, norms)
        self.attention = DifferentialAttention(config, source, f"{at}.self_attn", index)
        self.mlp_norm = RMSNorm(source, f"{at}.post_attention_layernorm", hidden, norms)
        self.mlp = GatedMLP(source, f"{at}.mlp", (hidden, config.intermediate_size))


def compose(config: ModelConfig, source: WeightSource) -> Network:
    layer, ends = functools.partial(DiffLlamaLayer, config, source), EndOptions(config.tie_word_embeddings)
    return read_network(config, source, layer, ends, NormOptions(config.norm_eps))
