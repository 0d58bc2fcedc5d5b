"""DeepSeek-V2 and V3 (DeepSeek-AI, 2024), and what shares their shape: Moonlight, Kimi K2, Youtu-LLM.

Llama's layer with compressed attention (`layers/latent_attention.py`) and, behind the first layers, experts of which
all tokens share a few.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from slotwise.compute.kernels.interface import LatentShape, Routing
from slotwise.compute.model.families.llama import LlamaLayer
from slotwise.compute.model.fields import Fields
from slotwise.compute.model.layers.embedding_and_head import EndOptions
from slotwise.compute.model.layers.latent_attention import LatentAttention, LatentConfig
from slotwise.compute.model.layers.mlp import GatedMLP
from slotwise.compute.model.layers.norm import NormOptions, RMSNorm
from slotwise.compute.model.layers.rank_weights import WeightSource
from slotwise.compute.model.model_config import (
    MAX_EXPERT_SIZE,
    MAX_EXPERTS,
    MAX_LAYERS,
    ConfigDefaults,
    MixtureConfig,
    ModelConfig,
    read_common,
    read_expert_groups,
    read_grouped_mixture,
    read_mlp_layers,
    read_rope,
    yarn_mscale,
)
from slotwise.compute.model.network import MLP, ExpertNames, Network, TokenMixer, read_experts, read_network

MAX_DIM = 1 << 14
V2_NAMES, V3_NAMES = ExpertNames(), ExpertNames(correction="mlp.gate.e_score_correction_bias")


@dataclass(frozen=True, slots=True)
class LatentDefaults:
    """What a family's configs mean where they leave out a size of compressed attention."""

    query_rank: int = 1536
    rank: int = 512
    nope_dim: int = 128
    rope_dim: int = 64
    value_dim: int = 128


def read_latent(
    fields: Fields, common: ConfigDefaults, sizes: LatentDefaults = LatentDefaults(), *,
    has_neighbors: bool | None = None,
) -> ModelConfig:
    """All of a config but its experts; rotary pairs are neighbors if `rope_interleave` says so, unless a family does.

    YaRN's factor for `mscale_all_dim` scales scores twice: once for queries, once for keys.
    """
    def dim(name: str, default: int) -> int:
        return fields.integer(name, default=default, maximum=MAX_DIM)

    rope_dim, rank = dim("qk_rope_head_dim", sizes.rope_dim), dim("kv_lora_rank", sizes.rank)
    if fields.integer("head_dim", default=rope_dim) not in (rope_dim, rank + rope_dim):  # the latter as vLLM has it
        raise fields.error("head_dim", f"must be qk_rope_head_dim ({rope_dim}) where keys are compressed")
    rope = read_rope(fields, head_dim=rope_dim, aliases={"deepseek_yarn": "yarn"})
    if rope.share != 1.0:
        raise fields.error("partial_rotary_factor", "must be 1: qk_rope_head_dim is what rotates")
    config = read_common(
        Fields({**fields.values, "head_dim": rope_dim}, fields.where), common,
        ropes=(rope,) * fields.integer("num_hidden_layers", maximum=MAX_LAYERS))
    if config.num_kv_heads != config.num_heads:
        raise fields.error("num_key_value_heads", f"({config.num_kv_heads}) must be num_attention_heads "
                           f"({config.num_heads}): all heads share what is cached")
    nope_dim = dim("qk_nope_head_dim", sizes.nope_dim)
    scaling = fields.section("rope_scaling" if fields.section("rope_scaling").values else "rope_parameters")
    sharper = 1.0
    if scaling.text("rope_type", default=scaling.text("type", default="default")) != "default" and scaling.has(
            "mscale_all_dim"):
        sharper = yarn_mscale(scaling.number("factor"), scaling.number("mscale_all_dim", minimum=-1.0))
    if has_neighbors is None:
        has_neighbors = fields.flag("rope_interleave", default=True)
    shape = LatentShape(
        config.num_heads, rank, rope_dim, nope_dim, dim("v_head_dim", sizes.value_dim),
        (nope_dim + rope_dim) ** -0.5 * sharper**2, has_neighbors)
    query_rank = 0 if fields.is_null("q_lora_rank") else dim("q_lora_rank", sizes.query_rank)
    return replace(config, latent=LatentConfig(shape, query_rank), output_bias=fields.flag("attention_bias"))


