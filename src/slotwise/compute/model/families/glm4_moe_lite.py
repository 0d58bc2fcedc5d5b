"""GLM-4.7-Flash (GLM Team, 2026): DeepSeek-V3 with larger heads, and experts behind the first layer."""

from __future__ import annotations

from dataclasses import replace

from slotwise.compute.kernels.interface import Routing
from slotwise.compute.model.families.deepseek import LatentDefaults, check_published, read_latent
from slotwise.compute.model.fields import Fields
from slotwise.compute.model.model_config import ConfigDefaults, ModelConfig, read_grouped_mixture

COMMON = ConfigDefaults(num_kv_heads=20, norm_eps=1e-5)
SIZES = LatentDefaults(query_rank=768, nope_dim=192, value_dim=256)


def configure(fields: Fields) -> ModelConfig:
    if fields.has("head_dim"):  # another name
        fields = Fields({"qk_rope_head_dim": fields.values["head_dim"], **fields.values}, fields.where)
    check_published(fields, "sigmoid", ("noaux_tc",))
    config, routing = read_latent(fields, COMMON, SIZES), Routing(64, 4, is_normalized=True, scale=1.8)
    return replace(
        config, mixture=read_grouped_mixture(fields, config.num_layers, routing, intermediate_size=1536, num_dense=1))
