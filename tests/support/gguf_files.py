"""GGUF files of small checkpoints, written with the gguf package: its names of tensors and keys, none of Slotwise's."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf.quants import quantize
from safetensors.torch import load_file

from support import gguf_dense as dense
from support import gguf_hybrids as hybrids

INTERLEAVED = (gguf.MODEL_ARCH.LLAMA, gguf.MODEL_ARCH.GRANITE, gguf.MODEL_ARCH.GRANITE_MOE, gguf.MODEL_ARCH.SMOLLM3,
               gguf.MODEL_ARCH.OLMO, gguf.MODEL_ARCH.MISTRAL3, gguf.MODEL_ARCH.ARCEE)
OFFSET = (gguf.MODEL_ARCH.GEMMA, gguf.MODEL_ARCH.GEMMA2, gguf.MODEL_ARCH.GEMMA3, gguf.MODEL_ARCH.NEMOTRON)
ARCHITECTURES = {
    "LlamaForCausalLM": gguf.MODEL_ARCH.LLAMA, "MistralForCausalLM": gguf.MODEL_ARCH.LLAMA,
    "MixtralForCausalLM": gguf.MODEL_ARCH.LLAMA, "Qwen2ForCausalLM": gguf.MODEL_ARCH.QWEN2,
    "Qwen3ForCausalLM": gguf.MODEL_ARCH.QWEN3, "Qwen3MoeForCausalLM": gguf.MODEL_ARCH.QWEN3MOE,
    "Gemma2ForCausalLM": gguf.MODEL_ARCH.GEMMA2, "Gemma3ForCausalLM": gguf.MODEL_ARCH.GEMMA3,
    "GraniteForCausalLM": gguf.MODEL_ARCH.GRANITE, "Olmo2ForCausalLM": gguf.MODEL_ARCH.OLMO2,
    "OlmoeForCausalLM": gguf.MODEL_ARCH.OLMOE, "Phi3ForCausalLM": gguf.MODEL_ARCH.PHI3,
    "SmolLM3ForCausalLM": gguf.MODEL_ARCH.SMOLLM3, "Glm4ForCausalLM": gguf.MODEL_ARCH.GLM4,
    "Ernie4_5ForCausalLM": gguf.MODEL_ARCH.ERNIE4_5, "SeedOssForCausalLM": gguf.MODEL_ARCH.SEED_OSS,
    "GptOssForCausalLM": gguf.MODEL_ARCH.GPT_OSS, "GraniteMoeForCausalLM": gguf.MODEL_ARCH.GRANITE_MOE,
    **dict.fromkeys(("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "Glm4MoeLiteForCausalLM", "YoutuForCausalLM"),
                    gguf.MODEL_ARCH.DEEPSEEK2),
    **{f"{name}ForCausalLM": arch for name, arch in {
        "Gemma": gguf.MODEL_ARCH.GEMMA, "Gemma3n": gguf.MODEL_ARCH.GEMMA3N,
        "Gemma4": gguf.MODEL_ARCH.GEMMA4, "Cohere": gguf.MODEL_ARCH.COMMAND_R,
        "Cohere2": gguf.MODEL_ARCH.COHERE2, "HunYuanDenseV1": gguf.MODEL_ARCH.HUNYUAN_DENSE,
        "Ministral3": gguf.MODEL_ARCH.MISTRAL3, "Arcee": gguf.MODEL_ARCH.ARCEE, "Jais2": gguf.MODEL_ARCH.JAIS2,
        "Apertus": gguf.MODEL_ARCH.APERTUS, "Bloom": gguf.MODEL_ARCH.BLOOM, "Mpt": gguf.MODEL_ARCH.MPT,
        "Falcon": gguf.MODEL_ARCH.FALCON}.items()},
    "Lfm2ForCausalLM": gguf.MODEL_ARCH.LFM2, "Lfm2MoeForCausalLM": gguf.MODEL_ARCH.LFM2MOE,
    "MambaForCausalLM": gguf.MODEL_ARCH.MAMBA, "FalconMambaForCausalLM": gguf.MODEL_ARCH.MAMBA,
    "Mamba2ForCausalLM": gguf.MODEL_ARCH.MAMBA2, "JambaForCausalLM": gguf.MODEL_ARCH.JAMBA,
    "GraniteMoeHybridForCausalLM": gguf.MODEL_ARCH.GRANITE_HYBRID,
    "NemotronHForCausalLM": gguf.MODEL_ARCH.NEMOTRON_H, "FalconH1ForCausalLM": gguf.MODEL_ARCH.FALCON_H1,
    "MiniCPM3ForCausalLM": gguf.MODEL_ARCH.MINICPM3, "GPT2LMHeadModel": gguf.MODEL_ARCH.GPT2,
    "GPTNeoXForCausalLM": gguf.MODEL_ARCH.GPTNEOX, "PhiForCausalLM": gguf.MODEL_ARCH.PHI2,
    "StableLmForCausalLM": gguf.MODEL_ARCH.STABLELM, "GPTBigCodeForCausalLM": gguf.MODEL_ARCH.STARCODER,
    "Starcoder2ForCausalLM": gguf.MODEL_ARCH.STARCODER2, "NemotronForCausalLM": gguf.MODEL_ARCH.NEMOTRON,
    "OlmoForCausalLM": gguf.MODEL_ARCH.OLMO,
    "Glm4MoeForCausalLM": gguf.MODEL_ARCH.GLM4_MOE, "Dots1ForCausalLM": gguf.MODEL_ARCH.DOTS1,
    "ExaoneMoeForCausalLM": gguf.MODEL_ARCH.EXAONE_MOE, "AfmoeForCausalLM": gguf.MODEL_ARCH.AFMOE,
    "MiniMaxM2ForCausalLM": gguf.MODEL_ARCH.MINIMAXM2, "Ernie4_5_MoeForCausalLM": gguf.MODEL_ARCH.ERNIE4_5_MOE,
    "HunYuanMoEV1ForCausalLM": gguf.MODEL_ARCH.HUNYUAN_MOE, "Qwen2MoeForCausalLM": gguf.MODEL_ARCH.QWEN2MOE,
    "PhimoeForCausalLM": gguf.MODEL_ARCH.PHIMOE, "Llama4ForCausalLM": gguf.MODEL_ARCH.LLAMA4,
    "GraniteMoeSharedForCausalLM": gguf.MODEL_ARCH.GRANITE_MOE,
}  # fmt: skip
MIXTURES = [f"{name}ForCausalLM" for name in (
    "Glm4Moe", "Dots1", "ExaoneMoe", "Afmoe", "MiniMaxM2", "Ernie4_5_Moe", "HunYuanMoEV1", "Qwen2Moe", "Phimoe",
    "Llama4", "GraniteMoeShared")]
WINDOWED = (  # files have theirs
    "ExaoneMoeForCausalLM", "AfmoeForCausalLM", "Gemma2ForCausalLM", "Gemma3ForCausalLM", "Phi3ForCausalLM",
    "GptOssForCausalLM", "Cohere2ForCausalLM", "Gemma3nForCausalLM", "Gemma4ForCausalLM")
Edit = Callable[[gguf.GGUFWriter], None]


def write(
    folder: Path, path: Path, kind: str | Callable[[str], str] = "F32", *, edit: Edit = lambda writer: None,
    parts: int = 1, fuses: bool = False,
) -> Path:
    """Writes a checkpoint to `path`, with matrices stored as `kind` or as it says of their names, as llama.cpp does.

    `edit` may add to the metadata; `fuses` as `--fuse-qkv` of the converter.  With several parts `path` is a name
    without an end; returns the first part.
    """
    config = _usual(json.loads((folder / "config.json").read_text()))
    arch = ARCHITECTURES[config["architectures"][0]]
    tensors = {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
    name = gguf.MODEL_ARCH_NAMES[arch]
    most = -(-(len(tensors) + 1) // parts) if parts > 1 else 0
    writer = gguf.GGUFWriter(path, name, split_max_tensors=most)
    tensors = hybrids.multiplied(tensors, config)
    _add_config(writer, hybrids.common(dense.common(config)))
    hybrids.add_states(writer, dense.common(config))
    dense.add_keys(writer, config, tensors)
    if (folder / "tokenizer.json").is_file():
        add_tokenizer(writer, folder, size=config["vocab_size"])
    names = gguf.get_tensor_name_map(arch, hybrids.num_layers(dense.common(config)))
    tensors = dense.changed(hybrids.changed(_joined(_stacked(_absorbed(tensors, config))), config), config)
    stored_tensors: dict[str, np.ndarray[Any, Any]] = {}
    for original, tensor in _split(tensors).items():
        stored = names.get_name(original, (".weight", ".bias"))
        assert stored, original
        stored_tensors[stored] = _converted(arch, original, tensor, config)
    for stored, numbers in (_fused(stored_tensors) if fuses else stored_tensors).items():
        writer.add_tensor(stored, *_stored(
            numbers, "F32" if stored.endswith(".bias") else kind if isinstance(kind, str) else kind(stored)))
    for stored, factors in _rope_factors(config).items():
        writer.add_tensor(stored, factors)
    edit(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return next(iter(sorted(path.parent.glob(f"{path.stem}-00001-of-*.gguf")))) if parts > 1 else path


def _fused(tensors: dict[str, np.ndarray[Any, Any]]) -> dict[str, np.ndarray[Any, Any]]:
    """Queries, keys and values of each layer that has all three as one tensor."""
    found = dict(tensors)
    for name in tensors:
        parts = [name.replace("attn_v.", f"attn_{part}.") for part in "qkv"]
        if "attn_v." in name and all(part in tensors for part in parts):
            found[name.replace("attn_v", "attn_qkv")] = np.concatenate([found.pop(part) for part in parts])
    return found


USUAL = {
    "n_embd": "hidden_size", "n_layer": "num_hidden_layers", "n_head": "num_attention_heads",
    "n_inner": "intermediate_size", "n_positions": "max_position_embeddings"}
EPS = "layer_norm_epsilon", "layer_norm_eps", "norm_epsilon", "norm_eps"


def _usual(config: dict[str, Any]) -> dict[str, Any]:
    """The config of a classic under the names of Llama's."""
    found = {USUAL.get(name, name): value for name, value in config.items()}
    if "num_attention_heads" in found:
        found.setdefault("num_key_value_heads", found["num_attention_heads"])
    if found.get("multi_query"):
        found["num_key_value_heads"] = 1
    return found


