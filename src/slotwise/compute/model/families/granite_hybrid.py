"""Granite 4 (IBM, 2025): Granite 3 with Mamba-2's layer in place of attention in most layers, mostly without positions;
an MLP in every layer, and experts next to it in the mixtures.

    h = h + m * mixer(norm(h)),  h = h + m * (experts(norm(h)) + mlp(norm(h)))

The factor m is where `families/granite.py` has it.
"""

from __future__ import annotations

import functools
from dataclasses import replace

from slotwise.compute.kernels.interface import Routing
from slotwise.compute.model.families import granite
from slotwise.compute.model.families.bamba import read_mixer, read_recurrent
from slotwise.compute.model.fields import Fields
from slotwise.compute.model.layers.attention import AttentionOptions, LayerStep
from slotwise.compute.model.layers.embedding_and_head import EndOptions
from slotwise.compute.model.layers.mlp import GatedMLP
from slotwise.compute.model.layers.norm import NormOptions, ResidualStream, RMSNorm
from slotwise.compute.model.layers.rank_weights import WeightSource
from slotwise.compute.model.layers.rope import NoRope
from slotwise.compute.model.model_config import LINEAR, ModelConfig, read_mixture, read_state_layers
from slotwise.compute.model.network import MLP, DecoderLayer, Network, read_network

ROPE = "rope"  # of `position_embedding_type`


def configure(fields: Fields) -> ModelConfig:
    shared = fields.integer("shared_intermediate_size", default=1024)
    fields = Fields({"intermediate_size": 11008, **fields.values}, fields.where)
    config = granite.configure(fields)
    positions = fields.text("position_embedding_type", default="none")
    if positions not in (ROPE, "none", "nope"):
        raise fields.error("position_embedding_type", f"must be {ROPE} or null, not {positions!r:.40}")
    states = read_state_layers(fields, [LINEAR] * config.num_layers)
    recurrent = replace(read_recurrent(fields, config, states),
                        eps=fields.number("rms_norm_eps", default=1e-6))  # that of its norm is not divided
    config = replace(config, recurrent=recurrent if any(states) else None, mlp_bias=False, has_fused_gates=True,
                     ropes=config.ropes if positions == ROPE else (NoRope(),) * config.num_layers)
    if not fields.integer("num_local_experts", default=8, minimum=0):
        return replace(config, intermediate_size=shared)
    mixture = read_mixture(fields, config, Routing(8, 2, is_normalized=True))
    return replace(config, mixture=replace(mixture, shared_intermediate_size=shared))


class GraniteHybridLayer(DecoderLayer):
    """Where there are no experts, the MLP is the one that all tokens share."""

    def __init__(self, config: ModelConfig, source: WeightSource, index: int) -> None:
        at, hidden, norms = f"model.layers.{index}", config.hidden_size, NormOptions(config.norm_eps)
        self.attention_norm = RMSNorm(source, f"{at}.input_layernorm", hidden, norms)
        self.attention = read_mixer(config, source, index, AttentionOptions(config.qkv_bias, config.output_bias))
        self.mlp_norm = RMSNorm(source, f"{at}.post_attention_layernorm", hidden, norms)
        names = ("input_linear",) if config.has_fused_gates else ("gate_proj", "up_proj")
        self.mlp: MLP = granite.experts(config, source, at) if config.mixture else GatedMLP(
            source, f"{at}.shared_mlp", (hidden, config.intermediate_size), is_fused=config.has_fused_gates,
            names=(*names, "output_linear"))

    def forward(self, h: ResidualStream, step: LayerStep) -> None:
        h += self.attention(self.attention_norm(h), step)
        h += self.mlp(self.mlp_norm(h))


def compose(config: ModelConfig, source: WeightSource) -> Network:
    ends = EndOptions(config.tie_word_embeddings, config.embedding_scale, logit_scale=config.logit_scale)
    layer = functools.partial(GraniteHybridLayer, config, source)
    return read_network(config, source, layer, ends, NormOptions(config.norm_eps))
