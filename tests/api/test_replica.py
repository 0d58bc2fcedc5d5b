"""`GET /replica`: what a router is told, over HTTP, by a live server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.live_server import Server, eventually, running

from slotwise.core.routing.prompt import PIECE, digests, written

PROMPT = [40 + number % 9 for number in range(300)]


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(folder, tmp_path_factory.mktemp("log") / "engine", "enable_prefix_caching=1") as started:
        yield started


def test_a_router_is_told_load_and_limits(server: Server) -> None:
    told = server.get("/replica").json()
    assert told["accepts"] and told["slots"] >= 1 and told["num_waiting"] == 0 and told["is_whole"]
    assert told["adapters"] == [] and told["max_loras"] >= 1


def test_a_router_is_told_which_of_its_pieces_are_cached(server: Server) -> None:
    text = bytes(4 * PIECE)  # as the router reads the prompt: four pieces of 75 tokens
    pieces = digests("", [text])
    before = server.get("/replica").json()
    body = {"prompt": PROMPT, "max_tokens": 2, "temperature": 0}
    header = {"X-Slotwise-Prefix": written(len(text), pieces)}
    assert server.post("/v1/completions", body, **header).status_code == 200

    def told() -> dict[str, object]:
        return server.get(f"/replica?instance={before['instance']}&since={before['version']}").json()

    eventually(lambda: told()["added"])
    assert set(told()["added"]) == set(pieces) and not told()["is_whole"]
    assert told()["piece_tokens"] > 0
    assert set(server.get("/replica?instance=another&since=1").json()["added"]) >= set(pieces)


@pytest.mark.parametrize("value", ["", "x", "5:123456789012", "256:12345678901g"])
def test_another_header_is_refused(server: Server, value: str) -> None:
    answer = server.post("/v1/completions", {"prompt": [40], "max_tokens": 1},
                         **{"X-Slotwise-Prefix": value})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "X-Slotwise-Prefix"


@pytest.mark.parametrize("query", ["since=x", "since=-1", "since=" + "9" * 16, "instance=" + "x" * 3000])
def test_another_query_is_refused(server: Server, query: str) -> None:
    assert server.get(f"/replica?{query}").status_code == 400
