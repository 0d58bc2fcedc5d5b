"""Zamba2 (Glorioso et al., "The Zamba2 suite", 2024): Mamba-2's layers, and before some of them a block of attention
and MLP that several layers share, each with low-rank products of its own.

    t = linear(block(norm(concat(h, embedding)))),  h += mamba2(norm(h + t))       with a block
                                                    h += mamba2(norm(h))           else
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from slotwise.compute.kernels.interface import Activation, AttentionShape, Kernels, StateSpaceShape
from slotwise.compute.model.families.bamba import read_recurrent
from slotwise.compute.model.fields import Fields
from slotwise.compute.model.layers.attention import LayerStep, refuse_parts, refuse_ranks
from slotwise.compute.model.layers.embedding_and_head import EndOptions
from slotwise.compute.model.layers.linear import Linear
from slotwise.compute.model.layers.mamba2 import Mamba2
from slotwise.compute.model.layers.mlp import NoMLP
from slotwise.compute.model.layers.norm import NormOptions, ResidualStream, RMSNorm
from slotwise.compute.model.layers.rank_weights import WeightSource
from slotwise.compute.model.layers.rope import NoRope, Rope
from slotwise.compute.model.model_config import (
    LINEAR,
    MAX_LAYERS,
    OLDER,
    ConfigDefaults,
    ModelConfig,
    read_activation,
    read_common,
    read_rope,
)
from slotwise.compute.model.network import DecoderLayer, Network, TokenMixer, read_network, refuse_stages

HYBRID, KINDS = "hybrid", "layers_block_type"
NAMES = {"n_mamba_heads": "mamba_n_heads", "mamba_ngroups": "mamba_n_groups"}
DEFAULT_KINDS = (
    [LINEAR] + ([LINEAR] * 5 + [HYBRID]) * 7 + [LINEAR] * 4 + [HYBRID] + [LINEAR] * 3 + [HYBRID] + [LINEAR] * 2)
NORM_EPS = 1e-5  # behind the rule


@dataclass(frozen=True, slots=True)
class Zamba2Config:
    """The blocks that layers share."""

    hybrids: tuple[int, ...]  # the layers with a block before them
    num_blocks: int
    rank: int  # of each call's own products
    adapts_attention: bool
    activation: Activation
    bias: bool  # of an MLP


def configure(fields: Fields) -> ModelConfig:
    if fields.flag("use_long_context"):
        raise fields.error("use_long_context", "is true, which is not supported")
    hidden, heads = fields.integer("hidden_size", default=2560), fields.integer("num_attention_heads", default=32)
    if 2 * hidden % heads:
        raise fields.error("hidden_size", f"({hidden}), twice, must be a multiple of num_attention_heads ({heads})")
    fields = fields.renamed(NAMES).replaced(head_dim=2 * hidden // heads).with_defaults(
        hidden_size=hidden, num_attention_heads=heads, intermediate_size=4 * hidden, mamba_n_heads=8, mamba_d_state=64,
        num_hidden_layers=54, vocab_size=32000, max_position_embeddings=4096)
    num_layers = fields.integer("num_hidden_layers", maximum=MAX_LAYERS)
    kinds = [OLDER.get(kind, kind) for kind in fields.texts(KINDS)] if fields.has(KINDS) else DEFAULT_KINDS
    if len(kinds) != num_layers or set(kinds) - {LINEAR, HYBRID}:
        raise fields.error(KINDS, f"must be {LINEAR} or {HYBRID} for each of num_hidden_layers ({num_layers})")
    hybrids = tuple(layer for layer, kind in enumerate(kinds) if kind == HYBRID)
    rope: Rope = read_rope(fields) if fields.flag("use_mem_rope") else NoRope()
    config = read_common(
        fields, ConfigDefaults(norm_eps=1e-5, tie_word_embeddings=True), (), (rope,) * num_layers)
    adapts = fields.flag("use_shared_attention_adapter")
    if adapts and config.num_kv_heads != config.num_heads:
        raise fields.error("num_key_value_heads", f"must be num_attention_heads ({heads}) with "
                           "use_shared_attention_adapter")
    own = Zamba2Config(
        hybrids, fields.integer("num_mem_blocks", default=1), fields.integer("adapter_rank", default=128), adapts,
        read_activation(fields, "gelu"), fields.flag("add_bias_linear"))
    recurrent = read_recurrent(fields, config, tuple(kind == LINEAR for kind in kinds))
    assert isinstance(recurrent.shape, StateSpaceShape)
    shape = replace(recurrent.shape, least_step=fields.number("time_step_min", default=0.001, minimum=-1e-30),
                    largest_step=math.inf)
    return replace(
        config, attention_scale=(config.head_dim / 2) ** -0.5, own=own,
        recurrent=replace(recurrent, shape=shape, has_bias=own.bias, has_convolution_bias=True, eps=NORM_EPS,
                          beside=tuple(kind == HYBRID for kind in kinds)))


def _own(config: ModelConfig) -> Zamba2Config:
    assert isinstance(config.own, Zamba2Config)
    return config.own


class Block:
    """What several layers share, under the name of the first of them."""

    def __init__(self, config: ModelConfig, source: WeightSource, name: str) -> None:
        own, hidden, norms = _own(config), config.hidden_size, NormOptions(config.norm_eps)
        query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        at, mlp = f"{name}.self_attn", f"{name}.feed_forward"
        self.norm = RMSNorm(source, f"{name}.input_layernorm", 2 * hidden, norms)
        self.qkv = Linear(source, {f"{at}.q_proj": query, f"{at}.k_proj": key, f"{at}.v_proj": key}, 2 * hidden)
        self.output = Linear(source, {f"{at}.o_proj": hidden}, query)
        self.mlp_norm = RMSNorm(source, f"{name}.pre_ff_layernorm", hidden, norms)
        self.gate_up = Linear(source, {f"{mlp}.gate_up_proj": 2 * config.intermediate_size}, hidden, bias=own.bias)
        self.down = Linear(source, {f"{mlp}.down_proj": hidden}, config.intermediate_size, bias=own.bias)
        self.bytes = sum(part.bytes for part in (
            self.norm, self.qkv, self.output, self.mlp_norm, self.gate_up, self.down))


class LowRank:
    """Two products in turn, `[tokens, inputs] -> [tokens, outputs]`."""

    def __init__(self, source: WeightSource, name: str, sizes: tuple[int, int, int]) -> None:
        inputs, rank, outputs = sizes
        self._first = Linear(source, {f"{name}.0": rank}, inputs)
        self._second = Linear(source, {f"{name}.1": outputs}, rank)
        self.bytes = self._first.bytes + self._second.bytes

    def __call__(self, x: Tensor) -> Tensor:
        return self._second(self._first(x))


class BlockCall:
    """A call of a block: `[tokens, 2 * hidden] -> [tokens, hidden]`, with the products of this call.

    Args:
        number: of the call, among all calls of blocks.
    """

    def __init__(self, config: ModelConfig, source: WeightSource, block: Block, number: int) -> None:
        own, hidden = _own(config), config.hidden_size
        layer, first = own.hybrids[number], own.hybrids[number % own.num_blocks]
        name = f"model.layers.{first}.shared_transformer"
        self._kernels, self._block, self._activation = source.kernels, block, own.activation
        self.shape: AttentionShape = config.attention_shape(layer)
        self.ropes = (config.ropes[layer],)
        wide = config.num_heads * config.head_dim
        self._more = [
            LowRank(source, f"{name}.self_attn.linear_{part}_adapter_list.{number}", (2 * hidden, own.rank, wide))
            for part in "qkv"] if own.adapts_attention else []
        self._more_mlp = LowRank(source, f"{name}.feed_forward.gate_up_proj_adapter_list.{number}",
                                 (hidden, own.rank, 2 * config.intermediate_size))
        self._linear = Linear(source, {f"model.layers.{layer}.linear": hidden}, hidden)
        self.bytes = self._linear.bytes + self._more_mlp.bytes + sum(each.bytes for each in self._more)
        self.bytes += block.bytes if layer == first else 0

    def __call__(self, x: Tensor, step: LayerStep) -> Tensor:
        kernels, block = self._kernels, self._block
        out = kernels.attention(self.store(x, step), step.cache, step.batch, self.shape)
        x = block.mlp_norm(block.output(out))
        gate_up = kernels.rowwise(torch.add, block.gate_up(x), self._more_mlp(x))
        return self._linear(block.down(kernels.activate(gate_up, self._activation, is_gated=True)))

    def store(self, x: Tensor, step: LayerStep) -> Tensor:
        """Write keys and values to the cache; returns the queries `[tokens, heads, head_dim]`."""
        x = self._block.norm(x)
        qkv = self._block.qkv(x)
        if self._more:
            qkv = self._kernels.rowwise(_added, qkv, *[product(x) for product in self._more])
        return self._kernels.rotary_store(
            qkv, step.rotary[self.ropes[0]], step.batch, step.cache, self.shape, None)


def _added(x: Tensor, *parts: Tensor) -> Tensor:
    return x + torch.cat(parts, dim=1)


class OriginalStream(ResidualStream):
    """Hidden states next to the embedding of their tokens."""

    def __init__(self, x: Tensor, original: Tensor, kernels: Kernels) -> None:
        super().__init__(x, kernels)
        self.original = original

    def keep(self, rows: Tensor) -> None:
        super().keep(rows)
        self.original = self.original.index_select(0, rows)


class Start:
    """Keeps the embedding."""

    bytes = token_bytes = 0

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels

    def __call__(self, token_ids: Tensor, x: Tensor) -> OriginalStream:
        return OriginalStream(x, self._kernels.rowwise(torch.clone, x), self._kernels)


class Joined:
    """Hidden states and the embedding, `[tokens, 2 * hidden]`."""

    bytes = 0

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels

    def __call__(self, h: ResidualStream, /) -> Tensor:
        assert isinstance(h, OriginalStream)
        return self._kernels.rowwise(_joined, h.sum(), h.original)


def _joined(x: Tensor, original: Tensor) -> Tensor:
    return torch.cat((x, original), dim=1)


class CalledState:
    """A layer with a state over the sum of hidden states and what a call of a block makes of them, also Zamba's."""

    def __init__(self, source: WeightSource, call: TokenMixer, norm: RMSNorm, state: TokenMixer) -> None:
        self.ropes = call.ropes
        self._kernels, self._call, self._norm, self._state = source.kernels, call, norm, state
        self.bytes = call.bytes + norm.bytes + state.bytes

    def __call__(self, x: Tensor, step: LayerStep) -> Tensor:
        """`[tokens, 2 * hidden]`, joined, `-> [kept tokens, hidden]`."""
        assert step.beside is not None
        return self._state(self._summed(x, step), step.beside)

    def store(self, x: Tensor, step: LayerStep) -> Tensor:
        assert step.beside is not None
        return self._state.store(self._summed(x, step), step.beside)

    def _summed(self, x: Tensor, step: LayerStep) -> Tensor:
        return self._norm(self._kernels.rowwise(_plus_first, x, self._call(x, step)))


