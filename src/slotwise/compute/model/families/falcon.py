"""Falcon (TII, 2023): attention and MLP read the same norm of the hidden states, and heads share keys and values.

    h += attention(norm(h)) + down(gelu(up(norm(h))))

The 7B model has one head of keys and values, the larger ones several, each next to its queries, and two norms; those
called RW add attention and MLP in turn, and have ALiBi.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

from slotwise.compute.model.families.gpt2 import ClassicLayer, Parts, read_plain, with_inner
from slotwise.compute.model.families.gpt_neox import ParallelLayer
from slotwise.compute.model.fields import Fields
from slotwise.compute.model.layers import alibi
from slotwise.compute.model.layers.attention import Attention, AttentionOptions, LayerStep
from slotwise.compute.model.layers.embedding_and_head import EndOptions
from slotwise.compute.model.layers.mlp import PlainMLP
from slotwise.compute.model.layers.norm import LayerNormOptions, Norm, ResidualStream
from slotwise.compute.model.layers.rank_weights import WeightSource
from slotwise.compute.model.layers.rope import NoRope
from slotwise.compute.model.model_config import ConfigDefaults, ModelConfig, read_head_dim, read_rope
from slotwise.compute.model.network import DecoderLayer, Network, read_network

NAMES = {"layer_norm_epsilon": "rms_norm_eps", "ffn_hidden_size": "intermediate_size"}
DEFAULTS = ConfigDefaults(norm_eps=1e-5, tie_word_embeddings=True)
SHARED, OWN, IN_TURN = "shared", "own", "in turn"  # norms of attention and MLP
PARTS = {
    kind: Parts(norms[0], "self_attention", norms[1], "mlp.dense_h_to_4h", "mlp.dense_4h_to_h")
    for kind, norms in {SHARED: ("input_layernorm", ""), OWN: ("ln_attn", "ln_mlp"),
                        IN_TURN: ("input_layernorm", "post_attention_layernorm")}.items()}


@dataclass(frozen=True, slots=True)
class FalconConfig:
    """What only this family has."""

    norms: str
    qkv_groups: int


def configure(fields: Fields) -> ModelConfig:
    fields = fields.renamed({"n_embed": "hidden_size"}) if fields.has("n_embed") else fields
    fields = with_inner(fields.renamed(NAMES)).with_defaults(max_position_embeddings=2048)
    has_biases, bias, heads = fields.flag("alibi"), fields.flag("bias"), fields.integer("num_attention_heads")
    rope = NoRope() if has_biases else read_rope(fields, head_dim=read_head_dim(fields))
    config = read_plain(fields, DEFAULTS, "gelu", "activation", rope=rope)
    kv_heads, norms = fields.integer("num_kv_heads", default=heads), _norms(fields)
    groups = kv_heads
    if not fields.flag("new_decoder_architecture"):
        if not fields.flag("multi_query", default=True) and kv_heads != heads:
            raise fields.error("num_kv_heads", f"({kv_heads}) must be num_attention_heads ({heads}), without "
                               "multi_query and new_decoder_architecture")
        kv_heads = groups = 1 if fields.flag("multi_query", default=True) else heads
    return replace(config, num_kv_heads=kv_heads, qkv_bias=bias, output_bias=bias, mlp_bias=bias, has_biases=has_biases,
                   is_parallel=norms != IN_TURN, own=FalconConfig(norms, groups))


def _norms(fields: Fields) -> str:
    is_new, count = fields.flag("new_decoder_architecture"), "num_ln_in_parallel_attn"
    if not fields.flag("parallel_attn", default=True):
        if is_new:
            raise fields.error("parallel_attn", "is false, which is not supported with new_decoder_architecture")
        return IN_TURN
    number = fields.integer(count, default=2 if is_new else 1, maximum=2)
    if number == 2 and not is_new:
        raise fields.error(count, "must be 1 without new_decoder_architecture")
    return OWN if number == 2 else SHARED


class SharedNormLayer(DecoderLayer):
    """Attention and MLP read the same norm."""

    live_states = 4

    def __init__(
        self, config: ModelConfig, source: WeightSource, index: int, options: AttentionOptions, norms: LayerNormOptions,
        parts: Parts,
    ) -> None:
        at, hidden = f"model.layers.{index}", config.hidden_size
        self.attention_norm: Norm = norms.read(source, f"{at}.{parts.attention_norm}", hidden)
        self.attention = Attention(
            source, f"{at}.{parts.attention}", config.attention_shape(index), config.ropes[index], hidden, options)
        self.mlp = PlainMLP(source, at, (parts.up, parts.down), (hidden, config.intermediate_size),
                            activation=config.activation, bias=config.mlp_bias)

    def forward(self, h: ResidualStream, step: LayerStep) -> None:
        x = self.attention_norm(h)
        h += self.attention(x, step)
        h += self.mlp(step.kept(x))


LAYERS: dict[str, type[SharedNormLayer] | type[ClassicLayer]] = {
    SHARED: SharedNormLayer, OWN: ParallelLayer, IN_TURN: ClassicLayer}


def compose(config: ModelConfig, source: WeightSource) -> Network:
    own, norms, biases = config.own, LayerNormOptions(config.norm_eps), None
    assert isinstance(own, FalconConfig)
    if config.has_biases:
        biases = alibi.rounded_biases(
            alibi.slopes(config.num_heads), config.max_position_embeddings, config.head_dim**-0.5)
    options = AttentionOptions(
        config.qkv_bias, config.output_bias, names=("", "", "", "dense"), qkv_name="query_key_value",
        qkv_groups=own.qkv_groups, biases=biases)
    layer = functools.partial(
        LAYERS[own.norms], config, source, options=options, norms=norms, parts=PARTS[own.norms])
    return read_network(config, source, layer, EndOptions(config.tie_word_embeddings), norms)
