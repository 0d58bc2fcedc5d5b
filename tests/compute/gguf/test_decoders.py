"""A model in GGUF computes the tokens of the safetensors checkpoint that it was made from."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.checkpoints import FAMILIES, class_name, edit_config, make, one_thread, prompts
from support.gguf_files import ARCHITECTURES, write
from support.ragged import Driver

from slotwise.compute.kernels.reference import ReferenceKernels
from slotwise.compute.model.loading import load_model, read_config

SHORT, LONG = [1, 7, 18], [5, 110]  # tokens; shorter than the windows of Mistral and Qwen 2, which files do not have


UNCONVERTED = ("nemotron_h_moe", "falcon_rw", "gemma4_moe")  # of a class that is converted otherwise
CONVERTED = [family for family in FAMILIES if class_name(family) in ARCHITECTURES and family not in UNCONVERTED]
GEMMA = {"tie_word_embeddings": True, "query_pre_attn_scalar": 32}
MSCALED = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 512,
           "mscale": 0.75, "mscale_all_dim": 0.75}
USUAL: dict[str, dict[str, Any]] = {  # what files do not say, as it is in published models
    "gemma2": GEMMA, "gemma3": GEMMA | {"num_hidden_layers": 7, "sliding_window_pattern": 6},
    "smollm3": {"no_rope_layer_interval": 4, "use_sliding_window": False}, "mixtral": {"sliding_window": None},
    "qwen3_moe": {"decoder_sparse_step": 1}, "phi": {"qk_layernorm": False}, "starcoder2": {"sliding_window": None},
    "minicpm3": {"dim_model_base": 256, "v_head_dim": None},
    "youtu": {"rope_interleave": True}, "deepseek_v3": {"rope_parameters": MSCALED},
    "falcon_h1": {"mamba_norm_before_gate": False}, "nemotron_h": {"time_step_min": 0.001},
    "qwen2_moe": {"mlp_only_layers": [], "use_sliding_window": False}, "afmoe": {"global_attn_every_n_layers": 4},
    "llama4": {"attention_chunk_size": 8192, "floor_scale": 8192, "attn_scale": 0.1, "no_rope_layer_interval": 4},
    "dots1": {"sliding_window": None}, "phimoe": {"router_jitter_noise": 0.01},
    "jamba": {"num_hidden_layers": 6}, "falcon_new": {"ffn_hidden_size": 384},
    "mpt": {"attn_config": {"clip_qkv": 2.0}}, "bloom": {"apply_residual_connection_post_layernorm": False},
    "cohere2": {"layer_types": ["sliding_attention"] * 3 + ["full_attention"]},
    "ministral3": {"rope_parameters": {
        "rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 32,
        "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.5}},
    "gemma3n": {"intermediate_size": 160, "activation_sparsity_pattern": [0.5, 0.0, 0.8, 0.0, 0.0, 0.5]},
    "glm4_moe_lite": {"mlp_layer_types": ["dense", "sparse", "sparse"]}}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return cache(lambda family: make(family, tmp_path_factory.mktemp(family), **USUAL.get(family, {})))


def logits(model: Path, lengths: list[int]) -> torch.Tensor:
    """Of every token of prompts so long: `[tokens, vocab]`, in plain torch."""
    with one_thread():
        decoder = load_model(model, kernels=ReferenceKernels(), dtype="float32")
        return Driver(decoder).step(list(enumerate(prompts(lengths))), list(range(sum(lengths))))


def assert_alike(model: Path, other: Path, lengths: list[int]) -> None:
    """Two models have the same weights and config: their logits differ by rounding at most."""
    found, wanted = logits(model, lengths), logits(other, lengths)
    assert (found - wanted).abs().max() < 3e-4 * wanted.std()


@pytest.mark.parametrize("family", CONVERTED)
def test_a_file_computes_the_tokens_of_its_checkpoint(
    family: str, checkpoint: Callable[[str], Path], tmp_path: Path,
) -> None:
    folder = checkpoint(family)
    lengths = SHORT if family in ("mistral", "qwen2") else SHORT + LONG
    assert_alike(write(folder, tmp_path / "model.gguf"), folder, lengths)


@pytest.mark.parametrize(("family", "kind"), [("llama_bias", "F32"), ("qwen2", "Q8_0"), ("gemma4", "F32")])
def test_queries_keys_and_values_may_be_one_tensor(
    family: str, kind: str, checkpoint: Callable[[str], Path], tmp_path: Path,
) -> None:
    """As `--fuse-qkv` of the converter writes them: with biases, interleaved, in blocks, with heads that vary."""
    folder = checkpoint(family)
    fused, separate = (write(folder, tmp_path / f"{fuses}.gguf", kind, fuses=fuses) for fuses in (True, False))
    assert "blk.0.attn_qkv.weight" in {tensor.name for tensor in gguf.GGUFReader(fused).tensors}
    assert torch.equal(logits(fused, SHORT), logits(separate, SHORT))


@pytest.mark.parametrize(("family", "kind"), [("qwen2", "QWEN2VL"), ("qwen3", "QWEN3VL")])
def test_the_text_part_of_a_model_for_images(
    family: str, kind: str, checkpoint: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = checkpoint(family)
    monkeypatch.setitem(ARCHITECTURES, f"{class_name(family)}", getattr(gguf.MODEL_ARCH, kind))

    def add(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_dimension_sections([8, 4, 4, 0])
        writer.add_num_deepstack_layers(3)

    assert_alike(write(folder, tmp_path / "model.gguf", edit=add), folder, SHORT)


def test_a_mistral3_without_sharpening_is_a_mistral(
    checkpoint: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = checkpoint("mistral")
    monkeypatch.setitem(ARCHITECTURES, "MistralForCausalLM", gguf.MODEL_ARCH.MISTRAL3)
    assert_alike(write(folder, tmp_path / "model.gguf"), folder, SHORT)


def test_the_last_blocks_of_a_file_that_draft_are_not_read(tmp_path: Path) -> None:
    folder = make("deepseek_v3", tmp_path / "checkpoint", **USUAL["deepseek_v3"])
    path = write(folder, tmp_path / "model.gguf", edit=lambda writer: writer.add_nextn_predict_layers(1))
    assert_alike(path, edit_config(folder, num_hidden_layers=2), SHORT)


def test_quantized_latents_are_close_to_plain_ones(tmp_path: Path) -> None:
    """Each head's part of what makes keys and values is stored in blocks of its own."""
    sizes = {"kv_lora_rank": 64, "qk_nope_head_dim": 32, "v_head_dim": 32}
    folder = make("deepseek_v2", tmp_path / "checkpoint", **sizes)
    path = write(folder, tmp_path / "model.gguf", lambda name: "Q8_0" if "_b." in name else "F32")
    quantized, plain = (Driver(load_model(model, kernels=ReferenceKernels(), dtype="float32")).step(
        [(0, prompts([30])[0])]) for model in (path, folder))
    assert 0 < (quantized - plain).abs().max() < 0.2 * plain.std()


