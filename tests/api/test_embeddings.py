"""`/v1/embeddings` over an engine whose vectors are the first tokens of their inputs."""

from __future__ import annotations

import base64
import struct
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import pytest
from support.live_server import JSON, Server, eventually, running, unanswered

from slotwise.text.tokenizer import Tokenizer

PATH, WIDTH, LONGEST = "/v1/embeddings", 4, 512


def embed(server: Server, given: Any, **body: Any) -> dict[str, Any]:
    response = server.post(PATH, {"input": given, **body})
    assert response.status_code == 200, response.text
    return response.json()


def vectors(answer: dict[str, Any]) -> list[list[float]]:
    assert [one["index"] for one in answer["data"]] == list(range(len(answer["data"])))
    return [one["embedding"] for one in answer["data"]]


def test_every_form_of_input(server: Server, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("the fox")
    padded = [*map(float, ids), 0.0, 0.0, 0.0][:WIDTH]
    assert vectors(embed(server, "the fox")) == vectors(embed(server, ids)) == [padded]
    assert vectors(embed(server, ["the fox", "the fox"])) == vectors(embed(server, [ids, ids])) == [padded, padded]
    answer = embed(server, [[5, 6], [7] * 9], model="toy", user="u")
    assert vectors(answer) == [[5, 6, 0, 0], [7, 7, 7, 7]]
    assert answer["object"] == "list" and answer["model"] == "toy" and answer["data"][0]["object"] == "embedding"
    assert answer["usage"] | {"prompt_tokens_details": None} == {
        "prompt_tokens": 11, "completion_tokens": 0, "total_tokens": 11, "prompt_tokens_details": None}


def test_base64_holds_float32(server: Server) -> None:
    (one,) = embed(server, [9, 8, 7, 6, 5], encoding_format="base64", dimensions=3)["data"]
    assert struct.unpack("<3f", base64.b64decode(one["embedding"])) == (9, 8, 7)


def test_the_openai_client(server: Server, openai: ModuleType) -> None:
    client = openai.OpenAI(base_url=server.url + "/v1", api_key="x", max_retries=0)
    for options in ({}, {"encoding_format": "float"}, {"encoding_format": "base64"}):
        answer = client.embeddings.create(model="toy", input=[[3, 4], [5, 6]], **options)
        found = [one.embedding for one in answer.data]
        if options.get("encoding_format") != "base64":
            assert [list(one) for one in found] == [[3, 4, 0, 0], [5, 6, 0, 0]]
        assert answer.usage.prompt_tokens == answer.usage.total_tokens == 4


def test_an_input_may_fill_the_context(server: Server) -> None:
    assert vectors(embed(server, [7] * LONGEST)) == [[7] * WIDTH]
    refused = server.post(PATH, {"input": [7] * (LONGEST + 1)})
    assert refused.status_code == 400 and refused.json()["error"]["code"] == "context_length_exceeded"
    assert vectors(embed(server, [7] * LONGEST + [8], truncate_prompt_tokens=-1)) == [[7] * WIDTH]
    left = embed(server, [7, 8, 9], truncate_prompt_tokens=2, truncation_side="left")
    assert vectors(left) == [[8, 9, 0, 0]] and left["usage"]["prompt_tokens"] == 2


@pytest.mark.parametrize(("body", "param"), [
    ({}, "input"), ({"input": []}, "input"), ({"input": ""}, "input"), ({"input": [[]]}, "input"),
    ({"input": ["a", 1]}, "input"), ({"input": [400]}, "input"), ({"input": [-1]}, "input"),
    ({"input": [[1]] * 1025}, "input"), ({"input": "a", "dimensions": 0}, "dimensions"),
    ({"input": "a", "dimensions": 5}, "dimensions"), ({"input": "a", "dimensions": "x"}, "dimensions"),
    ({"input": "a", "encoding_format": "int8"}, "encoding_format"), ({"input": "a", "model": "other"}, "model"),
    ({"input": "a", "priority": 1 << 80}, "priority"), ({"input": "a", "truncate_prompt_tokens": 0},
                                                        "truncate_prompt_tokens"),
    ({"input": "a", "service_tier": "none"}, "service_tier"), ({"input": {"a": 1}}, "input")])
def test_what_is_wrong_is_named(server: Server, body: dict[str, Any], param: str) -> None:
    response = server.post(PATH, body)
    assert response.status_code == (404 if param == "model" else 400), response.text
    error = response.json()["error"]
    assert param in (error["param"] or error["message"])
    assert embed(server, "a")["data"]


def test_unknown_fields_are_told(server: Server) -> None:
    response = server.post(PATH, {"input": "a", "dimension": 2})
    assert response.status_code == 200 and "'dimension'" in response.headers["x-slotwise-warning"]


def test_a_large_body_is_bounded_before_it_is_decoded(server: Server) -> None:
    response = server.post(PATH, {"input": ["a"] * 40_000})
    assert response.status_code == 400 and response.json()["error"]["param"] == "input"


def test_a_failed_step_is_an_error_of_its_own(server: Server) -> None:
    response = server.post(PATH, {"input": [398, 1]})
    assert response.status_code == 500 and response.json()["error"]["code"] == "engine_error"
    assert embed(server, "a")["data"]


@pytest.mark.parametrize("path", ["/v1/audio/transcriptions", "/v1/audio/speech", "/v1/images/generations"])
def test_what_no_model_here_can_do_is_refused_by_name(server: Server, path: str) -> None:
    response = server.post(path, {"query": "a", "documents": ["b"]})
    error = response.json()["error"]
    assert response.status_code == 404 and error["code"] == "not_supported"
    assert "is not served" in error["message"]


def test_it_is_listed(server: Server) -> None:
    assert "POST /v1/embeddings" in server.get("/nowhere").json()["error"]["message"]
    assert "/v1/embeddings" in server.get("/openapi.json").json()["paths"]
    assert "/v1/embeddings" in server.get("/docs").text


@pytest.fixture(scope="module")
def slow(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Half a second a step, one slot, two keys."""
    log = tmp_path_factory.mktemp("slow") / "engine"
    with running(folder, log, "seconds_per_step=0.5", "max_num_seqs=1", "max_num_queued_reqs=100",
                 "api_keys=one,two") as started:
        yield started


def test_a_key_is_needed_and_a_client_that_leaves_frees_its_place(slow: Server) -> None:
    assert slow.post(PATH, {"input": "a"}).status_code == 401
    key = {"Authorization": "Bearer one"}
    with unanswered(slow, PATH, {"input": [[5] * 9] * 60, "request_id": "left"}, **key):
        eventually(lambda: slow.get("/requests/left", **key).status_code == 200)
    eventually(lambda: slow.engine_log.read_text().count("finish embd-left-") >= 1)
    eventually(lambda: slow.get("/health").json()["num_live"] == 0)


def test_its_time_is_explained(server: Server) -> None:
    assert server.post(PATH, {"input": [[3] * 20, [4]], "request_id": "explain-me"}).status_code == 200
    eventually(lambda: server.get("/explain/explain-me").status_code == 200)
    told = server.get("/explain/embd-explain-me").json()
    assert [one["completion_tokens"] for one in told["requests"]] == [0, 0], told


def test_an_abort_is_no_vector_and_a_deadline_is_504(slow: Server) -> None:
    key = {"Authorization": "Bearer one"}
    answers: list[httpx.Response] = []

    def ask() -> None:
        answers.append(httpx.post(slow.url + PATH, json={"input": [[5]] * 60, "request_id": "abort-me"},
                                  headers=JSON | key, timeout=60))

    asking = threading.Thread(target=ask)
    asking.start()
    eventually(lambda: slow.get("/requests/abort-me", **key).status_code == 200)
    late = slow.post(PATH, {"input": "a", "queue_timeout": 0.01}, **key)
    assert late.status_code == 504 and late.json()["error"]["code"] == "timeout"
    assert slow.post("/abort_requests", {"request_id": "abort-me"}, **key).json()["aborted"] == ["abort-me"]
    asking.join()
    assert answers[0].status_code == 400 and answers[0].json()["error"]["code"] == "abort"
