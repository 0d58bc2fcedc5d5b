"""The benchmark of perplexity on a model in GGUF, beside transformers on its original."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from benchmarks.perplexity import KINDS, loss, of_model
from support.checkpoints import make, one_thread, prompts, reference_model
from support.gguf_files import write


def test_a_model_in_gguf_is_measured_with_each_type_of_weights_and_of_cache(tmp_path: Path) -> None:
    folder = make("llama2", tmp_path / "model")
    file = write(folder, tmp_path / "model.gguf", "Q8_0")
    texts = prompts([300, 500])
    with torch.inference_mode():
        found = {(name, cached): loss(decoder, texts) for name, cached, decoder in of_model(file)}
        with one_thread():
            model = reference_model(folder, "float32")
            expected = sum(
                float(torch.nn.functional.cross_entropy(model(ids[None]).logits[0, :-1], ids[1:], reduction="sum"))
                for ids in map(torch.tensor, texts))
    assert len(found) == len(KINDS) + 1 and {count for _, count in found.values()} == {300 + 500 - 2}
    for (name, cached), (nats, _) in found.items():
        close = 0.5 if name.startswith("int4") else 0.05
        assert math.isclose(nats, expected, rel_tol=close), (name, cached)
    assert len({nats for nats, _ in found.values()}) == len(found), "two of them are the same"
