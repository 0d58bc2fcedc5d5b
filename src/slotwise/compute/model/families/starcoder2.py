"""StarCoder2 (Lozhkov et al., 2024): Mistral with biases, LayerNorms, and MLPs of two products."""

from __future__ import annotations

from dataclasses import replace

from slotwise.compute.model.families.gpt2 import ClassicLayer, Parts, compose_layers, read_plain
from slotwise.compute.model.fields import Fields
from slotwise.compute.model.layers.attention import AttentionOptions
from slotwise.compute.model.layers.rank_weights import WeightSource
from slotwise.compute.model.model_config import ConfigDefaults, ModelConfig, read_rope, read_window
from slotwise.compute.model.network import Network

DEFAULTS = ConfigDefaults(num_kv_heads=2, norm_eps=1e-5, tie_word_embeddings=True)
PARTS = Parts("input_layernorm", "self_attn", "post_attention_layernorm", "mlp.c_fc", "mlp.c_proj")


def configure(fields: Fields) -> ModelConfig:
    fields = fields.renamed({"norm_epsilon": "rms_norm_eps"})
    config, bias = read_plain(
        fields, DEFAULTS, "gelu_pytorch_tanh", rope=read_rope(fields)), fields.flag("use_bias", default=True)
    return replace(config, qkv_bias=bias, output_bias=bias, mlp_bias=bias,
                   windows=(read_window(fields, 0),) * config.num_layers)


def compose(config: ModelConfig, source: WeightSource) -> Network:
    return compose_layers(
        config, source, ClassicLayer, PARTS, AttentionOptions(config.qkv_bias, config.output_bias))
