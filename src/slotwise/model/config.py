"""The architecture and sizes of a decoder, from its checkpoint's config."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from slotwise.kernels.interface import AttentionShape
from slotwise.model.errors import CheckpointError
from slotwise.model.fields import Fields
from slotwise.model.layers.rope import Rope, read_rope
from slotwise.model.quantization.config import read_quantization
from slotwise.model.quantization.scheme import Quantization

MAX_LAYERS = 1024
FULL, SLIDING = "full_attention", "sliding_attention"  # of `layer_types`

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16, "float64": torch.float64}


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """One decoder-only transformer of Llama's kind.

    Raises:
        CheckpointError: the numbers do not fit together.
    """

    architecture: str  # the class name in `architectures`
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int  # may differ from hidden_size / num_heads
    rms_norm_eps: float
    rope: Rope
    max_position_embeddings: int  # tokens
    windows: tuple[int, ...]  # per layer: tokens a query may look back on, itself included; 0: no limit
    tie_word_embeddings: bool  # the head is the embedding table
    eos_token_ids: tuple[int, ...]
    dtype: torch.dtype  # of the weights once loaded
    qkv_bias: bool = False
    output_bias: bool = False  # of the product after attention
    mlp_bias: bool = False
    qk_norm: bool = False  # RMS norms of each head's query and key
    attention_scale: float = 0.0  # of scores; 0: head_dim ** -0.5
    attention_soft_cap: float = 0.0  # of scores; 0: none
    logit_soft_cap: float = 0.0  # 0: none
    quantization: Quantization | None = None  # of the weights of products, as config.json says; None: plain numbers

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise CheckpointError(
                f"config.json: num_attention_heads ({self.num_heads}) must be a multiple of num_key_value_heads "
                f"({self.num_kv_heads})"
            )
        if self.head_dim % 2:
            raise CheckpointError(f"config.json: head_dim must be even for rotary embeddings, not {self.head_dim}")
        if not self.rope.is_finite(self.head_dim, self.max_position_embeddings):
            raise CheckpointError(
                "config.json: rope_theta and what scales it give angles that are no numbers, or too large ones")
        if len(self.windows) != self.num_layers:
            raise CheckpointError(
                f"config.json: layer_types names {len(self.windows)} layers, num_hidden_layers {self.num_layers}"
            )

    def attention_shape(self, index: int) -> AttentionShape:
        """The attention of layer `index`, as kernels compute it."""
        return AttentionShape(
            self.num_heads, self.num_kv_heads, self.head_dim, self.attention_scale or self.head_dim**-0.5,
            self.windows[index], self.attention_soft_cap)

    @property
    def layer_weights(self) -> int:
        """Weights of all layers' products: each token is multiplied by all of them."""
        heads = (2 * self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        return self.num_layers * self.hidden_size * (heads + 3 * self.intermediate_size)


def read_common(
    fields: Fields, activations: Sequence[str] = ("silu", "swish"), num_kv_heads: int | None = None,
) -> ModelConfig:
    """The fields that all families write alike; a family's module replaces what differs.

    `activations` are the names of the one activation that the family computes.  `num_kv_heads` is what a config has
    that leaves them out; None: as many as heads of queries, which a null means in every family.

    Raises CheckpointError when a field is absent, malformed or needs something not implemented.
    """
    _refuse_unsupported(fields)
    for name in ("hidden_act", "hidden_activation"):
        activation = fields.text(name, default=activations[0])
        if activation not in activations:
            raise fields.error(name, f"must be {activations[0]}, not {activation!r:.40}")
    hidden, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    num_layers = fields.integer("num_hidden_layers", maximum=MAX_LAYERS)
    absent = heads if num_kv_heads is None or fields.is_null("num_key_value_heads") else num_kv_heads
    return ModelConfig(
        architecture=fields.texts("architectures")[0],
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=fields.integer("num_key_value_heads", default=absent),
        head_dim=_head_dim(fields, hidden, heads),
        rms_norm_eps=fields.number("rms_norm_eps", default=1e-6),
        rope=read_rope(fields),
        max_position_embeddings=fields.integer("max_position_embeddings"),
        windows=(0,) * num_layers,
        tie_word_embeddings=fields.flag("tie_word_embeddings"),
        eos_token_ids=fields.token_ids("eos_token_id"),
        dtype=_stored_dtype(fields),
        quantization=read_quantization(fields),
    )


def _refuse_unsupported(fields: Fields) -> None:
    """Raises CheckpointError for fields of every family that would change the answer and are not implemented."""
    fields.refuse(("quantization",), "is set: checkpoints quantised by MLX are not supported: serve the one it was "
                  "made from, which quantization int8 or int4 quantises")
    if fields.section("per_layer_config").values:
        raise fields.error("per_layer_config", "gives layers sizes of their own, which is not supported")
    if fields.flag("is_encoder_decoder"):
        raise fields.error("is_encoder_decoder", "is true: only decoders are supported")


def read_window(fields: Fields) -> int:
    """`sliding_window` in tokens; 0, for no limit, where it is null, and transformers' default where it is absent."""
    return 0 if fields.is_null("sliding_window") else fields.integer("sliding_window", default=4096)


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
    if SLIDING in kinds and not window:
        raise fields.error("sliding_window", "is null, but layers have sliding attention")
    return tuple(window if kind == SLIDING else 0 for kind in kinds)


def _head_dim(fields: Fields, hidden: int, heads: int) -> int:
    if not fields.has("head_dim") and hidden % heads:
        raise fields.error("hidden_size", f"({hidden}) must be a multiple of num_attention_heads ({heads})")
    return fields.integer("head_dim", default=hidden // heads)


def _stored_dtype(fields: Fields) -> torch.dtype:
    """`dtype` since transformers 5, `torch_dtype` before; float32 in a file with neither."""
    name = fields.text("dtype", default=fields.text("torch_dtype", default="float32")).removeprefix("torch.")
    if name not in _DTYPES:
        raise fields.error("dtype", f"must be one of {', '.join(_DTYPES)}, not {name!r:.40}")
    return _DTYPES[name]
