"""Architectures of GGUF files, and their tensors' names.

    llama.cpp             here, as in Hugging Face checkpoints
    blk.0.attn_q.weight   model.layers.0.self_attn.q_proj.weight

llama.cpp rotates neighbouring dimensions of a head in some architectures, and so its converter interleaves the rows of
their queries and keys: row `2 i + j` of a head is row `j head_dim / 2 + i` of the original.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from slotwise.model.gguf import families
from slotwise.model.gguf.keys import Fields, Keys

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
_UNREAD = re.compile(  # the config has what they say
    r"(rope_freqs|rope_factors_long|rope_factors_short)\.weight|blk\.\d{1,4}\.attn_rot_embd\.weight")


def _nothing(keys: Keys, common: Mapping[str, Any]) -> Fields:
    return {}


@dataclass(frozen=True, slots=True)
class Architecture:
    """How an architecture of llama.cpp is served."""

    served_as: str  # a name in `families.FAMILIES`
    is_interleaved: bool = False  # rows of queries and keys
    norm_offset: float = 0.0  # that the converter has added to the weights of norms
    parts: Mapping[str, str] = field(default_factory=dict)  # of a layer, beside or instead of the usual ones; with
    # its kind, ".weight", where the name here has none
    more: Callable[[Keys, Mapping[str, Any]], Fields] = _nothing  # fields of a config beside the common ones
    has_experts: bool = False
    splits_experts: bool = False  # that lie together in checkpoints of the family
    rotates_parts: bool = False  # of heads, perhaps

    def name_of(self, stored: str) -> str:
        """The name that a family gives the tensor that is `stored` in a file; one that no family reads stays unknown.

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
    """Whether a tensor is read with the config, or repeats what it says."""
    return _UNREAD.fullmatch(stored) is not None


ARCHITECTURES = {
    "llama": Architecture("LlamaForCausalLM", is_interleaved=True),  # Mistral, too
    "llama with experts": Architecture("MixtralForCausalLM", is_interleaved=True, parts=_MIXTRAL, more=families.mixtral,
                                       has_experts=True),
    "qwen2": Architecture("Qwen2ForCausalLM"),
    "qwen3": Architecture("Qwen3ForCausalLM"),
    "qwen3moe": Architecture("Qwen3MoeForCausalLM", parts=_EXPERTS, more=families.qwen3_moe, has_experts=True),
    "gemma2": Architecture("Gemma2ForCausalLM", norm_offset=1.0, parts=_GEMMA, more=families.gemma2),
    "gemma3": Architecture("Gemma3ForCausalLM", norm_offset=1.0, parts=_GEMMA, more=families.gemma3),
    "granite": Architecture("GraniteForCausalLM", is_interleaved=True, more=families.granite),
    "granitemoe": Architecture("GraniteMoeForCausalLM", is_interleaved=True, parts=_GRANITE, more=families.granite_moe,
                               has_experts=True, splits_experts=True),
    "olmo2": Architecture("Olmo2ForCausalLM", parts=_BEHIND, more=families.olmo2),
    "phi3": Architecture("Phi3ForCausalLM", parts=_FUSED, more=families.phi3, rotates_parts=True),
    "glm4": Architecture("Glm4ForCausalLM", parts=_GLM4, more=families.glm4, rotates_parts=True),
    "ernie4_5": Architecture("Ernie4_5ForCausalLM", more=families.ernie4_5),
    "seed_oss": Architecture("SeedOssForCausalLM", parts=_SEED, more=families.seed_oss),
    "olmoe": Architecture("OlmoeForCausalLM", parts=_EXPERTS, more=families.olmoe, has_experts=True),
    "gpt-oss": Architecture("GptOssForCausalLM", parts=_GPT_OSS, more=families.gpt_oss, has_experts=True,
                            splits_experts=True),
    "smollm3": Architecture("SmolLM3ForCausalLM", is_interleaved=True),
}
"""By `general.architecture`; one has experts where its `expert_count` is not 0."""
WITH_EXPERTS = " with experts"
