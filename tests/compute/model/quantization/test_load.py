"""Models with quantized weights, against `transformers` on the same file, and against their dequantized weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support import quantized_checkpoints as quantized
from support.checkpoints import as_part, make, one_thread, prompts, reference_model
from support.ragged import Driver

from slotwise.compute.kernels.cpu.kernels import CpuKernels
from slotwise.compute.kernels.cpu.products import linear_bf16
from slotwise.compute.kernels.matrix import Format
from slotwise.compute.kernels.reference import ReferenceKernels
from slotwise.compute.model.loading import UnreadModel, describe, load_model, read_config
from slotwise.errors import CheckpointError

# What transformers loads on a CPU.  Its activations stay as they are for these, so that logits are the same numbers.
SAME = ["W4A16", "W8A16", "FP8, blocks", "DeepSeek's FP8", "fp8, static"]
# It rounds activations of these to 8 bits, a scale for each token or, static, for all; the most that logits may differ.
ROUNDED = {"W8A8": 0.5, "W8A8, static": 2.0, "W8A8, asymmetric": 0.5, "FP8, dynamic": 1.5, "FP8, static": 2.0}


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def get(family: str) -> Path:
        if family not in made:
            made[family] = make(family, tmp_path_factory.mktemp(family) / "dense", **quantized.SIZES)
        return made[family]

    return get


@pytest.fixture(autouse=True)
def few_threads() -> Iterator[None]:
    with one_thread():
        yield


def logits(folder: Path, rows: list[list[int]]) -> torch.Tensor:
    return Driver(load_model(folder, kernels=ReferenceKernels())).step(list(enumerate(rows)))


@pytest.mark.parametrize("family", ["llama_bias", "qwen3"])
@pytest.mark.parametrize("name", quantized.KINDS)
def test_logits_are_those_of_the_dequantized_weights(
        name: str, family: str, dense: Callable[[str], Path], tmp_path: Path) -> None:
    whole = quantized.quantize(dense(family), tmp_path / "model", quantized.KINDS[name]())
    found = logits(tmp_path / "model", rows := prompts([12, 3]))
    quantized.configure(tmp_path / "model", ...)
    quantized.save(whole, tmp_path / "model")
    torch.testing.assert_close(found, logits(tmp_path / "model", rows), atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("name", [*SAME, *ROUNDED])
def test_logits_are_those_of_transformers(name: str, dense: Callable[[str], Path], tmp_path: Path) -> None:
    quantized.quantize(dense("llama3"), tmp_path / "model", quantized.KINDS[name]())
    [ids] = rows = prompts([12])
    with torch.inference_mode():
        expected = reference_model(tmp_path / "model", "float32")(torch.tensor([ids])).logits[0, -1]
    difference = (logits(tmp_path / "model", rows)[0] - expected).abs().max()
    assert difference < ROUNDED.get(name, 1e-3) < 0.3 * expected.abs().max()


def test_modules_that_a_config_leaves_out_are_plain(dense: Callable[[str], Path], tmp_path: Path) -> None:
    """Beside quantized ones in one product, too: queries are quantized, keys and values are not."""
    kind = quantized.KINDS["W4A16"]()
    left = ["re:.*[kv]_proj$", "model.layers.1.mlp.down_proj", "lm_head"]
    whole = quantized.quantize(dense("llama3"), tmp_path / "model", kind)
    plain = load_file(dense("llama3") / "model.safetensors")
    stored = load_file(tmp_path / "model" / "model.safetensors")
    for name in plain:
        if name.endswith(("k_proj.weight", "v_proj.weight")) or name == "model.layers.1.mlp.down_proj.weight":
            module = name.removesuffix(".weight")
            stored = {part: tensor for part, tensor in stored.items() if not part.startswith(f"{module}.")}
            stored[name] = whole[name] = plain[name]
    quantized.save(stored, tmp_path / "model")
    quantized.configure(tmp_path / "model", kind.config | {"ignore": left})
    found = logits(tmp_path / "model", rows := prompts([12, 3]))
    quantized.configure(tmp_path / "model", ...)
    quantized.save(whole, tmp_path / "model")
    torch.testing.assert_close(found, logits(tmp_path / "model", rows), atol=1e-4, rtol=1e-5)


LISTS: dict[str, Callable[[str], dict[str, Any]]] = {  # that leave out the module of this name
    "W4A16": lambda name: {"ignore": [name, "re:vision_tower.*"]},
    "FP8, dynamic": lambda name: {"ignore": [f"re:{name.replace('.', '[.]')}"]},
    "DeepSeek's FP8": lambda name: {"modules_to_not_convert": [name]},
    "awq": lambda name: {"modules_to_not_convert": ["vision_tower", name]},
    "gptq 4": lambda name: {"dynamic": {f"-:{name.replace('.', '[.]')}": {}}},
    "NF4": lambda name: {"llm_int8_skip_modules": ["lm_head", name]},
}  # fmt: skip


@pytest.mark.parametrize("beginning", ["model.language_model.", "language_model.model."])
@pytest.mark.parametrize("name", LISTS)
def test_lists_name_the_modules_of_a_part_for_text(
        name: str, beginning: str, dense: Callable[[str], Path], tmp_path: Path) -> None:
    left, kind = "model.layers.1.mlp.down_proj", quantized.KINDS[name]()
    whole = quantized.quantize(dense("gemma3"), tmp_path / "text", kind)
    stored = {part: tensor for part, tensor in load_file(tmp_path / "text" / "model.safetensors").items()
              if not part.startswith(f"{left}.")}
    stored[f"{left}.weight"] = whole[f"{left}.weight"] = load_file(dense("gemma3") / "model.safetensors")[
        f"{left}.weight"]
    quantized.save(stored, tmp_path / "text")
    listed = LISTS[name](left.replace("model.", beginning))
    if "config_groups" in kind.config:  # the names of all others, in place of their class
        [(group, scheme)] = kind.config["config_groups"].items()
        others = [part.replace("model.", beginning).removesuffix(".weight") for part in whole
                  if quantized.is_quantized(part) and not part.startswith(left)]
        listed["config_groups"] = {group: scheme | {"targets": others}}
    quantized.configure(tmp_path / "text", kind.config | listed)
    found = logits(as_part(tmp_path / "text", tmp_path / "both", beginning), rows := prompts([12, 3]))
    quantized.configure(tmp_path / "text", ...)
    quantized.save(whole, tmp_path / "text")
    torch.testing.assert_close(found, logits(tmp_path / "text", rows), atol=1e-4, rtol=1e-5)


def test_biases_that_autogptq_wrote_for_a_model_without(dense: Callable[[str], Path], tmp_path: Path) -> None:
    quantized.quantize(dense("llama3"), tmp_path / "model", quantized.KINDS["gptq 4"]())
    rows, stored = prompts([12]), load_file(tmp_path / "model" / "model.safetensors")
    before, name = logits(tmp_path / "model", rows), "model.layers.0.mlp.up_proj.bias"
    quantized.save(stored | {name: torch.zeros(256).half()}, tmp_path / "model")
    assert torch.equal(logits(tmp_path / "model", rows), before)
    quantized.save(stored | {name: torch.ones(256).half()}, tmp_path / "model")
    with pytest.raises(CheckpointError, match=r"up_proj\.bias is not zero, but the model has no bias"):
        logits(tmp_path / "model", rows)


def test_parts_in_several_files(dense: Callable[[str], Path], tmp_path: Path) -> None:
    """The parts of one weight may lie in two shards."""
    import json

    from safetensors.torch import save_file

    folder = tmp_path / "model"
    quantized.quantize(dense("llama3"), folder, quantized.KINDS["awq"]())
    rows, stored = prompts([12]), load_file(folder / "model.safetensors")
    before = logits(folder, rows)
    (folder / "model.safetensors").unlink()
    files: dict[str, Any] = {"model-1.safetensors": {}, "model-2.safetensors": {}}
    for place, (name, tensor) in enumerate(sorted(stored.items())):
        files[f"model-{1 + place % 2}.safetensors"][name] = tensor
    for file, tensors in files.items():
        save_file(tensors, folder / file)
    index = {"weight_map": {name: file for file, tensors in files.items() for name in tensors}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert torch.equal(logits(folder, rows), before)


def test_the_config_says_how_weights_are_stored(dense: Callable[[str], Path], tmp_path: Path) -> None:
    quantized.quantize(dense("llama3"), tmp_path / "model", quantized.KINDS["NF4"]())
    quantization = read_config(tmp_path / "model").quantization
    assert quantization is not None and quantization.description == "bitsandbytes, NF4"
    assert read_config(dense("llama3")).quantization is None


@pytest.mark.parametrize("name", quantized.KINDS)
def test_the_kernels_of_the_cpu_differ_by_their_rounding(
        name: str, dense: Callable[[str], Path], tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Activations have 8 bits there: a format's own rounding of weights to 4 bits moves logits by more."""
    whole = quantized.quantize(dense("llama3"), tmp_path / "model", quantized.KINDS[name]())
    rows, kernels = prompts([12, 3]), CpuKernels()
    described = describe(tmp_path / "model", "auto", kernels)
    unread = UnreadModel(tmp_path / "model", described, "auto", kernels)
    decoder = unread.read()
    found = Driver(decoder).step(list(enumerate(rows)))
    exact = logits(tmp_path / "model", rows)
    assert (found - exact).abs().max() < 0.08 * exact.abs().max()
    assert unread.sizes.weight_bytes == decoder.weight_bytes
    is_widened = "fp8" in name.lower()
    assert is_widened is any("weights in FP8 are widened" in record.getMessage() for record in caplog.records)
    full = sum(tensor.nbytes for tensor in [*whole.values(), whole["model.embed_tokens.weight"]])  # the head, too
    assert is_widened or decoder.weight_bytes < 0.75 * full


