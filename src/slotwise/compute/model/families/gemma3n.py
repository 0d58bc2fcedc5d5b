"""Gemma 3n (Gemma Team, 2025), text: four residual streams, of which a layer computes one and predicts the others.

    predicted = streams + coefficients(streams[active]) @ streams         AltUp (Baykal et al., 2023)
    a = predicted[active],  x = norm(a)
    a = (a + norm(attention(x)) + laurel(x)) / sqrt(2)                     laurel(x) = x + norm(right(left(x)))
    a += norm(mlp(norm(a)))
    streams = predicted + correction(a) * (a - predicted[active])
    streams[1:] += per-layer embedding of streams[active]

The last layers read the keys and values of an earlier one, and the gates of the first ones are sparse: those below the
95th percentile of a normal distribution with their mean and variance are 0.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from statistics import NormalDist

import torch
from torch import Tensor

from slotwise.compute.model.families.gemma import ACTIVATIONS, GEMMA3_THETA, LOCAL_THETA
from slotwise.compute.model.fields import Fields
from slotwise.compute.model.layers.attention import Attention, AttentionOptions, LayerStep, SharedAttention
from slotwise.compute.model.layers.embedding_and_head import EndOptions
from slotwise.compute.model.layers.linear import Linear
from slotwise.compute.model.layers.mlp import GatedMLP
from slotwise.compute.model.layers.norm import Norm, NormOptions, ResidualStream, RMSNorm
from slotwise.compute.model.layers.per_layer_embedding import PerLayerGate, PerLayerInputs, PerLayerStream
from slotwise.compute.model.layers.rank_weights import WeightSource, heads_of
from slotwise.compute.model.model_config import (
    FULL,
    MAX_LAYERS,
    SLIDING,
    ConfigDefaults,
    ModelConfig,
    read_common,
    read_layer_types,
    read_ropes,
    read_window,
    text_part,
)
from slotwise.compute.model.network import DecoderLayer, Network, read_network, refuse_stages
from slotwise.errors import CheckpointError

DEFAULTS = ConfigDefaults(num_kv_heads=2, head_dim=256, tie_word_embeddings=True)
SPARSE_LAYERS, SPARSITY = 10, 0.95
LEAST = 1e-5  # of the square of a stream's size


@dataclass(frozen=True, slots=True)
class Gemma3nConfig:
    """What only this family has."""

    intermediate_sizes: tuple[int, ...]  # by layer
    sparsity: tuple[float, ...]  # by layer: the part of the gates that are 0
    num_streams: int
    active: int  # the stream that layers compute
    scales_active: bool  # before the per-layer embedding
    laurel_rank: int
    input_size: int  # of a per-layer embedding
    input_vocab_size: int


def configure(fields: Fields) -> ModelConfig:
    num_layers = fields.integer("num_hidden_layers", maximum=MAX_LAYERS)
    kinds = fields.texts("layer_types") if fields.has("layer_types") else tuple(
        SLIDING if (layer + 1) % 5 else FULL for layer in range(num_layers))
    ropes = read_ropes(fields, {FULL: fields.number("rope_theta", default=GEMMA3_THETA),
                                SLIDING: fields.number("rope_local_base_freq", default=LOCAL_THETA)})
    windows, sizes = read_layer_types(fields, read_window(fields, 512), kinds), _sizes(fields, num_layers)
    fields = Fields({**fields.values, "intermediate_size": max(sizes)}, fields.where)
    config = read_common(fields, DEFAULTS, ACTIVATIONS, [ropes[kind] for kind in kinds])
    bias = fields.flag("attention_bias")
    streams = fields.integer("altup_num_inputs", default=4, maximum=64)
    return replace(
        config, qkv_bias=bias, output_bias=bias, qk_norm=True, attention_scale=1.0, windows=windows,
        logit_soft_cap=0.0 if fields.is_null("final_logit_softcapping") else fields.number(
            "final_logit_softcapping", default=30.0),
        kv_layers=read_kv_layers(fields, kinds, 15),
        own=Gemma3nConfig(
            sizes, _sparsity(fields, num_layers), streams,
            fields.integer("altup_active_idx", default=0, minimum=0, maximum=streams - 1),
            fields.flag("altup_correct_scale", default=True), fields.integer("laurel_rank", default=64),
            fields.integer("hidden_size_per_layer_input", default=256),
            fields.integer("vocab_size_per_layer_input", default=262_144)))


def configure_text(fields: Fields) -> ModelConfig:
    """The text part of a model for images, sound and text: prompts are text."""
    return configure(text_part(fields, TEXT_DEFAULTS))


TEXT_DEFAULTS = {
    "vocab_size": 262_400, "hidden_size": 2048, "intermediate_size": 16_384, "num_hidden_layers": 35,
    "num_attention_heads": 8, "max_position_embeddings": 32_768}


def read_kv_layers(fields: Fields, kinds: tuple[str, ...], default: int) -> tuple[int, ...]:
    """By layer, the one whose keys and values it reads: the last `num_kv_shared_layers` those of the last of their kind
    before; () without such layers.
    """
    shared = fields.integer("num_kv_shared_layers", default=default, minimum=0)
    first = len(kinds) - shared
    if not shared:
        return ()
    if first < 1 or set(kinds[first:]) - set(kinds[:first]):
        raise fields.error("num_kv_shared_layers", f"({shared}) leaves no layer of each kind before them")
    last = {kind: layer for layer, kind in enumerate(kinds[:first])}
    return tuple(layer if layer < first else last[kind] for layer, kind in enumerate(kinds))


def _sizes(fields: Fields, num_layers: int) -> tuple[int, ...]:
    if not isinstance(fields.values.get("intermediate_size"), list):
        return (fields.integer("intermediate_size"),) * num_layers
    sizes = fields.integers("intermediate_size")
    if len(sizes) != num_layers or not all(sizes):
        raise fields.error("intermediate_size", f"must be one size or {num_layers}, not {sizes!r:.40}")
    return sizes


def _sparsity(fields: Fields, num_layers: int) -> tuple[float, ...]:
    name = "activation_sparsity_pattern"
    if not fields.has(name):
        sparse = SPARSE_LAYERS if num_layers > SPARSE_LAYERS else 0
        return (SPARSITY,) * sparse + (0.0,) * (num_layers - sparse)
    values = fields.values[name] if isinstance(fields.values[name], list) else []
    if len(values) != num_layers or not all(isinstance(each, (int, float)) and 0 <= each < 1 for each in values):
        raise fields.error(name, f"must be a list of {num_layers} numbers from 0 to below 1")
    return tuple(map(float, values))


class AltUp:
    """Predicts all streams of a layer, and corrects them by what it computed of the active one.

    Streams lie behind each other: `[tokens, streams * hidden]`.
    """

    def __init__(self, config: ModelConfig, source: WeightSource, at: str) -> None:
        own, hidden = own_of(config), config.hidden_size
        self._kernels, self._own, self._hidden = source.kernels, own, hidden
        count, name = own.num_streams, f"{at}.altup"
        self._norm = RMSNorm(source, f"{name}.router_norm", hidden, NormOptions(config.norm_eps))
        self._router = Linear(source, {f"{name}.modality_router": count}, hidden, is_exact=True)
        self._prediction = source.tensor({f"{name}.prediction_coefs.weight": (count * count, count)}).double()
        self._correction = source.tensor({f"{name}.correction_coefs.weight": (count, count)}).double()
        self.scale = source.tensor({f"{name}.correct_output_scale": (hidden,)})
        self.bytes = self._norm.bytes + self._router.bytes + (count**3 + count**2 + hidden) * source.dtype.itemsize

    def active(self, streams: Tensor) -> Tensor:
        """`[tokens, hidden]` of the active stream."""
        return self._kernels.rowwise(functools.partial(one_of, self._own.active, self._hidden), streams)

    def _routed(self, active: Tensor) -> Tensor:
        """`[tokens, streams]`, before the tanh."""
        return self._router(self._kernels.rowwise(
            functools.partial(_times, 1.0 / self._hidden), self._norm(active)))

    def predict(self, streams: Tensor) -> Tensor:
        work = functools.partial(_predicted, self._prediction, self._hidden)
        return self._kernels.rowwise(work, streams, self._routed(self.active(streams)))

    def correct(self, predicted: Tensor, active: Tensor) -> Tensor:
        work = functools.partial(_corrected, self._correction, self._own.active)
        return self._kernels.rowwise(work, predicted, active, self._routed(active))


# Coefficients are computed in float64, in which a result does not depend on its place in a vector of the processor.


def one_of(index: int, hidden: int, streams: Tensor) -> Tensor:
    """One of the streams, in memory of its own."""
    return streams[:, index * hidden : (index + 1) * hidden].contiguous()


def _times(factor: float, x: Tensor) -> Tensor:
    return x * factor


def _predicted(weight: Tensor, hidden: int, streams: Tensor, routed: Tensor) -> Tensor:
    coefficients = _product(routed.double().tanh().to(streams.dtype), weight)  # [tokens, streams * streams]
    parts = streams.view(len(streams), -1, hidden)
    count = parts.shape[1]
    coefficients = coefficients.view(-1, count, count)
    predicted = [parts[:, to] + sum_of([parts[:, of] * coefficients[:, to, of, None] for of in range(count)])
                 for to in range(count)]
    return torch.cat(predicted, 1)


def _corrected(weight: Tensor, active: int, predicted: Tensor, x: Tensor, routed: Tensor) -> Tensor:
    coefficients = _product(routed.double().tanh().to(x.dtype), weight) + 1.0  # [tokens, streams]
    parts = predicted.view(len(x), -1, x.shape[1])
    innovation = x - parts[:, active]
    return (parts + coefficients[:, :, None] * innovation[:, None]).view(predicted.shape)


def _product(x: Tensor, weight: Tensor) -> Tensor:
    """`x @ weight.T`, the same for a row whatever the others are."""
    return sum_of([x[:, at, None].double() * weight[:, at] for at in range(x.shape[1])]).to(x.dtype)


def sum_of(terms: list[Tensor]) -> Tensor:
    """Their sum, from the first to the last."""
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total


class SparseMLP:
    """A gated MLP with GELU, whose gates are 0 below the quantile `sparsity` of a normal distribution."""

    def __init__(self, source: WeightSource, name: str, sizes: tuple[int, int], sparsity: float) -> None:
        hidden, intermediate = sizes
        self._kernels, self._above = source.kernels, NormalDist().inv_cdf(sparsity)
        parts = {f"{name}.gate_proj": intermediate, f"{name}.up_proj": intermediate}
        self.gate_up = Linear(source, parts, hidden)
        self.down = Linear(source, {f"{name}.down_proj": hidden}, intermediate)
        self.bytes = self.token_bytes = self.gate_up.bytes + self.down.bytes

    def __call__(self, x: Tensor) -> Tensor:
        sparse = self._kernels.rowwise(functools.partial(_sparse, self._above), self.gate_up(x))
        return self.down(self._kernels.gelu_mul(sparse))


def _sparse(above: float, gate_up: Tensor) -> Tensor:
    """Gates less their mean and `above` standard deviations, where that is positive."""
    gates, ups = gate_up.chunk(2, dim=-1)
    exact = gates.double()
    mean, deviation = exact.mean(-1, keepdim=True), exact.std(-1, keepdim=True, unbiased=False)
    return torch.cat((torch.relu(gates - (mean + above * deviation).to(gates.dtype)), ups), dim=-1)


class PredictedNorm:
    """Predicts the streams, and norms the active one."""

    def __init__(self, altup: AltUp, norm: RMSNorm) -> None:
        self._altup, self._norm, self.bytes = altup, norm, norm.bytes

    def __call__(self, h: ResidualStream, /) -> Tensor:
        h.replace(self._altup.predict(h.sum()))
        return self.of_active(h)

    def of_active(self, h: ResidualStream) -> Tensor:
        """Of streams that are predicted."""
        return self._norm(self._altup.active(h.sum()))


class Gemma3nLayer(DecoderLayer):
    """One layer; `live_states` are mostly streams."""

    live_states = 16

    attention_norm: PredictedNorm

    def __init__(self, config: ModelConfig, source: WeightSource, index: int) -> None:
        own, at, hidden = own_of(config), f"model.layers.{index}", config.hidden_size
        norms = NormOptions(config.norm_eps)
        self._index, self._own, self._kernels = index, own, source.kernels
        self.altup = AltUp(config, source, at)
        self.attention_norm = PredictedNorm(self.altup, RMSNorm(source, f"{at}.input_layernorm", hidden, norms))
        self.attention = read_attention(config, source, index, norms)
        self.attention_post_norm = RMSNorm(source, f"{at}.post_attention_layernorm", hidden, norms)
        self.left = Linear(source, {f"{at}.laurel.linear_left": own.laurel_rank}, hidden)
        self.right = Linear(source, {f"{at}.laurel.linear_right": hidden}, own.laurel_rank)
        self.laurel_norm = RMSNorm(source, f"{at}.laurel.post_laurel_norm", hidden, norms)
        self.mlp_norm = RMSNorm(source, f"{at}.pre_feedforward_layernorm", hidden, norms)
        sizes, sparsity = (hidden, own.intermediate_sizes[index]), own.sparsity[index]
        self.mlp = SparseMLP(source, f"{at}.mlp", sizes, sparsity) if sparsity else GatedMLP(
            source, f"{at}.mlp", sizes, activation="gelu_tanh")
        self.mlp_post_norm = RMSNorm(source, f"{at}.post_feedforward_layernorm", hidden, norms)
        self.gate = PerLayerGate(source, at, (hidden, own.input_size), norms)

    def forward(self, h: ResidualStream, step: LayerStep) -> None:
        assert isinstance(h, PerLayerStream)
        rowwise = self._kernels.rowwise
        attended = self.attention(self.attention_norm(h), step)  # from here on of kept tokens
        predicted, x = h.sum(), self.attention_norm.of_active(h)
        laurel = self.laurel_norm(self.right(self.left(x)))
        a = rowwise(_joined, self.altup.active(predicted), self.attention_post_norm(attended), x, laurel)
        a = rowwise(torch.add, a, self.mlp_post_norm(self.mlp(self.mlp_norm(a))))
        streams = self.altup.correct(predicted, a)
        active = self.altup.active(streams)
        if self._own.scales_active:
            active = rowwise(functools.partial(torch.mul, self.altup.scale), active)
        h.replace(rowwise(_with_inputs, streams, self.gate(active, h.inputs(self._index))))


def _joined(active: Tensor, attended: Tensor, x: Tensor, laurel: Tensor) -> Tensor:
    return (active + attended + (x + laurel)) / math.sqrt(2)


def _with_inputs(streams: Tensor, added: Tensor) -> Tensor:
    """Added to all streams but the first."""
    return torch.cat((streams[:, : added.shape[1]], streams[:, added.shape[1] :] + added.repeat(
        1, streams.shape[1] // added.shape[1] - 1)), dim=1)


def read_attention(
    config: ModelConfig, source: WeightSource, index: int, norms: NormOptions, *, has_values: bool = True,
) -> Attention | SharedAttention:
    """Of a layer that norms queries, keys and values, or reads the keys and values of another one; also Gemma 4's."""
    name, shape, rope = f"model.layers.{index}.self_attn", config.attention_shape(index), config.ropes[index]
    if config.kv_layer(index) != index:
        return SharedAttention(source, name, shape, rope, config.hidden_size, norms, bias=config.qkv_bias)
    keys = heads_of(shape, source.group).shape.num_kv_heads
    qkv = functools.partial(_normed_values, keys, config.norm_eps, has_values)
    options = AttentionOptions(config.qkv_bias, config.output_bias, norms, has_values=has_values, qkv=qkv)
    return Attention(source, name, shape, rope, config.hidden_size, options)


