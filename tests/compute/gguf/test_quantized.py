"""Files with quantized weights, through the whole engine on a CPU: packed blocks are multiplied as they are."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import gguf
import pytest
import torch
from support.checkpoints import make, prompts
from support.converted import FOLDER, PROMPT
from support.gguf_files import write
from support.ragged import Driver

from slotwise import LLM, SamplingParams
from slotwise.compute.kernels.reference import ReferenceKernels
from slotwise.compute.kernels.select import choose
from slotwise.compute.model.loading import load_model
from slotwise.engine.config import ConfigError

KINDS = ["Q8_0", "Q4_0", "Q5_1"]
GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
SMALL = {"max_num_seqs": 8, "max_model_len": 256, "max_num_batched_tokens": 64}
SIZES = {"hidden_size": 128, "intermediate_size": 256}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folder = make("llama3", tmp_path_factory.mktemp("wide"), tokenizer=True, dtype="bfloat16", **SIZES)
    return cache(lambda kind: write(folder, tmp_path_factory.mktemp("gguf") / f"{kind}.gguf", kind))


@pytest.mark.parametrize("kind", KINDS)
def test_products_of_packed_blocks_are_close_to_those_of_what_they_stand_for(
    kind: str, files: Callable[[str], Path],
) -> None:
    """Activations are rounded to eight bits, and no more than that is lost."""
    rows = list(enumerate(prompts([5, 40])))
    exact, packed = (Driver(load_model(files(kind), kernels=kernels, dtype="float32")).step(rows).double()
                     for kernels in (ReferenceKernels(), choose("cpu")))
    assert torch.nn.functional.cosine_similarity(exact, packed).min() > 0.995


@pytest.mark.parametrize("kind", KINDS)
def test_answers_are_the_same_alone_and_in_company(kind: str, files: Callable[[str], Path]) -> None:
    llm = LLM(model=str(files(kind)), **SMALL)
    asked = [{"prompt_token_ids": ids} for ids in prompts([5, 90, 33])]
    together = llm.generate(asked, GREEDY, use_tqdm=False)
    for prompt, crowd in zip(asked, together, strict=True):
        [alone] = llm.generate([prompt], GREEDY, use_tqdm=False)
        assert alone.outputs[0].token_ids == crowd.outputs[0].token_ids


def test_what_is_stored_is_told_and_takes_as_little(files: Callable[[str], Path]) -> None:
    infos = {kind: LLM(model=str(files(kind)), **SMALL).info for kind in ("BF16", "Q8_0", "Q4_0")}
    assert {kind: info.quantization for kind, info in infos.items()} == {
        "BF16": "none", "Q8_0": "GGUF, Q8_0", "Q4_0": "GGUF, Q4_0"}
    sizes = [info.memory.weights for info in infos.values()]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[1] < 0.6 * sizes[0] and sizes[2] < 0.36 * sizes[0]


def test_quantized_weights_are_not_quantized_again(files: Callable[[str], Path]) -> None:
    with pytest.raises(ConfigError, match=r"quantized already \(GGUF, Q4_0\)"):
        LLM(model=str(files("Q4_0")), quantization="int8", **SMALL)


@pytest.mark.parametrize(("family", "kind", "share"), [
    ("qwen3_moe", "Q8_0", 0.35), ("qwen3_moe", "Q4_0", 0.35), ("gpt_oss", "MXFP4", 0.35),
    ("granite_moe", "Q8_0", 0.45)])  # Granite's scaled head is plain numbers
def test_experts_stay_packed(family: str, kind: str, share: float, tmp_path: Path) -> None:
    """Logits are those of what they stand for, but for activations; answers do not depend on the company."""
    sizes = {**SIZES, "moe_intermediate_size": 128, "decoder_sparse_step": 1, "num_hidden_layers": 2}
    folder = make(family, tmp_path / "dense", tokenizer=True, dtype="bfloat16", **sizes)
    file, plain = (write(folder, tmp_path / f"{name}.gguf", name) for name in (kind, "BF16"))
    rows = list(enumerate(prompts([5, 40])))
    exact, packed, wide = (load_model(path, kernels=kernels, dtype="float32") for path, kernels in (
        (file, ReferenceKernels()), (file, choose("cpu")), (plain, choose("cpu"))))
    assert packed.weight_bytes < share * wide.weight_bytes
    found, expected = (Driver(decoder).step(rows).double() for decoder in (packed, exact))
    assert torch.nn.functional.cosine_similarity(expected, found).min() > 0.995
    llm = LLM(model=str(file), **SMALL)
    asked = [{"prompt_token_ids": ids} for ids in prompts([5, 90, 33])]
    together = llm.generate(asked, GREEDY, use_tqdm=False)
    for prompt, crowd in zip(asked, together, strict=True):
        [alone] = llm.generate([prompt], GREEDY, use_tqdm=False)
        assert alone.outputs[0].token_ids == crowd.outputs[0].token_ids


def test_parts_of_experts_may_have_types_of_their_own(tmp_path: Path) -> None:
    """As `llama-quantize` writes them, by layer, too; and gates in another one than what they gate."""
    def kind(name: str) -> str:
        types = {"ffn_gate_exps": "Q4_0", "ffn_up_exps": "Q5_0" if ".0." in name else "Q4_0", "ffn_down_exps": "Q8_0"}
        return types.get(name.split(".")[-2], "BF16")

    sizes = {**SIZES, "moe_intermediate_size": 128, "decoder_sparse_step": 1, "num_hidden_layers": 2}
    file = write(make("qwen3_moe", tmp_path / "dense", dtype="bfloat16", **sizes), tmp_path / "mixed.gguf", kind)
    rows = list(enumerate(prompts([5, 40])))
    exact, packed = (Driver(load_model(file, kernels=kernels, dtype="float32")).step(rows).double()
                     for kernels in (ReferenceKernels(), choose("cpu")))
    assert torch.nn.functional.cosine_similarity(exact, packed).min() > 0.995


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1"])
def test_packed_experts_may_have_a_scale_each(kind: str, tmp_path: Path) -> None:
    """Gemma 4's: the scales of their blocks are multiplied by it, and the products are rounded to the same type."""
    blocks, plain = (rewritten(FOLDER / "gemma4_moe.gguf", tmp_path / f"{name}.gguf", kind, keeps_blocks=keeps_blocks)
                     for name, keeps_blocks in (("blocks", True), ("plain", False)))
    packed, exact = (Driver(load_model(path, kernels=kernels, dtype="float32")).step([(0, PROMPT)]).double()
                     for path, kernels in ((blocks, choose("cpu")), (plain, ReferenceKernels())))
    assert torch.nn.functional.cosine_similarity(exact, packed).min() > 0.995


def rewritten(path: Path, target: Path, kind: str, *, keeps_blocks: bool) -> Path:
    """A copy of a file whose experts are stored as `kind`, or as the numbers that this stands for."""
    reader, stored = gguf.GGUFReader(path), gguf.GGMLQuantizationType[kind]
    writer = gguf.GGUFWriter(target, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            is_array = field.types[0] == gguf.GGUFValueType.ARRAY
            writer.add_key_value(name, field.contents(), field.types[0], field.types[1] if is_array else None)
    for tensor in reader.tensors:
        numbers = gguf.dequantize(tensor.data, tensor.tensor_type)
        if tensor.name.endswith("_exps.weight"):
            packed = gguf.quantize(numbers, stored)
            writer.add_tensor(tensor.name, packed if keeps_blocks else gguf.dequantize(packed, stored),
                              raw_dtype=stored if keeps_blocks else None)
        else:
            writer.add_tensor(tensor.name, numbers)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target
