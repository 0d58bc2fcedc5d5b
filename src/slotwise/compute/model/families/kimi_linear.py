"""Kimi Linear (Kimi Team, 2025): in three of four layers a recurrent state by a delta rule with a decay for each line
of the state, in the fourth compressed attention without positions, and DeepSeek-V3's experts behind the first layer.
"""

from __future__ import annotations

import functools
from dataclasses import replace

from slotwise.compute.kernels.interface import DeltaShape
from slotwise.compute.model.families import deepseek
from slotwise.compute.model.fields import Fields
from slotwise.compute.model.layers.embedding_and_head import EndOptions
from slotwise.compute.model.layers.gated_delta import KIMI, GatedDelta
from slotwise.compute.model.layers.latent_attention import LatentAttention
from slotwise.compute.model.layers.mlp import GatedMLP
from slotwise.compute.model.layers.norm import NormOptions, RMSNorm
from slotwise.compute.model.layers.rank_weights import WeightSource
from slotwise.compute.model.layers.rope import NoRope
from slotwise.compute.model.model_config import (
    FULL,
    LINEAR,
    ConfigDefaults,
    ModelConfig,
    RecurrentConfig,
    read_state_layers,
)
from slotwise.compute.model.network import MLP, ExpertNames, Network, TokenMixer, read_experts, read_network

NAMES = {  # of published files
    "model_max_length": "max_position_embeddings", "moe_renormalize": "norm_topk_prob", "num_expert_group": "n_group",
    "num_experts": "n_routed_experts", "num_local_experts": "n_routed_experts",
    "num_experts_per_token": "num_experts_per_tok", "num_shared_experts": "n_shared_experts"}
PUBLISHED = {"head_dim": "linear_head_dim", "num_heads": "linear_num_heads",
             "short_conv_kernel_size": "linear_conv_kernel_dim"}  # of the section `linear_attn_config`
EXPERTS = ExpertNames(
    "block_sparse_moe.gate", "block_sparse_moe.experts", ("w1", "w3", "w2"), shared="block_sparse_moe.shared_experts",
    correction="block_sparse_moe.gate.e_score_correction_bias")


def configure(fields: Fields) -> ModelConfig:
    section = fields.section("linear_attn_config")
    for old, new in NAMES.items():
        if old in fields.values or new not in fields.values:
            fields = fields.renamed({old: new})
    fields = fields.with_defaults(**{new: section.values[old] for old, new in PUBLISHED.items() if section.has(old)})
    fields = fields.with_defaults(
        routed_scaling_factor=2.446, n_group=1, topk_group=1, moe_intermediate_size=1024)
    turning = dict.fromkeys(("head_dim", "rope_parameters", "rope_scaling", "rope_theta"))  # which has no effect here
    plain = Fields({"q_lora_rank": None, **fields.replaced(**turning).values}, fields.where)
    config = deepseek.read_latent(plain, ConfigDefaults(num_kv_heads=32, norm_eps=1e-5), has_neighbors=False)
    heads, size = (fields.integer(name, default=default, maximum=1 << 12)
                   for name, default in (("linear_num_heads", 32), ("linear_head_dim", 128)))
    shape = DeltaShape(
        heads, heads, size, size, fields.integer("linear_conv_kernel_dim", default=4, maximum=64), decays_lines=True,
        is_gated_by_sigmoid=True)
    states = read_state_layers(fields, _kinds(section, config.num_layers))
    if all(states) or not any(states):
        raise fields.error("layer_types", f"must name both {FULL} and {LINEAR}")
    mixture = deepseek.read_v3_mixture(fields, config.num_layers, num_dense=1)
    return replace(
        config, ropes=(NoRope(),) * config.num_layers, recurrent=RecurrentConfig(shape, states), mixture=mixture)


def _kinds(section: Fields, num_layers: int) -> list[str]:
    """The kinds of layers that published files count from 1."""
    if section.has("full_attn_layers"):
        full = section.integers("full_attn_layers")
        return [FULL if layer + 1 in full else LINEAR for layer in range(num_layers)]
    return [FULL if layer and layer % 4 == 0 else LINEAR for layer in range(num_layers)]


class KimiLayer(deepseek.LatentLayer):
    """Llama's layer with a recurrent state or compressed attention."""

    attention: TokenMixer

    def __init__(self, config: ModelConfig, source: WeightSource, index: int) -> None:
        at, hidden, norms, recurrent = (
            f"model.layers.{index}", config.hidden_size, NormOptions(config.norm_eps), config.recurrent)
        assert config.latent is not None and recurrent is not None and isinstance(recurrent.shape, DeltaShape)
        self.attention_norm = RMSNorm(source, f"{at}.input_layernorm", hidden, norms)
        self.attention = GatedDelta(
            source, f"{at}.self_attn", recurrent.shape, hidden, config.norm_eps, names=KIMI,
        ) if recurrent.layers[index] else LatentAttention(
            source, f"{at}.self_attn", config.latent, config.ropes[index], hidden, bias=config.output_bias)
        self.mlp_norm = RMSNorm(source, f"{at}.post_attention_layernorm", hidden, norms)
        self.mlp: MLP = read_experts(config, source, at, EXPERTS) if config.has_experts(index) else GatedMLP(
            source, f"{at}.mlp", (hidden, config.intermediate_size))


def compose(config: ModelConfig, source: WeightSource) -> Network:
    layer, ends = functools.partial(KimiLayer, config, source), EndOptions(config.tie_word_embeddings)
    return read_network(config, source, layer, ends, NormOptions(config.norm_eps))