def _plus_first(joined: Tensor, x: Tensor) -> Tensor:
    return joined[:, : x.shape[1]] + x


class Zamba2Layer(DecoderLayer):
    """A layer with a state, and a call of a block before it in some."""

    attention: TokenMixer
    live_states = 6

    def __init__(self, config: ModelConfig, source: WeightSource, index: int, call: BlockCall | None) -> None:
        at, hidden, recurrent = f"model.layers.{index}", config.hidden_size, config.recurrent
        assert recurrent is not None and isinstance(recurrent.shape, StateSpaceShape)
        at += "" if call is None else ".mamba_decoder"
        norm = RMSNorm(source, f"{at}.input_layernorm", hidden, NormOptions(config.norm_eps))
        state = Mamba2(source, f"{at}.mamba", recurrent.shape, hidden, recurrent.eps, bias=recurrent.has_bias)
        if call is None:
            self.attention_norm, self.attention = norm, state
        else:
            self.attention_norm, self.attention = Joined(source.kernels), CalledState(source, call, norm, state)
        self.mlp = NoMLP()

    def forward(self, h: ResidualStream, step: LayerStep) -> None:
        h += self.attention(self.attention_norm(h), step)


def compose(config: ModelConfig, source: WeightSource) -> Network:
    refuse_ranks(source, "a recurrent state next to a block that layers share")
    refuse_parts(source, "blocks that layers share")
    refuse_stages(source, "a block that reads the embedding")
    own = _own(config)
    block = functools.cache(lambda number: Block(
        config, source, f"model.layers.{own.hybrids[number]}.shared_transformer"))

    def layer(index: int) -> Zamba2Layer:
        if index not in own.hybrids:
            return Zamba2Layer(config, source, index, None)
        number = own.hybrids.index(index)
        return Zamba2Layer(config, source, index, BlockCall(config, source, block(number % own.num_blocks), number))

    network = read_network(
        config, source, layer, EndOptions(config.tie_word_embeddings), NormOptions(config.norm_eps))
    return replace(network, start=Start(source.kernels))
