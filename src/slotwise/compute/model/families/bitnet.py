"""BitNet b1.58 (Ma et al., 2024): Llama with squared ReLU, and norms before the last product of attention and MLP.

    h += output(norm(attention(norm(h)))),  h += down(norm(relu(gate(norm(h)))**2 * up(norm(h))))

Earlier models have SiLU in place of the squared ReLU.

Weights are plain, or packed in two bits (`quantization/bitnet.py`).
"""

from __future__ import annotations

import functools
from dataclasses import replace

from torch import Tensor

from slotwise.compute.model.families.llama import LlamaLayer
from slotwise.compute.model.fields import Fields
from slotwise.compute.model.layers.attention import Attention, AttentionOptions
from slotwise.compute.model.layers.embedding_and_head import EndOptions
from slotwise.compute.model.layers.linear import Linear
from slotwise.compute.model.layers.norm import NormOptions, RMSNorm
from slotwise.compute.model.layers.rank_weights import WeightSource
from slotwise.compute.model.model_config import ConfigDefaults, ModelConfig, read_activation, read_common
from slotwise.compute.model.network import Network, read_network
from slotwise.errors import CheckpointError

DEFAULTS = ConfigDefaults(num_kv_heads=5, norm_eps=1e-5, rope_theta=500_000.0)
ACTIVATIONS = "relu2", "silu"


def configure(fields: Fields) -> ModelConfig:
    config, bias = read_common(fields, DEFAULTS, ACTIVATIONS), fields.flag("attention_bias")
    return replace(config, qkv_bias=bias, output_bias=bias,
                   activation=read_activation(fields, ACTIVATIONS[0]))


class NormedMLP:
    """`down(norm(activation(gate(x)) * up(x)))`."""

    def __init__(self, config: ModelConfig, source: WeightSource, name: str, norms: NormOptions) -> None:
        hidden, intermediate = config.hidden_size, config.intermediate_size
        parts = {f"{name}.gate_proj": intermediate, f"{name}.up_proj": intermediate}
        self.gate_up = Linear(source, parts, hidden, gate=config.activation)
        self.norm = RMSNorm(source, f"{name}.ffn_sub_norm", intermediate, norms)
        self.down = Linear(source, {f"{name}.down_proj": hidden}, intermediate)
        self.bytes = self.token_bytes = self.gate_up.bytes + self.norm.bytes + self.down.bytes

    def __call__(self, x: Tensor) -> Tensor:
        return self.down(self.norm(self.gate_up(x)))


class BitNetLayer(LlamaLayer):
    """Llama's layer with these norms."""

    def __init__(self, config: ModelConfig, source: WeightSource, index: int) -> None:
        at, hidden, norms = f"model.layers.{index}", config.hidden_size, NormOptions(config.norm_eps)
        self.attention_norm = RMSNorm(source, f"{at}.input_layernorm", hidden, norms)
        self.attention = Attention(
            source, f"{at}.self_attn", config.attention_shape(index), config.ropes[index], hidden,
            AttentionOptions(config.qkv_bias, config.output_bias, result_norm=("attn_sub_norm", norms)))
        self.mlp_norm = RMSNorm(source, f"{at}.post_attention_layernorm", hidden, norms)
        self.mlp = NormedMLP(config, source, f"{at}.mlp", norms)


def compose(config: ModelConfig, source: WeightSource) -> Network:
    if source.group.size > 1:
        raise CheckpointError(f"tensor_parallel_size {source.group.size}: norms of all heads and of whole MLPs are not "
                              "divided: serve this model with tensor_parallel_size 1")
    layer, ends = functools.partial(BitNetLayer, config, source), EndOptions(config.tie_word_embeddings)
    return read_network(config, source, layer, ends, NormOptions(config.norm_eps))
