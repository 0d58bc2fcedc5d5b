"""The description of the service, and what schemathesis makes of it: whatever it says can be sent can be answered."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, assume, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from support.canary import singing
from support.live_server import Server, counted, running

from slotwise.api.app import ROUTES
from slotwise.api.asgi import OPEN_TO_ALL
from slotwise.text.tokenizer import Tokenizer

EXAMPLES = 2  # for each operation and mode; others at every run
CHECKS = [content_type_conformance, response_headers_conformance, response_schema_conformance, status_code_conformance]
GAP = 0.5  # seconds of computing: ten hostile bodies in a row, each of which may cost a twentieth of one
MAGIC = re.compile(r"\b39[6-9]\b")  # tokens at which the toy engine is told to fail
LIFECYCLE = ("/sleep", "/wake_up", "/v1/load_model")
REFUSALS = ("queue_full", "tokenizer_busy", "what_if_late")


@pytest.fixture(scope="module")
def document(server: Server) -> dict[str, Any]:
    return server.get("/openapi.json").json()


def test_every_route_is_described(document: dict[str, Any]) -> None:
    described = {(method.upper(), path) for path, methods in document["paths"].items() for method in methods}
    assert described == {(method, path.replace(":path}", "}")) for method, path, _ in ROUTES}
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            assert operation["summary"] and {"200", "400", "503"} <= set(operation["responses"]), (method, path)
            assert (operation.get("security") == []) == (path in OPEN_TO_ALL)
    names = [operation["operationId"] for methods in document["paths"].values() for operation in methods.values()]
    assert len(set(names)) == len(names)


def test_bodies_are_those_that_are_decoded(document: dict[str, Any]) -> None:
    chat = document["components"]["schemas"]["ChatRequest"]["properties"]
    assert chat["n"]["anyOf"][0] == {"type": "integer", "minimum": 1, "maximum": 128}
    assert {"queue_timeout", "cache_salt", "priority", "messages"} <= set(chat)
    assert chat["functions"]["enum"] == [None, []]
    assert document["components"]["schemas"]["ChatRequest"]["required"] == ["messages"]


def operations(server: Server) -> Iterator[Any]:
    schema = schemathesis.openapi.from_url(server.url + "/openapi.json")
    for result in schema.get_all_operations():
        yield result.ok()


def fuzz(operation: Any, mode: GenerationMode) -> None:
    """Raises for an answer that is not described, or is an error of the server."""

    @settings(max_examples=EXAMPLES, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(case=operation.as_strategy(generation_mode=mode))
    def sent(case: Any) -> None:
        assume(not MAGIC.search(repr(case.body)))
        if mode is GenerationMode.POSITIVE and isinstance(case.body, dict) and "model" in case.body:
            case.body["model"] = "toy"  # else nearly all are told that there is no such model
        response = case.call(timeout=120)
        case.validate_response(response, checks=CHECKS)
        if response.status_code == 503:
            assert json.loads(response.content)["error"]["code"] in REFUSALS
        elif response.status_code == 504:
            assert "queue_timeout" in case.body
        else:
            case.validate_response(response, checks=[not_a_server_error])

    sent()


@pytest.mark.slow
def test_whatever_is_sent_is_answered_and_a_stream_goes_on(
        folder: Path, tmp_path: Path, tokenizer: Tokenizer) -> None:
    with running(folder, tmp_path / "engine") as server, \
            singing(server, tokenizer.decode(counted(40, 200))) as canary:
        for operation in operations(server):
            if operation.method == "put" or operation.path == "/events" or operation.path in LIFECYCLE:
                continue  # some change how the canary is batched, or end it, see below; one never ends
            for mode in GenerationMode if operation.body else (GenerationMode.POSITIVE,):
                fuzz(operation, mode)
        assert server.get("/health").status_code == 200
    assert canary.gap < GAP


@pytest.mark.slow
def test_whatever_is_asked_of_sleep_is_answered_and_the_model_wakes_up(folder: Path, tmp_path: Path) -> None:
    with running(folder, tmp_path / "engine") as server:
        for operation in [operation for operation in operations(server) if operation.path in LIFECYCLE]:
            for mode in GenerationMode if operation.body else (GenerationMode.POSITIVE,):
                fuzz(operation, mode)
        assert server.post("/wake_up", "").status_code == 200
        assert server.get("/health").status_code == 200


@pytest.mark.slow
def test_whatever_is_asked_of_the_scheduler_is_answered(folder: Path, tmp_path: Path, tokenizer: Tokenizer) -> None:
    with running(folder, tmp_path / "engine") as server, singing(server, tokenizer.decode(counted(40, 200))):
        (operation,) = [operation for operation in operations(server) if operation.method == "put"]
        for mode in GenerationMode:
            fuzz(operation, mode)
        assert server.get("/health").status_code == 200