def _stacked(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """StableLM's norms of each head, together."""
    heads = [name for name in tensors if "_layernorm.norms." in name]
    found = {name: tensor for name, tensor in tensors.items() if name not in heads}
    for name in heads:
        at = name.split(".norms.")[0]
        found[f"{at}.weight"] = torch.stack([tensors[f"{at}.norms.{head}.weight"] for head in range(
            sum(other.startswith(f"{at}.norms.") for other in heads))])
    return found


def _add_config(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    heads, rope = config["num_attention_heads"], config.get("rope_parameters") or {}
    rope = rope.get("full_attention", rope)  # Gemma 3 has one for each kind of layer
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    lengths = head_dim, head_dim
    if "kv_lora_rank" in config:
        lengths, head_dim = _add_latent(writer, config), config["qk_rope_head_dim"]
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config.get("intermediate_size_mlp", config["intermediate_size"]))
    writer.add_head_count(heads)
    writer.add_head_count_kv(1 if _has_split(config) else config["num_key_value_heads"])
    writer.add_key_length(lengths[0])
    if lengths[1]:
        writer.add_value_length(lengths[1])
    writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
    if "rms_norm_eps" in config:
        writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    else:
        writer.add_layer_norm_eps(next((config[name] for name in EPS if name in config), 1e-5))
    if "use_parallel_residual" in config:
        writer.add_parallel_residual(config["use_parallel_residual"])
    if config.get("clip_qkv"):
        writer.add_clamp_kqv(config["clip_qkv"])
    writer.add_rope_freq_base(rope.get("rope_theta", 10_000.0))
    writer.add_vocab_size(config["vocab_size"])
    if rope.get("rope_type") in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope.get("rope_type") in ("yarn", "longrope"):
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if rope.get("rope_type") == "longrope":
        longer = config["max_position_embeddings"] / rope["original_max_position_embeddings"]
        sharper = np.sqrt(1 + np.log(longer) / np.log(rope["original_max_position_embeddings"]))
        writer.add_rope_scaling_attn_factors(float(rope.get("attention_factor") or sharper))
    for name, add in (
        ("attn_logit_softcapping", writer.add_attn_logit_softcapping),
        ("final_logit_softcapping", writer.add_final_logit_softcapping),
        ("attention_multiplier", writer.add_attention_scale), ("embedding_multiplier", writer.add_embedding_scale),
        ("residual_multiplier", writer.add_residual_scale), ("logits_scaling", writer.add_logit_scale),
        ("num_experts", writer.add_expert_count), ("num_local_experts", writer.add_expert_count),
        ("num_experts_per_tok", writer.add_expert_used_count),
        ("moe_intermediate_size", writer.add_expert_feed_forward_length),
    ):
        if config.get(name):
            add(config[name])
    _add_mixture(writer, config)
    if config["architectures"][0] in ("GptOssForCausalLM", "MiniMaxM2ForCausalLM", "Llama4ForCausalLM"):
        writer.add_expert_feed_forward_length(config["intermediate_size"])
    if config.get("sliding_window") and config["architectures"][0] in WINDOWED:
        writer.add_sliding_window(config["sliding_window"])


def _add_mixture(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """What the converter writes of experts that most mixtures have not."""
    architecture = config["architectures"][0]
    if architecture not in MIXTURES:
        return
    for names, add in (
        (("moe_num_experts",), writer.add_expert_count), (("moe_k", "moe_topk"), writer.add_expert_used_count),
        (("moe_num_shared_experts", "num_shared_experts"), writer.add_expert_shared_count),
        (("moe_layer_interval", "interleave_moe_layer_step"), writer.add_interleave_moe_layer_step),
        (("moe_layer_start_index", "num_dense_layers"), writer.add_leading_dense_block_count),
        (("route_scale",), writer.add_expert_weights_scale),
        (("shared_intermediate_size", "shared_expert_intermediate_size"), writer.add_expert_shared_feed_forward_length),
    ):
        for name in names:
            if name in config:
                add(config[name])
    if architecture == "ExaoneMoeForCausalLM":
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config["layer_types"]])
        writer.add_leading_dense_block_count(config["mlp_layer_types"].count("dense"))
    if "n_routed_experts" in config:
        writer.add_expert_count(config["n_routed_experts"])
        writer.add_expert_shared_count(config["n_shared_experts"])
        writer.add_leading_dense_block_count(config["first_k_dense_replace"])
    if "routed_scaling_factor" in config:
        writer.add_expert_weights_scale(config["routed_scaling_factor"])
        writer.add_expert_weights_norm(config["norm_topk_prob"])
        writer.add_expert_group_count(config["n_group"])
        writer.add_expert_group_used_count(config["topk_group"])
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if architecture == "HunYuanMoEV1ForCausalLM":
        writer.add_expert_feed_forward_length(config["intermediate_size"])
        writer.add_expert_shared_feed_forward_length(config["intermediate_size"])


