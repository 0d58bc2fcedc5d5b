"""A request's own fields, the server's defaults, and the operator's bound of output tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.live_server import Server, running

from slotwise.api.http.api_errors import ApiError
from slotwise.api.protocol.decoding import decode
from slotwise.api.protocol.protocol import ChatRequest
from slotwise.core.params import SamplingSpec
from slotwise.core.request_defaults import SamplingDefaults

HELLO = [{"role": "user", "content": "hello"}]
DEFAULTS = SamplingDefaults(temperature=0.6, top_p=0.9, top_k=7, min_p=0.1, repetition_penalty=1.2, max_tokens=11)


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    given = json.dumps(DEFAULTS.given | {"max_tokens_limit": 20})
    with running(folder, tmp_path_factory.mktemp("log") / "engine", f"sampling_defaults={given}") as started:
        yield started


def params(**body: Any) -> SamplingSpec:
    request = decode(ChatRequest, json.dumps({"messages": HELLO} | body).encode())
    return request.sampling_params(5, None, DEFAULTS.of_sampling)


def num_tokens(server: Server, path: str, **body: Any) -> int:
    response = server.post(path, {"ignore_eos": True} | body)
    assert response.status_code == 200, response.text
    return response.json()["usage"]["completion_tokens"]


def test_what_a_request_leaves_out_or_calls_null_is_the_default() -> None:
    expected = SamplingSpec(
        temperature=0.6, top_p=0.9, top_k=7, min_p=0.1, repetition_penalty=1.2, max_tokens=5)
    assert params() == params(temperature=None, top_k=None) == expected


@pytest.mark.parametrize(("name", "value"), [
    ("temperature", 0.0), ("top_p", 1.0), ("top_k", 0), ("min_p", 0.0), ("repetition_penalty", 1.0)])
def test_a_requests_own_field_wins_even_where_it_is_neutral(name: str, value: float) -> None:
    assert getattr(params(**{name: value}), name) == value
    others = {"temperature", "top_p", "top_k", "min_p", "repetition_penalty"} - {name}
    assert all(getattr(params(**{name: value}), other) == getattr(DEFAULTS, other) for other in others)


def test_a_value_out_of_range_is_refused_beside_defaults() -> None:
    with pytest.raises(ApiError, match="top_p"):
        params(top_p=2)


def test_a_chat_has_the_models_length_and_a_completion_openais(server: Server) -> None:
    assert num_tokens(server, "/v1/chat/completions", messages=HELLO) == 11
    assert num_tokens(server, "/v1/completions", prompt="the") == 16


def test_the_operators_bound_lowers_what_is_asked(server: Server) -> None:
    for asked, given in ((3, 3), (20, 20), (21, 20), (100_000, 20)):
        assert num_tokens(server, "/v1/chat/completions", messages=HELLO, max_completion_tokens=asked) == given
        assert num_tokens(server, "/v1/completions", prompt=["the", "fox"], max_tokens=asked) == 2 * given


def test_a_bound_below_openais_default_holds_for_completions(folder: Path, tmp_path: Path) -> None:
    with running(folder, tmp_path / "engine", 'sampling_defaults={"max_tokens_limit": 4}') as bounded:
        assert num_tokens(bounded, "/v1/completions", prompt="the") == 4
        assert num_tokens(bounded, "/v1/chat/completions", messages=HELLO) == 4
        assert bounded.get("/v1/models").json()["data"][0]["default_sampling_params"] == {}


def test_the_model_tells_its_defaults(server: Server) -> None:
    (model,) = server.get("/v1/models").json()["data"]
    assert model["default_sampling_params"] == DEFAULTS.given
    assert server.get("/v1/models/toy").json() == model
