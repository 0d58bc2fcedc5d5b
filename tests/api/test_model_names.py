"""A model with several names."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.live_server import Server, running

PROMPT = {"prompt": [2], "max_tokens": 1}
CHAT = {"messages": [{"role": "user", "content": "fox"}], "max_tokens": 1}


@pytest.fixture(scope="module")
def named(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(folder, tmp_path_factory.mktemp("log") / "engine", "more_model_names=second,org/third") as started:
        yield started


@pytest.mark.parametrize("name", ["toy", "second", "org/third"])
def test_a_request_may_have_any_of_them_and_the_response_has_the_first(named: Server, name: str) -> None:
    for path, body in (("/v1/completions", PROMPT), ("/v1/chat/completions", CHAT)):
        answer = named.post(path, body | {"model": name})
        assert answer.status_code == 200 and answer.json()["model"] == "toy"
        assert {event["model"] for event in named.events(path, body | {"model": name})} == {"toy"}
    assert named.post("/tokenize", {"prompt": "fox", "model": name}).status_code == 200
    assert named.post("/detokenize", {"tokens": [2], "model": name}).status_code == 200
    assert named.get(f"/v1/models/{name}").json()["id"] == name


def test_another_name_is_none_of_them(named: Server) -> None:
    for refused in (named.post("/v1/completions", PROMPT | {"model": "to"}), named.get("/v1/models/to"),
                    named.post("/tokenize", {"prompt": "fox", "model": "second "})):
        error = refused.json()["error"]
        assert refused.status_code == 404 and error["code"] == "model_not_found"
        assert "'toy' or 'second' or 'org/third'" in error["message"]


def test_the_list_has_all_and_metrics_the_first(named: Server) -> None:
    listed = named.get("/v1/models").json()["data"]
    assert [model["id"] for model in listed] == ["toy", "second", "org/third"]
    assert len({model["root"] for model in listed}) == 1
    metrics = named.get("/metrics").text
    assert set(re.findall(r'model_name="([^"]*)"', metrics)) == {"toy"}