def _normed_values(count: int, eps: float, has_values: bool, heads: Tensor) -> Tensor:
    """Heads with RMS norms of their values, which are keys where they are not the last `count`."""
    values = heads[:, -count:].float()
    normed = (values * torch.rsqrt(values.square().mean(-1, keepdim=True) + eps)).to(heads.dtype)
    return torch.cat((heads[:, :-count] if has_values else heads, normed), dim=1)


class Start:
    """The streams of a token: its embedding, and products with it that are as large."""

    def __init__(self, config: ModelConfig, source: WeightSource) -> None:
        own, hidden = own_of(config), config.hidden_size
        self._kernels, self._own, self._hidden = source.kernels, own, hidden
        self._inputs = PerLayerInputs(source, own.input_vocab_size, (hidden, config.num_layers, own.input_size),
                                      NormOptions(config.norm_eps))
        self._projections = [Linear(source, {f"model.altup_projections.{at}": hidden}, hidden)
                             for at in range(own.num_streams - 1)]
        projected = sum(each.bytes for each in self._projections)
        self.bytes, self.token_bytes = self._inputs.bytes + projected, self._inputs.token_bytes + projected

    def __call__(self, token_ids: Tensor, x: Tensor) -> PerLayerStream:
        streams = self._kernels.rowwise(_as_large, x, *[product(x) for product in self._projections])
        return PerLayerStream(streams, self._inputs(token_ids, x), self._inputs.size, self._kernels)


