"""Cohere's client for Python, against an embedding model and a model that chats."""

from __future__ import annotations

import base64
from importlib.metadata import version

import cohere
import pytest
from servers import Server

CLIENT = "`cohere` for Python"
VERSION = version("cohere")
SETTING = ('`ClientV2(api_key=..., base_url="http://127.0.0.1:8000")`, without `/v1`; any `api_key` if the server has '
           "none.")
QUERY = "Close a file."
DOCUMENTS = ["def close(self):", "import os", "def read(path):", "self.file.close()"]


def client(server: Server) -> cohere.ClientV2:
    return cohere.ClientV2(api_key=server.key, base_url=server.url)


def test_rerank(chat: Server) -> None:
    """`rerank` returns the best documents, with the scores that plain HTTP returns."""
    answer = client(chat).rerank(model=chat.model, query=QUERY, documents=DOCUMENTS, top_n=2, max_tokens_per_doc=64)
    scores = [one["score"] for one in chat.post("/v1/score", text_1=QUERY, text_2=DOCUMENTS)["data"]]
    best = sorted(range(len(scores)), key=lambda index: -scores[index])[:2]
    assert [(one.index, one.relevance_score) for one in answer.results] == [(index, scores[index]) for index in best]
    assert answer.meta is not None and answer.meta.billed_units is not None
    assert answer.meta.billed_units.search_units == 1


def test_rerank_v1(chat: Server) -> None:
    """`Client.rerank` of the first version returns documents, too."""
    answer = cohere.Client(api_key=chat.key, base_url=chat.url).rerank(
        model=chat.model, query=QUERY, documents=[{"text": one} for one in DOCUMENTS], return_documents=True)
    assert {one.document.text for one in answer.results} == set(DOCUMENTS)  # type: ignore[union-attr]


def test_embed(builtin: Server) -> None:
    """`embed` returns the vectors of `/v1/embeddings`, as numbers and packed."""
    kinds = ["float", "base64", "ubinary"]
    answer = client(builtin).embed(
        model=builtin.model, texts=DOCUMENTS, input_type="search_document", embedding_types=kinds)
    exact = [one["embedding"] for one in builtin.post("/v1/embeddings", input=DOCUMENTS)["data"]]
    assert answer.embeddings.float_ == exact
    packed = builtin.post("/v1/embeddings", input=DOCUMENTS, encoding_format="base64")["data"]
    assert answer.embeddings.base64 == [one["embedding"] for one in packed]
    assert len(base64.b64decode(packed[0]["embedding"])) == 4 * len(exact[0])
    assert answer.embeddings.ubinary is not None and len(answer.embeddings.ubinary[0]) == len(exact[0]) // 8


def test_errors(chat: Server) -> None:
    """A wrong key, an unknown model and a query that is too long are the client's own errors."""
    with pytest.raises(cohere.UnauthorizedError):
        cohere.ClientV2(api_key="wrong", base_url=chat.url).rerank(model=chat.model, query=QUERY, documents=DOCUMENTS)
    with pytest.raises(cohere.NotFoundError):
        client(chat).rerank(model="other", query=QUERY, documents=DOCUMENTS)
    with pytest.raises(cohere.BadRequestError):
        client(chat).rerank(model=chat.model, query="x " * 9000, documents=DOCUMENTS)
