"""Decisions and scores over HTTP: transformers' probabilities, the same bits in any company."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from support import checkpoints
from support.live import Live, serving

from slotwise import builtin
from slotwise.text.tokenizer import Tokenizer

PATH = "/v1/systemone"
STATE = "def close(self):\n    self.file.close()\n\n" * 40  # a prompt of several chunks
QUESTIONS: dict[str, Any] = {
    "kind": {"type": "choice", "instructions": "What is it?", "criteria": {"method": None, "function": "no self"}},
    "closes": {"type": "noul", "instructions": "Does it close a file?"},
    "length": {"type": "score", "instructions": "How long is it?", "criteria": ["short", "medium", "long"]}}
TEXTS = {
    "kind": "Question: What is it?\nA: method\nB: function - no self\nAnswer with the letter of one option only.",
    "closes": "Question: Does it close a file?\nyes\nno\nAnswer with yes or no only.",
    "length": "Question: How long is it?\n0: short\n1: medium\n2: long\nAnswer with the number of one level only."}
LABELS = {"kind": ["A", "B"], "closes": ["yes", "no"], "length": ["0", "1", "2"]}


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    log = tmp_path_factory.mktemp("serve") / "log"
    with serving("--dtype", "float32", "--max-num-batched-tokens", "128", log=log) as one:
        yield one


def asked(live: Live, path: str = PATH, **more: Any) -> dict[str, Any]:
    body = more or {"state": STATE, "questions": QUESTIONS}
    response = live.client.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


def tokens(live: Live, text: str) -> list[int]:
    return live.client.post("/tokenize", json={"prompt": text, "add_special_tokens": False}).json()["tokens"]


def test_probabilities_are_those_of_transformers(live: Live) -> None:
    model = checkpoints.reference_model(builtin.path(), "float32")
    told = asked(live)
    for name, text in TEXTS.items():
        messages = [{"role": "user", "content": f"{STATE}\n\n{text}"}]
        prompt = live.client.post("/tokenize", json={"messages": messages}).json()["tokens"]
        found = []
        for label in LABELS[name]:
            ids = tokens(live, "\n" + label)[1:]
            with torch.inference_mode():
                logprobs = model(torch.tensor([[*prompt, *ids]])).logits[0].log_softmax(-1)
            found.append(sum(float(logprobs[len(prompt) - 1 + at, token]) for at, token in enumerate(ids)))
        exact = torch.tensor(found, dtype=torch.float64).exp()
        mass = float(exact.sum())
        shares = (exact / mass).tolist()
        assert list(told["answers"][name]["probabilities"].values()) == pytest.approx(shares, rel=1e-3)
        assert told["diagnostics"][name]["label_mass"] == pytest.approx(mass, rel=1e-3)


def test_the_bits_are_the_same_in_any_company(live: Live) -> None:
    def answers(path: str, **body: Any) -> Any:
        told = asked(live, path, **body)
        return [told.get(name) for name in ("answers", "diagnostics", "results", "data")]

    pairs = {"query": "close a file", "documents": ["def close(self):", "import os", "def read(path):"]}
    requests: list[tuple[str, dict[str, Any]]] = [
        (PATH, {"state": STATE, "questions": QUESTIONS}), ("/v1/rerank", pairs),
        ("/v1/score", {"text_1": "close a file", "text_2": ["def close(self):"]})]
    alone = [answers(path, **body, cache_salt="alone") for path, body in requests]
    assert [answers(path, **body, cache_salt="alone") for path, body in requests] == alone  # from the cache
    with ThreadPoolExecutor(16) as pool:
        crowd = [pool.submit(live.client.post, "/v1/completions", json={
            "prompt": f"def f{n}(self):", "max_tokens": 40, "ignore_eos": True}) for n in range(8)]
        found = [pool.submit(answers, path, **body, cache_salt=f"crowd{n}")
                 for n in range(3) for path, body in requests]
        assert [one.result() for one in found] == alone * 3
        assert all(one.result().status_code == 200 for one in crowd)


def test_a_cross_encoder_is_served(tmp_path: Path) -> None:
    folder = checkpoints.make("eurobert", tmp_path / "model", tokenizer=True, kind="ForSequenceClassification",
                              num_labels=1)
    tokenizer = Tokenizer.load(folder)
    theirs = checkpoints.reference_model(folder, "float32", "AutoModelForSequenceClassification")
    query, documents = "def close(self):", ["def f(x):", "return x", "class A:\n    pass", "def close(self):"]

    def exact(document: str) -> float:
        ids = tokenizer.pair_marks.pair(*[tokenizer.encode(one, add_special_tokens=False) for one in (query, document)])
        assert ids == tokenizer.encode_pair(query, document)
        with torch.inference_mode(), checkpoints.one_thread():
            return float(theirs(torch.tensor([ids])).logits[0, 0].sigmoid())

    wanted = [exact(document) for document in documents]
    with serving(str(folder), "--dtype", "float32", "--max-model-len", "64", log=tmp_path / "log") as live:
        scored = asked(live, "/v1/score", text_1=query, text_2=documents)["data"]
        assert [one["score"] for one in scored] == pytest.approx(wanted, abs=1e-5)
        best = asked(live, "/v2/rerank", query=query, documents=documents, top_n=1)["results"]
        assert best == [{"index": wanted.index(max(wanted)), "relevance_score": pytest.approx(max(wanted), abs=1e-5)}]
        assert asked(live, "/classify", input="return x")["data"][0]["num_classes"] == 1
        for path, body in (("/v1/completions", {"prompt": "a"}), (PATH, {"state": "a", "questions": QUESTIONS})):
            assert "only classifies" in live.client.post(path, json=body).json()["error"]["message"]
        assert "/v1/rerank" in live.client.get("/").text
        assert live.client.get("/v1/models").json()["data"][0]["capabilities"] == ["score", "classification"]
        long = live.client.post("/v1/score", json={"text_1": query, "text_2": "x " * 400})
        assert long.json()["error"]["code"] == "context_length_exceeded"
