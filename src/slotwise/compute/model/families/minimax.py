"""MiniMax-Text-01 (MiniMax, 2025): in most layers linear attention with a fixed decay per head, in the others Llama's
attention; Mixtral's experts.  Residual sums are weighted, and add to the normed states.

    h = a * norm(h) + b * attention(norm(h)),  h = a * norm(h) + b * experts(norm(h))

Linear attention ("lightning attention", Qin et al., 2024) is Mamba-2's rule with steps of 1: queries are its C, keys
its B, and the rate of a head is its decay.  Its results are gated by a sigmoid, where the kernel gates by SiLU.  So the
kernel gets a constant gate, and the weights of the norm after the rule are divided by the SiLU of that constant.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from slotwise.compute.kernels.interface import (
    ConvolutionWeights,
    LayerCache,
    RaggedBatch,
    Routing,
    StateSpaceShape,
    StateSpaceWeights,
)
from slotwise.compute.model.families.mistral import EXPERTS, MIXTRAL
from slotwise.compute.model.fields import Fields
from slotwise.compute.model.layers.attention import Attention, LayerStep, refuse_ranks
from slotwise.compute.model.layers.embedding_and_head import EndOptions
from slotwise.compute.model.layers.linear import Linear
from slotwise.compute.model.layers.norm import NormOptions, ResidualStream, RMSNorm
from slotwise.compute.model.layers.rank_weights import WeightSource
from slotwise.compute.model.layers.rope import Rope
from slotwise.compute.model.layers.short_convolution import advanced
from slotwise.compute.model.model_config import (
    FULL,
    LINEAR,
    ModelConfig,
    RecurrentConfig,
    read_common,
    read_mixture,
    read_state_layers,
    read_window,
)
from slotwise.compute.model.network import DecoderLayer, Network, TokenMixer, read_experts, read_network

CONSTANT = 1.28125  # the gate, which every type of hidden states represents exactly
NORM_EPS = 1e-6  # of the norm after the rule


@dataclass(frozen=True, slots=True)
class MiniMaxConfig:
    """The factors of hidden states and of the addend, for each kind of sublayer."""

    full: tuple[float, float]
    linear: tuple[float, float]
    mlp: tuple[float, float]


def configure(fields: Fields) -> ModelConfig:
    config = read_common(fields, MIXTRAL)
    heads, size = config.num_heads, config.head_dim
    kinds = [LINEAR if layer % 2 else FULL for layer in range(config.num_layers)]
    states = read_state_layers(fields, kinds)
    if read_window(fields, 0) and any(states):
        raise fields.error("sliding_window", "is set, which is not supported with recurrent states")
    shape = StateSpaceShape(
        heads, size, heads, size, taps=2, is_normed_first=True, least_step=1.0, largest_step=1.0)
    own = MiniMaxConfig(*[(fields.number(f"{part}_alpha_factor", default=1.0),
                           fields.number(f"{part}_beta_factor", default=1.0))
                          for part in ("full_attn", "linear_attn", "mlp")])
    return replace(
        config, own=own, mixture=read_mixture(fields, config, Routing(8, 2, is_normalized=True)),
        recurrent=RecurrentConfig(shape, states, eps=NORM_EPS) if any(states) else None)


class LightningAttention:
    """The linear attention called `name` in the checkpoint.

    Args:
        decays: logarithms of the decay of each head, below 0.
    """

    ropes: tuple[Rope, ...] = ()

    def __init__(
        self, source: WeightSource, name: str, shape: StateSpaceShape, hidden_size: int, decays: Tensor, eps: float,
    ) -> None:
        refuse_ranks(source, "a recurrent state")
        self.shape = shape
        self._kernels, values = source.kernels, shape.values
        heads = torch.arange(3 * values).view(shape.num_heads, 3, -1)  # of each head, queries, keys and values
        order = torch.cat([heads[:, part].flatten() for part in (2, 1, 0)])
        self._qkv = Linear(source, {f"{name}.qkv_proj": 3 * values}, hidden_size, order=order)
        self._gate = Linear(source, {f"{name}.output_gate": values}, hidden_size)
        self.output = Linear(source, {f"{name}.out_proj": hidden_size}, values)
        norm = source.tensor({f"{name}.norm.weight": (values,)}).float()
        device, count = norm.device, shape.num_heads
        taps = torch.tensor([0.0, 1.0])[:, None].expand(2, shape.channels).contiguous()  # an identity
        self._weights = StateSpaceWeights(
            ConvolutionWeights(taps.to(device), None), decays.to(device), torch.ones(count, device=device),
            torch.zeros(count, device=device), norm * (1 + math.exp(-CONSTANT)) / CONSTANT, eps)
        self.bytes = self._qkv.bytes + self._gate.bytes + self.output.bytes + norm.nbytes

    def __call__(self, x: Tensor, step: LayerStep) -> Tensor:
        """`[tokens, hidden] -> [kept tokens, hidden]`."""
        gate = self._gate(x)
        return self.output(step.kept(self._kernels.sigmoid_mul(gate, self.store(x, step))))

    def store(self, x: Tensor, step: LayerStep) -> Tensor:
        """Advance the rows' states; returns the normed results `[tokens, values]`."""
        mixed = self._kernels.rowwise(self._between_constants, self._qkv(x))

        def advance(mixed: Tensor, batch: RaggedBatch, cache: LayerCache) -> Tensor:
            return self._kernels.state_space(mixed, self._weights, cache, batch, self.shape)

        return advanced(step, mixed, advance)

    def _between_constants(self, qkv: Tensor) -> Tensor:
        """Adds the constant gate before values, keys and queries, and the steps, which are 0, after them."""
        shape = self.shape
        return torch.cat((qkv.new_full((len(qkv), shape.values), CONSTANT), qkv,
                          qkv.new_zeros(len(qkv), shape.num_heads)), dim=1)


