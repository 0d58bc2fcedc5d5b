"""What families ask a checkpoint for, before it is opened."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from checkpoints import FAMILIES, make, prompts
from ragged import Driver
from safetensors.torch import load_file

from slotwise.kernels.reference import ReferenceKernels
from slotwise.model.checkpoint import read_config
from slotwise.model.families import tensor_shapes
from slotwise.model.load import load_model

EXPERTS = re.compile(r"\.(experts|input_linear|output_linear)\.")


@pytest.mark.parametrize("family", FAMILIES)
def test_the_tensors_listed_are_those_of_the_checkpoint(family: str, checkpoint: Callable[[str], Path]) -> None:
    folder = checkpoint(family)
    stored = {name: tuple(tensor.shape) for name, tensor in load_file(folder / "model.safetensors").items()}
    assert tensor_shapes(read_config(folder)) == stored


@pytest.mark.parametrize("family", FAMILIES)
def test_bytes_are_those_of_all_tensors(family: str, checkpoint: Callable[[str], Path]) -> None:
    folder = checkpoint(family)
    decoder = load_model(folder, kernels=ReferenceKernels())
    sizes = {name: tensor.nbytes for name, tensor in load_file(folder / "model.safetensors").items()}
    embedding = sizes["model.embed_tokens.weight"]
    head = embedding if decoder.config.tie_word_embeddings else 0  # counted once more: kernels may pack it
    assert decoder.weight_bytes == sum(sizes.values()) + head
    unread, mixture = 0, decoder.config.mixture
    if mixture:  # the experts that a token does not choose
        of_experts = sum(size for name, size in sizes.items() if EXPERTS.search(name))
        unread = of_experts - of_experts * mixture.routing.top_k // mixture.routing.num_experts
        assert unread > 0
    assert decoder.step_weight_bytes == decoder.weight_bytes - embedding - unread
    assert decoder.workspace_bytes(7, 2) > 2 * decoder.config.vocab_size * torch.float32.itemsize


@pytest.mark.parametrize("family", FAMILIES)
def test_a_sharded_checkpoint_is_the_whole_one(family: str, checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    sharded, [ids] = make(family, tmp_path / "sharded", shard_size="300KB"), prompts([9])
    assert len(list(sharded.glob("*.safetensors"))) > 1
    whole, parts = (Driver(load_model(folder, kernels=ReferenceKernels())).step([(0, ids)])
                    for folder in (checkpoint(family), sharded))
    assert torch.equal(whole, parts)
