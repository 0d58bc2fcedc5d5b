"""Zamba (Glorioso et al., "Zamba: A Compact 7B SSM Hybrid Model", 2024): Mamba's layers in heads, and before some of
them one block of attention and MLP that these layers share.

    t = linear(block(norm(concat(h, embedding)))),  h += mamba(norm(h + t))       with the block
                                                    h += mamba(norm(h))           else
"""

from __future__ import annotations

import functools
from dataclasses import replace

from torch import Tensor

from slotwise.compute.kernels.interface import AttentionShape, SelectiveShape
from slotwise.compute.model.families.mamba import read_rank
from slotwise.compute.model.families.zamba2 import HYBRID, KINDS, CalledState, Joined, Start
from slotwise.compute.model.fields import Fields
from slotwise.compute.model.layers.attention import LayerStep, refuse_parts, refuse_ranks
from slotwise.compute.model.layers.embedding_and_head import EndOptions
from slotwise.compute.model.layers.linear import Linear
from slotwise.compute.model.layers.mamba import Mamba
from slotwise.compute.model.layers.mlp import GatedMLP, NoMLP
from slotwise.compute.model.layers.norm import NormOptions, ResidualStream, RMSNorm
from slotwise.compute.model.layers.rank_weights import WeightSource
from slotwise.compute.model.layers.rope import NoRope
from slotwise.compute.model.model_config import (
    LINEAR,
    MAX_LAYERS,
    OLDER,
    ConfigDefaults,
    ModelConfig,
    RecurrentConfig,
    read_activation,
    read_common,
)
from slotwise.compute.model.network import DecoderLayer, Network, TokenMixer, read_network, refuse_stages

PERIOD, OFFSET = 6, 4  # of layers with a block, from the third one on


