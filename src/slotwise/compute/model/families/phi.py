"""Phi-1, Phi-1.5 and Phi-2 (Gunasekar et al., 2023): GPT-J's layer with biases, of which half of a head rotates."""

from __future__ import annotations

from dataclasses import replace

from slotwise.compute.model.families.gpt2 import Parts, compose_layers
from slotwise.compute.model.families.gpt_neox import read_partial
from slotwise.compute.model.families.gptj import SharedNormLayer, biased_ends
from slotwise.compute.model.fields import Fields
from slotwise.compute.model.layers.attention import AttentionOptions
from slotwise.compute.model.layers.norm import HeadNormOptions
from slotwise.compute.model.layers.rank_weights import WeightSource
from slotwise.compute.model.model_config import ModelConfig
from slotwise.compute.model.network import Network

PARTS = Parts("input_layernorm", "self_attn", "", "mlp.fc1", "mlp.fc2")
NAMES = ("q_proj", "k_proj", "v_proj", "dense")


def configure(fields: Fields) -> ModelConfig:
    return replace(read_partial(fields, 0.5, "gelu_new"), qk_norm=fields.flag("qk_layernorm"))


def compose(config: ModelConfig, source: WeightSource) -> Network:
    norms = HeadNormOptions(config.norm_eps, has_bias=True) if config.qk_norm else None
    options = AttentionOptions(True, True, names=NAMES, head_norm=norms)
    return compose_layers(config, source, SharedNormLayer, PARTS, options, biased_ends(config))
