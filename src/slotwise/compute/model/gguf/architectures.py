"""The architectures of GGUF files: which family serves each, its keys beyond the common ones, and its tensors' names.

    llama.cpp             here, as in Hugging Face checkpoints
    blk.0.attn_q.weight   model.layers.0.self_attn.q_proj.weight

llama.cpp rotates neighboring dimensions of a head in some architectures, and so its converter interleaves the rows of
their queries and keys: row `2 i + j` of a head is row `j head_dim / 2 + i` of the original.

From top to bottom: typed access to a file's keys, its rotary embedding, the fields that single architectures add to a
config.json (`common` are the fields that are known by then), and the table `ARCHITECTURES`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from statistics import NormalDist
from typing import Any

import torch

from slotwise.errors import CheckpointError
from slotwise.platform.gguf_file import GGUFModel

ARCHITECTURE = "general.architecture"
NEXTN = "nextn_predict_layers"  # the last blocks of a file, which draft and are not read
MAX_WIDTH = 1 << 24


class ArchitectureKeys:
    """The metadata of one file, and which of its keys were read.

    Every reader raises CheckpointError, as those of `Metadata`.
    """

    def __init__(self, model: GGUFModel) -> None:
        self.metadata, self.tensors = model.metadata, model.tensors
        self.prefix = model.metadata.text(ARCHITECTURE)
        self._read: set[str] = set()

    def has(self, key: str) -> bool:
        return self.metadata.has(f"{self.prefix}.{key}")

    @property
    def drafting(self) -> int:
        """Number of draft (MTP) blocks at the end, which are not read."""
        return self.integer(NEXTN, default=0, minimum=0)

    def has_tensor(self, layer: int, part: str) -> bool:
        """Whether a block has a tensor, whose name may end in `.weight`."""
        return any(f"blk.{layer}.{part}{kind}" in self.tensors for kind in ("", ".weight"))

    def integer(self, key: str, *, default: int | None = None, minimum: int = 1, maximum: int = MAX_WIDTH) -> int:
        return self.metadata.integer(self._name(key), default, minimum=minimum, maximum=maximum)

    def number(self, key: str, default: float | None = None, *, minimum: float = 0.0, maximum: float = 1e30) -> float:
        return self.metadata.number(self._name(key), default, minimum=minimum, maximum=maximum)

    def flag(self, key: str, *, default: bool) -> bool:
        return self.metadata.flag(self._name(key), default)

    def text(self, key: str, default: str) -> str:
        return self.metadata.text(self._name(key), default)

    def numbers(self, key: str, count: int, *, may_be_infinite: bool = False) -> list[float]:
        """As many numbers; also true and false."""
        name = self._name(key)
        found = self._of_layers(self.metadata.numbers(name, may_be_infinite=may_be_infinite), count)
        if len(found) != count:
            raise self.metadata.error(name, f"must have {count} numbers, not {len(found)}")
        return found

    def ignore(self, *keys: str) -> None:
        """Count keys as read that have no effect on texts."""
        self._read |= {self._name(key) for key in keys}

    def alike(
        self, key: str, layers: int, default: int | None = None, *, some: bool = False, varies: bool = False,
    ) -> int:
        """A number that a file may give for each layer, and that must be the same in all.

        `some`: it may be 0 in layers of another kind.  `varies`: it may differ, and the least is returned.
        """
        name = self._name(key)
        numbers = self._of_layers(self.metadata.numbers(name), layers)
        if some and len(numbers) == layers:
            numbers = [number for number in numbers if number] or numbers
            layers = len(numbers)
        if not numbers and default is None:
            raise self.metadata.error(name, "is missing")
        values = set(numbers) if default is None or numbers else {default}
        values = {min(values)} if varies else values
        if len(values) > 1 or len(numbers) not in (0, 1, layers):
            raise self.metadata.error(name, f"gives {len(numbers)} layers {len(values)} sizes: all must be alike")
        value = values.pop()
        if not isinstance(value, int) or not 1 <= value <= MAX_WIDTH:
            raise self.metadata.error(name, f"must be a whole number from 1 to {MAX_WIDTH}, not {value!r:.40}")
        return value

    def present(self, key: str, layers: int) -> list[bool]:
        """Whether a number that a file gives for each layer is not 0."""
        numbers = self._of_layers(self.metadata.numbers(self._name(key)), layers)
        if len(numbers) not in (1, layers):
            raise self.error(key, f"gives {len(numbers)} numbers, and the model has {layers} layers")
        return [number > 0 for number in (numbers if len(numbers) == layers else numbers * layers)]

    def heads(self, key: str, layers: int, least: int) -> list[int]:
        """A number for each layer; `least` is the result of `alike`, which has checked them."""
        numbers = [int(each) for each in self._of_layers(self.metadata.numbers(self._name(key)), layers)]
        return numbers if len(numbers) == layers else [least] * layers

    def _of_layers(self, numbers: Sequence[float], layers: int) -> list[float]:
        """Drops the numbers of draft blocks, if a key has them."""
        return [*numbers[:layers]] if len(numbers) == layers + self.drafting else [*numbers]

    def unread(self) -> list[str]:
        """The keys that nothing has read."""
        prefix = f"{self.prefix}."
        return [key.removeprefix(prefix) for key in self.metadata.keys(prefix) if key not in self._read]

    def each(self, key: str) -> list[Any]:
        """The value of a key, or the values of its array; [] where a file has it not."""
        self._name(key)
        return self.values(key) if self.has(key) else []

    def values(self, key: str) -> list[Any]:
        """The value of an existing key, or the values of its array."""
        name = f"{self.prefix}.{key}"
        try:
            return [self.metadata.scalar(name)]
        except CheckpointError:
            return [*self.metadata.numbers(name)]

    def _name(self, key: str) -> str:
        """The key in the file, which counts as read."""
        name = f"{self.prefix}.{key}"
        self._read.add(name)
        return name

    def rows(self, tensor: str) -> int:
        """Of a tensor of the first layer; 0 where there is none."""
        found = self.tensors.get(f"blk.0.{tensor}.weight")
        return found[1].shape[0] if found else 0

    def error(self, key: str, problem: str) -> CheckpointError:
        return self.metadata.error(f"{self.prefix}.{key}", problem)


ConfigFields = dict[str, Any]
"""Some fields of a config.json."""


MAX_THETA = 1e12
MIN_FACTOR, MAX_FACTOR = 0.01, 1e6  # of a scaling
LONG, SHORT = "rope_factors_long", "rope_factors_short"  # tensors of LongRoPE


def read_rope(keys: ArchitectureKeys, context: int, head_dim: int) -> ConfigFields:
    """`context` is the longest, in tokens."""
    rope: ConfigFields = {"rope_type": "default", "rope_theta": theta(keys, "rope.freq_base", 10_000.0)}
    rotated = keys.integer("rope.dimension_count", default=head_dim)
    if keys.has("rope.dimension_count"):
        rope["partial_rotary_factor"] = rotated / head_dim
    original = {"original_max_position_embeddings": keys.integer("rope.scaling.original_context_length",
                                                                 default=context)}
    if factors := read_factors(keys, LONG, rotated // 2):
        if (kind := keys.text("rope.scaling.type", "longrope")) != "longrope":
            raise keys.error("rope.scaling.type", f"is {kind!r:.40}, but the file has tensors of longrope")
        return rope | original | {
            "rope_type": "longrope", "long_factor": [*factors],
            "short_factor": [*read_factors(keys, SHORT, rotated // 2)],
            "attention_factor": keys.number("rope.scaling.attn_factor", 1.0, maximum=MAX_FACTOR)}
    is_scaled = keys.has("rope.scale_linear") or keys.has("rope.scaling.factor")
    kind = keys.text("rope.scaling.type", "linear" if is_scaled else "none")  # as in llama.cpp
    if kind == "none":
        return rope
    older = keys.number("rope.scale_linear", 1.0, minimum=MIN_FACTOR, maximum=MAX_FACTOR)
    factor = keys.number("rope.scaling.factor", older, minimum=MIN_FACTOR, maximum=MAX_FACTOR)
    if kind == "linear":
        return rope | {"rope_type": "linear", "factor": factor}
    if kind != "yarn":
        raise keys.error("rope.scaling.type", f"{kind!r:.40} is not supported; these are: none, linear, yarn")
    length = math.log(max(factor, 1.0))
    sharper = (0.1 * length + 1.0) / (
        0.1 * length * keys.number("rope.scaling.yarn_log_multiplier", 0.0, minimum=-1.0, maximum=MAX_FACTOR) + 1.0)
    # The converter writes a checkpoint's `attention_factor` there, which is all of it.
    sharper = keys.number("rope.scaling.yarn_attn_factor", sharper, maximum=MAX_FACTOR)
    return rope | original | {
        "rope_type": "yarn", "factor": factor,
        "attention_factor": sharper * keys.number("rope.scaling.attn_factor", 1.0, maximum=MAX_FACTOR),
        "beta_fast": keys.number("rope.scaling.yarn_beta_fast", 32.0, maximum=MAX_FACTOR),
        "beta_slow": keys.number("rope.scaling.yarn_beta_slow", 1.0, maximum=MAX_FACTOR)}


def theta(keys: ArchitectureKeys, key: str, default: float) -> float:
    """A base of frequencies."""
    return keys.number(key, default, minimum=1.0, maximum=MAX_THETA)


def read_factors(
    keys: ArchitectureKeys, name: str, pairs: int, most: float = MAX_FACTOR,
) -> tuple[float, ...]:
    """A tensor of what the frequencies of each pair of dimensions are divided by; none where a file has it not."""
    stored = f"{name}.weight"
    if stored not in keys.tensors:
        return ()
    path, tensor = keys.tensors[stored]
    where = f"{path}: tensor {stored}"
    if tensor.type.name != "F32" or prod(tensor.shape) != pairs:
        raise CheckpointError(f"{where} must be {pairs} numbers of F32, half of what turns of a head, not "
                              f"{list(tensor.shape)} of {tensor.type.name}")
    with path.open("rb") as file:
        file.seek(tensor.start)
        factors = torch.frombuffer(bytearray(file.read(tensor.end - tensor.start)), dtype=torch.float32)
    if not (factors.isfinite().all() and (factors >= MIN_FACTOR).all() and (factors <= most).all()):
        raise CheckpointError(f"{where} must hold numbers from {MIN_FACTOR} to {most:g}")
    return tuple(factors.tolist())


MAX_CAP = 1e6
MAX_EXPERTS = 4096
GEMMA2_LARGEST, GEMMA3_LARGEST = 46, 62  # layers of the models whose scores are scaled by another size than a head's
FULL, SLIDING = "full_attention", "sliding_attention"


def gemma2(keys: ArchitectureKeys, common: Mapping[str, Any]) -> ConfigFields:
    return {
        "query_pre_attn_scalar": _scale(common, GEMMA2_LARGEST),
        "attn_logit_softcapping": keys.number("attn_logit_softcapping", 50.0, maximum=MAX_CAP),
        "final_logit_softcapping": keys.number("final_logit_softcapping", 30.0, maximum=MAX_CAP),
        "sliding_window": keys.integer("attention.sliding_window", default=4096)}


def gemma3(keys: ArchitectureKeys, common: Mapping[str, Any]) -> ConfigFields:
    """Without a window every layer has full attention; with one, the last of six."""
    window, local = keys.has("attention.sliding_window"), theta(keys, "rope.freq_base_swa", 10_000.0)
    pattern = keys.integer("attention.sliding_window_pattern", default=6)
    kinds = [SLIDING if window and (layer + 1) % pattern else FULL for layer in range(common["num_hidden_layers"])]
    cap = "final_logit_softcapping"
    return {
        "query_pre_attn_scalar": _scale(common, GEMMA3_LARGEST), "layer_types": kinds,
        "sliding_window": keys.integer("attention.sliding_window") if window else None,
        "rope_parameters": {FULL: common["rope_parameters"],
                            SLIDING: {"rope_type": "default", "rope_theta": local}},
    } | ({cap: keys.number(cap, maximum=MAX_CAP)} if keys.has(cap) else {})


def _scale(common: Mapping[str, Any], largest: int) -> float:
    if common["num_hidden_layers"] == largest:
        return float(common["hidden_size"] / common["num_attention_heads"])
    return float(common["head_dim"])


def granite(keys: ArchitectureKeys, common: Mapping[str, Any]) -> ConfigFields:
    """Raises CheckpointError for a model without positions, which llama.cpp marks by a key with another meaning."""
    if not keys.flag("rope.scaling.finetuned", default=True):
        raise keys.error("rope.scaling.finetuned", "is false, which stands for no rotary embedding: not supported")
    return _granite_factors(keys, common)


def _granite_factors(keys: ArchitectureKeys, common: Mapping[str, Any]) -> ConfigFields:
    return {
        "attention_multiplier": keys.number("attention.scale", common["head_dim"] ** -0.5, maximum=MAX_CAP),
        "embedding_multiplier": keys.number("embedding_scale", 1.0, maximum=MAX_CAP),
        "residual_multiplier": keys.number("residual_scale", 1.0, maximum=MAX_CAP),
        "logits_scaling": keys.number("logit_scale", 1.0, maximum=MAX_CAP)}


def granite_moe(keys: ArchitectureKeys, common: Mapping[str, Any]) -> ConfigFields:
    """With an expert that all tokens share, another class."""
    fields = granite(keys, common) | _experts(keys, "num_local_experts")
    if shared := keys.integer("expert_shared_feed_forward_length", default=0, minimum=0):
        fields |= {"architectures": ["GraniteMoeSharedForCausalLM"], "shared_intermediate_size": shared}
    return fields


def gpt_oss(keys: ArchitectureKeys, common: Mapping[str, Any]) -> ConfigFields:
    """Every second layer has a window.

    YaRN does not round the bounds of its blend in the published models, of which files say nothing.
    """
    pattern = keys.integer("attention.sliding_window_pattern", default=2)
    kinds = [SLIDING if (layer + 1) % pattern else FULL for layer in range(common["num_hidden_layers"])]
    return _experts(keys, "num_local_experts") | {
        "intermediate_size": keys.integer("expert_feed_forward_length"), "layer_types": kinds,
        "sliding_window": keys.integer("attention.sliding_window"),
        "rope_parameters": {**common["rope_parameters"], "truncate": False}}


def olmo2(keys: ArchitectureKeys, common: Mapping[str, Any]) -> ConfigFields:
    """Also OLMo 3, which llama.cpp calls the same; its layers with windows do not scale rotary embeddings."""
    if not keys.has("attention.sliding_window"):
        return {}
    rope = common["rope_parameters"]
    return {
        "architectures": ["Olmo3ForCausalLM"], "sliding_window": keys.integer("attention.sliding_window"),
        "layer_types": _window_kinds(keys, common["num_hidden_layers"], 4),
        "rope_parameters": {FULL: rope, SLIDING: _rope_of_windows(keys, rope)}}


def _rope_of_windows(keys: ArchitectureKeys, rope: Mapping[str, Any]) -> ConfigFields:
    """The rotary embedding of layers with windows, which is not scaled; `rope` is that of the others."""
    base = theta(keys, "rope.freq_base_swa", rope["rope_theta"])
    return {"rope_type": "default", "rope_theta": base}


def exaone4(keys: ArchitectureKeys, common: Mapping[str, Any]) -> ConfigFields:
    if not keys.has("attention.sliding_window"):
        return {"sliding_window": None}
    return {"sliding_window": keys.integer("attention.sliding_window"),
            "layer_types": _window_kinds(keys, common["num_hidden_layers"], 4)}


def granite_windows(keys: ArchitectureKeys, common: Mapping[str, Any]) -> ConfigFields:
    """Windows in most layers; some layers may be without positions.  Files with experts are another class."""
    layers, pattern = common["num_hidden_layers"], "attention.rope_pattern"
    base = common["rope_parameters"]["rope_theta"]
    turns = keys.numbers(pattern, layers) if keys.has(pattern) else [True] * layers
    fields = _granite_factors(keys, common) | {
        "sliding_window": keys.integer("attention.sliding_window"), "layer_types": _window_kinds(keys, layers, 4),
        "layer_rope_theta": [base if each else 0 for each in turns]}
    if not keys.integer("expert_count", default=0, minimum=0):
        return fields
    shared = keys.integer("expert_shared_feed_forward_length", default=0, minimum=0)
    return fields | _experts(keys, "num_local_experts") | {
        "architectures": ["GraniteMoeSWAForCausalLM"], "shared_intermediate_size": shared}


def mellum(keys: ArchitectureKeys, common: Mapping[str, Any]) -> ConfigFields:
    rope = common["rope_parameters"]
    return _experts(keys) | _windows_if_set(keys, common) | {
        "moe_intermediate_size": keys.integer("expert_feed_forward_length"),
        "norm_topk_prob": keys.flag("expert_weights_norm", default=True),
        "rope_parameters": {FULL: rope, SLIDING: _rope_of_windows(keys, rope)}}


def _windows_if_set(keys: ArchitectureKeys, common: Mapping[str, Any], *, first_is_full: bool = False) -> ConfigFields:
    """The window and the kinds of layers; without a window all layers attend to the whole context.

    `first_is_full`: the default is that the first of four layers, and not the last, is without a window.
    """
    layers, key = common["num_hidden_layers"], "attention.sliding_window"
    window = keys.integer(key, minimum=0) if keys.has(key) else 0
    kinds = [FULL] * layers
    if window and first_is_full and not keys.has("attention.sliding_window_pattern"):
        kinds = [SLIDING if layer % 4 else FULL for layer in range(layers)]
    elif window:
        kinds = _window_kinds(keys, layers, 4)
    return {"sliding_window": window or None, "layer_types": kinds}


def _sparse_layers(keys: ArchitectureKeys, common: Mapping[str, Any]) -> ConfigFields:
    """Finds which layers have experts by the tensors of the file."""
    keys.ignore("leading_dense_block_count")
    return {"mlp_layer_types": ["sparse" if keys.has_tensor(layer, "ffn_gate_inp") else "dense"
                                for layer in range(common["num_hidden_layers"])]}


def hy_v3(keys: ArchitectureKeys, common: Mapping[str, Any]) -> ConfigFields:
    _check_sigmoid(keys)
    size, shared = keys.integer("expert_feed_forward_length"), "expert_shared_feed_forward_length"
    if not keys.flag("expert_weights_norm", default=True):
        raise keys.error("expert_weights_norm", "is false, which is not supported in this architecture")
    return _experts(keys) | _sparse_layers(keys, common) | {
        "moe_intermediate_size": size, "num_shared_experts": keys.integer(shared, default=size, minimum=0) // size,
        "router_scaling_factor": keys.number("expert_weights_scale", 1.0, maximum=MAX_FACTOR)}


def laguna(keys: ArchitectureKeys, common: Mapping[str, Any]) -> ConfigFields:
    _check_sigmoid(keys)
    layers, size, rope = common["num_hidden_layers"], common["head_dim"], common["rope_parameters"]
    heads = keys.heads("attention.head_count", layers, common["num_attention_heads"])
    turning = keys.integer("rope.dimension_count_swa", default=size)
    per_head = keys.rows("attn_gate") == heads[0]
    return _experts(keys) | _sparse_layers(keys, common) | _windows_if_set(keys, common, first_is_full=True) | {
        "num_attention_heads_per_layer": heads, "gating": "per-head" if per_head else "per-element",
        "moe_intermediate_size": keys.integer("expert_feed_forward_length"),
        "shared_expert_intermediate_size": keys.integer("expert_shared_feed_forward_length"),
        "moe_routed_scaling_factor": keys.number("expert_weights_scale", 1.0, maximum=MAX_FACTOR),
        "rope_parameters": {FULL: {"partial_rotary_factor": 1.0, **rope},
                            SLIDING: _rope_of_windows(keys, rope) | {"partial_rotary_factor": turning / size}}}


def dbrx(keys: ArchitectureKeys, common: Mapping[str, Any]) -> ConfigFields:
    clip = keys.number("attention.clamp_kqv", 0.0, minimum=-1.0, maximum=MAX_CAP)
    return {
        "attn_config": {"kv_n_heads": common["num_key_value_heads"], "clip_qkv": clip if clip > 0 else None,
                        "rope_theta": common["rope_parameters"]["rope_theta"]},
        "ffn_config": {"ffn_hidden_size": common["intermediate_size"],
                       "moe_num_experts": keys.integer("expert_count", maximum=MAX_EXPERTS),
                       "moe_top_k": keys.integer("expert_used_count", maximum=MAX_EXPERTS)}}


def deepseek32(keys: ArchitectureKeys, common: Mapping[str, Any]) -> ConfigFields:
    """DeepSeek-V3.2, and GLM-5, with indexers."""
    _check_sigmoid(keys)
    fields = deepseek2(keys, common)
    del fields["architectures"]
    kinds = "attention.indexer.types"
    if keys.has(kinds):
        layers = common["num_hidden_layers"]
        fields["indexer_types"] = ["full" if each else "shared" for each in keys.numbers(kinds, layers)]
    return fields | {
        "index_n_heads": keys.integer("attention.indexer.head_count"),
        "index_head_dim": keys.integer("attention.indexer.key_length"),
        "index_topk": keys.integer("attention.indexer.top_k")}


def qwen3_next(keys: ArchitectureKeys, common: Mapping[str, Any]) -> ConfigFields:
    fields = _delta(keys, common)
    return fields | _experts_of_delta(keys) if keys.integer("expert_count", default=0, minimum=0) else fields


def qwen3_5(keys: ArchitectureKeys, common: Mapping[str, Any]) -> ConfigFields:
    """A text's three positions are equal; value heads are stored in another order (`GatedDelta`)."""
    keys.ignore("rope.dimension_sections")
    return qwen3_next(keys, common)