def _decays(config: ModelConfig, index: int) -> Tensor:
    """Logarithms of the decays of layer `index`, by head: smaller ones in later heads and layers."""
    heads = config.num_heads
    depth = 1 - index / (config.num_layers - 1 + 1e-5) + 1e-5
    return -(1 / 2 ** (8 / heads)) ** (torch.arange(heads) + 1.0) * depth


def _weighted(h: Tensor, x: Tensor, factors: tuple[float, float]) -> Tensor:
    return h * factors[0] + x * factors[1]


class MiniMaxLayer(DecoderLayer):
    """Weighted sums of normed states and the results of attention and experts."""

    attention: TokenMixer
    live_states = 4

    def __init__(self, config: ModelConfig, source: WeightSource, index: int) -> None:
        at, hidden, norms, recurrent = (
            f"model.layers.{index}", config.hidden_size, NormOptions(config.norm_eps), config.recurrent)
        assert isinstance(config.own, MiniMaxConfig)
        self._kernels, is_linear = source.kernels, recurrent is not None and recurrent.layers[index]
        self.attention_norm = RMSNorm(source, f"{at}.input_layernorm", hidden, norms)
        if is_linear:
            assert recurrent is not None and isinstance(recurrent.shape, StateSpaceShape)
            self.attention = LightningAttention(
                source, f"{at}.self_attn", recurrent.shape, hidden, _decays(config, index), recurrent.eps)
        else:
            self.attention = Attention(
                source, f"{at}.self_attn", config.attention_shape(index), config.ropes[index], hidden)
        self.mlp_norm = RMSNorm(source, f"{at}.post_attention_layernorm", hidden, norms)
        self.mlp = read_experts(config, source, at, EXPERTS)
        own = config.own
        self._attention_factors, self._mlp_factors = own.linear if is_linear else own.full, own.mlp

    def forward(self, h: ResidualStream, step: LayerStep) -> None:
        h.replace(self.attention_norm(h))
        self._add(h, self.attention(h.sum(), step), self._attention_factors)
        h.replace(self.mlp_norm(h))
        self._add(h, self.mlp(h.sum()), self._mlp_factors)

    def _add(self, h: ResidualStream, x: Tensor, factors: tuple[float, float]) -> None:
        h.replace(self._kernels.rowwise(functools.partial(_weighted, factors=factors), h.sum(), x))


def compose(config: ModelConfig, source: WeightSource) -> Network:
    layer, ends = functools.partial(MiniMaxLayer, config, source), EndOptions(config.tie_word_embeddings)
    return read_network(config, source, layer, ends, NormOptions(config.norm_eps))
