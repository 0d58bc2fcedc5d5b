"""The config of a GGUF file: its metadata under the names of a config.json, each value checked under its own.

    llama.block_count   num_hidden_layers        shapes and names of tensors   vocab_size, tied head, biases, dtype
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

from slotwise.gguf.metadata import Metadata
from slotwise.gguf.model import open_model
from slotwise.gguf.special_tokens import TOKENS, find_special_tokens
from slotwise.model.config import MAX_LAYERS, ModelConfig
from slotwise.model.errors import CheckpointError
from slotwise.model.families import FAMILIES, configure
from slotwise.model.fields import Fields
from slotwise.model.gguf.architectures import ARCHITECTURES, WITH_EXPERTS, Architecture
from slotwise.model.gguf.families import has_bias
from slotwise.model.gguf.keys import ARCHITECTURE, Keys
from slotwise.model.gguf.neutral import check_general, check_unread
from slotwise.model.gguf.ropes import read_factors, read_rope
from slotwise.model.layers.rope import DividedRope, NoRope
from slotwise.model.quantization.gguf_blocks import BLOCK_TYPES
from slotwise.model.quantization.scheme import Scheme

MIN_EPS = 1e-12
MIN_CONTEXT = 2  # tokens: a prompt's and an output's
TABLE = "token_embd.weight"
_DTYPES = {"F32": "float32", "F16": "float16"}  # of most weights; bfloat16 computes with all others


def read_gguf_config(path: Path) -> ModelConfig:
    """The decoder that a GGUF file describes.

    Raises CheckpointError when a value is absent, malformed or contradicts another or the tensors, and for
    architectures that are not supported; the message names file and key.
    """
    model = open_model(path)
    architecture, keys = architecture_of(model.metadata), Keys(model)
    common = _common(keys, architecture)
    config = configure(Fields(common | architecture.more(keys, common), str(path)))
    if config.mixture is not None:
        config = replace(config, mixture=replace(config.mixture, are_split=architecture.splits_experts))
    if kinds := [kind for kind in _types(keys) if kind in BLOCK_TYPES]:
        config = replace(config, quantization=BlockQuantization(f"GGUF, {' and '.join(kinds)}"))
    check_unread(keys, config)
    check_general(keys.metadata)
    divisors = read_factors(keys, "rope_freqs", config.head_dim // 2)
    if not divisors:
        return config
    ropes = [rope if isinstance(rope, NoRope) else DividedRope(rope.theta, divisors) for rope in config.ropes]
    return replace(config, ropes=tuple(ropes))


@dataclass(slots=True)
class BlockQuantization:
    """Weights in blocks: each tensor says its own type."""

    description: str

    def scheme(self, module: str) -> Scheme | None:
        """None: a tensor of a file is a whole weight."""
        return None


def architecture_of(metadata: Metadata) -> Architecture:
    """Raises CheckpointError for one that is not supported."""
    name = metadata.text(ARCHITECTURE)
    has_experts = metadata.integer(f"{name}.expert_count", 0) > 0 and name + WITH_EXPERTS in ARCHITECTURES
    found = ARCHITECTURES.get(name + WITH_EXPERTS if has_experts else name)
    if found is None or found.served_as not in FAMILIES:
        served = [name for name, one in ARCHITECTURES.items() if one.served_as in FAMILIES]
        raise metadata.error(ARCHITECTURE, f"{name!r:.40} is not supported; these are: {', '.join(served)}")
    return found


def _common(keys: Keys, architecture: Architecture) -> dict[str, object]:
    """The fields that all architectures write alike."""
    layers, hidden = keys.integer("block_count", maximum=MAX_LAYERS), keys.integer("embedding_length")
    heads = keys.alike("attention.head_count", layers)
    kv_heads = keys.alike("attention.head_count_kv", layers, default=heads)
    if heads % kv_heads:
        raise keys.error("attention.head_count", f"({heads}) must be a multiple of head_count_kv ({kv_heads})")
    if keys.integer("expert_count", default=0, minimum=0) and not architecture.has_experts:
        raise keys.error("expert_count", "is set: mixtures of experts are not supported in this architecture")
    head_dim, context = _head_dim(keys, hidden, heads), keys.integer("context_length", minimum=MIN_CONTEXT)
    rotated = keys.integer("rope.dimension_count", default=head_dim)
    if rotated != head_dim and not architecture.rotates_parts:
        raise keys.error("rope.dimension_count", f"({rotated}) must be the size of a head ({head_dim})")
    return {
        "architectures": [architecture.served_as], "hidden_size": hidden, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head_dim,
        "intermediate_size": keys.alike("feed_forward_length", layers), "max_position_embeddings": context,
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon", minimum=MIN_EPS, maximum=1.0),
        "vocab_size": _vocab_size(keys, hidden), "tie_word_embeddings": "output.weight" not in keys.tensors,
        "eos_token_id": find_special_tokens(keys.metadata, keys.metadata.texts(TOKENS)).ends, "dtype": _dtype(keys),
        "attention_bias": has_bias(keys, "attn_q") and has_bias(keys, "attn_output"),
        "mlp_bias": has_bias(keys, "ffn_gate"), "rope_parameters": read_rope(keys, context, head_dim),
    }  # fmt: skip


def _head_dim(keys: Keys, hidden: int, heads: int) -> int:
    if not keys.has("attention.key_length") and hidden % heads:
        raise keys.error("embedding_length", f"({hidden}) must be a multiple of attention.head_count ({heads})")
    head_dim = keys.integer("attention.key_length", default=hidden // heads)
    if keys.integer("attention.value_length", default=head_dim) != head_dim:
        raise keys.error("attention.value_length", f"must be the same as attention.key_length ({head_dim})")
    if head_dim % 2:
        raise keys.error("attention.key_length", f"({head_dim}) must be even for rotary embeddings")
    return head_dim


def _vocab_size(keys: Keys, hidden: int) -> int:
    """The rows of the table: more than tokens, in some files."""
    if TABLE not in keys.tensors:
        raise CheckpointError(f"{keys.metadata.where}: tensor {TABLE} is missing")
    shape = keys.tensors[TABLE][1].shape
    if len(shape) != 2 or shape[1] != hidden:
        raise keys.error("embedding_length", f"is {hidden}, but {TABLE} has shape {list(shape)}")
    if keys.has("vocab_size") and keys.integer("vocab_size") != shape[0]:
        raise keys.error("vocab_size", f"is {keys.integer('vocab_size')}, but {TABLE} has {shape[0]} rows")
    return shape[0]


def _dtype(keys: Keys) -> str:
    """What most weights of products are stored as; bfloat16 computes with what is neither float16 nor float32."""
    return _DTYPES.get(_types(keys)[0], "bfloat16")


def _types(keys: Keys) -> list[str]:
    """How weights of products are stored, that of the most numbers first."""
    sizes: Counter[str] = Counter()
    for _, tensor in keys.tensors.values():
        if len(tensor.shape) > 1:
            sizes[tensor.type.name] += prod(tensor.shape)
    return [kind for kind, _ in sizes.most_common()]