def _delta(keys: ArchitectureKeys, common: Mapping[str, Any]) -> ConfigFields:
    """Layers with a gated delta rule."""
    layers, heads = common["num_hidden_layers"], keys.integer("ssm.time_step_rank")
    every, key = keys.integer("full_attention_interval", default=4), "attention.recurrent_layers"
    states = keys.numbers(key, layers) if keys.has(key) else [(layer + 1) % every for layer in range(layers)]
    return {
        "layer_types": ["linear_attention" if each else FULL for each in states],
        "linear_conv_kernel_dim": keys.integer("ssm.conv_kernel"), "linear_num_value_heads": heads,
        "linear_key_head_dim": keys.integer("ssm.state_size"), "linear_num_key_heads": keys.integer("ssm.group_count"),
        "linear_value_head_dim": keys.integer("ssm.inner_size") // heads}


def _experts_of_delta(keys: ArchitectureKeys) -> ConfigFields:
    size = keys.integer("expert_feed_forward_length")
    return _experts(keys) | {
        "moe_intermediate_size": size, "norm_topk_prob": keys.flag("expert_weights_norm", default=True),
        "shared_expert_intermediate_size": keys.integer("expert_shared_feed_forward_length", default=size)}


def kimi_linear(keys: ArchitectureKeys, common: Mapping[str, Any]) -> ConfigFields:
    """Layers without key heads have a recurrent state."""
    _check_sigmoid(keys)
    layers = common["num_hidden_layers"]
    full = keys.present("attention.head_count_kv", layers)
    keys.ignore("attention.value_length")
    return _latent(keys, common, has_other_length=True) | _routed(keys) | {
        "layer_types": [FULL if each else "linear_attention" for each in full],
        "first_k_dense_replace": keys.integer("leading_dense_block_count", default=0, minimum=0),
        "norm_topk_prob": keys.flag("expert_weights_norm", default=True),
        "linear_num_heads": common["num_attention_heads"], "linear_head_dim": keys.integer("kda.head_dim"),
        "linear_conv_kernel_dim": keys.integer("ssm.conv_kernel")}


def mimo_v2(keys: ArchitectureKeys, common: Mapping[str, Any]) -> ConfigFields:
    """Layers with windows may have another number of key heads."""
    _check_sigmoid(keys)
    layers, size, rope = common["num_hidden_layers"], common["head_dim"], common["rope_parameters"]
    kinds = _window_kinds(keys, layers, 6)
    heads = keys.heads("attention.head_count_kv", layers, common["num_key_value_heads"])
    by_kind = {kind: next((count for count, each in zip(heads, kinds, strict=True) if each == kind), heads[0])
               for kind in (FULL, SLIDING)}
    return _routed(keys) | _sparse_layers(keys, common) | {
        "layer_types": kinds, "sliding_window": keys.integer("attention.sliding_window"),
        "num_key_value_heads": by_kind[FULL], "swa_num_key_value_heads": by_kind[SLIDING],
        "v_head_dim": keys.integer("attention.value_length", default=size),
        "norm_topk_prob": keys.flag("expert_weights_norm", default=True),
        "attention_value_scale": keys.number("attention.value_scale", 1.0, maximum=MAX_CAP),
        "rope_parameters": {FULL: rope, SLIDING: _rope_of_windows(keys, rope) | {
            "partial_rotary_factor": rope.get("partial_rotary_factor", 1.0)}}}


def cohere2_moe(keys: ArchitectureKeys, common: Mapping[str, Any]) -> ConfigFields:
    """With LayerNorms or RMS norms, depending on which epsilon the file has."""
    norms = {} if keys.has("attention.layer_norm_rms_epsilon") else {
        "rms_norm_eps": None, "layer_norm_eps": keys.number("attention.layer_norm_epsilon", maximum=1.0)}
    scoring = keys.integer("expert_gating_func", default=SIGMOID, minimum=0)
    return _experts(keys) | _sparse_layers(keys, common) | _windows_if_set(keys, common, first_is_full=True) | norms | {
        "logit_scale": keys.number("logit_scale", 0.0625, maximum=MAX_CAP),
        "expert_selection_fn": "sigmoid" if scoring == SIGMOID else "softmax",
        "norm_topk_prob": keys.flag("expert_weights_norm", default=False),
        "num_shared_experts": keys.integer("expert_shared_count", default=0, minimum=0, maximum=MAX_EXPERTS),
        "intermediate_size": keys.integer("expert_feed_forward_length"),
        "prefix_dense_intermediate_size": common["intermediate_size"]}


def phi3(keys: ArchitectureKeys, common: Mapping[str, Any]) -> ConfigFields:
    window = "attention.sliding_window"
    return {"sliding_window": keys.integer(window, minimum=0) or None} if keys.has(window) else {}


def seed_oss(keys: ArchitectureKeys, common: Mapping[str, Any]) -> ConfigFields:
    return {"attention_bias": has_bias(keys, "attn_q"), "attention_out_bias": has_bias(keys, "attn_output")}


def ernie4_5(keys: ArchitectureKeys, common: Mapping[str, Any]) -> ConfigFields:
    return {"use_bias": has_bias(keys, "attn_q")}


def glm4(keys: ArchitectureKeys, common: Mapping[str, Any]) -> ConfigFields:
    return {"attention_bias": has_bias(keys, "attn_q")}


def has_bias(keys: ArchitectureKeys, part: str) -> bool:
    return f"blk.0.{part}.bias" in keys.tensors


def gpt_neox(keys: ArchitectureKeys, common: Mapping[str, Any]) -> ConfigFields:
    return WHOLE_HEADS | {"use_parallel_residual": keys.flag("use_parallel_residual", default=True),
                          "attention_bias": has_bias(keys, "attn_qkv")}


def phi2(keys: ArchitectureKeys, common: Mapping[str, Any]) -> ConfigFields:
    return WHOLE_HEADS


def stablelm(keys: ArchitectureKeys, common: Mapping[str, Any]) -> ConfigFields:
    """As in llama.cpp, attention and MLP read the same normed states where there is no norm before the MLP."""
    is_parallel = not keys.rows("ffn_norm")
    if keys.flag("use_parallel_residual", default=is_parallel) != is_parallel:
        raise keys.error("use_parallel_residual", f"is {not is_parallel}, which contradicts the norms in the file")
    return WHOLE_HEADS | {"use_parallel_residual": is_parallel, "use_qkv_bias": has_bias(keys, "attn_q"),
                          "qk_layernorm": keys.rows("attn_q_norm") > 0}


def starcoder(keys: ArchitectureKeys, common: Mapping[str, Any]) -> ConfigFields:
    if common["num_key_value_heads"] not in (1, common["num_attention_heads"]):
        raise keys.error("attention.head_count_kv", "must be 1, or the number of heads")
    return {"multi_query": common["num_key_value_heads"] == 1}


def starcoder2(keys: ArchitectureKeys, common: Mapping[str, Any]) -> ConfigFields:
    return {"use_bias": has_bias(keys, "attn_q"), "sliding_window": None}


def nemotron(keys: ArchitectureKeys, common: Mapping[str, Any]) -> ConfigFields:
    return WHOLE_HEADS | {"mlp_bias": has_bias(keys, "ffn_up")}


def olmo(keys: ArchitectureKeys, common: Mapping[str, Any]) -> ConfigFields:
    clip = keys.number("attention.clamp_kqv", 0.0, minimum=-1.0, maximum=MAX_CAP)
    return {"clip_qkv": clip if clip > 0 else None}


WHOLE_HEADS = {"partial_rotary_factor": 1.0}  # rotate where a file does not say which part does


def mixtral(keys: ArchitectureKeys, common: Mapping[str, Any]) -> ConfigFields:
    return _experts(keys, "num_local_experts") | {"sliding_window": None}


def olmoe(keys: ArchitectureKeys, common: Mapping[str, Any]) -> ConfigFields:
    return _experts(keys) | {"norm_topk_prob": keys.flag("expert_weights_norm", default=False)}


def qwen3_moe(keys: ArchitectureKeys, common: Mapping[str, Any]) -> ConfigFields:
    return _experts(keys) | {
        "moe_intermediate_size": keys.integer("expert_feed_forward_length"),
        "norm_topk_prob": keys.flag("expert_weights_norm", default=True),
        "mlp_only_layers": [], "decoder_sparse_step": 1}


SIGMOID = 2  # of `expert_gating_func`
LOG_MULTIPLIER = "rope.scaling.yarn_log_multiplier"


def deepseek2(keys: ArchitectureKeys, common: Mapping[str, Any]) -> ConfigFields:
    """DeepSeek-V2 and V3, and what llama.cpp calls so: GLM-4.7-Flash and, without experts, Youtu-LLM."""
    fields = _latent(keys, common)
    rope = common["rope_parameters"]
    if rope["rope_type"] == "yarn" and keys.has(LOG_MULTIPLIER):  # a tenth of the factor of scores alone
        fields["rope_parameters"] = rope | {
            "mscale_all_dim": keys.number(LOG_MULTIPLIER, minimum=-1.0, maximum=MAX_FACTOR) / 0.1,
            "attention_factor": keys.number("rope.scaling.yarn_attn_factor", 1.0, maximum=MAX_FACTOR)}
    if not keys.integer("expert_count", default=0, minimum=0):
        keys.integer("leading_dense_block_count", default=0, minimum=0)
        return fields | {"architectures": ["YoutuForCausalLM"]}
    fields |= _routed(keys) | _sparse_layers(keys, common)
    groups, kept = fields["n_group"], fields["topk_group"]
    is_normalized = fields.pop("norm_topk_prob")
    scoring = keys.integer("expert_gating_func", default=0, minimum=0)
    layers = range(common["num_hidden_layers"])
    if scoring == SIGMOID or (scoring == 0 and any(keys.has_tensor(layer, "exp_probs_b.bias") for layer in layers)):
        return fields | {"architectures": ["DeepseekV3ForCausalLM"], "norm_topk_prob": is_normalized}
    if is_normalized:
        raise keys.error("expert_weights_norm", "is true, which is not supported with experts chosen by softmax")
    return fields | {"topk_method": "group_limited_greedy" if kept < groups else "greedy"}


def minicpm3(keys: ArchitectureKeys, common: Mapping[str, Any]) -> ConfigFields:
    return _latent(keys, common, common["hidden_size"] // common["num_attention_heads"])


def _latent(
    keys: ArchitectureKeys, common: Mapping[str, Any], value_dim: int | None = None, *, has_other_length: bool = False,
) -> ConfigFields:
    """The sizes of compressed attention; `value_dim` is that of a head where a file does not say.

    `has_other_length`: files have a value length that is not used.

    Files that have the weights of keys and of values apart call what is cached a key and a value, of one head.
    """
    rope_dim, rank = common["head_dim"], keys.integer("attention.kv_lora_rank")
    ending = "_mla" if keys.has("attention.key_length_mla") else ""
    query = keys.integer(f"attention.key_length{ending}")
    value = keys.integer(f"attention.value_length{ending}", default=value_dim)
    cached = {"key_length": rank + rope_dim} | ({} if has_other_length else {"value_length": rank})
    for name, size in cached.items() if ending else ():
        if keys.integer(f"attention.{name}", default=size) != size:
            raise keys.error(f"attention.{name}", f"must be {size}, the numbers that are cached")
    if query <= rope_dim:
        raise keys.error(f"attention.key_length{ending}", f"must be above rope.dimension_count ({rope_dim})")
    ranked = "attention.q_lora_rank"
    return {
        "num_key_value_heads": common["num_attention_heads"], "kv_lora_rank": rank, "qk_rope_head_dim": rope_dim,
        "qk_nope_head_dim": query - rope_dim, "v_head_dim": value, "attention_bias": has_bias(keys, "attn_kv_a_mqa"),
        "q_lora_rank": keys.integer(ranked) if keys.has(ranked) else None}


def _routed(
    keys: ArchitectureKeys, count: str = "n_routed_experts", shared: str = "n_shared_experts",
) -> ConfigFields:
    """Experts as DeepSeek's configs write them; `count` and `shared` are the names of their numbers."""
    return _experts(keys, count) | {
        shared: keys.integer("expert_shared_count", default=0, minimum=0, maximum=MAX_EXPERTS),
        "moe_intermediate_size": keys.integer("expert_feed_forward_length"),
        "first_k_dense_replace": keys.integer("leading_dense_block_count", default=0, minimum=0),
        "routed_scaling_factor": keys.number("expert_weights_scale", 1.0, maximum=MAX_FACTOR),
        "norm_topk_prob": keys.flag("expert_weights_norm", default=False),
        "n_group": keys.integer("expert_group_count", default=1, maximum=MAX_EXPERTS),
        "topk_group": keys.integer("expert_group_used_count", default=1, maximum=MAX_EXPERTS)}


def _check_sigmoid(keys: ArchitectureKeys) -> None:
    """Raises CheckpointError where experts are not chosen by sigmoid scores."""
    if (scoring := keys.integer("expert_gating_func", default=SIGMOID, minimum=0)) != SIGMOID:
        raise keys.error("expert_gating_func", f"must be {SIGMOID} in this architecture, not {scoring}")


def glm4_moe(keys: ArchitectureKeys, common: Mapping[str, Any]) -> ConfigFields:
    """Also Solar Open's."""
    _check_sigmoid(keys)
    return _routed(keys) | {
        "attention_bias": has_bias(keys, "attn_q"),
        "use_qk_norm": "blk.0.attn_q_norm.weight" in keys.tensors}


def dots1(keys: ArchitectureKeys, common: Mapping[str, Any]) -> ConfigFields:
    _check_sigmoid(keys)
    return _routed(keys) | {"sliding_window": None}


def exaone_moe(keys: ArchitectureKeys, common: Mapping[str, Any]) -> ConfigFields:
    _check_sigmoid(keys)
    return _routed(keys, "num_experts", "num_shared_experts") | {
        "sliding_window": keys.integer("attention.sliding_window"),
        "layer_types": _window_kinds(keys, common["num_hidden_layers"], 4)}


def afmoe(keys: ArchitectureKeys, common: Mapping[str, Any]) -> ConfigFields:
    """Embeddings are scaled and shares are normalized, whatever a file says."""
    _check_sigmoid(keys)
    fields = _routed(keys, "num_experts", "num_shared_experts")
    return fields | {
        "num_dense_layers": fields["first_k_dense_replace"], "route_scale": fields["routed_scaling_factor"],
        "mup_enabled": True, "sliding_window": keys.integer("attention.sliding_window"),
        "layer_types": _window_kinds(keys, common["num_hidden_layers"], 4)}


def _window_kinds(keys: ArchitectureKeys, layers: int, every: int) -> list[str]:
    """The kind of each layer: a file gives them one by one, or says in how many the last has full attention."""
    key = "attention.sliding_window_pattern"
    if len(given := keys.each(key)) > 1:
        if len(given) < layers:
            raise keys.error(key, f"must be for each of {layers} layers, not {len(given)}")
        return [SLIDING if windowed else FULL for windowed in given[:layers]]
    every = keys.integer(key, default=every)
    return [SLIDING if (layer + 1) % every else FULL for layer in range(layers)]


def minimax_m2(keys: ArchitectureKeys, common: Mapping[str, Any]) -> ConfigFields:
    _check_sigmoid(keys)
    return _experts(keys, "num_local_experts") | {"intermediate_size": keys.integer("expert_feed_forward_length")}


def ernie4_5_moe(keys: ArchitectureKeys, common: Mapping[str, Any]) -> ConfigFields:
    """The length of shared experts in files is not theirs, but follows from the number of heads: it is not read."""
    keys.integer("expert_shared_feed_forward_length", default=0, minimum=0)
    return ernie4_5(keys, common) | {
        "moe_num_experts": keys.integer("expert_count", maximum=MAX_EXPERTS),
        "moe_k": keys.integer("expert_used_count", maximum=MAX_EXPERTS),
        "moe_intermediate_size": keys.integer("expert_feed_forward_length"),
        "moe_layer_interval": keys.integer("interleave_moe_layer_step", default=1),
        "moe_layer_start_index": keys.integer("leading_dense_block_count", default=0, minimum=0),
        "moe_num_shared_experts": keys.integer("expert_shared_count", default=0, minimum=0)}


def hunyuan_moe(keys: ArchitectureKeys, common: Mapping[str, Any]) -> ConfigFields:
    keys.integer("expert_shared_count", default=1, maximum=1)
    return {
        "num_experts": keys.integer("expert_count", maximum=MAX_EXPERTS),
        "moe_topk": keys.integer("expert_used_count", maximum=MAX_EXPERTS),
        "intermediate_size": keys.integer("expert_shared_feed_forward_length", default=common["intermediate_size"])}


def qwen2_moe(keys: ArchitectureKeys, common: Mapping[str, Any]) -> ConfigFields:
    return _experts(keys) | {
        "moe_intermediate_size": keys.integer("expert_feed_forward_length"),
        "shared_expert_intermediate_size": keys.integer("expert_shared_feed_forward_length"),
        "norm_topk_prob": False, "qkv_bias": has_bias(keys, "attn_q")}


def phimoe(keys: ArchitectureKeys, common: Mapping[str, Any]) -> ConfigFields:
    rope = common["rope_parameters"]
    if rope["rope_type"] == "longrope":
        rope = rope | dict.fromkeys(("short_mscale", "long_mscale"), rope["attention_factor"])
    return phi3(keys, common) | _experts(keys, "num_local_experts") | {
        "rope_parameters": rope, "attention_bias": has_bias(keys, "attn_q"),
        "lm_head_bias": "output.bias" in keys.tensors}


LLAMA4_CHUNK, MAVERICK = 8192, 128  # tokens; the experts of the model without norms of queries and keys


def llama4(keys: ArchitectureKeys, common: Mapping[str, Any]) -> ConfigFields:
    """Chunks are of the published models' size, and every fourth layer sees all, unless a file says 0."""
    window, fields = "attention.sliding_window", _experts(keys, "num_local_experts")
    has_chunks = not keys.has(window) or keys.integer(window, minimum=0) > 0
    return fields | {
        "intermediate_size": keys.integer("expert_feed_forward_length"),
        "intermediate_size_mlp": common["intermediate_size"],
        "interleave_moe_layer_step": keys.integer("interleave_moe_layer_step"),
        "use_qk_norm": fields["num_local_experts"] != MAVERICK, "attn_temperature_tuning": has_chunks,
        "attention_chunk_size": LLAMA4_CHUNK if has_chunks else None,
        "no_rope_layers": [] if has_chunks else [1] * common["num_hidden_layers"]}


def _experts(keys: ArchitectureKeys, count: str = "num_experts") -> ConfigFields:
    """`count` is the name of their number."""
    return {count: keys.integer("expert_count", maximum=MAX_EXPERTS),
            "num_experts_per_tok": keys.integer("expert_used_count", maximum=MAX_EXPERTS)}


_LAYER = re.compile(r"blk\.(?P<layer>\d{1,4})\.(?P<part>[\w.]+?)(?:\.(?P<kind>weight|bias))?")
_EXPERT = re.compile(r"\.experts\.\d+\.")
_ENDS = {"token_embd": "model.embed_tokens", "position_embd": "model.embed_positions", "output_norm": "model.norm",
         "output": "lm_head"}
_PARTS = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm", "ffn_norm": "post_attention_layernorm", "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
_BEHIND = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
_GEMMA = {**_BEHIND, "ffn_norm": "pre_feedforward_layernorm"}
_FUSED = {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
_EXPERTS = {"ffn_gate_inp": "mlp.gate", "ffn_gate_exps": "mlp.experts.{}.gate_proj",
            "ffn_up_exps": "mlp.experts.{}.up_proj", "ffn_down_exps": "mlp.experts.{}.down_proj"}
_MIXTRAL = {"ffn_gate_inp": "block_sparse_moe.gate", "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
            "ffn_up_exps": "block_sparse_moe.experts.{}.w3", "ffn_down_exps": "block_sparse_moe.experts.{}.w2"}
_GLM4 = {"post_attention_norm": "post_self_attn_layernorm", "post_ffw_norm": "post_mlp_layernorm",
         "ffn_up": "mlp.gate_up_proj"}
_SEED = {"post_attention_norm": "post_attention_layernorm"}
_GPT_OSS = {**_EXPERTS, "ffn_gate_inp": "mlp.router", "post_attention_norm": "post_attention_layernorm",
            "attn_sinks.weight": "self_attn.sinks"}
_GRANITE = {"ffn_gate_inp": "block_sparse_moe.router.layer",
            "ffn_gate_exps": "block_sparse_moe.experts.{}.gate_proj",
            "ffn_up_exps": "block_sparse_moe.experts.{}.up_proj",
            "ffn_down_exps": "block_sparse_moe.experts.{}.down_proj",
            "ffn_gate_shexp": "shared_mlp.gate_proj", "ffn_up_shexp": "shared_mlp.up_proj",
            "ffn_down_shexp": "shared_mlp.output_linear"}
_LATENT = {
    "attn_q_a": "self_attn.q_a_proj", "attn_q_a_norm": "self_attn.q_a_layernorm", "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa", "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj", "attn_k_b": "self_attn.k_b_proj.{}", "attn_v_b": "self_attn.v_b_proj.{}"}
_DEEPSEEK = {**_EXPERTS, **_LATENT, "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
             **{f"ffn_{part}_shexp": f"mlp.shared_experts.{part}_proj" for part in ("gate", "up", "down")}}
_GPT2 = {"attn_norm": "ln_1", "attn_qkv": "attn.c_attn", "attn_output": "attn.c_proj", "ffn_norm": "ln_2",
         "ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}
_NEOX = {"attn_qkv": "attention.query_key_value", "attn_output": "attention.dense", "ffn_up": "mlp.dense_h_to_4h",
         "ffn_down": "mlp.dense_4h_to_h"}
_PHI2 = {"attn_output": "self_attn.dense", "ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"}
_STABLELM = {"attn_q_norm": "self_attn.q_layernorm.norms.{}", "attn_k_norm": "self_attn.k_layernorm.norms.{}"}
_STARCODER2 = {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}
_SHARED = {f"ffn_{part}_shexp": f"mlp.shared_experts.{part}_proj" for part in ("gate", "up", "down")}
_GLM4_MOE = {**_EXPERTS, **_SHARED, **_SEED, "exp_probs_b.bias": "mlp.gate.e_score_correction_bias"}
_DOTS1 = {**_EXPERTS, **_SHARED, "exp_probs_b.bias": "mlp.gate.e_score_correction_bias"}
_EXAONE_MOE = {**_EXPERTS, **_SHARED, "exp_probs_b.bias": "mlp.e_score_correction_bias"}
_ERNIE_MOE = {**_EXPERTS, **_SHARED, "exp_probs_b.bias": "mlp.moe_statics.e_score_correction_bias"}
_AFMOE = {**_EXPERTS, **_SHARED, **_SEED, "ffn_gate_inp": "mlp.router.gate", "exp_probs_b.bias": "mlp.expert_bias",
          "attn_gate": "self_attn.gate_proj", "ffn_norm": "pre_mlp_layernorm", "post_ffw_norm": "post_mlp_layernorm"}
_MINIMAX = {**_MIXTRAL, "exp_probs_b.bias": "block_sparse_moe.e_score_correction_bias"}
_QWEN2_MOE = {**_EXPERTS, "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
              **{f"ffn_{part}_shexp": f"mlp.shared_expert.{part}_proj" for part in ("gate", "up", "down")}}
_HUNYUAN_MOE = {**_EXPERTS, "ffn_gate_inp": "mlp.gate.wg", "attn_q_norm": "self_attn.query_layernorm",
                "attn_k_norm": "self_attn.key_layernorm",
                **{f"ffn_{part}_shexp": f"mlp.shared_mlp.{part}_proj" for part in ("gate", "up", "down")}}
_LLAMA4 = {"ffn_gate_inp": "feed_forward.router", **{
    f"ffn_{part}{kind}": f"feed_forward.{inner}{part}_proj" for part in ("gate", "up", "down")
    for kind, inner in (("", ""), ("_exps", "experts.{}."), ("_shexp", "shared_expert."))}}
BOTH, GATES, UPS = " and ", "ffn_gate_exps", "ffn_up_exps"
_LAGUNA = {**_EXPERTS, "attn_gate": "self_attn.g_proj", "exp_probs_b.bias": "mlp.experts.e_score_correction_bias",
           **{f"ffn_{part}_shexp": f"mlp.shared_expert.{part}_proj" for part in ("gate", "up", "down")}}
_HY_V3 = {**_EXPERTS, "ffn_gate_inp": "mlp.router.gate", "exp_probs_b.bias": "mlp.expert_bias",
          "exp_probs_b": "mlp.expert_bias",
          **{f"ffn_{part}_shexp": f"mlp.shared_mlp.{part}_proj" for part in ("gate", "up", "down")}}
_DBRX = {
    "attn_norm": "norm_attn_norm.norm_1", "attn_output_norm": "norm_attn_norm.norm_2",
    "attn_qkv": "norm_attn_norm.attn.Wqkv", "attn_output": "norm_attn_norm.attn.out_proj",
    "ffn_gate_inp": "ffn.router.layer", "ffn_gate_exps": "ffn.experts.{}.w1", "ffn_up_exps": "ffn.experts.{}.v1",
    "ffn_down_exps": "ffn.experts.{}.w2"}
_MIMO = {**_DOTS1, "attn_sinks.weight": "self_attn.attention_sink_bias"}
_GRANITE_WINDOWS = {
    **_GRANITE, "ffn_gate_inp": "block_sparse_moe.router", "attn_sinks.weight": "self_attn.sinks",
    "ffn_up_shexp": f"shared_mlp.gate_proj{BOTH}shared_mlp.up_proj", "ffn_down_shexp": "shared_mlp.output_linear"}
_INDEXER = {f"indexer.{there}": f"self_attn.indexer.{here}" for there, here in {
    "attn_q_b": "wq_b", "attn_k": "wk", "k_norm": "k_norm", "proj": "weights_proj"}.items()}
_DELTA = {
    **_SEED, **_QWEN2_MOE, "attn_qkv": "linear_attn.in_proj_qkv", "attn_gate": "linear_attn.in_proj_z",
    "ssm_ba": "linear_attn.in_proj_ba", "ssm_beta": "linear_attn.in_proj_b", "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_conv1d": "linear_attn.conv1d", "ssm_dt.bias": "linear_attn.dt_bias", "ssm_a": "linear_attn.A_log",
    "ssm_norm": "linear_attn.norm", "ssm_out": "linear_attn.out_proj"}
_KIMI = {
    **_LATENT, **_MIXTRAL, "exp_probs_b.bias": "block_sparse_moe.gate.e_score_correction_bias",
    **{f"ffn_{part}_shexp": f"block_sparse_moe.shared_experts.{part}_proj" for part in ("gate", "up", "down")},
    **{f"ssm_conv1d_{part}": f"self_attn.{part}_conv1d" for part in "qkv"},
    "ssm_f_a": "self_attn.f_a_proj", "ssm_f_b": "self_attn.f_b_proj", "ssm_beta": "self_attn.b_proj",
    "ssm_g_a": "self_attn.g_a_proj", "ssm_g_b": "self_attn.g_b_proj", "ssm_a": "self_attn.A_log",
    "ssm_dt.bias": "self_attn.dt_bias", "ssm_norm": "self_attn.o_norm"}
_UNREAD = re.compile(  # the config has what they say
    r"(rope_freqs|rope_factors_long|rope_factors_short)\.weight|blk\.\d{1,4}\.attn_rot_embd\.weight")


def _nothing(keys: ArchitectureKeys, common: Mapping[str, Any]) -> ConfigFields:
    return {}


@dataclass(frozen=True, slots=True)
class Architecture:
    """How an architecture of llama.cpp is served."""

    served_as: str  # a name in `family_table.FAMILIES`
    is_interleaved: bool = False  # rows of queries and keys
    norm_offset: float = 0.0  # that the converter has added to the weights of norms
    # Parts of a layer in addition to `_PARTS` or instead of them; with ".weight" where the name here has no kind.
    parts: Mapping[str, str] = field(default_factory=dict)
    # Fields of a config that only this architecture has.
    more: Callable[[ArchitectureKeys, Mapping[str, Any]], ConfigFields] = _nothing
    has_experts: bool = False
    splits_experts: bool = False  # that lie together in checkpoints of the family, and gates of MLPs
    ends: Mapping[str, str] = field(default_factory=dict)  # parts outside layers in addition to `_ENDS`
    has_states: bool = False  # numbers of heads and widths may be 0 in some layers
    lacks_attention: bool = False  # and MLPs
    rotates_parts: bool = False  # of heads, perhaps
    is_compressed: bool = False  # keys and values are: the size of a head is that of what rotates
    has_layer_norms: bool = False  # and not RMS norms
    varies: bool = False  # heads of keys and widths may differ by layer, and one embedding rotates by `rope_freqs`
    # The fused weight of queries, keys and values, whose rows the converter reorders; "": the three are separate.
    ungrouped: str = ""
    has_smaller_values: bool = False  # than keys
    # Value heads of recurrent layers are stored in another order: the first of each key head, then the second ones.
    has_tiled_values: bool = False
    # Parts of a layer that are numbers in an array of the metadata, and their shapes, by its key.
    numbers: Mapping[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)

    def name_of(self, stored: str) -> str:
        """A family's name for the tensor that a file calls `stored`.

        An unknown part of a layer is named as one, so that a model which holds it is refused.  Two names with
        `BOTH` between them are those of the first and the second half of a tensor's rows.
        """
        if layer := _LAYER.fullmatch(stored):
            at, parts = f"model.layers.{int(layer['layer'])}.", self._every_part
            kind = f".{layer['kind']}" if layer["kind"] else ""
            named = parts.get(layer["part"] + kind)
            names = [named] if named else [
                name + kind for name in parts.get(layer["part"], layer["part"]).split(BOTH)]
            return BOTH.join(at + name for name in names)
        end, _, kind = stored.rpartition(".")
        ends = _ENDS | dict(self.ends)
        return f"{ends[end]}.{kind}" if end in ends else stored

    @property
    def _every_part(self) -> dict[str, str]:
        """Also names the gate and up projections of experts that some files have as one tensor."""
        parts = _PARTS | dict(self.parts)
        if GATES in parts and UPS in parts:
            parts.setdefault("ffn_gate_up_exps", f"{parts[GATES]}{BOTH}{parts[UPS]}")
        return parts

    def stored_name(self, name: str) -> str:
        """The name in a file of the tensor that families call `name`: for messages."""
        stem, _, kind = name.rpartition(".")
        if stem.startswith("model.layers."):
            layer, _, part = name.removeprefix("model.layers.").partition(".")
            by_name = {here: there for there, here in (_PARTS | dict(self.parts)).items()}
            part = _EXPERT.sub(".experts.{}.", part)
            stem = part.removesuffix(f".{kind}")
            return f"blk.{layer}.{by_name.get(part) or by_name.get(stem, stem) + f'.{kind}'}"
        ends = {here: there for there, here in (_ENDS | dict(self.ends)).items()}
        return f"{ends[stem]}.{kind}" if stem in ends else name


_SSM = {
    "ssm_in": "mamba.in_proj", "ssm_conv1d": "mamba.conv1d", "ssm_x": "mamba.x_proj", "ssm_dt": "mamba.dt_proj",
    "ssm_a": "mamba.A_log", "ssm_d": "mamba.D", "ssm_norm": "mamba.norm", "ssm_out": "mamba.out_proj",
    "ssm_dt_norm": "mamba.dt_layernorm", "ssm_b_norm": "mamba.b_layernorm", "ssm_c_norm": "mamba.c_layernorm"}
_SSM2 = {**_SSM, "ssm_dt.bias": "mamba.dt_bias"}
_MIXER, _MIXER2 = ({"attn_norm": "norm", **{there: here.replace("mamba.", "mixer.") for there, here in parts.items()}}
                   for parts in (_SSM, _SSM2))
_FEED = {"ffn_norm": "pre_ff_layernorm", **{f"ffn_{part}": f"feed_forward.{part}_proj" for part in (
    "gate", "up", "down")}}
_JAMBA = {**_SSM, **_FEED, "ffn_gate_inp": "feed_forward.router",
          **{f"ffn_{part}_exps": f"feed_forward.experts.{{}}.{part}_proj" for part in ("gate", "up", "down")}}
_FALCON_H1 = {**_SSM2, **_FEED, "ffn_norm": "pre_ff_layernorm.weight"}  # whose name in files has no kind
_NEMOTRON_H = {
    **_MIXER2, **{f"attn_{part}": f"mixer.{part}_proj" for part in "qkv"}, "attn_output": "mixer.o_proj",
    "ffn_up": "mixer.up_proj", "ffn_down": "mixer.down_proj", "ffn_gate_inp": "mixer.gate",
    "exp_probs_b.bias": "mixer.gate.e_score_correction_bias", "ffn_up_exps": "mixer.experts.{}.up_proj",
    "ffn_down_exps": "mixer.experts.{}.down_proj", "ffn_up_shexp": "mixer.shared_experts.up_proj",
    "ffn_down_shexp": "mixer.shared_experts.down_proj", "ffn_latent_down": "mixer.fc1_latent_proj",
    "ffn_latent_up": "mixer.fc2_latent_proj"}
_GRANITE_HYBRID = {**_SSM2, **_GRANITE, **{f"ffn_{part}{kind}": f"shared_mlp.{here}" for kind in ("", "_shexp")
                                           for part, here in (("gate", "gate_proj"), ("up", "up_proj"),
                                                              ("down", "output_linear"))}}
_LFM2 = {"attn_norm": "operator_norm", "attn_output": "self_attn.out_proj", "attn_q_norm": "self_attn.q_layernorm",
         "attn_k_norm": "self_attn.k_layernorm", "shortconv.conv": "conv.conv", "shortconv.in_proj": "conv.in_proj",
         "shortconv.out_proj": "conv.out_proj", "ffn_norm": "ffn_norm", "ffn_gate": "feed_forward.w1",
         "ffn_up": "feed_forward.w3", "ffn_down": "feed_forward.w2"}
_LFM2_MOE = {**_LFM2, "ffn_gate_inp": "feed_forward.gate", "exp_probs_b.bias": "feed_forward.expert_bias",
             "ffn_gate_exps": "feed_forward.experts.{}.w1", "ffn_up_exps": "feed_forward.experts.{}.w3",
             "ffn_down_exps": "feed_forward.experts.{}.w2"}
_LFM2_ENDS = {"token_embd_norm": "model.norm"}
STATE_FULL = "attention.head_count_kv"  # 0 in layers with a state


def lfm2(keys: ArchitectureKeys, common: Mapping[str, Any]) -> ConfigFields:
    full = keys.present(STATE_FULL, common["num_hidden_layers"])
    return {
        "layer_types": [FULL if each else "conv" for each in full], "norm_eps": common["rms_norm_eps"],
        "conv_L_cache": keys.integer("shortconv.l_cache"), "block_auto_adjust_ff_dim": False}


def lfm2_moe(keys: ArchitectureKeys, common: Mapping[str, Any]) -> ConfigFields:
    if (scoring := keys.integer("expert_gating_func", default=SIGMOID)) != SIGMOID:
        raise keys.error("expert_gating_func", f"must be {SIGMOID}, sigmoid, not {scoring}")
    dense = keys.integer("leading_dense_block_count", default=0, minimum=0)
    return lfm2(keys, common) | _experts(keys) | {
        "num_dense_layers": dense, "moe_intermediate_size": keys.integer("expert_feed_forward_length"),
        "routed_scaling_factor": keys.number("expert_weights_scale", 1.0, maximum=MAX_FACTOR),
        "use_expert_bias": f"blk.{dense}.exp_probs_b.bias" in keys.tensors}


def mamba(keys: ArchitectureKeys, common: Mapping[str, Any]) -> ConfigFields:
    """Mamba, and Falcon Mamba, which norms dt, B and C."""
    normed = keys.flag("ssm.dt_b_c_rms", default=False)
    return {
        "architectures": ["FalconMambaForCausalLM" if normed else "MambaForCausalLM"],
        "layer_norm_epsilon": common["rms_norm_eps"], "mixer_rms_eps": common["rms_norm_eps"],
        "intermediate_size": keys.integer("ssm.inner_size"), "state_size": keys.integer("ssm.state_size"),
        "conv_kernel": keys.integer("ssm.conv_kernel"), "time_step_rank": keys.integer("ssm.time_step_rank")}


def mamba2(keys: ArchitectureKeys, common: Mapping[str, Any]) -> ConfigFields:
    inner, heads = keys.integer("ssm.inner_size"), keys.integer("ssm.time_step_rank")
    return {
        "layer_norm_epsilon": common["rms_norm_eps"], "num_heads": heads, "head_dim": inner // heads,
        "expand": inner / common["hidden_size"], "n_groups": keys.integer("ssm.group_count"),
        "state_size": keys.integer("ssm.state_size"), "conv_kernel": keys.integer("ssm.conv_kernel")}


def jamba(keys: ArchitectureKeys, common: Mapping[str, Any]) -> ConfigFields:
    layers, hidden = common["num_hidden_layers"], common["hidden_size"]
    sparse = [f"blk.{layer}.ffn_gate_inp.weight" in keys.tensors for layer in range(layers)]
    fields = _experts(keys) if any(sparse) else {"num_experts": 1}
    return fields | _every(keys, "attn_layer", keys.present(STATE_FULL, layers)) | _every(
        keys, "expert_layer", sparse) | {
        "mamba_expand": keys.integer("ssm.inner_size") / hidden, "mamba_d_state": keys.integer("ssm.state_size"),
        "mamba_d_conv": keys.integer("ssm.conv_kernel"), "mamba_dt_rank": keys.integer("ssm.time_step_rank")}


def _every(keys: ArchitectureKeys, name: str, layers: list[bool]) -> ConfigFields:
    """The period and the offset of the layers that are so.  Raises CheckpointError where they have neither."""
    found = [number for number, each in enumerate(layers) if each]
    period = found[1] - found[0] if len(found) > 1 else len(layers)
    first = found[0] if found else len(layers) - 1
    if found != [number for number in range(len(layers)) if number % period == first] and found:
        raise keys.error(STATE_FULL, f"and the experts are not every so many layers: {name} has no period")
    return {f"{name}_period": period if found else len(layers) + 1, f"{name}_offset": first if found else len(layers)}


def _space(keys: ArchitectureKeys, common: Mapping[str, Any]) -> ConfigFields:
    """Mamba-2's layers in hybrids."""
    inner, heads = keys.integer("ssm.inner_size"), keys.integer("ssm.time_step_rank")
    return {
        "mamba_n_heads": heads, "mamba_d_head": inner // heads, "mamba_n_groups": keys.integer("ssm.group_count"),
        "mamba_d_state": keys.integer("ssm.state_size"), "mamba_d_conv": keys.integer("ssm.conv_kernel"),
        "mamba_expand": inner / common["hidden_size"]}


def bamba(keys: ArchitectureKeys, common: Mapping[str, Any]) -> ConfigFields:
    """Half of each head rotates, whatever the file says."""
    keys.ignore("rope.dimension_count", "rope.scaling.finetuned")
    full = keys.present(STATE_FULL, common["num_hidden_layers"])
    return _space(keys, common) | {
        "attn_layer_indices": [layer for layer, each in enumerate(full) if each],
        "rope_parameters": common["rope_parameters"] | {"partial_rotary_factor": 0.5}}


def granite_hybrid(keys: ArchitectureKeys, common: Mapping[str, Any]) -> ConfigFields:
    full = keys.present(STATE_FULL, common["num_hidden_layers"])
    turns = keys.flag("rope.scaling.finetuned", default=True)
    experts = keys.integer("expert_count", default=0, minimum=0)
    shared = keys.integer("expert_shared_feed_forward_length", default=0, minimum=0)
    return _granite_factors(keys, common) | _space(keys, common) | {
        "layer_types": [FULL if each else "linear_attention" for each in full],
        "position_embedding_type": "rope" if turns else None,
        "shared_intermediate_size": shared or common["intermediate_size"],
        "num_local_experts": experts} | (_experts(keys, "num_local_experts") if experts else {})


def nemotron_h(keys: ArchitectureKeys, common: Mapping[str, Any]) -> ConfigFields:
    """Also Nemotron 3, which has experts; the tensors of a file show which layers have experts and which an MLP."""
    layers, space = common["num_hidden_layers"], _space(keys, common)
    full = keys.present(STATE_FULL, layers)
    kinds = [FULL if attends else "linear_attention" for attends in full]
    for layer in range(layers):
        if keys.has_tensor(layer, "ffn_up") or keys.has_tensor(layer, "ffn_up_exps"):
            kinds[layer] = "moe" if keys.has_tensor(layer, "ffn_up_exps") else "mlp"
    experts = "moe" in kinds
    size, latent = keys.integer("expert_feed_forward_length") if experts else 0, "moe_latent_size"
    mixture = _routed(keys) | {
        "moe_shared_expert_intermediate_size": keys.integer("expert_shared_feed_forward_length", default=size),
        latent: keys.integer(latent, minimum=0) if keys.has(latent) else None} if experts else {}
    mixture.pop("first_k_dense_replace", None)
    return mixture | {
        "layers_block_type": kinds,
        "layer_norm_epsilon": common["rms_norm_eps"], "mamba_num_heads": space["mamba_n_heads"],
        "mamba_head_dim": space["mamba_d_head"], "n_groups": space["mamba_n_groups"],
        "ssm_state_size": space["mamba_d_state"], "conv_kernel": space["mamba_d_conv"]}


def falcon_h1(keys: ArchitectureKeys, common: Mapping[str, Any]) -> ConfigFields:
    """The converter multiplies the factors into the weights."""
    inner = keys.integer("ssm.inner_size")
    return _space(keys, common) | {
        "mamba_d_ssm": inner, "mamba_rms_norm": "blk.0.ssm_norm.weight" in keys.tensors,
        "mamba_norm_before_gate": False}


def is_unread(stored: str) -> bool:
    """Whether a tensor is read with the config, or repeats it."""
    return _UNREAD.fullmatch(stored) is not None


WITH_EXPERTS = " with experts"
WITH_SEVERAL_KEYS = " with several heads of keys"
WITH_POSITIONS = " with positions"
ARCHITECTURES = {
    "llama": Architecture("LlamaForCausalLM", is_interleaved=True),  # Mistral, too
    "llama with experts": Architecture("MixtralForCausalLM", is_interleaved=True, parts=_MIXTRAL, more=mixtral,
                                       has_experts=True),
    "qwen2": Architecture("Qwen2ForCausalLM"),
    "qwen3": Architecture("Qwen3ForCausalLM"),
    "qwen3moe": Architecture("Qwen3MoeForCausalLM", parts=_EXPERTS, more=qwen3_moe, has_experts=True),
    "gemma2": Architecture("Gemma2ForCausalLM", norm_offset=1.0, parts=_GEMMA, more=gemma2),
    "gemma3": Architecture("Gemma3ForCausalLM", norm_offset=1.0, parts=_GEMMA, more=gemma3),
    "granite": Architecture("GraniteForCausalLM", is_interleaved=True, more=granite),
    "granitemoe": Architecture("GraniteMoeForCausalLM", is_interleaved=True, parts=_GRANITE, more=granite_moe,
                               has_experts=True, splits_experts=True),
    "olmo2": Architecture("Olmo2ForCausalLM", parts=_BEHIND, more=olmo2),
    "phi3": Architecture("Phi3ForCausalLM", parts=_FUSED, more=phi3, rotates_parts=True),
    "glm4": Architecture("Glm4ForCausalLM", parts=_GLM4, more=glm4, rotates_parts=True),
    "ernie4_5": Architecture("Ernie4_5ForCausalLM", more=ernie4_5),
    "seed_oss": Architecture("SeedOssForCausalLM", parts=_SEED, more=seed_oss),
    "olmoe": Architecture("OlmoeForCausalLM", parts=_EXPERTS, more=olmoe, has_experts=True),
    "glm4moe": Architecture("Glm4MoeForCausalLM", parts=_GLM4_MOE, more=glm4_moe, has_experts=True, rotates_parts=True),
    "dots1": Architecture("Dots1ForCausalLM", parts=_DOTS1, more=dots1, has_experts=True),
    "exaone-moe": Architecture("ExaoneMoeForCausalLM", parts=_EXAONE_MOE, more=exaone_moe, has_experts=True),
    "afmoe": Architecture("AfmoeForCausalLM", parts=_AFMOE, more=afmoe, has_experts=True),
    "minimax-m2": Architecture("MiniMaxM2ForCausalLM", parts=_MINIMAX, more=minimax_m2, has_experts=True,
                               rotates_parts=True),
    "ernie4_5-moe": Architecture("Ernie4_5_MoeForCausalLM", parts=_ERNIE_MOE, more=ernie4_5_moe, has_experts=True,
                                 splits_experts=True),
    "hunyuan-moe": Architecture("HunYuanMoEV1ForCausalLM", parts=_HUNYUAN_MOE, more=hunyuan_moe, has_experts=True),
    "qwen2moe": Architecture("Qwen2MoeForCausalLM", parts=_QWEN2_MOE, more=qwen2_moe, has_experts=True),
    "phimoe": Architecture("PhimoeForCausalLM", parts=_MIXTRAL, more=phimoe, has_experts=True, rotates_parts=True),
    "llama4": Architecture("Llama4ForCausalLM", parts=_LLAMA4, more=llama4, has_experts=True, splits_experts=True),
    "gpt-oss": Architecture("GptOssForCausalLM", parts=_GPT_OSS, more=gpt_oss, has_experts=True,
                            splits_experts=True),
    "deepseek2": Architecture("YoutuForCausalLM", parts=_LATENT, more=deepseek2, is_compressed=True),
    "deepseek2 with experts": Architecture("DeepseekV2ForCausalLM", parts=_DEEPSEEK, more=deepseek2, has_experts=True,
                                           is_compressed=True),
    "minicpm3": Architecture("MiniCPM3ForCausalLM", parts=_LATENT, more=minicpm3, is_compressed=True),
    "gpt2": Architecture("GPT2LMHeadModel", parts=_GPT2, has_layer_norms=True),
    "gptneox": Architecture("GPTNeoXForCausalLM", parts=_NEOX, more=gpt_neox, rotates_parts=True, has_layer_norms=True),
    "phi2": Architecture("PhiForCausalLM", parts=_PHI2, more=phi2, rotates_parts=True, has_layer_norms=True),
    "stablelm": Architecture("StableLmForCausalLM", parts=_STABLELM, more=stablelm, rotates_parts=True,
                             has_layer_norms=True),
    "starcoder": Architecture("GPTBigCodeForCausalLM", parts=_GPT2, more=starcoder, has_layer_norms=True),
    "starcoder2": Architecture("Starcoder2ForCausalLM", parts=_STARCODER2, more=starcoder2, has_layer_norms=True),
    "nemotron": Architecture("NemotronForCausalLM", norm_offset=1.0, more=nemotron, rotates_parts=True,
                             has_layer_norms=True),
    "olmo": Architecture("OlmoForCausalLM", is_interleaved=True, more=olmo, has_layer_norms=True),
    "smollm3": Architecture("SmolLM3ForCausalLM", is_interleaved=True),
    "lfm2": Architecture("Lfm2ForCausalLM", parts=_LFM2, ends=_LFM2_ENDS, more=lfm2, has_states=True),
    "lfm2moe": Architecture("Lfm2MoeForCausalLM", parts=_LFM2_MOE, ends=_LFM2_ENDS, more=lfm2_moe, has_states=True,
                            has_experts=True),
    "mamba": Architecture("MambaForCausalLM", parts=_MIXER, more=mamba, lacks_attention=True),
    "mamba2": Architecture("Mamba2ForCausalLM", parts=_MIXER2, more=mamba2, lacks_attention=True),
    "jamba": Architecture("JambaForCausalLM", parts=_JAMBA, more=jamba, has_states=True, has_experts=True),
    "granitehybrid" + WITH_POSITIONS: Architecture(
        "BambaForCausalLM", is_interleaved=True, parts={**_SSM2, **_FEED}, more=bamba, has_states=True,
        rotates_parts=True),
    "granitehybrid": Architecture("GraniteMoeHybridForCausalLM", is_interleaved=True, parts=_GRANITE_HYBRID,
                                  more=granite_hybrid, has_states=True, has_experts=True, splits_experts=True),
    **dict.fromkeys(("nemotron_h", "nemotron_h_moe"), Architecture(
        "NemotronHForCausalLM", parts=_NEMOTRON_H, more=nemotron_h, has_states=True, has_experts=True,
        rotates_parts=True)),
    "falcon-h1": Architecture("FalconH1ForCausalLM", parts=_FALCON_H1, more=falcon_h1, has_states=True),
}
"""By `general.architecture`; one has experts where its `expert_count` is not 0."""


def logit_scaled(keys: ArchitectureKeys, common: Mapping[str, Any]) -> ConfigFields:
    return {"logit_scale": keys.number("logit_scale", 0.0625, maximum=MAX_CAP),
            "use_qk_norm": "blk.0.attn_q_norm.weight" in keys.tensors}


def cohere2(keys: ArchitectureKeys, common: Mapping[str, Any]) -> ConfigFields:
    """The last of four layers has no window."""
    keys.ignore("attention.sliding_window_pattern")
    return logit_scaled(keys, common) | {"sliding_window": keys.integer("attention.sliding_window", default=4096)}


def multimodal(keys: ArchitectureKeys, common: Mapping[str, Any]) -> ConfigFields:
    """The text part of a model for images: the positions of a token of text are one."""
    keys.ignore("rope.dimension_sections", "n_deepstack_layers")
    return {}


def multimodal_moe(keys: ArchitectureKeys, common: Mapping[str, Any]) -> ConfigFields:
    return multimodal(keys, common) | qwen3_moe(keys, common)


def mistral3(keys: ArchitectureKeys, common: Mapping[str, Any]) -> ConfigFields:
    """Ministral 3, or the text part of Mistral Small 3, which does not sharpen late queries."""
    key = "attention.temperature_scale"
    if not keys.has(key) or not keys.values(key)[0]:
        return {"architectures": ["MistralForCausalLM"], "sliding_window": None}
    beta = keys.number(key, maximum=MAX_CAP)
    return {"rope_parameters": common["rope_parameters"] | {"llama_4_scaling_beta": beta}, "sliding_window": None}


def plain_mlps(keys: ArchitectureKeys, common: Mapping[str, Any]) -> ConfigFields:
    return {"mlp_bias": has_bias(keys, "ffn_up")}


def mpt(keys: ArchitectureKeys, common: Mapping[str, Any]) -> ConfigFields:
    clip = "attention.clamp_kqv"
    if keys.number("attention.max_alibi_bias", 8.0, minimum=-1.0) != 8:
        raise keys.error("attention.max_alibi_bias", "must be 8")
    return {"attn_config": {"clip_qkv": (keys.number(clip, minimum=-1.0) or None) if keys.has(clip) else None}}


def falcon(keys: ArchitectureKeys, common: Mapping[str, Any]) -> ConfigFields:
    """That of 7 billion weights has one head of keys; the larger ones have two norms in a layer."""
    kv_heads, bias = common["num_key_value_heads"], has_bias(keys, "attn_qkv")
    return {"num_kv_heads": kv_heads, "new_decoder_architecture": kv_heads > 1, "multi_query": True, "bias": bias}


def gemma3n(keys: ArchitectureKeys, common: Mapping[str, Any]) -> ConfigFields:
    layers = common["num_hidden_layers"]
    above = keys.numbers("activation_sparsity_scale", layers, may_be_infinite=True)
    kinds = [SLIDING if each else FULL for each in keys.numbers("attention.sliding_window_pattern", layers)]
    local = theta(keys, "rope.freq_base_swa", 10_000.0)
    table = keys.tensors.get("per_layer_token_embd.weight")
    if table is None:
        raise CheckpointError(f"{keys.metadata.where}: tensor per_layer_token_embd.weight is missing")
    cap = "final_logit_softcapping"
    return {
        "layer_types": kinds, "sliding_window": keys.integer("attention.sliding_window"),
        "rope_parameters": {FULL: common["rope_parameters"], SLIDING: {"rope_type": "default", "rope_theta": local}},
        "activation_sparsity_pattern": [NormalDist().cdf(each) for each in above],
        "altup_active_idx": keys.integer("altup.active_idx", minimum=0, maximum=64),
        "altup_num_inputs": keys.integer("altup.num_inputs", maximum=64),
        "hidden_size_per_layer_input": keys.integer("embedding_length_per_layer_input"),
        "vocab_size_per_layer_input": table[1].shape[0],
        "num_kv_shared_layers": keys.integer("attention.shared_kv_layers", default=0, minimum=0),
        "laurel_rank": keys.rows("laurel_l"), "final_logit_softcapping": keys.number(cap, 30.0, maximum=MAX_CAP)}


UNTURNED = 1e30  # what converters divide the frequency of a pair by that does not turn


def gemma4(keys: ArchitectureKeys, common: Mapping[str, Any]) -> ConfigFields:
    """Numbers that differ by layer are those of layers with a window, and others of those without."""
    layers, size = common["num_hidden_layers"], common["head_dim"]
    kinds = [SLIDING if each else FULL for each in keys.numbers("attention.sliding_window_pattern", layers)]
    heads = keys.heads("attention.head_count_kv", layers, common["num_key_value_heads"])
    widths = keys.metadata.numbers(f"{keys.prefix}.feed_forward_length")
    factors = read_factors(keys, "rope_freqs", size // 2, UNTURNED)
    turning = sum(factor < UNTURNED for factor in factors) / max(1, len(factors)) if factors else 1.0
    table = keys.tensors.get("per_layer_token_embd.weight")
    local, cap = theta(keys, "rope.freq_base_swa", 10_000.0), "final_logit_softcapping"
    full = next((layer for layer, kind in enumerate(kinds) if kind == FULL), 0)
    small = next((layer for layer, kind in enumerate(kinds) if kind == SLIDING), full)
    has_experts = keys.integer("expert_count", default=0, minimum=0) > 0
    experts = {"enable_moe_block": True, "num_experts": keys.integer("expert_count", maximum=MAX_EXPERTS),
               "top_k_experts": keys.integer("expert_used_count", maximum=MAX_EXPERTS),
               "moe_intermediate_size": keys.integer("expert_feed_forward_length")} if has_experts else {}
    return experts | {
        "layer_types": kinds, "sliding_window": keys.integer("attention.sliding_window"),
        "num_key_value_heads": heads[small], "head_dim": keys.integer("attention.key_length_swa", default=size),
        "per_layer_config": {str(layer): {"head_dim": size, "num_key_value_heads": heads[layer]}
                             for layer, kind in enumerate(kinds) if kind == FULL},
        "attention_k_eq_v": f"blk.{full}.attn_v.weight" not in keys.tensors,
        "use_double_wide_mlp": max(widths) > min(widths),
        "num_kv_shared_layers": keys.integer("attention.shared_kv_layers", default=0, minimum=0),
        "hidden_size_per_layer_input": keys.integer("embedding_length_per_layer_input", default=0, minimum=0),
        "vocab_size_per_layer_input": common["vocab_size"] if table is None else table[1].shape[0],
        "rope_parameters": {
            FULL: {"rope_type": "proportional", "rope_theta": common["rope_parameters"]["rope_theta"],
                   "partial_rotary_factor": turning},
            SLIDING: {"rope_type": "default", "rope_theta": local}},
        "final_logit_softcapping": keys.number(cap, maximum=MAX_CAP) if keys.has(cap) else None}


def bitnet(keys: ArchitectureKeys, common: Mapping[str, Any]) -> ConfigFields:
    """Files do not name the activation: it is SiLU in llama.cpp, and in the models that its converter accepts."""
    return {"hidden_act": "silu"}


_BITNET = {"attn_sub_norm": "self_attn.attn_sub_norm", "ffn_sub_norm": "mlp.ffn_sub_norm"}
_BLOOM = {
    "attn_qkv": "self_attention.query_key_value", "attn_output": "self_attention.dense",
    "ffn_up": "mlp.dense_h_to_4h", "ffn_down": "mlp.dense_4h_to_h"}
_MPT = {"attn_norm": "norm_1", "attn_qkv": "attn.Wqkv", "attn_output": "attn.out_proj", "ffn_norm": "norm_2",
        "ffn_up": "ffn.up_proj", "ffn_down": "ffn.down_proj"}
_HUNYUAN = {"attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm"}
_PER_LAYER = {
    "inp_gate": "per_layer_input_gate", "proj": "per_layer_projection", "post_norm": "post_per_layer_input_norm"}
_PER_LAYER_ENDS = {
    "per_layer_token_embd": "model.embed_tokens_per_layer", "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm"}
_GEMMA3N = {
    **_GEMMA, **_PER_LAYER, "laurel_l": "laurel.linear_left", "laurel_r": "laurel.linear_right",
    "laurel_post_norm": "laurel.post_laurel_norm", "altup_correct_coef": "altup.correction_coefs",
    "altup_predict_coef": "altup.prediction_coefs", "altup_router": "altup.modality_router",
    "altup_router_norm": "altup.router_norm", "altup_correct_scale.weight": "altup.correct_output_scale"}
_GEMMA4 = {
    **_GEMMA, **_PER_LAYER, "layer_output_scale.weight": "layer_scalar", "ffn_gate_inp": "router.proj",
    "ffn_gate_inp.scale": "router.scale", "ffn_down_exps.scale": "router.per_expert_scale",
    "post_ffw_norm_1": "post_feedforward_layernorm_1", "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    "post_ffw_norm_2": "post_feedforward_layernorm_2",
    **{f"ffn_{part}_exps": f"experts.{{}}.{part}_proj" for part in ("gate", "up", "down")}}
_XIELU = {f"xielu.{name}": (f"mlp.act_fn.{name}", (1,) if name.startswith("alpha") else ())
          for name in ("alpha_p", "alpha_n", "beta", "eps")}

ARCHITECTURES |= {
    "gemma": Architecture("GemmaForCausalLM", norm_offset=1.0),
    "gemma3n": Architecture(
        "Gemma3nForCausalLM", parts=_GEMMA3N, more=gemma3n,
        ends={**_PER_LAYER_ENDS, "altup_proj": "model.altup_projections.{}",
              "altup_unembd_proj": "model.altup_unembed_projections.{}"}),
    "gemma4": Architecture(
        "Gemma4ForCausalLM", parts=_GEMMA4, more=gemma4, ends=_PER_LAYER_ENDS, varies=True, has_experts=True,
        splits_experts=True),
    "command-r": Architecture("CohereForCausalLM", more=logit_scaled, has_layer_norms=True),
    "cohere2": Architecture("Cohere2ForCausalLM", more=cohere2, has_layer_norms=True),
    "qwen2vl": Architecture("Qwen2ForCausalLM", more=multimodal),
    "qwen3vl": Architecture("Qwen3ForCausalLM", more=multimodal),
    "hunyuan-dense": Architecture("HunYuanDenseV1ForCausalLM", parts=_HUNYUAN),
    "mistral3": Architecture("Ministral3ForCausalLM", is_interleaved=True, more=mistral3),
    "bitnet": Architecture("BitNetForCausalLM", parts=_BITNET, more=bitnet),
    "arcee": Architecture("ArceeForCausalLM", is_interleaved=True, more=plain_mlps),
    "jais2": Architecture("Jais2ForCausalLM", more=plain_mlps, has_layer_norms=True),
    "chatglm": Architecture("GlmForCausalLM", parts={"ffn_up": "mlp.gate_up_proj"}, more=glm4, rotates_parts=True),
    "exaone4": Architecture("Exaone4ForCausalLM", parts=_BEHIND, more=exaone4),
    "cohere2moe": Architecture("Cohere2MoeForCausalLM", parts={**_EXPERTS, **_SHARED}, more=cohere2_moe,
                               has_experts=True, has_layer_norms=True),
    "laguna": Architecture("LagunaForCausalLM", parts=_LAGUNA, more=laguna, has_experts=True, rotates_parts=True,
                           varies=True),
    "dbrx": Architecture("DbrxForCausalLM", parts=_DBRX, more=dbrx, has_experts=True, splits_experts=True,
                         has_layer_norms=True),
    "granite_swa": Architecture("GraniteSWAForCausalLM", is_interleaved=True, parts=_GRANITE_WINDOWS,
                                more=granite_windows, has_experts=True, splits_experts=True),
    "mellum": Architecture("MellumForCausalLM", parts=_EXPERTS, more=mellum, has_experts=True),
    "hy_v3": Architecture("HYV3ForCausalLM", parts=_HY_V3, more=hy_v3, has_experts=True),
    "deepseek32": Architecture("DeepseekV32ForCausalLM", parts=_DEEPSEEK | _INDEXER, more=deepseek32,
                               has_experts=True, is_compressed=True),
    "glm-dsa": Architecture("GlmMoeDsaForCausalLM", parts=_DEEPSEEK | _INDEXER, more=deepseek32,
                            has_experts=True, is_compressed=True),
    "mimo2": Architecture("MiMoV2FlashForCausalLM", parts=_MIMO, more=mimo_v2, has_experts=True, rotates_parts=True,
                          varies=True, has_smaller_values=True),
    "qwen3vlmoe": Architecture("Qwen3MoeForCausalLM", parts=_EXPERTS, more=multimodal_moe, has_experts=True),
    "qwen3next": Architecture("Qwen3NextForCausalLM", norm_offset=1.0, parts=_DELTA, more=qwen3_next, has_experts=True,
                              rotates_parts=True),
    "qwen35": Architecture("Qwen3_5ForCausalLM", norm_offset=1.0, parts=_DELTA, more=qwen3_5, rotates_parts=True,
                           has_tiled_values=True),
    "qwen35moe": Architecture("Qwen3_5MoeForCausalLM", norm_offset=1.0, parts=_DELTA, more=qwen3_5, has_experts=True,
                              rotates_parts=True, has_tiled_values=True),
    "kimi-linear": Architecture("KimiLinearForCausalLM", parts=_KIMI, more=kimi_linear, has_states=True,
                                has_experts=True, is_compressed=True),
    "apertus": Architecture(
        "ApertusForCausalLM", numbers=_XIELU,
        parts={"attn_norm": "attention_layernorm", "ffn_norm": "feedforward_layernorm"}),
    "bloom": Architecture("BloomForCausalLM", parts=_BLOOM, has_layer_norms=True,
                          ends={"token_embd_norm": "model.embed_norm"}, ungrouped="self_attention.query_key_value"),
    "mpt": Architecture("MptForCausalLM", parts=_MPT, more=mpt, has_layer_norms=True),
    "falcon": Architecture("FalconForCausalLM", parts=_BLOOM, more=falcon, has_layer_norms=True),
    "falcon" + WITH_SEVERAL_KEYS: Architecture(
        "FalconForCausalLM", parts=_BLOOM | {"attn_norm": "ln_mlp", "attn_norm_2": "ln_attn"}, more=falcon,
        has_layer_norms=True, ungrouped="self_attention.query_key_value"),
}
