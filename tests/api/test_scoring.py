"""`/rerank`, `/score`, `/classify` and `/v2/embed` over an engine whose vectors are the first tokens of their prompts,
whose label's number is the sigmoid of a hundredth of the last token, and whose token after x is probably x + 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.live_server import Server, running

from slotwise.api.pooling.label_reads import UNTHINKING
from slotwise.api.pooling.scoring import judged
from slotwise.text.chat_template import render
from slotwise.text.tokenizer import Tokenizer

RERANK, SCORE, CLASSIFY, EMBED = "/v1/rerank", "/v1/score", "/v1/classify", "/v2/embed"
QUERY, DOCUMENTS = "the fox", ["the dog", "brown", "the fox", "runs through"]


def started(folder: Path, factory: pytest.TempPathFactory, *settings: str) -> Any:
    return running(folder, factory.mktemp("scoring") / "engine", *settings)


@pytest.fixture(scope="module")
def embedding(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """An embedding model with a prompt for queries."""
    settings = 'pooling_defaults={"is_declared": true, "prompts": {"query": "zz "}}'
    with started(folder, tmp_path_factory, settings) as one:
        yield one


@pytest.fixture(scope="module")
def crossing(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A cross-encoder."""
    with started(folder, tmp_path_factory, 'pooling_defaults={"labels": ["fits"], "activation": "sigmoid"}') as one:
        yield one


