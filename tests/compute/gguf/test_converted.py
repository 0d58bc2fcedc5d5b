"""Files that llama.cpp's own converter wrote give the logits that `transformers` computes from their checkpoints."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file
from support.checkpoints import one_thread
from support.converted import CONVERTED, FOLDER, LOGITS, PROMPT
from support.ragged import Driver

from slotwise.compute.kernels.reference import ReferenceKernels
from slotwise.compute.model.loading import load_model


@pytest.mark.parametrize("family", CONVERTED)
def test_a_file_of_the_converter_computes_the_logits_of_transformers(family: str) -> None:
    wanted = load_file(LOGITS)[family]
    with one_thread():
        decoder = load_model(FOLDER / f"{family}.gguf", kernels=ReferenceKernels(), dtype="float32")
        found = Driver(decoder).step([(0, PROMPT)], list(range(len(PROMPT))))
    assert (found - wanted).abs().max() < 1e-3 * wanted.std()
    assert torch.equal(found.argmax(1), wanted.argmax(1))
