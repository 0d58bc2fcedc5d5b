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
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import prod
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

    def integer(self, key: str, *, default: int | None = None, minimum: int = 1, maximum: int = MAX_WIDTH) -> int:
        return self.metadata.integer(self._name(key), default, minimum=minimum, maximum=maximum)

    def number(self, key: str, default: float | None = None, *, minimum: float = 0.0, maximum: float = 1e30) -> float:
        return self.metadata.number(self._name(key), default, minimum=minimum, maximum=maximum)

    def flag(self, key: str, *, default: bool) -> bool:
        return self.metadata.flag(self._name(key), default)

    def text(self, key: str, default: str) -> str:
        return self.metadata.text(self._name(key), default)

    def alike(self, key: str, layers: int, default: int | None = None) -> int:
        """A number that a file may give for each layer, and that must be the same in all."""
        name = self._name(key)
        numbers = self.metadata.numbers(name)
        if not numbers and default is None:
            raise self.metadata.error(name, "is missing")
        values = set(numbers) if default is None or numbers else {default}
        if len(values) > 1 or len(numbers) not in (0, 1, layers):
            raise self.metadata.error(name, f"gives {len(numbers)} layers {len(values)} sizes: all must be alike")
        value = values.pop()
        if not isinstance(value, int) or not 1 <= value <= MAX_WIDTH:
            raise self.metadata.error(name, f"must be a whole number from 1 to {MAX_WIDTH}, not {value!r:.40}")
        return value

    def unread(self) -> list[str]:
        """The keys that nothing has read."""
        prefix = f"{self.prefix}."
        return [key.removeprefix(prefix) for key in self.metadata.keys(prefix) if key not in self._read]

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
    if rotated != head_dim:
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


def read_factors(keys: ArchitectureKeys, name: str, pairs: int) -> tuple[float, ...]:
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
    if not (factors.isfinite().all() and (factors >= MIN_FACTOR).all() and (factors <= MAX_FACTOR).all()):
        raise CheckpointError(f"{where} must hold numbers from {MIN_FACTOR} to {MAX_FACTOR:g}")
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
    return {
        "attention_multiplier": keys.number("attention.scale", common["head_dim"] ** -0.5, maximum=MAX_CAP),
        "embedding_multiplier": keys.number("embedding_scale", 1.0, maximum=MAX_CAP),
        "residual_multiplier": keys.number("residual_scale", 1.0, maximum=MAX_CAP),
        "logits_scaling": keys.number("logit_scale", 1.0, maximum=MAX_CAP)}


def granite_moe(keys: ArchitectureKeys, common: Mapping[str, Any]) -> ConfigFields:
    """Raises CheckpointError for a shared expert, which another family has."""
    shared = "expert_shared_feed_forward_length"
    if keys.integer(shared, default=0, minimum=0):
        raise keys.error(shared, "is set: shared experts are not supported in this architecture")
    return granite(keys, common) | _experts(keys, "num_local_experts")


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
    """Raises CheckpointError for OLMo 3, which llama.cpp calls the same, and which has windows."""
    if keys.has("attention.sliding_window"):
        raise keys.error("attention.sliding_window", "is set, which is not supported in this architecture")
    return {}


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
    fields, layers = _latent(keys, common), common["num_hidden_layers"] - keys.integer(NEXTN, default=0, minimum=0)
    fields |= {"num_hidden_layers": layers}
    rope = common["rope_parameters"]
    if rope["rope_type"] == "yarn" and keys.has(LOG_MULTIPLIER):  # a tenth of the factor of scores alone
        fields["rope_parameters"] = rope | {
            "mscale_all_dim": keys.number(LOG_MULTIPLIER, minimum=-1.0, maximum=MAX_FACTOR) / 0.1,
            "attention_factor": keys.number("rope.scaling.yarn_attn_factor", 1.0, maximum=MAX_FACTOR)}
    dense = keys.integer("leading_dense_block_count", default=0, minimum=0)
    if not keys.integer("expert_count", default=0, minimum=0):
        return fields | {"architectures": ["YoutuForCausalLM"]}
    groups, kept = (keys.integer(f"expert_group_{name}", default=1, maximum=MAX_EXPERTS)
                    for name in ("count", "used_count"))
    fields |= _experts(keys, "n_routed_experts") | {
        "n_shared_experts": keys.integer("expert_shared_count", default=0, minimum=0, maximum=MAX_EXPERTS),
        "moe_intermediate_size": keys.integer("expert_feed_forward_length"), "first_k_dense_replace": dense,
        "routed_scaling_factor": keys.number("expert_weights_scale", 1.0, maximum=MAX_FACTOR),
        "n_group": groups, "topk_group": kept}
    is_normalized = keys.flag("expert_weights_norm", default=False)
    scoring = keys.integer("expert_gating_func", default=0, minimum=0)
    if scoring == SIGMOID or (scoring == 0 and f"blk.{dense}.exp_probs_b.bias" in keys.tensors):
        return fields | {"architectures": ["DeepseekV3ForCausalLM"], "norm_topk_prob": is_normalized}
    if is_normalized:
        raise keys.error("expert_weights_norm", "is true, which is not supported with experts chosen by softmax")
    return fields | {"topk_method": "group_limited_greedy" if kept < groups else "greedy"}


