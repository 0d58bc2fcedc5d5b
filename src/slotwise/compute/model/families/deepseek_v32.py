"""DeepSeek-V3.2 (DeepSeek-AI, 2025) and GLM-5 (GLM Team, 2026), as far as their sparse attention sees every token.

Both are DeepSeek-V3 with indexers, which select the `index_topk` tokens that a query attends to.  In a context of at
most so many tokens they select all of them.  So that is the longest context served here, and the weights of indexers
are checked, but not kept.
"""

from __future__ import annotations

import functools
from dataclasses import replace

from slotwise.compute.kernels.interface import Routing
from slotwise.compute.model.families.deepseek import (
    MAX_DIM,
    V3_NAMES,
    LatentDefaults,
    LatentLayer,
    check_published,
    read_latent,
    read_v3_mixture,
)
from slotwise.compute.model.fields import Fields
from slotwise.compute.model.layers.embedding_and_head import EndOptions
from slotwise.compute.model.layers.latent_attention import Indexers
from slotwise.compute.model.layers.norm import NormOptions
from slotwise.compute.model.layers.rank_weights import WeightSource
from slotwise.compute.model.model_config import ConfigDefaults, ModelConfig, read_grouped_mixture
from slotwise.compute.model.network import Network, read_network


def configure(fields: Fields) -> ModelConfig:
    config = read_latent(fields, ConfigDefaults(num_kv_heads=128), has_neighbors=True)
    config = _bounded(fields, config, (True,) * config.num_layers, num_heads=64)
    return replace(config, mixture=read_v3_mixture(fields, config.num_layers, num_dense=3))


def configure_glm(fields: Fields) -> ModelConfig:
    check_published(fields, "sigmoid", ("noaux_tc",))
    sizes = LatentDefaults(query_rank=2048, nope_dim=192, value_dim=256)
    common = ConfigDefaults(num_kv_heads=64, norm_eps=1e-5)
    config = read_latent(fields, common, sizes, has_neighbors=True)
    config = _bounded(fields, config, _read_indexers(fields, config.num_layers), num_heads=32)
    routing = Routing(256, 8, is_normalized=True, scale=2.5)
    return replace(
        config, mixture=read_grouped_mixture(fields, config.num_layers, routing, intermediate_size=2048, num_dense=3))


def _bounded(fields: Fields, config: ModelConfig, layers: tuple[bool, ...], *, num_heads: int) -> ModelConfig:
    """A config for contexts in which indexers, which some `layers` have, select every token."""
    assert config.latent is not None
    indexers = Indexers(
        fields.integer("index_n_heads", default=num_heads, maximum=MAX_DIM),
        fields.integer("index_head_dim", default=128, maximum=MAX_DIM), layers)
    longest = fields.integer("index_topk", default=2048)
    return replace(config, max_position_embeddings=min(config.max_position_embeddings, longest),
                   latent=replace(config.latent, indexers=indexers))


def _read_indexers(fields: Fields, num_layers: int) -> tuple[bool, ...]:
    """Whether each layer has an indexer of its own, or shares that of a layer before it."""
    if fields.has("indexer_types"):
        kinds = fields.texts("indexer_types")
    elif isinstance(fields.values.get("index_topk_pattern"), str):
        kinds = tuple({"F": "full", "S": "shared"}.get(kind, kind) for kind in fields.text("index_topk_pattern"))
    elif fields.has("index_topk_pattern"):
        kinds = fields.texts("index_topk_pattern")
    else:
        every = max(fields.integer("index_topk_freq", default=1, minimum=0), 1)
        first = fields.integer("index_skip_topk_offset", default=2, minimum=0)
        return tuple(max(layer - first + 1, 0) % every == 0 for layer in range(num_layers))
    if len(kinds) != num_layers or set(kinds) - {"full", "shared"}:
        raise fields.error("indexer_types", f"must be full or shared for each of {num_layers} layers")
    return tuple(kind == "full" for kind in kinds)


class IndexedLayer(LatentLayer):
    """DeepSeek-V3's layer; checks the weights of its indexer."""

    def __init__(self, config: ModelConfig, source: WeightSource, index: int) -> None:
        super().__init__(config, source, index, V3_NAMES)
        assert config.latent is not None
        assert config.latent.indexers is not None
        num_heads, head_dim, layers = config.latent.indexers
        if layers[index]:
            at = f"model.layers.{index}.self_attn.indexer"
            for name, size in (("wq_b.weight", (num_heads * head_dim, config.latent.query_rank)),
                               ("wk.weight", (head_dim, config.hidden_size)), ("k_norm.weight", (head_dim,)),
                               ("k_norm.bias", (head_dim,)), ("weights_proj.weight", (num_heads, config.hidden_size))):
                source.tensor({f"{at}.{name}": size})


def compose(config: ModelConfig, source: WeightSource) -> Network:
    layer, ends = functools.partial(IndexedLayer, config, source), EndOptions(config.tie_word_embeddings)
    return read_network(config, source, layer, ends, NormOptions(config.norm_eps))