@pytest.mark.parametrize("rope", [
    {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0},
    {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 256},
], ids=lambda rope: rope["rope_type"])
def test_scaled_ropes(rope: dict[str, object], tmp_path: Path) -> None:
    folder = make("llama2", tmp_path / "checkpoint", rope_parameters=rope, max_position_embeddings=1024)
    path = write(folder, tmp_path / "model.gguf")
    assert torch.equal(*(read_config(model).ropes[0].inverse_frequencies(32) for model in (folder, path)))
    assert_alike(path, folder, LONG)


@pytest.mark.parametrize("kind", ["F16", "BF16"])
def test_types_of_two_bytes(kind: str, tmp_path: Path) -> None:
    dtype = {"F16": "float16", "BF16": "bfloat16"}[kind]
    folder = make("qwen3", tmp_path / "checkpoint", dtype=dtype)
    path = write(folder, tmp_path / "model.gguf", kind)
    assert read_config(path).dtype == read_config(folder).dtype == getattr(torch, dtype)
    assert_alike(path, folder, SHORT)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
@pytest.mark.parametrize("family", ["llama3", "qwen3"])
def test_quantized_types_compute_what_the_gguf_package_makes_of_them(
    family: str, kind: str, checkpoint: Callable[[str], Path], tmp_path: Path,
) -> None:
    """Of Llama the rows of queries and keys are put back into their order within the packed blocks."""
    folder = checkpoint(family)
    path = write(folder, tmp_path / "model.gguf", kind)
    assert_alike(path, dequantized(folder, path, tmp_path / "dequantized"), SHORT)


def dequantized(folder: Path, path: Path, target: Path) -> Path:
    """A copy of the checkpoint with each matrix rounded as the file has it: rows are independent."""
    shutil.copytree(folder, target)
    kinds = {tensor.tensor_type for tensor in gguf.GGUFReader(path).tensors} - {gguf.GGMLQuantizationType.F32}
    (kind,) = kinds
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if tensor.ndim == 2:
            tensors[name] = torch.from_numpy(gguf.dequantize(gguf.quantize(tensor.numpy(), kind), kind))
    save_file(tensors, target / "model.safetensors")
    return target


def test_a_split_file_is_one_model(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    folder = checkpoint("llama2")
    first = write(folder, tmp_path / "model.gguf", parts=3)
    assert len(list(tmp_path.glob("*.gguf"))) == 3
    assert_alike(first, folder, SHORT)
    assert_alike(tmp_path, folder, SHORT)
    last = next(iter(tmp_path.glob("*-00003-of-*.gguf")))
    assert_alike(last, folder, SHORT)


def test_windows_and_soft_caps_are_read(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    folder = checkpoint("gemma2")
    found, expected = read_config(write(folder, tmp_path / "model.gguf")), read_config(folder)
    assert found.windows == expected.windows and found.logit_soft_cap == expected.logit_soft_cap
    assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"] == found.tie_word_embeddings
