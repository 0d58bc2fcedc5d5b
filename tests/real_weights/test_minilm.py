"""all-MiniLM-L6-v2 with its published weights: vectors of texts against transformers, whatever their company."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from support.checkpoints import one_thread, reference_model

from slotwise import LLM
from slotwise.compute.model.published_models import PUBLISHED, present

pytestmark = [pytest.mark.real_weights, pytest.mark.slow]

TEXTS = [
    "That is a happy person", "That is a very happy person", "Today is a sunny day", "x", "Ein Satz auf Deutsch.",
    "日本語の文。", " ".join(f"Sentence number {number} of a long text about trains." for number in range(24))]


@pytest.fixture(scope="module")
def folder() -> Path:
    """The model; without it the test is skipped or, where `SLOTWISE_REAL_WEIGHTS` is `required`, as in CI, it fails."""
    if (path := present(PUBLISHED["minilm"])) is not None:
        return path
    missing = "the weights of minilm are not in the cache folder: run `slotwise pull minilm`"
    if os.environ.get("SLOTWISE_REAL_WEIGHTS") == "required":
        pytest.fail(missing)
    pytest.skip(missing)


@pytest.fixture(scope="module")
def exact(folder: Path) -> torch.Tensor:
    """What sentence-transformers' modules make of transformers' hidden states: their mean, of length 1."""
    from transformers import AutoTokenizer

    tokenizer, model = AutoTokenizer.from_pretrained(folder), reference_model(folder, "float32", "AutoModel")
    with torch.inference_mode(), one_thread():
        hidden = [model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0] for text in TEXTS]
    return torch.nn.functional.normalize(torch.stack([one.mean(0) for one in hidden]))


def test_vectors_equal_transformers_in_company_and_alone(folder, exact):
    llm = LLM(str(folder), dtype="float32")
    together = torch.tensor([one.outputs.embedding for one in llm.embed(TEXTS, use_tqdm=False)])
    torch.testing.assert_close(together, exact, atol=1e-5, rtol=0)
    for text, vector in zip(TEXTS, together, strict=True):
        assert torch.equal(torch.tensor(llm.embed(text, use_tqdm=False)[0].outputs.embedding), vector)
    scores = [one.outputs.score for one in llm.score(TEXTS[0], TEXTS[1:3], use_tqdm=False)]
    assert scores == pytest.approx([0.943, 0.257], abs=2e-3)  # on the model's card


@pytest.mark.parametrize(("quantization", "least"), [("int8", 0.9985), ("int4", 0.95)])
def test_vectors_of_rounded_weights_point_the_same_way(
    folder: Path, exact: torch.Tensor, quantization: str, least: float
) -> None:
    """The least cosine of a text's vector and its exact one."""
    llm = LLM(str(folder), quantization=quantization)
    found = torch.tensor([one.outputs.embedding for one in llm.embed(TEXTS, use_tqdm=False)])
    cosines = torch.nn.functional.cosine_similarity(found, exact)
    assert least < float(cosines.min()) < 0.99999, cosines
