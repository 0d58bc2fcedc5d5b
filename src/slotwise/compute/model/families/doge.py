"""Doge (SmallDoge, 2025): Llama whose scores have a bias that each key head computes from its token's values.

    bias = exp(A * softplus(dt(values)));  score = query @ key / sqrt(head_dim) + bias
    h = h * scales + attention(norm(h)),  h = h * scales + mlp(norm(h))

A bias is a number of its token alone, so it is cached as one more dimension of the token's key.  In a context longer
than `keep_window_size` a query attends only to the tokens with the largest biases: that is the longest context served
here, as with DeepSeek-V3.2's indexers.  Experts of one row each (`is_moe`) are refused.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad, softplus

from slotwise.compute.model.families import llama
from slotwise.compute.model.fields import Fields
from slotwise.compute.model.layers.attention import LayerStep, refuse_ranks
from slotwise.compute.model.layers.embedding_and_head import EndOptions
from slotwise.compute.model.layers.linear import Linear
from slotwise.compute.model.layers.mlp import GatedMLP
from slotwise.compute.model.layers.norm import NormOptions, ResidualStream, RMSNorm
from slotwise.compute.model.layers.rank_weights import WeightSource
from slotwise.compute.model.model_config import ModelConfig, read_window
from slotwise.compute.model.network import DecoderLayer, Network, read_network

ADDED = 8  # dimensions of a cached head, of which one is the bias; the others are 0, and keep rows aligned


def configure(fields: Fields) -> ModelConfig:
    if fields.flag("is_moe"):
        raise fields.error("is_moe", "is true: experts of one row each, which a product of keys retrieves, are not "
                           "supported")
    config = llama.configure(fields)
    size = config.head_dim + ADDED
    ropes = tuple(replace(rope, share=(config.head_dim + 0.5) / size) for rope in config.ropes)
    return replace(
        config, head_dim=size, ropes=ropes, qk_norm=True, attention_scale=config.head_dim**-0.5,
        windows=(read_window(fields, 0),) * config.num_layers,
        max_position_embeddings=min(config.max_position_embeddings, fields.integer("keep_window_size", default=2048)))


class BiasedAttention:
    """The attention called `name` of layer `index`, over keys with a bias."""

    def __init__(self, config: ModelConfig, source: WeightSource, name: str, index: int) -> None:
        refuse_ranks(source, "a bias of scores that all key heads compute together")
        hidden, self._size = config.hidden_size, config.head_dim - ADDED
        self._kernels, self.shape, self.ropes = source.kernels, config.attention_shape(index), (config.ropes[index],)
        heads, kv_heads = config.num_heads, config.num_kv_heads
        norms, key = NormOptions(config.norm_eps), kv_heads * self._size
        parts = {f"{name}.q_proj": heads * self._size, f"{name}.k_proj": key, f"{name}.v_proj": key}
        self.qkv = Linear(source, parts, hidden, bias=config.qkv_bias)
        self.output = Linear(source, {f"{name}.o_proj": hidden}, heads * self._size, bias=config.output_bias)
        self.bias = Linear(source, {f"{name}.dt_proj": kv_heads}, key, bias=config.qkv_bias, is_exact=True)
        self.query_norm, self.key_norm = (
            RMSNorm(source, f"{name}.{part}_norm", self._size, norms) for part in ("q", "k"))
        self._columns = [functools.partial(torch.narrow_copy, dim=1, start=start, length=length)
                         for start, length in ((0, heads * self._size), (heads * self._size, key),
                                               (heads * self._size + key, key))]
        decay = source.floats({f"{name}.A": (kv_heads,)})
        self._joined = functools.partial(_joined, decay, self._size)
        self._without = functools.partial(_without, self._size)
        self.bytes = sum(part.bytes for part in (self.qkv, self.output, self.bias, self.query_norm, self.key_norm))
        self.bytes += kv_heads * source.dtype.itemsize

    def __call__(self, x: Tensor, step: LayerStep) -> Tensor:
        """`[tokens, hidden] -> [kept tokens, hidden]`."""
        out = self._kernels.attention(self.store(x, step), step.cache, step.batch, self.shape)
        return self.output(step.kept(self._kernels.rowwise(self._without, out)))

    def store(self, x: Tensor, step: LayerStep) -> Tensor:
        """Write keys with their biases, and values, to the cache; returns the queries `[tokens, heads, head_dim]`."""
        qkv = self.qkv(x)
        query, key, value = (self._kernels.rowwise(columns, qkv) for columns in self._columns)
        bias = self.bias(value)
        normed = [norm(part.view(-1, self._size)) for norm, part in ((self.query_norm, query), (self.key_norm, key))]
        qkv = self._kernels.rowwise(
            self._joined, normed[0].view(query.shape), normed[1].view(key.shape), value, bias)
        return self._kernels.rotary_store(
            qkv, step.rotary[self.ropes[0]], step.batch, step.cache, self.shape, None)


def _joined(decay: Tensor, size: int, query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
    """Queries, keys and values `[tokens, heads * (size + ADDED)]` whose scores contain the biases `[tokens, heads]`.

    Kernels rotate a dimension of a head's first half with one of its second half, so half of what is added is behind
    each half.  In float64, in which a result does not depend on its place in a vector of the processor.
    """
    biases = torch.exp(decay.double() * softplus(bias.double())).to(key.dtype).unsqueeze(2)
    query, key, value = (part.view(len(part), -1, size) for part in (query, key, value))

    def halves(part: Tensor, added: Tensor) -> Tensor:
        first, second = part.chunk(2, dim=2)
        return torch.cat((first, pad(added, (0, ADDED // 2 - 1)), pad(second, (0, ADDED // 2))), dim=2)

    factors = torch.full_like(query[:, :, :1], size**0.5)  # by which scores are divided
    return torch.cat((halves(query, factors), halves(key, biases), pad(value, (0, ADDED))), dim=1).flatten(1)


def _without(size: int, out: Tensor) -> Tensor:
    """`[tokens, heads * (size + ADDED)] -> [tokens, heads * size]`."""
    return out.view(len(out), -1, size + ADDED)[:, :, :size].flatten(1)


class ScaledResidual:
    """The residual stream times a weight for each of its numbers."""

    def __init__(self, source: WeightSource, name: str, size: int) -> None:
        self._kernels, self.bytes = source.kernels, size * source.dtype.itemsize
        self._scale = functools.partial(torch.mul, source.tensor({name: (size,)}))

    def __call__(self, h: ResidualStream) -> None:
        h.replace(self._kernels.rowwise(self._scale, h.whole()))


class DogeLayer(DecoderLayer):
    """One layer."""

    live_states = 4

    def __init__(self, config: ModelConfig, source: WeightSource, index: int) -> None:
        at, hidden, norms = f"model.layers.{index}", config.hidden_size, NormOptions(config.norm_eps)
        self.attention_norm = RMSNorm(source, f"{at}.input_layernorm", hidden, norms)
        self.attention = BiasedAttention(config, source, f"{at}.self_attn", index)
        self.scale_before_attention = ScaledResidual(source, f"{at}.input_residual", hidden)
        self.mlp_norm = RMSNorm(source, f"{at}.post_attention_layernorm", hidden, norms)
        self.mlp = GatedMLP(source, f"{at}.mlp", (hidden, config.intermediate_size), bias=config.mlp_bias)
        self.scale_before_mlp = ScaledResidual(source, f"{at}.post_attention_residual", hidden)

    def forward(self, h: ResidualStream, step: LayerStep) -> None:
        out = self.attention(self.attention_norm(h), step)
        self.scale_before_attention(h)
        h += out
        out = self.mlp(self.mlp_norm(h))
        self.scale_before_mlp(h)
        h += out


def compose(config: ModelConfig, source: WeightSource) -> Network:
    layer, ends = functools.partial(DogeLayer, config, source), EndOptions(config.tie_word_embeddings)
    return read_network(config, source, layer, ends, NormOptions(config.norm_eps))
