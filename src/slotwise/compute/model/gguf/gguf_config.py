"""The config of a GGUF file: its metadata under the names of a config.json, each value checked under its own.

    llama.block_count   num_hidden_layers        shapes and names of tensors   vocab_size, tied head, biases, dtype

A key that no reader asks for must have a value that changes nothing (`check_unread`); otherwise it is refused by name.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

from slotwise.compute.model.family_table import FAMILIES, configure
from slotwise.compute.model.fields import Fields
from slotwise.compute.model.generation_config import NOT_OBEYED, OF_OTHERS, SAMPLING
from slotwise.compute.model.gguf.architectures import (
    ARCHITECTURE,
    ARCHITECTURES,
    NEXTN,
    WITH_EXPERTS,
    WITH_POSITIONS,
    WITH_SEVERAL_KEYS,
    Architecture,
    ArchitectureKeys,
    has_bias,
    read_factors,
    read_rope,
)
from slotwise.compute.model.gguf.block_types import BLOCK_TYPES
from slotwise.compute.model.layers.rope import DividedRope, NoRope, YarnRope
from slotwise.compute.model.model_config import MAX_LAYERS, ModelConfig
from slotwise.compute.model.quantization.scheme import Scheme
from slotwise.errors import CheckpointError
from slotwise.platform.gguf_file import (
    ALIGNMENT,
    TOKENS,
    TYPE,
    GGUFModel,
    Metadata,
    TensorEntry,
    find_special_tokens,
    open_model,
)

WITHOUT_EFFECT = (  # keys without effect here, whatever they say
    "tensor_data_layout", "rope.scaling.finetuned", "attention.layer_norm_epsilon",  # where norms are RMS norms
    "expert_feed_forward_length", "expert_shared_feed_forward_length",  # the shapes of tensors are compared
    "pooling_type",  # `compose/model_defaults.py` reads it
)  # fmt: skip
OF_YARN = "rope.scaling.yarn_beta_"
OF_ATTENTION = (  # and of MLPs
    "attention.head_count", "attention.key_length", "attention.value_length", "rope.", "feed_forward_length")
OF_EXPERTS = "expert_"
GENERAL = "general."
OBEYED = {ARCHITECTURE, TYPE, ALIGNMENT, *SAMPLING.values(), *NOT_OBEYED, *OF_OTHERS}
DESCRIPTIVE = {GENERAL + name for name in (
    "name", "author", "version", "organization", "finetune", "basename", "description", "quantized_by", "size_label",
    "license", "url", "doi", "uuid", "repo_url", "tags", "languages", "datasets", "file_type")}
DESCRIPTIONS = tuple(f"{GENERAL}{name}." for name in ("license", "source", "base_model", "dataset"))
LAYER_EPS, RMS_EPS = "attention.layer_norm_epsilon", "attention.layer_norm_rms_epsilon"
QUANTIZATION = f"{GENERAL}quantization_version"
BLOCKS_VERSION = 2  # of the layouts in `block_types.py`
CLOSE = 1e-6  # relative, of float32


def check_unread(keys: ArchitectureKeys, config: ModelConfig, architecture: Architecture) -> None:
    """Raises CheckpointError for a key that nothing has read and that may change the answer."""
    neutral = _neutral(config)
    for key in keys.unread():
        if architecture.lacks_attention and key.startswith(OF_ATTENTION):
            continue
        if key in WITHOUT_EFFECT or key.startswith(OF_YARN) or (config.mixture is None and key.startswith(OF_EXPERTS)):
            continue
        if key == "rope.freq_base_swa" and not any(config.windows):
            continue
        if key == RMS_EPS and architecture.has_layer_norms:
            continue
        allowed, values = neutral.get(key, ()), keys.values(key)
        if not all(_is_among(value, allowed) for value in values):
            shown = f"{values[0]!r:.40}" if len(values) == 1 else "set"
            raise keys.error(key, f"is {shown}, which is not supported in this architecture")


def check_general(metadata: Metadata) -> None:
    """Raises CheckpointError for a general key that is not known to change nothing."""
    for key in metadata.keys(GENERAL):
        if key in OBEYED or key in DESCRIPTIVE or key.startswith(DESCRIPTIONS):
            continue
        if key != QUANTIZATION:
            raise metadata.error(key, "is set, and what it asks for is not known")
        if (version := metadata.integer(key)) != BLOCKS_VERSION:
            raise metadata.error(key, f"is {version}, and only blocks of version {BLOCKS_VERSION} are supported")


def _neutral(config: ModelConfig) -> dict[str, tuple[object, ...]]:
    """The values of keys that describe the default behavior."""
    head_dim, rope = config.head_dim, config.ropes[0]
    return {
        "attention.causal": (True,),
        "attention.scale": (0, config.attention_scale or head_dim**-0.5),
        "attention.sliding_window": (0,) if not any(config.windows) else (),
        "attention.key_length_swa": (head_dim,), "attention.value_length_swa": (head_dim,),
        "attention.clamp_kqv": (0,), "attention.max_alibi_bias": (0,), "attention.output_scale": (0, 1),
        "attention.temperature_scale": (0,), "attention.shared_kv_layers": (0,),
        "attn_logit_softcapping": (0,), "final_logit_softcapping": (0,), "router_logit_softcapping": (0,),
        "logit_scale": (0, 1), "embedding_scale": (0, 1), "residual_scale": (0, 1),
        "embedding_length_out": (config.hidden_size,), "embedding_length_per_layer_input": (0,),
        "use_parallel_residual": (False,), "nextn_predict_layers": (0,), "n_deepstack_layers": (0,),
        "leading_dense_block_count": (0,), "interleave_moe_layer_step": (0, 1), "moe_every_n_layers": (0, 1),
        "expert_shared_count": (0,),
        "expert_group_count": (0, 1), "expert_group_used_count": (0, 1),
        "expert_weights_scale": (0, 1), "expert_weights_norm": (_is_normalized(config),),
        "expert_gating_func": (0, 1, 3) if _is_normalized(config) else (0, 1),  # softmax, before or after the choice
        "rope.dimension_count_swa": (rope.rotated(head_dim),), "rope.dimension_sections": (0,),
        "rope.freq_base_swa": (rope.theta,),
        "rope.scaling.alpha": (0,), "rope.scaling.attn_factor": (1,), "rope.scaling.factor": (1,),
        "rope.scale_linear": (1,), "rope.scaling.yarn_attn_factor": (1,), "rope.scaling.yarn_log_multiplier": (0,),
        "rope.scaling.yarn_ext_factor": (-1, 1) if isinstance(rope, YarnRope) else (-1, 0),
    }


def _is_normalized(config: ModelConfig) -> bool:
    return config.mixture is not None and config.mixture.routing.is_normalized


def _is_among(value: object, allowed: Sequence[object]) -> bool:
    if isinstance(value, (bool, str)):
        return value in allowed
    return isinstance(value, (int, float)) and any(
        isinstance(each, (int, float)) and not isinstance(each, bool) and math.isclose(value, each, rel_tol=CLOSE)
        for each in allowed)


MIN_EPS = 1e-12
MIN_CONTEXT = 2  # tokens: a prompt's and an output's
TABLE = "token_embd.weight"
_DTYPES = {"F32": "float32", "F16": "float16"}  # of most weights; bfloat16 computes with all others


def read_gguf_config(path: Path) -> ModelConfig:
    """The decoder that a GGUF file describes.

    Raises CheckpointError when a value is absent, malformed or contradicts another or the tensors, and for
    architectures that are not supported; the message names file and key.
    """
    model, architecture = open_separated(path)
    keys = ArchitectureKeys(model)
    common = _common(keys, architecture)
    config = configure(Fields(common | architecture.more(keys, common), str(path)))
    if config.mixture is not None:
        config = replace(config, mixture=replace(config.mixture, are_split=architecture.splits_experts))
    if architecture.splits_experts:
        config = replace(config, has_fused_gates=False)
    if config.recurrent is not None and architecture.has_tiled_values:
        config = replace(config, recurrent=replace(config.recurrent, has_tiled_values=True))
    if config.latent is not None:
        is_split = any(name.endswith(".attn_k_b.weight") for name in model.tensors)
        config = replace(config, latent=replace(config.latent, is_split=is_split))
    config = replace(config, has_ordered_qkv=True)
    if kinds := [kind for kind in _types(keys) if kind in BLOCK_TYPES]:
        config = replace(config, quantization=BlockQuantization(f"GGUF, {' and '.join(kinds)}"))
    check_unread(keys, config, architecture)
    check_general(keys.metadata)
    divisors = () if architecture.varies else read_factors(keys, "rope_freqs", config.head_dim // 2)
    if not divisors:
        return config
    ropes = [rope if isinstance(rope, NoRope) else DividedRope(rope.theta, divisors) for rope in config.ropes]
    return replace(config, ropes=tuple(ropes))


@dataclass(slots=True)
class BlockQuantization:
    """Weights in blocks: each tensor has a type of its own."""

    description: str

    def scheme(self, module: str) -> Scheme | None:
        """None: a tensor of a file is a whole weight."""
        return None


def architecture_of(metadata: Metadata) -> Architecture:
    """Raises CheckpointError for one that is not supported."""
    name = metadata.text(ARCHITECTURE)
    kinds = {WITH_EXPERTS: metadata.integer(f"{name}.expert_count", 0) > 0,
             WITH_SEVERAL_KEYS: max(metadata.numbers(f"{name}.attention.head_count_kv"), default=0) > 1,
             WITH_POSITIONS: metadata.flag(f"{name}.rope.scaling.finetuned", default=False)}
    kind = next((kind for kind, is_so in kinds.items() if is_so and name + kind in ARCHITECTURES), "")
    found = ARCHITECTURES.get(name + kind)
    if found is None or found.served_as not in FAMILIES:
        served = [name for name, one in ARCHITECTURES.items() if one.served_as in FAMILIES]
        raise metadata.error(ARCHITECTURE, f"{name!r:.40} is not supported; these are: {', '.join(served)}")
    return found


def open_separated(path: Path) -> tuple[GGUFModel, Architecture]:
    """A model and its architecture, with queries, keys and values as three tensors where the family has three.

    llama.cpp's converter writes them as one, `attn_qkv`, if it is told to (`--fuse-qkv`): the rows of queries, then
    those of keys, then those of values.

    Raises CheckpointError for an architecture that is not supported, and for rows that are not those of whole heads.
    """
    model = open_model(path)
    architecture = architecture_of(model.metadata)
    own = architecture.parts.get("attn_qkv", "")  # what the family itself has under this name
    of_states = own.startswith("linear_attn.")  # only in layers with a state; queries of the others have gates
    if own and not of_states:
        return model, architecture
    keys, tensors = ArchitectureKeys(model), dict(model.tensors)
    for name, (file, entry) in model.tensors.items():
        fused = _FUSED.fullmatch(name)
        if fused is None or (of_states and f"blk.{fused['layer']}.attn_output.weight" not in model.tensors):
            continue
        shares = _shares_of_heads(keys, int(fused["layer"]), 2 if of_states else 1)
        (rows, *others), size, first = entry.shape, entry.end - entry.start, 0
        if rows % sum(shares):
            raise CheckpointError(f"{file}: tensor {name} has {rows} rows, which are not those of whole heads of "
                                  "queries, keys and values")
        del tensors[name]
        for part, share in zip(("attn_q", "attn_k", "attn_v"), shares, strict=True):
            one, end = f"blk.{fused['layer']}.{part}.{fused['kind']}", first + rows * share // sum(shares)
            if one in tensors:
                raise CheckpointError(f"{file}: tensor {one} is there, and tensor {name}, which has its rows, too")
            tensors[one] = file, TensorEntry((end - first, *others), entry.type, entry.start + size * first // rows,
                                             entry.start + size * end // rows)
            first = end
    return model._replace(tensors=tensors), architecture


_FUSED = re.compile(r"blk\.(?P<layer>\d{1,4})\.attn_qkv\.(?P<kind>weight|bias)")


def _shares_of_heads(keys: ArchitectureKeys, layer: int, of_query: int) -> list[int]:
    """How the rows of a layer's queries, keys and values are related; a query has `of_query` rows for one of a key."""
    def of_layer(key: str, default: int) -> int:
        numbers = keys.each(key)
        return int(numbers[layer] if layer < len(numbers) else numbers[0] if numbers else default)

    heads = of_layer("attention.head_count", 1)
    kv_heads, size = of_layer("attention.head_count_kv", heads), of_layer("attention.key_length", 1)
    rows = of_query * heads * size, kv_heads * size, kv_heads * of_layer("attention.value_length", size)
    if min(rows) < 1:
        raise keys.error("attention.head_count", f"must be above 0 in layer {layer}, as the number of key heads and "
                         "their sizes: its queries, keys and values are one tensor")
    return [each // math.gcd(*rows) for each in rows]


def _common(keys: ArchitectureKeys, architecture: Architecture) -> dict[str, object]:
    """The fields that all architectures write alike."""
    blocks, hidden = keys.integer("block_count", maximum=MAX_LAYERS), keys.integer("embedding_length")
    if (layers := blocks - keys.drafting) < 1:
        raise keys.error(NEXTN, f"({keys.drafting}) must be below block_count ({blocks})")
    some, without = architecture.has_states, architecture.lacks_attention
    heads = 1 if without else keys.alike(
        "attention.head_count", layers, some=some, varies=architecture.varies)
    kv_heads = heads if without else keys.alike(
        "attention.head_count_kv", layers, default=heads, some=some, varies=architecture.varies)
    experts = keys.integer("expert_feed_forward_length") if architecture.has_experts and keys.has(
        "expert_feed_forward_length") else None  # where every layer has them
    width = 1 if without else keys.alike(
        "feed_forward_length", layers, experts, some=some, varies=architecture.varies)
    if heads % kv_heads:
        raise keys.error("attention.head_count", f"({heads}) must be a multiple of head_count_kv ({kv_heads})")
    if keys.integer("expert_count", default=0, minimum=0) and not architecture.has_experts:
        raise keys.error("expert_count", "is set: mixtures of experts are not supported in this architecture")
    head_dim = keys.integer("rope.dimension_count") if architecture.is_compressed else 2 if without else _head_dim(
        keys, hidden, heads, has_smaller_values=architecture.has_smaller_values)
    context = keys.integer("context_length", minimum=MIN_CONTEXT)
    rotated = keys.integer("rope.dimension_count", default=head_dim)
    if rotated != head_dim and not architecture.rotates_parts:
        raise keys.error("rope.dimension_count", f"({rotated}) must be the size of a head ({head_dim})")
    return {
        "architectures": [architecture.served_as], "hidden_size": hidden, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head_dim,
        "intermediate_size": width, "max_position_embeddings": context,
        "rms_norm_eps": keys.number(LAYER_EPS if architecture.has_layer_norms and (
            keys.has(LAYER_EPS) or not keys.has(RMS_EPS)) else RMS_EPS, minimum=MIN_EPS, maximum=1.0),
        "vocab_size": _vocab_size(keys, hidden), "tie_word_embeddings": "output.weight" not in keys.tensors,
        "eos_token_id": find_special_tokens(keys.metadata, keys.metadata.texts(TOKENS)).ends, "dtype": _dtype(keys),
        "attention_bias": has_bias(keys, "attn_q") and has_bias(keys, "attn_output"),
        "mlp_bias": has_bias(keys, "ffn_gate"), "rope_parameters": read_rope(keys, context, head_dim),
    }  # fmt: skip


def _head_dim(keys: ArchitectureKeys, hidden: int, heads: int, *, has_smaller_values: bool) -> int:
    if not keys.has("attention.key_length") and hidden % heads:
        raise keys.error("embedding_length", f"({hidden}) must be a multiple of attention.head_count ({heads})")
    head_dim = keys.integer("attention.key_length", default=hidden // heads)
    if not has_smaller_values and keys.integer("attention.value_length", default=head_dim) != head_dim:
        raise keys.error("attention.value_length", f"must be the same as attention.key_length ({head_dim})")
    if head_dim % 2:
        raise keys.error("attention.key_length", f"({head_dim}) must be even for rotary embeddings")
    return head_dim


def _vocab_size(keys: ArchitectureKeys, hidden: int) -> int:
    """The rows of the table: more than tokens, in some files."""
    if TABLE not in keys.tensors:
        raise CheckpointError(f"{keys.metadata.where}: tensor {TABLE} is missing")
    shape = keys.tensors[TABLE][1].shape
    if len(shape) != 2 or shape[1] != hidden:
        raise keys.error("embedding_length", f"is {hidden}, but {TABLE} has shape {list(shape)}")
    if keys.has("vocab_size") and keys.integer("vocab_size") != shape[0]:
        raise keys.error("vocab_size", f"is {keys.integer('vocab_size')}, but {TABLE} has {shape[0]} rows")
    return shape[0]


def _dtype(keys: ArchitectureKeys) -> str:
    """The type of most weights of products; bfloat16 unless that is float16 or float32."""
    return _DTYPES.get(_types(keys)[0], "bfloat16")


def _types(keys: ArchitectureKeys) -> list[str]:
    """How weights of products are stored, that of the most numbers first."""
    sizes: Counter[str] = Counter()
    for _, tensor in keys.tensors.values():
        if len(tensor.shape) > 1:
            sizes[tensor.type.name] += prod(tensor.shape)
    return [kind for kind, _ in sizes.most_common()]
