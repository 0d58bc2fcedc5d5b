"""The architecture and sizes of a decoder, read from its checkpoint's config.json.

`read_common` reads what all families write alike; a family's `configure` replaces what differs.  Rotary embeddings are
written in two formats: since transformers 5 one object, `rope_parameters`, has everything; before, `rope_theta` was a
separate field and `rope_scaling` had the rest.  Models whose layers rotate differently have such an object for each
kind of layer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from slotwise.compute.kernels.interface import (
    Activation,
    AttentionShape,
    ExpertActivation,
    ExpertGroups,
    LayerShape,
    Routing,
    StateShape,
)
from slotwise.compute.model.fields import Fields
from slotwise.compute.model.layers.latent_attention import LatentConfig
from slotwise.compute.model.layers.rope import LinearRope, Llama3Rope, LongRope, Rope, YarnRope
from slotwise.compute.model.names import with_head
from slotwise.compute.model.quantization.quantization_methods import read_quantization
from slotwise.compute.model.quantization.scheme import Quantization
from slotwise.compute.model.sentence_modules import DenseFields, read_labels
from slotwise.errors import CheckpointError

ORIGINAL = "original_max_position_embeddings"


class _RopeContext(NamedTuple):
    """What a scaling depends on in addition to its own fields."""

    theta: float
    original: int  # tokens of the context before it was extended
    longest: int  # tokens
    pairs: int  # that turn


def read_rope(
    fields: Fields, theta: float = 10_000.0, *, head_dim: int | None = None, aliases: Mapping[str, str] | None = None,
) -> Rope:
    """The one embedding of all layers.

    `theta` is the base where a config names none, `aliases` are further names of types.  `head_dim` is needed where
    a type has a factor for each pair, and for models that rotate a part of a head; None: there are none of either.

    Raises CheckpointError for variants that are not implemented.
    """
    name = "rope_scaling" if fields.section("rope_scaling").values else "rope_parameters"
    scaling = fields.section(name)
    if any(isinstance(value, dict) for value in scaling.values.values()):
        raise fields.error(name, "differs by layer type, which is not supported")
    if fields.has(ORIGINAL):
        scaling = Fields({**scaling.values, ORIGINAL: fields.values[ORIGINAL]}, scaling.where)
    base = scaling.number("rope_theta", default=fields.number("rope_theta", default=theta))
    return _read_scaling(fields, name, scaling, base, head_dim, aliases or {})


def refuse_rope_scaling(fields: Fields) -> None:
    """Raises CheckpointError for the older field, in a family of which transformers reads `rope_parameters` alone."""
    fields.refuse(("rope_scaling",), "is set, which is not supported in this architecture: rope_parameters has an "
                  "object for each kind of layer")


def read_ropes(fields: Fields, thetas: Mapping[str, float], head_dim: int | None = None) -> dict[str, Rope]:
    """The embedding of each kind of layer in `thetas`, with that base where `rope_parameters` names none.

    `rope_scaling`, from before transformers 5, is that of layers with full attention.  As in transformers, `truncate`
    has no effect in the object of a kind of layer.

    Raises CheckpointError for variants that are not implemented, and where `rope_parameters` is not by kind of layer.
    """
    by_kind, old = fields.section("rope_parameters"), fields.section("rope_scaling")
    for key in by_kind.values:
        if key not in thetas:
            known = ", ".join(thetas)
            raise fields.error("rope_parameters", f"must have an object for each of {known}, not {key!r:.40}")
    ropes = {}
    for kind, theta in thetas.items():
        scaling = by_kind.section(kind)
        if kind == "full_attention" and old.values:
            scaling = Fields({**scaling.values, **old.values}, f"{fields.where}, rope_scaling")
        scaling = Fields({name: value for name, value in scaling.values.items() if name != "truncate"}, scaling.where)
        base = scaling.number("rope_theta", default=theta)
        ropes[kind] = _read_scaling(fields, "rope_parameters", scaling, base, head_dim, {})
    return ropes


def _read_scaling(
    fields: Fields, name: str, scaling: Fields, theta: float, head_dim: int | None, aliases: Mapping[str, str],
) -> Rope:
    share = scaling.number("partial_rotary_factor", default=fields.number("partial_rotary_factor", default=1.0))
    rotated = int((head_dim or 0) * share)
    source = scaling if scaling.has("partial_rotary_factor") else fields
    if share != 1.0 and head_dim is None:
        raise source.error("partial_rotary_factor", "must be 1: rotating part of a head is not supported here")
    if share > 1.0 or (head_dim and (rotated % 2 or not rotated)):
        raise source.error("partial_rotary_factor",
                           f"must rotate an even number of {head_dim} dimensions, not {share!r:.40}")
    kind = scaling.text("rope_type", default=scaling.text("type", default="default"))
    kind = aliases.get(kind, kind)
    if kind not in _READERS:
        raise fields.error(name, f"type {kind!r:.40} is not supported; these are: {', '.join(_READERS)}")
    longest = fields.integer("max_position_embeddings")
    original = scaling.integer(ORIGINAL, default=longest)
    return _READERS[kind](scaling, _RopeContext(theta, original, longest, rotated // 2), share)


def _read_plain(scaling: Fields, context: _RopeContext, share: float) -> Rope:
    return Rope(context.theta, share=share)


def _read_dynamic(scaling: Fields, context: _RopeContext, share: float) -> Rope:
    """Dynamic NTK scaling begins after `max_position_embeddings`, where positions are not served."""
    scaling.number("factor")
    return Rope(context.theta, share=share)


def _read_linear(scaling: Fields, context: _RopeContext, share: float) -> Rope:
    return LinearRope(context.theta, scaling.number("factor"), share=share)


def _read_llama3(scaling: Fields, context: _RopeContext, share: float) -> Rope:
    low = scaling.number("low_freq_factor")
    high = scaling.number("high_freq_factor", minimum=low)
    return Llama3Rope(context.theta, scaling.number("factor"), low, high, context.original, share=share)


def _read_yarn(scaling: Fields, context: _RopeContext, share: float) -> Rope:
    factor = scaling.number("factor")
    if context.theta <= 1:
        raise scaling.error("rope_theta", f"must be above 1 with yarn, not {context.theta!r:.40}")
    sharper = yarn_mscale(factor, 1.0)
    if scaling.has("mscale") and scaling.has("mscale_all_dim"):
        sharper = yarn_mscale(factor, scaling.number("mscale")) / yarn_mscale(factor, scaling.number("mscale_all_dim"))
    return YarnRope(
        context.theta, factor, context.original,
        beta_fast=scaling.number("beta_fast", default=32.0),
        beta_slow=scaling.number("beta_slow", default=1.0),
        attention_factor=scaling.number("attention_factor", default=sharper),
        truncate=scaling.flag("truncate", default=not scaling.is_null("truncate")),  # null: as in transformers
        share=share,
    )


def yarn_mscale(factor: float, weight: float) -> float:
    """By how much YaRN sharpens attention in a context `factor` times as long."""
    return 0.1 * weight * math.log(max(factor, 1.0)) + 1.0


def _read_longrope(scaling: Fields, context: _RopeContext, share: float) -> Rope:
    if not context.pairs:
        raise scaling.error("rope_type", "longrope is not supported in this architecture")
    factor = scaling.number("factor", default=context.longest / context.original)
    sharper = 1.0
    if factor > 1 and context.original > 1:
        sharper = math.sqrt(1 + math.log(factor) / math.log(context.original))
    short, long = (_factors(scaling, name, context.pairs) for name in ("short_factor", "long_factor"))
    return LongRope(context.theta, short, long, context.original,
                    scaling.number("attention_factor", default=sharper), share=share)


def _factors(scaling: Fields, name: str, pairs: int) -> tuple[float, ...]:
    factors = scaling.numbers(name)
    if len(factors) != pairs:
        raise scaling.error(name, f"must have {pairs} numbers, one for each pair that turns, not {len(factors)}")
    return factors


_READERS: dict[str, Callable[[Fields, _RopeContext, float], Rope]] = {
    "default": _read_plain, "linear": _read_linear, "dynamic": _read_dynamic, "llama3": _read_llama3,
    "yarn": _read_yarn, "longrope": _read_longrope}


MAX_LAYERS = 1024
MAX_EXPERTS = 4096  # of a layer
OF_TOKENIZER = -2  # in place of a separator that the tokenizer's files name
FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"  # of `layer_types`
MAX_EXPERT_SIZE = 1 << 20
LEAST_SUM = 1e-20  # by which DeepSeek-V3 and its followers divide shares at least
TEXT_SHARED = ("architectures", "dtype", "torch_dtype", "quantization", "quantization_config", "tie_word_embeddings",
               "eos_token_id")
"""Fields of a config for images and text that its text part need not have."""

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16, "float64": torch.float64}


@dataclass(frozen=True, slots=True)
class MixtureConfig:
    """Experts in place of an MLP, in some of the layers."""

    routing: Routing
    intermediate_size: int  # of an expert
    layers: tuple[bool, ...]  # whether each layer has experts
    shared_intermediate_size: int = 0  # of the expert that all tokens share; 0: no such expert
    activation: ExpertActivation = "silu"
    latent_size: int = 0  # of what experts compute on; 0: the hidden size
    has_correction: bool = False  # added to the scores by which experts are chosen, where not all of a family have it
    are_split: bool = False  # into tensors of their own, where the family's checkpoints have them together


@dataclass(frozen=True, slots=True)
class RecurrentConfig:
    """Recurrent states in place of attention, or next to it, in some of the layers."""

    shape: StateShape
    layers: tuple[bool, ...]  # whether each layer has one in place of attention
    beside: tuple[bool, ...] = ()  # whether each layer has one next to attention; (): no layer has
    is_interleaved: bool = False  # see `layers/gated_delta.py`
    has_tiled_values: bool = False  # see `layers/gated_delta.py`
    has_bias: bool = False  # in the layer's products
    has_convolution_bias: bool = False
    eps: float = 0.0  # of the norm behind the rule; 0: that of other norms


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """One decoder-only transformer of Llama's kind.

    Raises:
        CheckpointError: the numbers do not fit together.
    """

    architecture: str  # the class name in `architectures`, of the model with a head
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int  # may differ from hidden_size / num_heads
    norm_eps: float
    ropes: tuple[Rope, ...]  # per layer; NoRope where nothing turns, whatever else tells positions apart
    max_position_embeddings: int  # tokens
    windows: tuple[int, ...]  # per layer: tokens a query may look back on, itself included; 0: no limit
    tie_word_embeddings: bool  # the head is the embedding table
    eos_token_ids: tuple[int, ...]
    dtype: torch.dtype  # of the weights once loaded
    has_head: bool = True  # without one a model makes vectors, or classifies, only
    is_causal: bool = True  # else tokens attend to later ones, too: the model computes whole prompts
    num_labels: int = 0  # of the classification head; 0: the model has no such head
    token_types: int = 0  # of a table of them, which is added to the embedding
    separator: int = -1  # the token behind a text, which tells types apart; -1: all are of the first
    dense: tuple[DenseFields, ...] = ()  # the modules that pooled vectors pass
    max_seq_length: int = 0  # tokens of a text, as sentence-transformers' files say; 0: they do not
    pooling: str = "last"  # a name of `sentence_modules.FLAGS`, of checkpoints whose files name none
    qkv_bias: bool = False
    output_bias: bool = False  # of the product after attention
    mlp_bias: bool = False
    qk_norm: bool = False  # RMS norms of queries and keys
    has_fused_qkv: bool = False  # queries, keys and values are one weight
    has_ordered_qkv: bool = False  # in one weight, all queries first, then all keys: not by groups of heads
    has_fused_gates: bool = False  # gates and what they gate are one weight
    attention_scale: float = 0.0  # of scores; 0: head_dim ** -0.5
    attention_soft_cap: float = 0.0  # of scores; 0: none
    logit_soft_cap: float = 0.0  # 0: none
    logit_scale: float = 1.0  # of logits
    embedding_scale: float = 1.0
    activation: Activation = "silu"  # of MLPs
    has_gated_mlp: bool = True  # else an MLP has two products
    is_parallel: bool = False  # attention and MLP read the same hidden states
    qkv_clip: float = 0.0  # of queries, keys and values; 0: they are not clipped
    has_gated_attention: bool = False
    has_biases: bool = False  # scores have biases by position (ALiBi)
    has_relative_biases: bool = False  # scores have biases by the distance of query and key
    has_chunks: bool = False  # windows are chunks of positions
    mixture: MixtureConfig | None = None  # None: every layer has an MLP
    recurrent: RecurrentConfig | None = None  # None: every layer has attention
    latent: LatentConfig | None = None  # compressed attention, in every layer without a recurrent state
    # By layer, its heads of keys and values and their size; (): all layers have `num_kv_heads` and `head_dim`.
    layer_heads: tuple[tuple[int, int], ...] = ()
    query_heads: tuple[int, ...] = ()  # by layer; (): all layers have `num_heads`, which is the most otherwise
    kv_layers: tuple[int, ...] = ()  # by layer, the one whose keys and values it reads; (): its own
    own: object = None  # what the layers of one family read, as an object of its own module
    quantization: Quantization | None = None  # of the weights of products, as config.json says; None: plain numbers

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise CheckpointError(
                f"config.json: num_attention_heads ({self.num_heads}) must be a multiple of num_key_value_heads "
                f"({self.num_kv_heads})"
            )
        if self.head_dim % 2:
            raise CheckpointError(f"config.json: head_dim must be even for rotary embeddings, not {self.head_dim}")
        if not all(rope.is_finite(self.head_dim, self.max_position_embeddings) for rope in set(self.ropes)):
            raise CheckpointError(
                "config.json: rope_theta and what scales it give angles that are NaN or too large")
        if len(self.windows) != self.num_layers:
            raise CheckpointError(
                f"config.json: layer_types names {len(self.windows)} layers, num_hidden_layers {self.num_layers}"
            )

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return min(self.max_seq_length or self.max_position_embeddings, self.max_position_embeddings)

    @property
    def vector_size(self) -> int:
        """Numbers of a vector."""
        return self.dense[-1].outputs if self.dense else self.hidden_size

    def attention_shape(self, index: int) -> AttentionShape:
        """The attention of layer `index`, as kernels compute it."""
        kv_heads, head_dim = self.layer_heads[index] if self.layer_heads else (self.num_kv_heads, self.head_dim)
        heads = self.query_heads[index] if self.query_heads else self.num_heads
        return AttentionShape(
            heads, kv_heads, head_dim, self.attention_scale or head_dim**-0.5, self.windows[index],
            self.attention_soft_cap, self.is_causal, self.has_biases,
            is_chunked=self.has_chunks and self.windows[index] > 0, has_relative_biases=self.has_relative_biases)

    def kv_layer(self, index: int) -> int:
        """The layer whose keys and values layer `index` reads."""
        return self.kv_layers[index] if self.kv_layers else index

    def has_state(self, index: int) -> bool:
        """Whether layer `index` has a recurrent state in place of attention."""
        return self.recurrent is not None and self.recurrent.layers[index]

    def layer_shape(self, index: int) -> LayerShape:
        """What layer `index` keeps in its cache."""
        if self.recurrent is not None and self.recurrent.layers[index]:
            return self.recurrent.shape
        return self.attention_shape(index) if self.latent is None else self.latent.shape

    @property
    def doubled_layers(self) -> tuple[int, ...]:
        """The layers with two caches: of attention, and of a recurrent state."""
        beside = self.recurrent.beside if self.recurrent else ()
        return tuple([layer for layer, is_doubled in enumerate(beside) if is_doubled])

    @property
    def recurrent_width(self) -> int:
        """The most numbers per token that activations of layers with a recurrent state take at a time."""
        if self.recurrent is None:
            return 0
        return self.recurrent.shape.width

    @property
    def latent_width(self) -> int:
        """The most numbers per token that activations of compressed attention take at a time."""
        if self.latent is None:
            return 0
        shape = self.latent.shape
        return self.latent.query_rank + 2 * shape.width + shape.num_heads * (
            shape.query_dim + shape.width + shape.rank + shape.value_dim)

    @property
    def mixture_of_experts(self) -> MixtureConfig:
        """That of a family which has one."""
        assert self.mixture is not None
        return self.mixture

    def has_experts(self, index: int) -> bool:
        """Whether layer `index` has experts in place of an MLP."""
        return self.mixture is not None and self.mixture.layers[index]

    @property
    def layer_weights(self) -> int:
        """Weights of all layers' products that a token is multiplied by: only the experts that it chooses."""
        heads = ((3 if self.has_gated_attention else 2) * self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        if self.latent is not None:
            heads = self._latent_weights // self.hidden_size
        weights = self.num_layers * self.hidden_size * (heads + self.mlp_products * self.intermediate_size)
        if self.recurrent is not None:
            instead = self.recurrent.shape.num_weights(self.hidden_size) - self.hidden_size * heads
            weights += sum(self.recurrent.layers) * instead
            weights += len(self.doubled_layers) * self.recurrent.shape.num_weights(self.hidden_size)
        if self.mixture is None:
            return weights
        mixture, routing = self.mixture, self.mixture.routing
        chosen = 3 * (routing.top_k * mixture.intermediate_size + mixture.shared_intermediate_size)
        instead = chosen + routing.num_experts - self.mlp_products * self.intermediate_size
        return weights + sum(mixture.layers) * self.hidden_size * instead

    @property
    def mlp_products(self) -> int:
        """Products of an MLP, each of which has `hidden_size * intermediate_size` weights."""
        return 3 if self.has_gated_mlp else 2

    @property
    def _latent_weights(self) -> int:
        """Weights of a layer's compressed attention."""
        assert self.latent is not None
        shape, rank, hidden = self.latent.shape, self.latent.query_rank, self.hidden_size
        heads = shape.num_heads
        queries = rank * (hidden + heads * shape.query_dim) if rank else hidden * heads * shape.query_dim
        products = heads * shape.rank * (shape.nope_dim + shape.value_dim)
        return queries + products + hidden * (shape.width + heads * shape.value_dim)

    @property
    def mlp_width(self) -> int:
        """The most numbers per token that an MLP's activations take at a time, or a mixture's."""
        if self.mixture is None:
            return 3 * self.intermediate_size
        mixture = self.mixture
        chosen = mixture.routing.top_k * (2 * self.hidden_size + 3 * mixture.intermediate_size)
        of_experts = chosen + 3 * mixture.shared_intermediate_size + self.hidden_size
        return max(3 * self.intermediate_size, of_experts)


ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_python": "gelu", "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu_python_tanh": "gelu_tanh",
    "gelu_accurate": "gelu_tanh", "quick_gelu": "quick_gelu", "relu": "relu", "relu2": "relu2"}
