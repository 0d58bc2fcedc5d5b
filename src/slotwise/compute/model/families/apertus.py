"""Apertus (Swiss AI Initiative, 2025): Llama with norms of queries and keys, and MLPs of two products with xIELU; also
the text part of Apertus 1.5.

    xielu(x) = p * x**2 + x / 2                                    where x > 0
    xielu(x) = n * (exp(min(x, -1e-6)) - 1 - x) + x / 2            else        (Huang and Schlag, 2024)

p and n are learned by each layer, as their inverse softplus.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import torch
from torch import Tensor

from slotwise.compute.model.families.llama import LlamaLayer
from slotwise.compute.model.fields import Fields
from slotwise.compute.model.layers.attention import Attention, AttentionOptions
from slotwise.compute.model.layers.embedding_and_head import EndOptions
from slotwise.compute.model.layers.linear import Linear
from slotwise.compute.model.layers.norm import NormOptions, RMSNorm
from slotwise.compute.model.layers.rank_weights import NO_CUTS, WeightSource, mlp_share
from slotwise.compute.model.model_config import ConfigDefaults, ModelConfig, read_common
from slotwise.compute.model.network import Network, read_network
from slotwise.compute.model.stored_tensors import Cut

DEFAULTS = ConfigDefaults(norm_eps=1e-5, rope_theta=12_000_000.0)
ROPE = {
    "rope_type": "llama3", "rope_theta": 12_000_000.0, "factor": 8.0, "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0, "high_freq_factor": 4.0}
EPS = -1e-6


def configure(fields: Fields) -> ModelConfig:
    if not fields.section("rope_parameters").values and not fields.section("rope_scaling").values:
        fields = Fields({**fields.values, "rope_parameters": ROPE}, fields.where)
    config, bias = read_common(fields, DEFAULTS, ("xielu",)), fields.flag("attention_bias")
    return replace(config, qkv_bias=bias, output_bias=bias, qk_norm=True, has_gated_mlp=False)


def configure_text(fields: Fields) -> ModelConfig:
    """The text part of Apertus 1.5."""
    size = fields.integer("vocab_size", default=266752)
    if fields.integer("output_vocab_size", default=size) != size:
        raise fields.error("output_vocab_size", f"must be vocab_size ({size}): a smaller head is not supported")
    return configure(fields)


class XIELUMLP:
    """`down(xielu(up(x)))`."""

    def __init__(self, source: WeightSource, name: str, sizes: tuple[int, int]) -> None:
        hidden, intermediate = sizes
        up, down, up_cuts, down_cuts = f"{name}.up_proj", f"{name}.down_proj", NO_CUTS, NO_CUTS
        if source.group.size > 1:
            own = mlp_share(intermediate, source.group, source.unit)
            up_cuts, down_cuts = {up: Cut((own,))}, {down: Cut(columns=own)}
        self._kernels = source.kernels
        self.up = Linear(source, {up: intermediate}, hidden, cuts=up_cuts)
        self.down = Linear(source, {down: hidden}, intermediate, cuts=down_cuts)
        positive, negative = (source.floats({f"{name}.act_fn.{part}": (1,)}) for part in ("alpha_p", "alpha_n"))
        beta, eps = (source.floats({f"{name}.act_fn.{part}": ()}) for part in ("beta", "eps"))
        self._xielu = functools.partial(_xielu, torch.nn.functional.softplus(positive.double()),
                                        beta.double() + torch.nn.functional.softplus(negative.double()), beta, eps)
        self.bytes = self.token_bytes = self.up.bytes + self.down.bytes + 4 * source.dtype.itemsize

    def __call__(self, x: Tensor) -> Tensor:
        return self.down(self._kernels.rowwise(self._xielu, self.up(x)))


def _xielu(positive: Tensor, negative: Tensor, beta: Tensor, eps: Tensor, x: Tensor) -> Tensor:
    """In float64, in which a result does not depend on its place in a vector of the processor."""
    wide = x.double()
    below = (torch.expm1(torch.minimum(wide, eps.double())) - wide) * negative
    return (torch.where(wide > 0, positive * wide * wide, below) + beta.double() * wide).to(x.dtype)


class ApertusLayer(LlamaLayer):
    """Llama's layer with this MLP."""

    def __init__(self, config: ModelConfig, source: WeightSource, index: int) -> None:
        at, hidden, norms = f"model.layers.{index}", config.hidden_size, NormOptions(config.norm_eps)
        self.attention_norm = RMSNorm(source, f"{at}.attention_layernorm", hidden, norms)
        self.attention = Attention(
            source, f"{at}.self_attn", config.attention_shape(index), config.ropes[index], hidden,
            AttentionOptions(config.qkv_bias, config.output_bias, norms))
        self.mlp_norm = RMSNorm(source, f"{at}.feedforward_layernorm", hidden, norms)
        self.mlp = XIELUMLP(source, f"{at}.mlp", (hidden, config.intermediate_size))


def compose(config: ModelConfig, source: WeightSource) -> Network:
    layer, ends = functools.partial(ApertusLayer, config, source), EndOptions(config.tie_word_embeddings)
    return read_network(config, source, layer, ends, NormOptions(config.norm_eps))
