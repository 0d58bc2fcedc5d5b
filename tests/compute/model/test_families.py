"""What families ask a checkpoint for, before it is opened."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.checkpoints import ARE_ALL_ASKED, DIFFERENT_CACHES, FAMILIES, class_name, make, prompts
from support.ragged import Driver

from slotwise.compute.kernels.checked import CheckedKernels
from slotwise.compute.kernels.cpu.kernels import CpuKernels
from slotwise.compute.kernels.reference import ReferenceKernels
from slotwise.compute.kernels.timed import TimedKernels
from slotwise.compute.model.family_table import FAMILIES as FAMILY_TABLE
from slotwise.compute.model.family_table import tensor_shapes
from slotwise.compute.model.layers.embedding_and_head import POSITIONS
from slotwise.compute.model.loading import load_model, read_config
from slotwise.compute.model.names import canonical
from slotwise.compute.model.weights import BUFFERS
from slotwise.errors import CheckpointError

COMPUTED = ("xglm", "ctrl")  # whose table of positions is not in the checkpoint
EXPERTS = re.compile(r"(?<!\.self_attention)\.(experts|(block_sparse_moe|mlp)\.(input|output)_linear)\."
                     r"(?!e_score_correction_bias)")


@pytest.mark.parametrize("family", FAMILIES)
def test_the_tensors_listed_are_those_of_the_checkpoint(family: str, checkpoint: Callable[[str], Path]) -> None:
    folder = checkpoint(family)
    transposed = tuple([f"{name}.weight" for name in FAMILY_TABLE[class_name(family)].transposed])
    stored = {canonical(name): tuple(tensor.shape[::-1] if transposed and name.endswith(transposed) else tensor.shape)
              for name, tensor in load_file(folder / "model.safetensors").items() if not name.endswith(BUFFERS)}
    assert tensor_shapes(read_config(folder)) == stored


@pytest.mark.parametrize("family", FAMILIES)
def test_bytes_are_those_of_all_tensors(family: str, checkpoint: Callable[[str], Path]) -> None:
    folder = checkpoint(family)
    decoder = load_model(folder, kernels=ReferenceKernels())
    # An indexer selects every token of the contexts that are served.
    sizes = {canonical(name): tensor.nbytes for name, tensor in load_file(folder / "model.safetensors").items()
             if ".indexer." not in name and not name.endswith(BUFFERS)}
    if POSITIONS in sizes or family in COMPUTED:  # a table without the rows that no position has
        config = decoder.config
        sizes[POSITIONS] = config.max_position_embeddings * config.hidden_size * config.dtype.itemsize
    embedding = sizes["model.embed_tokens.weight"]
    head = embedding if decoder.config.tie_word_embeddings else 0  # counted once more: kernels may pack it
    assert decoder.weight_bytes == sum(sizes.values()) + head
    unread, mixture = 0, decoder.config.mixture
    if mixture:  # the experts that a token does not choose
        of_experts = sum(size for name, size in sizes.items() if EXPERTS.search(name))
        unread = of_experts - of_experts * mixture.routing.top_k // mixture.routing.num_experts
        assert unread > 0
    tables = embedding + sizes.get("model.embed_tokens_per_layer.weight", 0)  # of which a token reads a row
    assert decoder.step_weight_bytes == decoder.weight_bytes - tables - unread
    assert decoder.workspace_bytes(7, 2) > 2 * decoder.config.vocab_size * torch.float32.itemsize


@pytest.mark.parametrize("family", ["qwen2_moe", "gpt_oss", "olmo2", "qwen3_next"])
def test_checked_and_timed_kernels_compute_all_of_a_family(family: str, checkpoint: Callable[[str], Path]) -> None:
    asked = prompts([9, 3])
    plain, checked, timed = (
        Driver(load_model(checkpoint(family), kernels=kernels, dtype="float32")).greedy(asked, 4)
        for kernels in (CpuKernels(), CheckedKernels(CpuKernels()), TimedKernels(CpuKernels())))
    assert plain == checked == timed


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "gpt_oss", "qwen3_next"])
def test_experts_are_quantized(family: str, checkpoint: Callable[[str], Path]) -> None:
    [ids] = prompts([40])
    exact, quantized = (
        load_model(checkpoint(family), kernels=CpuKernels(quantization=name), dtype="float32")
        for name in ("none", "int8"))
    logits = [Driver(decoder).step([(0, ids)])[0] for decoder in (exact, quantized)]
    assert 0 < (logits[0] - logits[1]).norm() < 0.5 * logits[0].norm()  # other weights are off by 1.4
    assert quantized.weight_bytes < 0.6 * exact.weight_bytes


def test_kernels_without_mixtures_say_so(checkpoint: Callable[[str], Path]) -> None:
    class Without(ReferenceKernels):
        mixture_refusal = "mixtures of experts are not supported on device x"

    with pytest.raises(CheckpointError, match="mixtures of experts are not supported on device x"):
        load_model(checkpoint("mixtral"), kernels=Without())
    assert load_model(checkpoint("llama2"), kernels=Without())


def test_kernels_without_recurrent_states_say_so(checkpoint: Callable[[str], Path]) -> None:
    class Without(ReferenceKernels):
        state_refusal = "layers with a recurrent state are not supported on device x"

    with pytest.raises(CheckpointError, match="a recurrent state are not supported on device x"):
        load_model(checkpoint("qwen3_5"), kernels=Without())
    assert load_model(checkpoint("llama2"), kernels=Without())


@pytest.mark.parametrize("family", FAMILIES if ARE_ALL_ASKED else DIFFERENT_CACHES)
def test_a_sharded_checkpoint_is_the_whole_one(family: str, checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    sharded, [ids] = make(family, tmp_path / "sharded", shard_size="300KB"), prompts([9])
    assert len(list(sharded.glob("*.safetensors"))) > 1
    whole, parts = (Driver(load_model(folder, kernels=ReferenceKernels())).step([(0, ids)])
                    for folder in (checkpoint(family), sharded))
    assert torch.equal(whole, parts)


@pytest.mark.parametrize(("family", "beginnings", "buffers"), [
    ("gpt2", {"transformer.": ""}, {"h.0.attn.bias": (1, 1, 8, 8), "h.0.attn.masked_bias": ()}),
    ("gpt_neox", {}, {"gpt_neox.layers.0.attention.bias": (1, 1, 8, 8), "gpt_neox.layers.0.attention.masked_bias": (),
                      "gpt_neox.layers.0.attention.rotary_emb.inv_freq": (3,)}),
    ("gpt_neox", {"lm_head.": "embed_out."}, {}),
    ("opt_350m", {"model.": ""}, {}),
    ("gptj", {}, {"transformer.h.0.attn.bias": (1, 1, 8, 8), "transformer.h.0.attn.masked_bias": ()}),
])
def test_published_files_have_other_names_and_masks(
    family: str, beginnings: dict[str, str], buffers: dict[str, tuple[int, ...]], checkpoint: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    folder = Path(shutil.copytree(checkpoint(family), tmp_path / "model"))
    tensors = load_file(folder / "model.safetensors")
    for old, new in beginnings.items():
        tensors = {new + name.removeprefix(old) if name.startswith(old) else name: tensor
                   for name, tensor in tensors.items()}
    (folder / "model.safetensors").unlink()
    save_file(tensors | {name: torch.ones(shape) for name, shape in buffers.items()}, folder / "model.safetensors")
    found, expected = (Driver(load_model(each, kernels=ReferenceKernels(), dtype="float32")).step([(0, [5, 7, 9])])
                       for each in (folder, checkpoint(family)))
    assert torch.equal(found, expected)
