"""sentence-transformers itself: a server of the same checkpoint gives its scores and vectors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest
from sentence_transformers import CrossEncoder, SentenceTransformer
from servers import Server, started
from tokenizers import Tokenizer, processors

CLIENT = "`sentence-transformers`"
VERSION = version("sentence-transformers")
SETTING = "The checkpoint's folder, or its hub id, is what `slotwise serve` serves."
QUERY = "def close(self):"
DOCUMENTS = ["self.file.close()", "import os", "def read(path):\n    return open(path).read()", "x = 1\n" * 40]


def checkpoint(folder: Path, kind: str, **fields: object) -> Path:
    """A random BERT whose tokenizer joins pairs as BERT's does."""
    from support import checkpoints

    checkpoints.make("bert", folder, tokenizer=True, kind=kind, **fields)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> $B:1 </s>:1", special_tokens=[("<s>", 1), ("</s>", 2)])
    tokenizer.save(str(folder / "tokenizer.json"))
    told = folder / "tokenizer_config.json"
    settings = json.loads(told.read_text()) | {
        "cls_token": "<s>", "sep_token": "</s>", "model_input_names": ["input_ids", "token_type_ids", "attention_mask"]}
    del settings["chat_template"]  # with one, sentence-transformers makes a message of each text
    told.write_text(json.dumps(settings))
    return folder


@pytest.fixture(scope="module")
def crossing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[CrossEncoder, Server]]:
    folder = checkpoint(tmp_path_factory.mktemp("crossing") / "model", "ForSequenceClassification", num_labels=1)
    model = CrossEncoder(str(folder), device="cpu")
    model.save_pretrained(str(folder))
    with started(folder, "cross", "", tmp_path_factory.mktemp("serve") / "log") as server:
        yield model, server


@pytest.fixture(scope="module")
def embedding(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[SentenceTransformer, Server]]:
    folder = checkpoint(tmp_path_factory.mktemp("embedding") / "model", "Model")
    model = SentenceTransformer(str(folder), device="cpu", prompts={"query": "query: ", "document": ""})
    model.save_pretrained(str(folder))
    with started(folder, "vectors", "", tmp_path_factory.mktemp("serve") / "log") as server:
        yield model, server


def test_predict(crossing: tuple[CrossEncoder, Server]) -> None:
    """`CrossEncoder.predict` gives the scores of `/v1/score`."""
    model, server = crossing
    scores = [one["score"] for one in server.post("/v1/score", text_1=QUERY, text_2=DOCUMENTS)["data"]]
    assert scores == pytest.approx(model.predict([(QUERY, one) for one in DOCUMENTS]).tolist(), abs=1e-5)


def test_rank(crossing: tuple[CrossEncoder, Server]) -> None:
    """`CrossEncoder.rank` gives the order of `/v1/rerank`, with its scores and documents."""
    model, server = crossing
    ranked = model.rank(QUERY, DOCUMENTS, return_documents=True, top_k=3)
    results = server.post("/v1/rerank", query=QUERY, documents=DOCUMENTS, top_n=3)["results"]
    assert [(one["index"], one["document"]["text"]) for one in results] == [
        (one["corpus_id"], one["text"]) for one in ranked]
    exact = [float(one["score"]) for one in ranked]
    assert [one["relevance_score"] for one in results] == pytest.approx(exact, abs=1e-5)


def test_encode(embedding: tuple[SentenceTransformer, Server]) -> None:
    """`SentenceTransformer.encode` gives the vectors of `/v1/embeddings`."""
    model, server = embedding
    vectors = [one["embedding"] for one in server.post("/v1/embeddings", input=DOCUMENTS)["data"]]
    for found, exact in zip(vectors, model.encode(DOCUMENTS), strict=True):
        assert found == pytest.approx(exact.tolist(), abs=1e-5)


def test_encode_query(embedding: tuple[SentenceTransformer, Server]) -> None:
    """`encode_query`, with the checkpoint's prompt for queries, is `input_type: "query"`; `similarity` is the score."""
    model, server = embedding
    (one,) = server.post("/v1/embeddings", input=QUERY, input_type="query")["data"]
    query = model.encode_query(QUERY)
    assert one["embedding"] == pytest.approx(query.tolist(), abs=1e-5)
    exact = model.similarity(query, model.encode_document(DOCUMENTS))[0].tolist()
    scores = [one["score"] for one in server.post("/v1/score", queries=QUERY, documents=DOCUMENTS)["data"]]
    assert scores == pytest.approx(exact, abs=1e-5)