def configure_v2(fields: Fields) -> ModelConfig:
    if fields.flag("mlp_bias"):
        raise fields.error("mlp_bias", "is true, which is not supported in this architecture")
    config = read_latent(fields, ConfigDefaults(), has_neighbors=True)
    check_published(fields, "softmax", ("greedy", "group_limited_greedy"))
    count = fields.integer("n_routed_experts", default=64, maximum=MAX_EXPERTS)
    top_k = fields.integer("num_experts_per_tok", maximum=count)
    groups = read_expert_groups(fields, count, top_k, num_best=1) if (
        fields.text("topk_method", default="greedy") == "group_limited_greedy") else None
    size = fields.integer("moe_intermediate_size", default=1407, maximum=MAX_EXPERT_SIZE)
    shared = fields.integer("n_shared_experts", default=2, maximum=MAX_EXPERTS)
    routing = Routing(
        count, top_k, is_normalized=False, scale=fields.number("routed_scaling_factor", default=1.0), groups=groups)
    mixture = MixtureConfig(routing, size, read_mlp_layers(fields, config.num_layers, 0), shared * size)
    return replace(config, mixture=mixture)


def configure_v3(fields: Fields) -> ModelConfig:
    config = read_latent(fields, ConfigDefaults(num_kv_heads=128))
    return replace(config, mixture=read_v3_mixture(fields, config.num_layers, num_dense=3))


def read_v3_mixture(fields: Fields, num_layers: int, *, num_dense: int, num_experts: int = 256) -> MixtureConfig:
    """The experts of a config that means by absent fields what DeepSeek-V3's does."""
    check_published(fields, "sigmoid", ("noaux_tc",))
    fields = Fields({"n_group": 8, "topk_group": 4, **fields.values}, fields.where)
    routing = Routing(num_experts, 8, is_normalized=True, scale=2.5)
    return read_grouped_mixture(fields, num_layers, routing, intermediate_size=2048, num_dense=num_dense)


def check_published(fields: Fields, scoring: str, methods: Sequence[str]) -> None:
    """Raises CheckpointError where fields of published configs that transformers does not read ask for more."""
    if fields.text("scoring_func", default=scoring) != scoring:
        raise fields.error("scoring_func", f"must be {scoring} in this architecture")
    if fields.text("topk_method", default=methods[0]) not in methods:
        raise fields.error("topk_method", f"must be {' or '.join(methods)} in this architecture")
    if fields.integer("moe_layer_freq", default=1) != 1:
        raise fields.error("moe_layer_freq", "must be 1 in this architecture")


def configure_youtu(fields: Fields) -> ModelConfig:
    return read_latent(fields, ConfigDefaults(num_kv_heads=16, tie_word_embeddings=True))


class LatentLayer(LlamaLayer):
    """Llama's layer with compressed attention."""

    attention: TokenMixer

    def __init__(self, config: ModelConfig, source: WeightSource, index: int, names: ExpertNames) -> None:
        at, hidden, norms = f"model.layers.{index}", config.hidden_size, NormOptions(config.norm_eps)
        assert config.latent is not None
        self.attention_norm = RMSNorm(source, f"{at}.input_layernorm", hidden, norms)
        self.attention = LatentAttention(
            source, f"{at}.self_attn", config.latent, config.ropes[index], hidden, bias=config.output_bias)
        self.mlp_norm = RMSNorm(source, f"{at}.post_attention_layernorm", hidden, norms)
        self.mlp: MLP = read_experts(config, source, at, names) if config.has_experts(index) else GatedMLP(
            source, f"{at}.mlp", (hidden, config.intermediate_size), bias=config.mlp_bias)


def compose(config: ModelConfig, source: WeightSource, names: ExpertNames = V3_NAMES) -> Network:
    """Also models without experts."""
    ends = EndOptions(config.tie_word_embeddings, config.embedding_scale, logit_scale=config.logit_scale)
    layer = functools.partial(LatentLayer, config, source, names=names)
    return read_network(config, source, layer, ends, NormOptions(config.norm_eps))


def compose_v2(config: ModelConfig, source: WeightSource) -> Network:
    return compose(config, source, V2_NAMES)