def _has_split(config: dict[str, Any]) -> bool:
    """Whether the converter stores what makes keys and values of latents apart."""
    return "kv_lora_rank" in config and config["architectures"][0] != "MiniCPM3ForCausalLM"


def _add_latent(writer: gguf.GGUFWriter, config: dict[str, Any]) -> tuple[int, int]:
    """The sizes of compressed attention and of experts; returns the lengths of a key and of a value, or 0."""
    rank, rope, query = config["kv_lora_rank"], config.get("rope_parameters") or {}, config["qk_rope_head_dim"]
    query += config["qk_nope_head_dim"]
    writer.add_kv_lora_rank(rank)
    if config.get("q_lora_rank"):
        writer.add_q_lora_rank(config["q_lora_rank"])
    if not _has_split(config):
        return query, 0
    writer.add_key_length_mla(query)
    writer.add_value_length_mla(config["v_head_dim"])
    if "mscale_all_dim" in rope:
        writer.add_rope_scaling_yarn_log_mul(0.1 * rope["mscale_all_dim"])
    dense = sum(kind == "dense" for kind in config.get("mlp_layer_types") or ())
    count = config.get("n_routed_experts")
    writer.add_leading_dense_block_count(
        config.get("first_k_dense_replace", dense) if count else config["num_hidden_layers"])
    writer.add_expert_shared_count(config.get("n_shared_experts", 0))
    if count:
        writer.add_expert_count(count)
        writer.add_expert_group_count(config.get("n_group") or 1)
        writer.add_expert_group_used_count(config.get("topk_group") or 1)
        writer.add_expert_weights_scale(config["routed_scaling_factor"])
        if config["architectures"][0] != "DeepseekV2ForCausalLM":
            writer.add_expert_weights_norm(config["norm_topk_prob"])
            writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    return rank + config["qk_rope_head_dim"], rank