def _as_large(x: Tensor, *others: Tensor) -> Tensor:
    """Streams behind each other, all of the size of the first."""
    size = x.square().mean(-1, keepdim=True).sqrt()
    return torch.cat([x, *[each * size / each.square().mean(-1, keepdim=True).clamp(min=LEAST).sqrt()
                           for each in others]], dim=1)


class End:
    """The norm of the mean of the streams, each multiplied by a weight of its own and of the size of the first."""

    def __init__(self, config: ModelConfig, source: WeightSource, norm: Norm) -> None:
        own, hidden = own_of(config), config.hidden_size
        self._kernels, self._norm, self._hidden = source.kernels, norm, hidden
        self._projections = [Linear(source, {f"model.altup_unembed_projections.{at}": hidden}, hidden)
                             for at in range(own.num_streams - 1)]
        self.bytes = norm.bytes + sum(each.bytes for each in self._projections)

    def __call__(self, h: ResidualStream, /) -> Tensor:
        streams, rowwise = h.sum(), self._kernels.rowwise
        first, *others = [rowwise(functools.partial(one_of, at, self._hidden), streams)
                          for at in range(len(self._projections) + 1)]
        projected = [product(x) for product, x in zip(self._projections, others, strict=True)]
        return self._norm(ResidualStream(rowwise(_mean, first, *projected), self._kernels))


def _mean(x: Tensor, *others: Tensor) -> Tensor:
    parts = _as_large(x, *others).view(len(x), -1, x.shape[1])
    return sum_of([*parts.unbind(1)]) / parts.shape[1]


def compose(config: ModelConfig, source: WeightSource) -> Network:
    refuse_stages(source, "alternating updates of several residual streams")
    if source.group.size > 1:
        raise CheckpointError(f"tensor_parallel_size {source.group.size}: sparse gates depend on the gates of all "
                              "ranks: serve this model with tensor_parallel_size 1")
    scale = torch.tensor(config.hidden_size**0.5, dtype=source.dtype).item()  # rounded, as the models were trained
    ends, norms = EndOptions(config.tie_word_embeddings, scale, config.logit_soft_cap), NormOptions(config.norm_eps)
    start = Start(config, source)
    network = read_network(config, source, functools.partial(Gemma3nLayer, config, source), ends, norms)
    return replace(network, start=start, norm=End(config, source, network.norm))


def own_of(config: ModelConfig) -> Gemma3nConfig:
    assert isinstance(config.own, Gemma3nConfig)
    return config.own