def configure(fields: Fields) -> ModelConfig:
    hidden, heads = fields.integer("hidden_size", default=3712), fields.integer("num_attention_heads", default=16)
    head_dim = fields.integer("attention_head_dim", default=2 * hidden // heads)
    if fields.integer("attention_hidden_size", default=2 * hidden) != 2 * hidden:
        raise fields.error("attention_hidden_size", f"must be twice hidden_size ({hidden})")
    if fields.text("hidden_mamba_act", default="silu") != "silu":
        raise fields.error("hidden_mamba_act", "must be silu")
    fields = fields.replaced(head_dim=head_dim).with_defaults(
        hidden_size=hidden, num_attention_heads=heads, num_key_value_heads=16, intermediate_size=14848,
        num_hidden_layers=76, vocab_size=32000, max_position_embeddings=4096)
    num_layers = fields.integer("num_hidden_layers", maximum=MAX_LAYERS)
    kinds = _read_kinds(fields, num_layers)
    config = read_common(
        fields, ConfigDefaults(norm_eps=1e-5, tie_word_embeddings=True), (), (NoRope(),) * num_layers)
    size, groups = int(fields.number("mamba_expand", default=2.0) * hidden), fields.integer("n_mamba_heads", default=2)
    if size % groups:
        raise fields.error("n_mamba_heads", f"({groups}) must divide mamba_expand times hidden_size ({size})")
    shape = SelectiveShape(
        size, fields.integer("mamba_d_state", default=16, maximum=1 << 12),
        fields.integer("mamba_d_conv", default=4, minimum=2, maximum=64), read_rank(fields, "mamba_dt_rank", hidden),
        groups)
    return replace(
        config, attention_scale=(config.head_dim / 2) ** -0.5, activation=read_activation(fields, "gelu"),
        recurrent=RecurrentConfig(
            shape, tuple(kind == LINEAR for kind in kinds), beside=tuple(kind == HYBRID for kind in kinds),
            has_bias=fields.flag("mamba_proj_bias"),
            has_convolution_bias=fields.flag("mamba_conv_bias", default=True)))


def _read_kinds(fields: Fields, num_layers: int) -> list[str]:
    if not fields.has(KINDS):
        period = fields.integer("attn_layer_period", default=PERIOD)
        offset = fields.integer("attn_layer_offset", default=OFFSET, minimum=0)
        behind = [HYBRID if layer % period == offset else LINEAR for layer in range(num_layers)]
        return [LINEAR, LINEAR, HYBRID, *behind][:num_layers]
    kinds = [OLDER.get(kind, kind) for kind in fields.texts(KINDS)]
    if len(kinds) != num_layers or set(kinds) - {LINEAR, HYBRID}:
        raise fields.error(KINDS, f"must be {LINEAR} or {HYBRID} for each of num_hidden_layers ({num_layers})")
    return kinds


class Block:
    """What layers share, under the name of the first of them: `[tokens, 2 * hidden] -> [tokens, hidden]`."""

    def __init__(self, config: ModelConfig, source: WeightSource, name: str) -> None:
        hidden, norms, at = config.hidden_size, NormOptions(config.norm_eps), f"{name}.self_attn"
        query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.norm = RMSNorm(source, f"{name}.input_layernorm", 2 * hidden, norms)
        self.qkv = Linear(source, {f"{at}.q_proj": query, f"{at}.k_proj": key, f"{at}.v_proj": key}, 2 * hidden)
        self.output = Linear(source, {f"{at}.o_proj": hidden}, query)
        self.mlp_norm = RMSNorm(source, f"{name}.pre_ff_layernorm", hidden, norms)
        self.mlp = GatedMLP(
            source, f"{name}.feed_forward", (hidden, config.intermediate_size), activation=config.activation)
        self.bytes = sum(part.bytes for part in (self.norm, self.qkv, self.output, self.mlp_norm, self.mlp))


class BlockCall:
    """A layer's call of the block, with the layer's own cache and last product; the first call counts its bytes."""

    def __init__(self, config: ModelConfig, source: WeightSource, block: Block, layer: int, *, is_first: bool) -> None:
        self._kernels, self._block = source.kernels, block
        self.shape: AttentionShape = config.attention_shape(layer)
        self.ropes = (config.ropes[layer],)
        self._linear = Linear(source, {f"model.layers.{layer}.linear": config.hidden_size}, config.hidden_size)
        self.bytes = self._linear.bytes + (block.bytes if is_first else 0)

    def __call__(self, x: Tensor, step: LayerStep) -> Tensor:
        block = self._block
        out = self._kernels.attention(self.store(x, step), step.cache, step.batch, self.shape)
        return self._linear(block.mlp(block.mlp_norm(block.output(out))))

    def store(self, x: Tensor, step: LayerStep) -> Tensor:
        """Write keys and values to the cache; returns the queries `[tokens, heads, head_dim]`."""
        qkv = self._block.qkv(self._block.norm(x))
        return self._kernels.rotary_store(
            qkv, step.rotary[self.ropes[0]], step.batch, step.cache, self.shape, None)


class ZambaLayer(DecoderLayer):
    """A layer with a state, and a call of the block before it in some."""

    attention: TokenMixer
    live_states = 6

    def __init__(self, config: ModelConfig, source: WeightSource, index: int, call: BlockCall | None) -> None:
        at, hidden, recurrent = f"model.layers.{index}", config.hidden_size, config.recurrent
        assert recurrent is not None and isinstance(recurrent.shape, SelectiveShape)
        at += "" if call is None else ".mamba_decoder"
        norm = RMSNorm(source, f"{at}.input_layernorm", hidden, NormOptions(config.norm_eps))
        state = Mamba(source, f"{at}.mamba", recurrent.shape, hidden, bias=recurrent.has_bias,
                      convolution_bias=recurrent.has_convolution_bias, has_heads=True)
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
    assert config.recurrent is not None
    hybrids = [layer for layer, has_block in enumerate(config.recurrent.beside) if has_block]
    block = functools.cache(lambda: Block(config, source, f"model.layers.{hybrids[0]}.shared_transf"))

    def layer(index: int) -> ZambaLayer:
        call = BlockCall(config, source, block(), index, is_first=index == hybrids[0]) if index in hybrids else None
        return ZambaLayer(config, source, index, call)

    network = read_network(
        config, source, layer, EndOptions(config.tie_word_embeddings), NormOptions(config.norm_eps))
    return replace(network, start=Start(source.kernels))
