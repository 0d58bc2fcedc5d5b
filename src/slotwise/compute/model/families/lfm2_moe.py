"""LFM2's mixtures (Liquid AI, 2025): LFM2 with experts behind the first layers, chosen by sigmoid scores."""

from __future__ import annotations

from dataclasses import replace

from slotwise.compute.kernels.interface import Routing
from slotwise.compute.model.families import lfm2
from slotwise.compute.model.fields import Fields
from slotwise.compute.model.layers.rank_weights import WeightSource
from slotwise.compute.model.model_config import MAX_EXPERTS, MixtureConfig, ModelConfig
from slotwise.compute.model.network import MLP, ExpertNames, Network, read_experts


def configure(fields: Fields) -> ModelConfig:
    fields = Fields({"intermediate_size": 7168, "hidden_size": 2048, **fields.values}, fields.where)
    config = lfm2.read_hybrid(fields)
    num_experts = fields.integer("num_experts", default=32, maximum=MAX_EXPERTS)
    top_k = fields.integer("num_experts_per_tok", default=4)
    if top_k > num_experts:
        raise fields.error("num_experts_per_tok", f"({top_k}) must be at most num_experts ({num_experts})")
    dense = fields.integer("num_dense_layers", default=2, minimum=0)
    routing = Routing(num_experts, top_k, fields.flag("norm_topk_prob", default=True), "sigmoid",
                      fields.number("routed_scaling_factor", default=1.0))
    return replace(config, mixture=MixtureConfig(
        routing, fields.integer("moe_intermediate_size", default=1792),
        tuple(layer >= dense for layer in range(config.num_layers)),
        has_correction=fields.flag("use_expert_bias", default=True)))


class Lfm2MoeLayer(lfm2.Lfm2Layer):
    """LFM2's layer, with experts in place of the MLP in most layers."""

    def read_mlp(self, config: ModelConfig, source: WeightSource, index: int) -> MLP:
        if not config.has_experts(index):
            return super().read_mlp(config, source, index)
        names = ExpertNames("feed_forward.gate", "feed_forward.experts", lfm2.PARTS,
                            correction="feed_forward.expert_bias" if config.mixture_of_experts.has_correction else "")
        return read_experts(config, source, f"model.layers.{index}", names)


def compose(config: ModelConfig, source: WeightSource) -> Network:
    return lfm2.compose(config, source, Lfm2MoeLayer)
