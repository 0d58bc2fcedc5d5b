"""What families ask a checkpoint for, before it is opened."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from checkpoints import FAMILIES
from safetensors.torch import load_file

from slotwise.kernels.reference import ReferenceKernels
from slotwise.model.checkpoint import read_config
from slotwise.model.families import tensor_shapes
from slotwise.model.load import load_model


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
    assert decoder.step_weight_bytes == decoder.weight_bytes - embedding
    assert decoder.workspace_bytes(7, 2) > 2 * decoder.config.vocab_size * torch.float32.itemsize