def add_tokenizer(writer: gguf.GGUFWriter, folder: Path, kind: str = "gpt-2", size: int = 0) -> None:
    """The byte-level tokenizer of a checkpoint, and its chat template."""
    description, settings = (json.loads((folder / name).read_text()) for name in (
        "tokenizer.json", "tokenizer_config.json"))
    kinds = {token["id"]: 3 if token["special"] else 4 for token in description["added_tokens"]}
    numbers = description["model"]["vocab"] | {token["content"]: token["id"] for token in description["added_tokens"]}
    tokens = sorted(numbers, key=numbers.__getitem__)
    words = len(tokens)
    tokens += [f"[PAD{number}]" for number in range(words, size)]  # as the converter fills a table up
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(kind)
    writer.add_token_list(tokens)
    writer.add_token_types([kinds.get(number, 1) for number in range(words)] + [5] * (len(tokens) - words))
    writer.add_token_merges([" ".join(merge) for merge in description["model"]["merges"]])
    writer.add_bos_token_id(tokens.index(settings["bos_token"]))
    writer.add_eos_token_id(tokens.index(settings["eos_token"]))
    if "pad_token" in settings:
        writer.add_pad_token_id(tokens.index(settings["pad_token"]))
    writer.add_chat_template(settings["chat_template"])