"""Activations by transformers' names."""


def read_activation(fields: Fields, default: str, name: str = "hidden_act") -> Activation:
    """The activation that the field `name` names.

    Raises CheckpointError for those that are not implemented.
    """
    value = fields.text(name, default=default)
    if value not in ACTIVATIONS:
        raise fields.error(name, f"{value!r:.40} is not supported; these are: {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[value]


@dataclass(frozen=True, slots=True)
class ConfigDefaults:
    """What a family's configs mean where they leave a field out."""

    num_kv_heads: int | None = None  # None: one per query head, as null means in every family
    head_dim: int | None = None  # None: the hidden size shared among the heads
    norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    tie_word_embeddings: bool = False


PLAIN_DEFAULTS = ConfigDefaults()


def read_common(
    fields: Fields, defaults: ConfigDefaults = PLAIN_DEFAULTS, activations: Sequence[str] = ("silu", "swish"),
    ropes: Sequence[Rope] | None = None,
) -> ModelConfig:
    """The fields that all families write alike; a family's module replaces what differs.

    `activations` are the names of the one activation that the family computes; none: its module reads it.  `ropes` are
    those of the layers; None: one for all of them, which is read here.

    Raises CheckpointError when a field is absent, malformed or needs something not implemented.
    """
    _refuse_unsupported(fields)
    for name in ("hidden_act", "hidden_activation") if activations else ():
        activation = fields.text(name, default=activations[0])
        if activation not in activations:
            raise fields.error(name, f"must be {activations[0]}, not {activation!r:.40}")
    hidden, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    num_layers = fields.integer("num_hidden_layers", maximum=MAX_LAYERS)
    absent = heads if defaults.num_kv_heads is None or fields.is_null("num_key_value_heads") else defaults.num_kv_heads
    return ModelConfig(
        architecture=with_head(fields.texts("architectures")[0]),
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=fields.integer("num_key_value_heads", default=absent),
        head_dim=defaults.head_dim if defaults.head_dim and not fields.has("head_dim") else read_head_dim(fields),
        norm_eps=fields.number("rms_norm_eps", default=defaults.norm_eps),
        ropes=tuple(ropes or (read_rope(fields, defaults.rope_theta),) * num_layers),
        max_position_embeddings=fields.integer("max_position_embeddings"),
        windows=(0,) * num_layers,
        tie_word_embeddings=fields.flag("tie_word_embeddings", default=defaults.tie_word_embeddings),
        num_labels=len(read_labels(fields).names),
        eos_token_ids=fields.token_ids("eos_token_id"),
        dtype=_stored_dtype(fields),
        quantization=read_quantization(fields),
    )


def read_mixture(
    fields: Fields, config: ModelConfig, default: Routing, *, intermediate_size: int | None = None,
) -> MixtureConfig:
    """The experts of a config, under the names in use.

    `default` is that of a config that says nothing; where its shares are those of all experts, `norm_topk_prob` may
    ask for the others.  `intermediate_size` is the default of `moe_intermediate_size`; None: experts have the size of
    an MLP, in every layer.
    """
    fields.refuse(("n_group", "topk_group", "scoring_func", "routed_scaling_factor"), "is set, which is not supported")
    routing = read_routing(fields, default)
    routing = replace(routing, is_normalized=default.is_normalized or fields.flag("norm_topk_prob"))
    if intermediate_size is None:
        return MixtureConfig(routing, config.intermediate_size, (True,) * config.num_layers)
    step = fields.integer("decoder_sparse_step", default=1)
    without = fields.integers("mlp_only_layers") if fields.has("mlp_only_layers") else ()
    layers = tuple(layer not in without and (layer + 1) % step == 0 for layer in range(config.num_layers))
    size = fields.integer("moe_intermediate_size", default=intermediate_size)
    return MixtureConfig(routing, size, layers)


def read_routing(
    fields: Fields, default: Routing, count: str = "", top_k: str = "num_experts_per_tok",
) -> Routing:
    """`default` with the numbers of experts, and of those that a token chooses, that the fields of these names give.

    `count` "" stands for both names in use, `num_experts` and `num_local_experts`.
    """
    name = count or next((name for name in ("num_experts", "num_local_experts") if fields.has(name)), "num_experts")
    num_experts = fields.integer(name, default=default.num_experts, maximum=MAX_EXPERTS)
    if not count and fields.integer("num_local_experts", default=num_experts) != num_experts:
        raise fields.error(name, f"({num_experts}) differs from num_local_experts")
    chosen = fields.integer(top_k, default=default.top_k)
    if chosen > num_experts:
        raise fields.error(top_k, f"({chosen}) must be at most {name} ({num_experts})")
    return replace(default, num_experts=num_experts, top_k=chosen)


def read_grouped_mixture(
    fields: Fields, num_layers: int, default: Routing, *, intermediate_size: int, num_shared: int = 1,
    num_dense: int = 1, count: str = "n_routed_experts", shared: str = "n_shared_experts",
) -> MixtureConfig:
    """The experts of a config as DeepSeek-V3's write them: chosen from groups, by sigmoid scores with a correction.

    `default` is that of a config that says nothing, and `num_dense` are its layers without experts, the first ones;
    `num_shared` experts are shared.  `count` and `shared` are the names of two fields.
    """
    routing = read_routing(fields, default, count)
    size = fields.integer("moe_intermediate_size", default=intermediate_size, maximum=MAX_EXPERT_SIZE)
    each = fields.integer(shared, default=num_shared, minimum=0, maximum=MAX_EXPERTS)
    routing = replace(
        routing,
        is_normalized=fields.flag("norm_topk_prob", default=default.is_normalized),
        scoring="sigmoid",
        scale=fields.number("routed_scaling_factor", default=default.scale),
        least_sum=LEAST_SUM,
        groups=read_expert_groups(fields, routing.num_experts, routing.top_k, num_best=2),
    )
    return MixtureConfig(routing, size, read_mlp_layers(fields, num_layers, num_dense), each * size)


def read_expert_groups(fields: Fields, num_experts: int, top_k: int, num_best: int) -> ExpertGroups | None:
    """`n_group` groups, of which `topk_group` are kept; None where all are."""
    count = fields.integer("n_group", default=1)
    if num_experts % count or num_experts < count * num_best:
        raise fields.error("n_group", f"({count}) must divide {num_experts} experts into groups of at least {num_best}")
    kept = fields.integer("topk_group", default=1)
    if kept > count:
        raise fields.error("topk_group", f"({kept}) must be at most n_group ({count})")
    if top_k > kept * num_experts // count:
        raise fields.error("num_experts_per_tok", f"({top_k}) must be at most {kept * num_experts // count}, the "
                           "experts of topk_group groups")
    return ExpertGroups(count, kept, num_best) if kept < count else None


def read_mlp_layers(fields: Fields, num_layers: int, num_dense: int) -> tuple[bool, ...]:
    """Whether each layer has experts: "sparse" in `mlp_layer_types`, or from layer `first_k_dense_replace` on."""
    if not fields.has("mlp_layer_types"):
        dense = fields.integer("first_k_dense_replace", default=num_dense, minimum=0)
        return tuple(layer >= dense for layer in range(num_layers))
    kinds = fields.texts("mlp_layer_types")
    if len(kinds) != num_layers or set(kinds) - {"dense", "sparse"}:
        raise fields.error("mlp_layer_types", f"must be dense or sparse for each of {num_layers} layers")
    return tuple(kind == "sparse" for kind in kinds)


def _refuse_unsupported(fields: Fields) -> None:
    """Raises CheckpointError for fields of every family that would change the answer and are not implemented."""
    fields.refuse(("quantization",), "is set: checkpoints quantized by MLX are not supported: serve the one it was "
                  "made from, which quantization int8 or int4 quantizes")
    if fields.section("per_layer_config").values:
        raise fields.error("per_layer_config", "gives layers sizes of their own, which is not supported")
    if fields.flag("is_encoder_decoder"):
        raise fields.error("is_encoder_decoder", "is true: only decoders are supported")


def read_window(fields: Fields, default: int = 4096) -> int:
    """`sliding_window` in tokens; 0, for no limit, where it is null, and transformers' `default` where it is absent."""
    if not fields.has("sliding_window"):
        return 0 if fields.is_null("sliding_window") else default
    return fields.integer("sliding_window")


def read_layer_windows(fields: Fields) -> tuple[int, ...]:
    """Windows by layer, as Qwen's configs write them: 0 without limit, else in tokens."""
    num_layers = fields.integer("num_hidden_layers", maximum=MAX_LAYERS)
    window = read_window(fields) if fields.flag("use_sliding_window") else 0
    if SLIDING in fields.texts("layer_types") and not fields.flag("use_sliding_window"):
        raise fields.error("layer_types", "asks for sliding attention, but use_sliding_window is false")
    full = fields.integer("max_window_layers", default=28, minimum=0)
    kinds = [FULL if layer < full or not window else SLIDING for layer in range(num_layers)]
    return read_layer_types(fields, window, kinds)


def read_layer_types(fields: Fields, window: int, default: Sequence[str]) -> tuple[int, ...]:
    """Windows by layer from `layer_types`, or from `default` where a config has none.

    Raises CheckpointError for other kinds of layers, and for sliding attention without a window.
    """
    kinds = fields.texts("layer_types") if fields.has("layer_types") else default
    unknown = set(kinds) - {FULL, SLIDING}
    if unknown:
        raise fields.error("layer_types", f"holds {min(unknown)!r:.40}, which is not supported")
    if fields.has("layer_types") and len(kinds) != fields.integer("num_hidden_layers"):
        raise fields.error("layer_types", f"names {len(kinds)} layers, num_hidden_layers "
                           f"{fields.integer('num_hidden_layers')}")
    if SLIDING in kinds and not window:
        raise fields.error("sliding_window", "is null, but layers have sliding attention")
    return tuple(window if kind == SLIDING else 0 for kind in kinds)


OLDER = {"mamba": LINEAR, "attention": FULL}  # what `layer_types` called them before transformers 5


def read_state_layers(
    fields: Fields, default: Sequence[str], name: str = "layer_types", kinds: tuple[str, str] = (LINEAR, FULL),
) -> tuple[bool, ...]:
    """Whether each layer has a recurrent state, from the field `name`, or from `default` where a config has none.

    `kinds` are what the field calls a layer with a state, and one with attention.

    Raises CheckpointError for other kinds of layers, and for another number of them than `num_hidden_layers`.
    """
    num_layers = fields.integer("num_hidden_layers", maximum=MAX_LAYERS)
    found = [OLDER.get(kind, kind) for kind in fields.texts(name)] if fields.has(name) else [*default]
    if unknown := set(found) - set(kinds):
        raise fields.error(name, f"holds {min(unknown)!r:.40}, which is not supported")
    if len(found) != num_layers:
        raise fields.error(name, f"names {len(found)} layers, num_hidden_layers {num_layers}")
    return tuple([kind == kinds[0] for kind in found])


def read_head_dim(fields: Fields) -> int:
    """`head_dim`, by default the hidden size shared among the heads."""
    hidden, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    if not fields.has("head_dim") and hidden % heads:
        raise fields.error("hidden_size", f"({hidden}) must be a multiple of num_attention_heads ({heads})")
    return fields.integer("head_dim", default=hidden // heads)


def _stored_dtype(fields: Fields) -> torch.dtype:
    """`dtype` since transformers 5, `torch_dtype` before; float32 in a file with neither."""
    name = fields.text("dtype", default=fields.text("torch_dtype", default="float32")).removeprefix("torch.")
    if name not in _DTYPES:
        raise fields.error("dtype", f"must be one of {', '.join(_DTYPES)}, not {name!r:.40}")
    return _DTYPES[name]


def text_part(fields: Fields, defaults: Mapping[str, object]) -> Fields:
    """The fields of the text part of a model for images and text, with `defaults` for absent ones."""
    shared = {name: fields.values[name] for name in TEXT_SHARED if fields.values.get(name) not in (None, {})}
    text = {name: value for name, value in fields.section("text_config").values.items() if value is not None}
    return Fields({**defaults, "dtype": None, **text, **shared}, f"{fields.where}, text_config")
