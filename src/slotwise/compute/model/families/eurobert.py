"""EuroBERT (Boizard et al., 2025): Llama's layers, whose tokens attend to both sides.

    labels = classifier(gelu(dense(pooled)))
"""

from __future__ import annotations

from dataclasses import replace

from slotwise.compute.model.families import llama
from slotwise.compute.model.fields import Fields
from slotwise.compute.model.layers.embedding_and_head import PooledHead
from slotwise.compute.model.layers.linear import Linear
from slotwise.compute.model.layers.rank_weights import WeightSource
from slotwise.compute.model.model_config import ModelConfig
from slotwise.compute.model.network import Network


def configure(fields: Fields) -> ModelConfig:
    if fields.texts("architectures")[0].endswith("ForSequenceClassification") and (
            fields.text("classifier_pooling", default="late") == "late"):
        raise fields.error("classifier_pooling", "late is not supported: bos and mean are")
    return replace(llama.configure(fields.with_defaults(rms_norm_eps=1e-5)), is_causal=False, pooling="cls")


def compose(config: ModelConfig, source: WeightSource) -> Network:
    network = llama.compose(replace(config, num_labels=0), source)
    if not config.num_labels:
        return network
    size = config.hidden_size
    dense = Linear(source, {"dense": size}, size, bias=True, is_exact=True)
    classifier = Linear(source, {"classifier": config.num_labels}, size, bias=True, is_exact=True)
    return replace(network, classifier=PooledHead((dense, "gelu"), (classifier, "")))
