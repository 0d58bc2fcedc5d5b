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

ARCHITECTURES = {
    "LlamaForCausalLM": gguf.MODEL_ARCH.LLAMA, "MistralForCausalLM": gguf.MODEL_ARCH.LLAMA,
    "Qwen2ForCausalLM": gguf.MODEL_ARCH.QWEN2, "Qwen3ForCausalLM": gguf.MODEL_ARCH.QWEN3,
    "Gemma2ForCausalLM": gguf.MODEL_ARCH.GEMMA2,
}  # fmt: skip
Edit = Callable[[gguf.GGUFWriter], None]


def write(folder: Path, path: Path, kind: str = "F32", *, edit: Edit = lambda writer: None, parts: int = 1) -> Path:
    """Writes a checkpoint to `path`, with matrices stored as `kind`, as llama.cpp's converter does.

    `edit` may add to the metadata.  With several parts `path` is a name without an end; returns the first part.
    """
    config = json.loads((folder / "config.json").read_text())
    arch = ARCHITECTURES[config["architectures"][0]]
    tensors = {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
    name = gguf.MODEL_ARCH_NAMES[arch]
    most = -(-(len(tensors) + 1) // parts) if parts > 1 else 0
    writer = gguf.GGUFWriter(path, name, split_max_tensors=most)
    _add_config(writer, config)
    if (folder / "tokenizer.json").is_file():
        add_tokenizer(writer, folder, size=config["vocab_size"])
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    for original, tensor in tensors.items():
        stored = names.get_name(original, (".weight", ".bias"))
        assert stored, original
        numbers = _converted(arch, original, tensor, config)
        writer.add_tensor(stored, *_stored(numbers, kind))
    for factors in _rope_factors(config, arch):
        writer.add_tensor("rope_freqs.weight", factors)
    edit(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return next(iter(sorted(path.parent.glob(f"{path.stem}-00001-of-*.gguf")))) if parts > 1 else path


def _add_config(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    heads, rope = config["num_attention_heads"], config.get("rope_parameters") or {}
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(rope.get("rope_theta", 10_000.0))
    writer.add_vocab_size(config["vocab_size"])
    if rope.get("rope_type") in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope.get("rope_type") == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if config.get("attn_logit_softcapping"):
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
        writer.add_sliding_window(config["sliding_window"])


def add_tokenizer(writer: gguf.GGUFWriter, folder: Path, kind: str = "gpt-2", size: int = 0) -> None:
    """The byte-level tokenizer of a checkpoint, and its chat template."""
    description, settings = (json.loads((folder / name).read_text()) for name in (
        "tokenizer.json", "tokenizer_config.json"))
    special = {token["id"] for token in description["added_tokens"]}
    tokens = sorted(description["model"]["vocab"], key=description["model"]["vocab"].__getitem__)
    words = len(tokens)
    tokens += [f"[PAD{number}]" for number in range(words, size)]  # as the converter fills a table up
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(kind)
    writer.add_token_list(tokens)
    writer.add_token_types([3 if number in special else 1 for number in range(words)] + [5] * (len(tokens) - words))
    writer.add_token_merges([" ".join(merge) for merge in description["model"]["merges"]])
    writer.add_bos_token_id(tokens.index(settings["bos_token"]))
    writer.add_eos_token_id(tokens.index(settings["eos_token"]))
    writer.add_pad_token_id(tokens.index(settings["pad_token"]))
    writer.add_chat_template(settings["chat_template"])


def _converted(arch: gguf.MODEL_ARCH, name: str, tensor: torch.Tensor, config: dict[str, Any]) -> np.ndarray[Any, Any]:
    """As the converter changes a tensor: rows of Llama's queries and keys interleaved, Gemma's norms offset."""
    numbers = tensor.float().numpy()
    for part, heads in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")):
        if arch == gguf.MODEL_ARCH.LLAMA and part in name:
            pairs = numbers.reshape(config[heads], 2, -1, *numbers.shape[1:])
            numbers = np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(numbers.shape))
    return numbers + 1.0 if arch == gguf.MODEL_ARCH.GEMMA2 and "norm" in name else numbers


def _stored(numbers: np.ndarray[Any, Any], kind: str) -> tuple[Any, ...]:
    """Data and further arguments of `add_tensor`; vectors stay in float32."""
    if numbers.ndim < 2 or kind == "F32":
        return (numbers,)
    if kind == "F16":
        return (numbers.astype(np.float16),)
    stored = gguf.GGMLQuantizationType[kind]
    return quantize(numbers, stored), None, stored


def _rope_factors(config: dict[str, Any], arch: gguf.MODEL_ARCH) -> list[np.ndarray[Any, Any]]:
    """What the frequencies of Llama 3's scaling are divided by."""
    rope = config.get("rope_parameters") or {}
    if rope.get("rope_type") != "llama3":
        return []
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    plain = 1.0 / rope["rope_theta"] ** (np.arange(0, head_dim, 2) / head_dim)
    turns = rope["original_max_position_embeddings"] * plain / (2 * np.pi)
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    keep = np.clip((turns - low) / (high - low), 0, 1)
    return [(1 / ((1 - keep) / rope["factor"] + keep)).astype(np.float32)]
