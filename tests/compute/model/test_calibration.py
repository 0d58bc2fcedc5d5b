"""Models write the tokens that their weights are rounded for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from benchmarks.perplexity import as_served, score
from benchmarks.real_texts import functions
from support.checkpoints import make

from slotwise import builtin
from slotwise.compute.kernels.select import choose, packing_of
from slotwise.compute.model import calibration
from slotwise.compute.model.calibration import write
from slotwise.compute.model.decoder import Decoder
from slotwise.compute.model.loading import load_model

# Of perplexity.  All frozen functions lose 0.9 to 1.2% in int4; these few, and other processors, some tenths more.
MOST_LOST = {"int8": 0.005, "int4": 0.02}
LEAST_KEPT = {"int8": 0.975, "int4": 0.90}  # of greedy tokens


def read(folder: Path, quantization: str, dtype: str = "float32") -> Decoder:
    kernels = choose("cpu", quantization)
    return as_served(kernels, lambda: load_model(folder, kernels=kernels, dtype=dtype))


def test_a_model_trained_in_float_keeps_its_words() -> None:
    """The built-in model, on functions held out of its training.  Without calibration int4 loses 2.4%."""
    texts = functions()[::4]
    with torch.inference_mode():
        exact = score(read(builtin.path(), "none"), texts)
        assert exact.count > 5_000
        for name, most in MOST_LOST.items():
            found = score(read(builtin.path(), name, "bfloat16"), texts)
            lost, kept = found.perplexity / exact.perplexity - 1, found.kept(exact)
            assert lost <= most and kept >= LEAST_KEPT[name], (name, lost, kept)


@pytest.mark.parametrize(("family", "kind"), [
    *dict.fromkeys(("qwen3_5", "glm4_moe_lite", "gpt2", "gemma2"), "ForCausalLM").items(), ("bert", "Model")])
def test_every_kind_of_layer_records_the_inputs_of_its_products(
    family: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Recurrent states, compressed attention, experts, windows, and attention to later tokens; twice the same."""
    monkeypatch.setattr(calibration, "ROWS", 8)
    monkeypatch.setattr(calibration, "LENGTH", 24)
    folder, found = make(family, tmp_path / "model", kind=kind), []
    for _ in range(2):
        kernels = choose("cpu", "int4")
        with packing_of(kernels).recording() as moments:
            tokens = write(load_model(folder, kernels=kernels), lambda done, total: None)
        assert tokens.shape == (24, 8) and len(tokens.unique()) > 100
        assert moments and all(one.isfinite().all() for one in moments)
        assert sum(bool(one.any()) for one in moments) >= len(moments) - 1, "all but a last layer's that no row needs"
        with packing_of(kernels).compensating(moments):
            load_model(folder, kernels=kernels)
        found.append(moments)
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)