def _converted(arch: gguf.MODEL_ARCH, name: str, tensor: torch.Tensor, config: dict[str, Any]) -> np.ndarray[Any, Any]:
    """As the converter changes a tensor: rows of queries and keys interleaved, norms offset, and so on."""
    numbers = tensor.float().numpy()
    for part, heads in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")):
        if arch in INTERLEAVED and part in name:
            pairs = numbers.reshape(config[heads], 2, -1, *numbers.shape[1:])
            numbers = np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(numbers.shape))
    if arch == gguf.MODEL_ARCH.GPT2 and name.endswith((".c_attn.weight", ".c_proj.weight", ".c_fc.weight")):
        numbers = np.ascontiguousarray(numbers.T)
    if arch == gguf.MODEL_ARCH.GPTNEOX and "query_key_value" in name:  # all queries, then all keys, then all values
        heads = numbers.reshape(config["num_attention_heads"], 3, -1, *numbers.shape[1:])
        numbers = np.ascontiguousarray(heads.swapaxes(0, 1).reshape(numbers.shape))
    return numbers + 1.0 if arch in OFFSET and name.endswith("norm.weight") else numbers


def _absorbed(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """What makes keys and values of latents apart, by heads, that of keys transposed."""
    found = {}
    for name, tensor in tensors.items():
        if _has_split(config) and "kv_b_proj" in name:
            key, value = tensor.view(config["num_attention_heads"], -1, tensor.shape[1]).split(
                [config["qk_nope_head_dim"], config["v_head_dim"]], dim=1)
            found[name.replace("kv_b_proj", "k_b_proj")] = key.transpose(1, 2).contiguous()
            found[name.replace("kv_b_proj", "v_b_proj")] = value.contiguous()
        else:
            renamed = name.replace("e_score_correction_bias", "e_score_correction.bias")
            found[renamed.replace(".expert_bias", ".expert_bias.bias")] = tensor
    return found


def _joined(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The matrices of all experts of a layer as one tensor."""
    experts: dict[str, list[torch.Tensor]] = {}
    others = {}
    for name in sorted(tensors, key=lambda name: [int(part) if part.isdigit() else 0 for part in name.split(".")]):
        parts = name.split(".experts.")
        if len(parts) == 1 or not parts[1][0].isdigit():
            others[name] = tensors[name]
        else:
            experts.setdefault(f"{parts[0]}.experts.{parts[1].partition('.')[2]}", []).append(tensors[name])
    return others | {name: torch.stack(each) for name, each in experts.items()}


def _split(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Gates and what they gate, which gpt-oss' and Granite's experts have together, as tensors of their own."""
    found = {}
    for name, tensor in tensors.items():
        at, _, part = name.rpartition(".")
        if name.endswith("feed_forward.experts.gate_up_proj"):
            found |= {f"{at}.{half}_proj.weight": part.contiguous()
                      for half, part in zip(("gate", "up"), tensor.mT.chunk(2, dim=1), strict=True)}
        elif part in ("gate_up_proj", "gate_up_proj_bias"):
            kind = "bias" if part.endswith("bias") else "weight"
            both = tensor if kind == "bias" else tensor.mT
            found |= {f"{at}.{half}_proj.{kind}": both[:, place::2].contiguous()
                      for place, half in enumerate(("gate", "up"))}
        elif name.endswith("experts.down_proj"):
            found[f"{name}.weight"] = tensor.mT.contiguous()
        elif name.endswith("experts.down_proj_bias"):
            found[f"{at}.down_proj.bias"] = tensor
        elif name.endswith("shared_mlp.input_linear.weight"):
            layer = name.split(".shared_mlp")[0]
            found |= {f"{layer}.mlp.shared_experts.{half}_proj.weight": part
                      for half, part in zip(("gate", "up"), tensor.chunk(2), strict=True)}
        elif name.endswith("input_linear.weight"):
            layer = name.split(".block_sparse_moe")[0]
            found |= {f"{layer}.mlp.experts.{half}_proj.weight": part
                      for half, part in zip(("gate", "up"), tensor.chunk(2, dim=1), strict=True)}
        else:
            found[f"{name}.weight" if part == "sinks" else name] = tensor
    return found


def _stored(numbers: np.ndarray[Any, Any], kind: str) -> tuple[Any, ...]:
    """Data and further arguments of `add_tensor`; vectors stay in float32."""
    if numbers.ndim < 2 or kind == "F32":
        return (numbers,)
    if kind == "F16":
        return (numbers.astype(np.float16),)
    stored = gguf.GGMLQuantizationType[kind]
    return quantize(numbers, stored), None, stored


def _rope_factors(config: dict[str, Any]) -> dict[str, np.ndarray[Any, Any]]:
    """What the frequencies of Llama 3's scaling, or of LongRoPE, are divided by."""
    rope = config.get("rope_parameters") or {}
    if rope.get("rope_type") == "longrope":
        return {f"rope_factors_{kind}.weight": np.array(rope[f"{kind}_factor"], np.float32)
                for kind in ("long", "short")}
    if rope.get("rope_type") != "llama3":
        return {}
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    plain = 1.0 / rope["rope_theta"] ** (np.arange(0, head_dim, 2) / head_dim)
    turns = rope["original_max_position_embeddings"] * plain / (2 * np.pi)
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    keep = np.clip((turns - low) / (high - low), 0, 1)
    return {"rope_freqs.weight": (1 / ((1 - keep) / rope["factor"] + keep)).astype(np.float32)}