@pytest.mark.skipif(not linear_bf16.has_bf16_gemm(), reason="no AVX-512 BF16")
@pytest.mark.parametrize("name", ["DeepSeek's FP8", "FP8, dynamic", "FP8, static", "FP8, blocks", "fp8, static"])
def test_floats_of_8_bits_are_multiplied_as_they_are_stored(
        name: str, dense: Callable[[str], Path], tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As bfloat16, to which a number times its scale is rounded."""
    whole = quantized.quantize(dense("llama3"), tmp_path / "model", quantized.KINDS[name]())
    kernels, rows = CpuKernels(path="bf16"), prompts([12, 3])
    stored = load_model(tmp_path / "model", kernels=kernels, dtype="bfloat16")
    found = Driver(stored).step(list(enumerate(rows)))
    assert not caplog.records
    quantized.configure(tmp_path / "model", ...)
    quantized.save(whole, tmp_path / "model")
    plain = load_model(tmp_path / "model", kernels=kernels, dtype="bfloat16")
    assert torch.equal(found, Driver(plain).step(list(enumerate(rows))))
    assert stored.weight_bytes < plain.weight_bytes


class Refusing(ReferenceKernels):
    """As kernels that multiply nothing quantized."""

    def format_refusal(self, format: Format, kind: torch.dtype) -> str:
        return "quantized weights are not supported on device nowhere"


def test_what_kernels_do_not_multiply_is_refused_by_name(dense: Callable[[str], Path], tmp_path: Path) -> None:
    quantized.quantize(dense("llama3"), tmp_path / "awq", quantized.KINDS["awq"]())
    with pytest.raises(CheckpointError, match=r"awq: quantized weights are not supported on device nowhere"):
        load_model(tmp_path / "awq", kernels=Refusing())


def test_floats_that_kernels_do_not_multiply_are_widened(dense: Callable[[str], Path], tmp_path: Path) -> None:
    quantized.quantize(dense("llama3"), tmp_path / "model", quantized.KINDS["DeepSeek's FP8"]())
    rows = prompts([12])
    decoder = load_model(tmp_path / "model", kernels=Refusing())
    assert torch.equal(Driver(decoder).step(list(enumerate(rows))), logits(tmp_path / "model", rows))


def test_experts_of_gpt_oss(tmp_path: Path) -> None:
    """As `transformers` dequantizes their blocks."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    folder = make("gpt_oss", tmp_path / "model", hidden_size=64, intermediate_size=32)
    stored, whole = {}, {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        stored[name] = whole[name] = tensor
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            experts, depth, outputs = tensor.shape
            del stored[name]
            blocks = stored[f"{name}_blocks"] = torch.randint(
                256, (experts, outputs, depth // 32, 16), dtype=torch.uint8)
            scales = stored[f"{name}_scales"] = torch.randint(
                122, 126, (experts, outputs, depth // 32), dtype=torch.uint8)
            whole[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    quantized.save(stored, folder)
    quantized.configure(folder, {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]})
    found = logits(folder, rows := prompts([12, 3]))
    assert packed_experts_agree(folder, rows, found) < sum(tensor.nbytes for tensor in whole.values())
    spoilt = {name: tensor for name, tensor in stored.items() if not name.endswith("0.mlp.experts.down_proj_scales")}
    quantized.save(spoilt, folder)
    with pytest.raises(CheckpointError, match=r"lacks 1 tensors .*layers\.0\.mlp\.experts\.down_proj_scales"):
        logits(folder, rows)
    quantized.configure(folder, ...)
    quantized.save(whole, folder)
    assert torch.equal(found, logits(folder, rows))


def packed_experts_agree(folder: Path, rows: list[list[int]], exact: torch.Tensor) -> int:
    """Compares logits of the CPU's kernels with `exact` ones; returns the bytes of the weights as packed."""
    kernels = CpuKernels()
    unread = UnreadModel(folder, describe(folder, "auto", kernels), "auto", kernels)
    decoder = unread.read()
    found = Driver(decoder).step(list(enumerate(rows)))
    assert (found - exact).abs().max() < 0.08 * exact.abs().max()
    assert unread.sizes.weight_bytes == decoder.weight_bytes
    return decoder.weight_bytes


@pytest.mark.parametrize("name", ["gptq 4, act-order", "awq, rows", "FP8, dynamic", "NF4"])
def test_experts_of_a_mixture(name: str, tmp_path: Path) -> None:
    """Its router is plain, though no list of these configs says so."""
    sizes = {"hidden_size": 128, "moe_intermediate_size": 64, "intermediate_size": 256, "num_hidden_layers": 2}
    dense = make("qwen3_moe", tmp_path / "dense", **sizes)
    whole = quantized.quantize(dense, tmp_path / "model", quantized.KINDS[name]())
    assert {"model.layers.1.mlp.gate.weight", "model.layers.1.mlp.experts.0.up_proj.weight"} <= set(whole)
    found = logits(tmp_path / "model", rows := prompts([12, 3]))
    packed = packed_experts_agree(tmp_path / "model", rows, found)
    if "FP8" not in name:  # which is widened beside activations in float32
        assert packed < 0.75 * sum(tensor.nbytes for tensor in whole.values())
    quantized.configure(tmp_path / "model", ...)
    quantized.save(whole, tmp_path / "model")
    torch.testing.assert_close(found, logits(tmp_path / "model", rows), atol=1e-4, rtol=1e-5)


def test_experts_in_different_formats_are_refused(tmp_path: Path) -> None:
    sizes = {"hidden_size": 128, "moe_intermediate_size": 64, "intermediate_size": 256, "num_hidden_layers": 2}
    dense, kind = make("qwen3_moe", tmp_path / "dense", **sizes), quantized.KINDS["gptq 4, act-order"]()
    quantized.quantize(dense, tmp_path / "model", kind)
    stored, plain = (load_file(folder / "model.safetensors") for folder in (tmp_path / "model", dense))
    left = "model.layers.1.mlp.experts.2"
    stored = {name: tensor for name, tensor in stored.items() if not name.startswith(f"{left}.")}
    stored |= {name: tensor for name, tensor in plain.items() if name.startswith(f"{left}.")}
    quantized.save(stored, tmp_path / "model")
    quantized.configure(tmp_path / "model", kind.config | {"dynamic": {f"-:.*{left}\\..*": {}}})
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.experts\.2 is stored in another format"):
        logits(tmp_path / "model", prompts([3]))
