"""The benchmark of perplexity on a model in GGUF, beside transformers on its original."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from benchmarks.perplexity import KINDS, of_model, score
from support.checkpoints import make, one_thread, prompts, reference_model
from support.gguf_files import write


def test_a_model_in_gguf_is_measured_with_each_type_of_weights_and_of_cache(tmp_path: Path) -> None:
    folder = make("llama2", tmp_path / "model")
    file = write(folder, tmp_path / "model.gguf", "Q8_0")
    texts = prompts([300, 500])
    with torch.inference_mode():
        found = {(name, cached): score(decoder, texts) for name, cached, decoder in of_model(file)}
        with one_thread():
            model = reference_model(folder, "float32")
            expected = sum(
                float(torch.nn.functional.cross_entropy(model(ids[None]).logits[0, :-1], ids[1:], reduction="sum"))
                for ids in map(torch.tensor, texts))
            greedy = torch.cat([model(ids[None]).logits[0, :-1].argmax(-1) for ids in map(torch.tensor, texts)])
    assert len(found) == len(KINDS) + 1 and {one.count for one in found.values()} == {300 + 500 - 2}
    exact = found["float32", "auto"]
    assert (exact.greedy == greedy).double().mean() > 0.8 and exact.kept(exact) == 1.0
    for (name, cached), one in found.items():
        close = 0.5 if name.startswith("int4") else 0.05
        assert math.isclose(one.nats, expected, rel_tol=close), (name, cached)
    assert len({one.nats for one in found.values()}) == len(found), "two of them are the same"