def minicpm3(keys: ArchitectureKeys, common: Mapping[str, Any]) -> ConfigFields:
    return _latent(keys, common, common["hidden_size"] // common["num_attention_heads"])


def _latent(keys: ArchitectureKeys, common: Mapping[str, Any], value_dim: int | None = None) -> ConfigFields:
    """The sizes of compressed attention; `value_dim` is that of a head where a file does not say.

    Files that have the weights of keys and of values apart call what is cached a key and a value, of one head.
    """
    rope_dim, rank = common["head_dim"], keys.integer("attention.kv_lora_rank")
    ending = "_mla" if keys.has("attention.key_length_mla") else ""
    query = keys.integer(f"attention.key_length{ending}")
    value = keys.integer(f"attention.value_length{ending}", default=value_dim)
    for name, size in (("key_length", rank + rope_dim), ("value_length", rank)) if ending else ():
        if keys.integer(f"attention.{name}", default=size) != size:
            raise keys.error(f"attention.{name}", f"must be {size}, the numbers that are cached")
    if query <= rope_dim:
        raise keys.error(f"attention.key_length{ending}", f"must be above rope.dimension_count ({rope_dim})")
    ranked = "attention.q_lora_rank"
    return {
        "num_key_value_heads": common["num_attention_heads"], "kv_lora_rank": rank, "qk_rope_head_dim": rope_dim,
        "qk_nope_head_dim": query - rope_dim, "v_head_dim": value, "attention_bias": has_bias(keys, "attn_kv_a_mqa"),
        "q_lora_rank": keys.integer(ranked) if keys.has(ranked) else None}


def _experts(keys: ArchitectureKeys, count: str = "num_experts") -> ConfigFields:
    """`count` is the name of their number."""
    return {count: keys.integer("expert_count", maximum=MAX_EXPERTS),
            "num_experts_per_tok": keys.integer("expert_used_count", maximum=MAX_EXPERTS)}


_LAYER = re.compile(r"blk\.(?P<layer>\d{1,4})\.(?P<part>\w+)\.(?P<kind>weight|bias)")
_EXPERT = re.compile(r"\.experts\.\d+\.")
_ENDS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
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
            "ffn_down_exps": "block_sparse_moe.experts.{}.down_proj"}
_LATENT = {
    "attn_q_a": "self_attn.q_a_proj", "attn_q_a_norm": "self_attn.q_a_layernorm", "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa", "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj", "attn_k_b": "self_attn.k_b_proj.{}", "attn_v_b": "self_attn.v_b_proj.{}"}
_DEEPSEEK = {**_EXPERTS, **_LATENT, "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
             **{f"ffn_{part}_shexp": f"mlp.shared_experts.{part}_proj" for part in ("gate", "up", "down")}}
_UNREAD = re.compile(  # the config has what they say
    r"(rope_freqs|rope_factors_long|rope_factors_short)\.weight|blk\.\d{1,4}\.attn_rot_embd\.weight")


def _nothing(keys: ArchitectureKeys, common: Mapping[str, Any]) -> ConfigFields:
    return {}


@dataclass(frozen=True, slots=True)
class Architecture:
    """How an architecture of llama.cpp is served."""

    served_as: str  # a name in `families.FAMILIES`
    is_interleaved: bool = False  # rows of queries and keys
    norm_offset: float = 0.0  # that the converter has added to the weights of norms
    # Parts of a layer in addition to `_PARTS` or instead of them; with ".weight" where the name here has no kind.
    parts: Mapping[str, str] = field(default_factory=dict)
    # Fields of a config that only this architecture has.
    more: Callable[[ArchitectureKeys, Mapping[str, Any]], ConfigFields] = _nothing
    has_experts: bool = False
    splits_experts: bool = False  # that lie together in checkpoints of the family
    rotates_parts: bool = False  # of heads, perhaps
    is_compressed: bool = False  # keys and values are: the size of a head is that of what rotates

    def name_of(self, stored: str) -> str:
        """A family's name for the tensor that a file calls `stored`.

        An unknown part of a layer is named as one, so that a model which holds it is refused.
        """
        if layer := _LAYER.fullmatch(stored):
            at, parts, kind = f"model.layers.{int(layer['layer'])}.", _PARTS | dict(self.parts), f".{layer['kind']}"
            return at + (parts.get(layer["part"] + kind) or parts.get(layer["part"], layer["part"]) + kind)
        end, _, kind = stored.rpartition(".")
        return f"{_ENDS[end]}.{kind}" if end in _ENDS else stored

    def stored_name(self, name: str) -> str:
        """The name in a file of the tensor that families call `name`: for messages."""
        stem, _, kind = name.rpartition(".")
        if stem.startswith("model.layers."):
            layer, _, part = name.removeprefix("model.layers.").partition(".")
            by_name = {here: there for there, here in (_PARTS | dict(self.parts)).items()}
            part = _EXPERT.sub(".experts.{}.", part)
            stem = part.removesuffix(f".{kind}")
            return f"blk.{layer}.{by_name.get(part) or by_name.get(stem, stem) + f'.{kind}'}"
        ends = {here: there for there, here in _ENDS.items()}
        return f"{ends[stem]}.{kind}" if stem in ends else name


def is_unread(stored: str) -> bool:
    """Whether a tensor is read with the config, or repeats it."""
    return _UNREAD.fullmatch(stored) is not None


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
    "gpt-oss": Architecture("GptOssForCausalLM", parts=_GPT_OSS, more=gpt_oss, has_experts=True,
                            splits_experts=True),
    "deepseek2": Architecture("YoutuForCausalLM", parts=_LATENT, more=deepseek2, is_compressed=True),
    "deepseek2 with experts": Architecture("DeepseekV2ForCausalLM", parts=_DEEPSEEK, more=deepseek2, has_experts=True,
                                           is_compressed=True),
    "minicpm3": Architecture("MiniCPM3ForCausalLM", parts=_LATENT, more=minicpm3, is_compressed=True),
    "smollm3": Architecture("SmolLM3ForCausalLM", is_interleaved=True),
}
"""By `general.architecture`; one has experts where its `expert_count` is not 0."""
WITH_EXPERTS = " with experts"