@pytest.fixture(scope="module")
def classifying(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with started(folder, tmp_path_factory, "num_labels=2", 'pooling_defaults={"labels": ["odd", "even"]}') as one:
        yield one


def post(server: Server, path: str, **body: Any) -> dict[str, Any]:
    response = server.post(path, body)
    assert response.status_code == 200, response.text
    return response.json()


def vector(tokenizer: Tokenizer, text: str) -> list[float]:
    return [*map(float, tokenizer.encode(text)), 0.0, 0.0, 0.0][:4]


def dot(first: list[float], second: list[float]) -> float:
    return sum(a * b for a, b in zip(first, second, strict=True))


def ranked(scores: list[float]) -> list[int]:
    return sorted(range(len(scores)), key=lambda index: -scores[index])


def test_an_embedding_model_ranks_by_its_vectors(embedding: Server, tokenizer: Tokenizer) -> None:
    scores = [dot(vector(tokenizer, "zz " + QUERY), vector(tokenizer, one)) for one in DOCUMENTS]
    answer = post(embedding, RERANK, query=QUERY, documents=DOCUMENTS)
    assert [one["index"] for one in answer["results"]] == ranked(scores)
    assert [one["relevance_score"] for one in answer["results"]] == sorted(scores, reverse=True)
    assert all(one["document"] == {"text": DOCUMENTS[one["index"]]} for one in answer["results"])
    assert answer["usage"]["total_tokens"] == answer["meta"]["tokens"]["input_tokens"] > 0
    assert answer["meta"]["billed_units"]["search_units"] == 1 and answer["id"].startswith("rerank-")
    best = post(embedding, "/v2/rerank", query=QUERY, documents=DOCUMENTS, top_n=2)["results"]
    assert [set(one) for one in best] == [{"index", "relevance_score"}] * 2
    assert post(embedding, "/v2/rerank", query=QUERY, documents=["a"], return_documents=True)["results"][0]["document"]
    objects = [{"text": DOCUMENTS[0], "title": "x"}, {"content": DOCUMENTS[1]},
               {"content": [{"type": "text", "text": DOCUMENTS[2]}]}, DOCUMENTS[3]]
    assert post(embedding, "/rerank", query={"text": QUERY}, documents=objects)["results"] == answer["results"]


def test_pairs_one_to_many_and_each_to_each(embedding: Server, tokenizer: Tokenizer) -> None:
    vectors = [vector(tokenizer, one) for one in (QUERY, *DOCUMENTS)]
    answer = post(embedding, SCORE, text_1=QUERY, text_2=DOCUMENTS)
    assert [one["score"] for one in answer["data"]] == [dot(vectors[0], one) for one in vectors[1:]]
    assert [(one["index"], one["object"]) for one in answer["data"]] == [(index, "score") for index in range(4)]
    assert answer["object"] == "list" and answer["id"].startswith("score-")
    each = post(embedding, "/score", data_1=DOCUMENTS, data_2=[QUERY] * 4)
    assert [one["score"] for one in each["data"]] == [one["score"] for one in answer["data"]]
    assert len(post(embedding, SCORE, text_1=QUERY, text_2=QUERY)["data"]) == 1
    named = post(embedding, SCORE, queries=QUERY, documents=DOCUMENTS)["data"]  # with the prompts of their roles
    assert named[0]["score"] == dot(vector(tokenizer, "zz " + QUERY), vectors[1])


def test_a_cross_encoder_reads_both_texts_as_one_prompt(crossing: Server, tokenizer: Tokenizer) -> None:
    last = [tokenizer.encode(one)[-1] / 100 for one in DOCUMENTS]
    sigmoids = [1 / (1 + math.exp(-one)) for one in last]
    answer = post(crossing, SCORE, text_1=QUERY, text_2=DOCUMENTS)
    assert [one["score"] for one in answer["data"]] == pytest.approx(sigmoids)
    assert answer["usage"]["prompt_tokens"] == sum(
        len(tokenizer.encode(QUERY)) + len(tokenizer.encode(one)) for one in DOCUMENTS)
    plain = post(crossing, SCORE, text_1=QUERY, text_2=DOCUMENTS, use_activation=False)
    assert [one["score"] for one in plain["data"]] == pytest.approx(last)
    order = [one["index"] for one in post(crossing, RERANK, query=QUERY, documents=DOCUMENTS)["results"]]
    assert order == ranked(sigmoids)


def test_documents_are_cut_as_far_as_they_must_or_may(crossing: Server, tokenizer: Tokenizer) -> None:
    long, short = "the fox " * 400, tokenizer.encode("the fox " * 400)
    answer = post(crossing, RERANK, query=QUERY, documents=[long])
    assert answer["usage"]["prompt_tokens"] == 512  # what the model's context has
    query = len(tokenizer.encode(QUERY))
    for fields, kept in (({"max_tokens_per_doc": 7}, 7), ({"truncate_prompt_tokens": 20}, 20 - query)):
        answer = post(crossing, RERANK, query=QUERY, documents=[long], use_activation=False, **fields)
        assert answer["usage"]["prompt_tokens"] == query + kept
        assert answer["results"][0]["relevance_score"] == pytest.approx(short[kept - 1] / 100)
    left = post(crossing, RERANK, query=QUERY, documents=[long], max_tokens_per_doc=7, truncation_side="left",
                use_activation=False)
    assert left["results"][0]["relevance_score"] == pytest.approx(short[-1] / 100)
    refused = crossing.post(SCORE, {"text_1": QUERY, "text_2": long})
    assert refused.status_code == 400 and refused.json()["error"]["code"] == "context_length_exceeded"
    assert refused.json()["error"]["param"] == "text_2"
    refused = crossing.post(RERANK, {"query": long, "documents": ["a"], "truncate_prompt_tokens": 9})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "query"


def test_a_model_that_chats_is_asked(server: Server, tokenizer: Tokenizer) -> None:
    """P(yes) / (P(yes) + P(no)) behind the chat template's prompt, which is Qwen3-Reranker's."""
    answer = post(server, SCORE, text_1=QUERY, text_2=DOCUMENTS, instruction="Find it.")
    last = tokenizer.encode("<assistant>")[-1]

    def probability(label: str) -> float:
        found, before = 1.0, last
        for token in tokenizer.encode("\n" + label)[1:]:
            found *= 2.0 ** -((token - before - 1) % 400 + 1)
            before = token
        return found

    expected = probability("yes") / (probability("yes") + probability("no"))
    assert [one["score"] for one in answer["data"]] == pytest.approx([expected] * 4, rel=1e-4)
    judge = ('<system>Judge whether the Document meets the requirements based on the Query and the Instruct provided. '
             'Note that the answer can only be "yes" or "no".<user><Instruct>: Find it.\n<Query>: the fox\n<Document>: '
             'the dog<assistant>')
    assert answer["usage"]["prompt_tokens"] >= 4 * len(tokenizer.encode(judge)) - 40
    cut = post(server, RERANK, query=QUERY, documents=["the fox " * 900], max_tokens_per_doc=30)
    assert cut["usage"]["prompt_tokens"] < 512 * 4


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("text", ["the fox ", "h\u00e9", "\u6f22\u5b57", "\U0001f600"])
def test_any_long_document_is_cut_to_what_fits_next_to_the_labels(server: Server, text: str, side: str) -> None:
    """Also in the middle of a character, whose parts would have more tokens than they were cut to."""
    for more in range(4):
        answer = post(server, RERANK, query=QUERY, documents=["x" * more + text * 500], truncation_side=side)
        (result,) = answer["results"]
        assert 0 <= result["relevance_score"] <= 1


def test_the_text_at_fault_is_named(server: Server) -> None:
    for fields in ({"query": "the fox " * 900, "documents": ["a"]}, {"query": "the fox " * 9, "documents": ["a"],
                                                                     "truncate_prompt_tokens": 20}):
        refused = server.post(RERANK, fields)
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "query", refused.text


def test_labels_of_texts(classifying: Server, tokenizer: Tokenizer) -> None:
    answer = post(classifying, CLASSIFY, input=["the fox", [7, 300, 4]], use_activation=False)
    first, second = answer["data"]
    assert second == {"index": 1, "label": "odd", "probs": pytest.approx([3.0, 0.04]), "num_classes": 2}
    assert first["probs"] == pytest.approx([token / 100 for token in tokenizer.encode("the fox")[-2:]])
    assert answer["object"] == "list" and answer["usage"]["completion_tokens"] == 0
    assert answer["id"].startswith("classify-")
    assert post(classifying, "/classify", input="the fox")["data"][0]["num_classes"] == 2


@pytest.mark.parametrize(("path", "body", "message"), [
    (RERANK, {"query": "a"}, "documents"), (RERANK, {"documents": ["a"]}, "query"),
    (RERANK, {"query": "a", "documents": []}, "documents"), (RERANK, {"query": "a", "documents": "b"}, "documents"),
    (RERANK, {"query": "a", "documents": ["b"], "top_n": 0}, "top_n"),
    (RERANK, {"query": "a", "documents": [{"title": "b"}]}, "an object needs text"),
    (RERANK, {"query": "a", "documents": [{"content": [{"type": "image_url"}]}]}, "image_url"),
    (RERANK, {"query": "a", "documents": ["b"], "rank_fields": ["title"]}, "rank_fields"),
    (RERANK, {"query": "a", "documents": ["b"], "max_chunks_per_doc": 3}, "max_chunks_per_doc"),
    (RERANK, {"query": "a", "documents": ["b"], "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    (RERANK, {"query": "a", "documents": ["b"] * 1024}, "at most 1024"),
    (SCORE, {"text_1": "a"}, "text_2"), (SCORE, {"text_1": ["a", "b"], "text_2": ["a"]}, "2 texts for 1"),
    (SCORE, {"text_1": "a", "text_2": "b", "queries": "c"}, "text_1 and text_2"),
    (SCORE, {"text_1": [], "text_2": []}, "text_1"), (SCORE, {"text_1": 4, "text_2": "b"}, "text_1"),
    (SCORE, {"text_1": "a", "text_2": "b", "use_activation": True}, "use_activation"),
    (SCORE, {"text_1": "a", "text_2": "b", "instruction": "c"}, "instruction"),
    (CLASSIFY, {"input": "a"}, "does not classify"), (CLASSIFY, {"messages": []}, "input"),
    (EMBED, {"texts": []}, "texts"), (EMBED, {"texts": ["a"], "embedding_types": ["int8"]}, "int8"),
    (EMBED, {"texts": ["a"], "embedding_types": ["binary"]}, "fill whole bytes"),
    (EMBED, {"texts": ["a"], "input_type": "other"}, "input_type"),
    (EMBED, {"texts": ["a"], "images": ["b"]}, "images"),
    (EMBED, {"texts": ["a " * 999], "truncate": "NONE"}, "maximum context length"),
    (EMBED, {"texts": ["a", "the fox runs"], "truncate": "NONE", "max_tokens": 2}, "maximum context length is 2"),
    ("/v1/embeddings", {"input": "a", "input_type": "other"}, "input_type")])
def test_what_is_wrong_is_named(embedding: Server, path: str, body: dict[str, Any], message: str) -> None:
    response = embedding.post(path, body)
    assert response.status_code == 400, response.text
    assert message in response.json()["error"]["message"]


def test_a_classifier_compares_no_texts(classifying: Server) -> None:
    error = classifying.post(RERANK, {"query": "a", "documents": ["b"]}).json()["error"]
    assert error["code"] == "scores_not_supported" and "/classify" in error["message"]


def test_vectors_in_coheres_form(embedding: Server, tokenizer: Tokenizer) -> None:
    kinds = ["float", "base64"]
    answer = post(embedding, EMBED, texts=["the fox"], embedding_types=kinds, input_type="search_document")
    assert answer["embeddings"]["float"] == [vector(tokenizer, "the fox")] and len(answer["embeddings"]["base64"]) == 1
    assert answer["meta"]["billed_units"]["input_tokens"] == len(tokenizer.encode("the fox"))
    query = post(embedding, EMBED, texts=["the fox"], input_type="search_query")["embeddings"]["float"]
    assert query == [vector(tokenizer, "zz the fox")]
    assert query == [post(embedding, "/v1/embeddings", input="the fox", input_type="query")["data"][0]["embedding"]]
    cut = post(embedding, EMBED, texts=["the fox runs through the grass"], max_tokens=1)["embeddings"]["float"]
    assert cut == [vector(tokenizer, "the fox runs")[:1] + [0.0] * 3]


def test_large_lists_are_bounded_before_they_are_decoded(embedding: Server) -> None:
    for path, body in ((RERANK, {"query": "a", "documents": ["aaaaaaaaaaaaaaa"] * 9000}),
                       (SCORE, {"text_1": "a", "text_2": ["aaaaaaaaaaaaaaa"] * 9000})):
        assert "at most" in embedding.post(path, body).json()["error"]["message"]
    nested = {"query": "a", "documents": [{"text": "b", "x": [[1] * 50] * 400}] * 40}
    assert "values next to their texts" in embedding.post(RERANK, nested).json()["error"]["message"]
    long = embedding.post(RERANK, {"query": "a", "documents": ["a,[{" * 20_000]})
    assert long.status_code == 200, long.text


def test_a_model_says_what_it_can_do(embedding: Server, crossing: Server, classifying: Server) -> None:
    for server, able in ((embedding, {"embedding", "score"}), (crossing, {"score", "classification"}),
                         (classifying, {"embedding", "classification"})):
        told = set(server.get("/v1/models/toy").json()["capabilities"])
        assert told & {"embedding", "score", "classification"} >= able and "decision" in told
    assert "score" not in classifying.get("/v1/models/toy").json()["capabilities"]


def test_a_pair_is_asked_about_as_qwen3_reranker_was_trained() -> None:
    """Its own template is Qwen3's: the prompt of its model card, with the reasoning left empty."""
    source = (Path(__file__).parents[1] / "text" / "templates" / "Qwen-Qwen3-0.6B.jinja").read_text()
    messages = judged("Find it.", "the fox", "A fox runs.")
    assert render(source, [], messages, UNTHINKING, False) == (
        '<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct '
        'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n<Instruct>: Find it.\n'
        '<Query>: the fox\n<Document>: A fox runs.<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n')
