"""`POST /what_if`: a server's own last minutes under other settings, answered by a process beside it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from live_server import JSON, Server, running

WHAT_IF = "/what_if"


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server whose last minutes are 16 requests at once in four slots."""
    with running(folder, tmp_path_factory.mktemp("log") / "engine", "seconds_per_step=0.01") as started:
        settings = {"max_num_seqs": 4}
        started.client.put(started.url + "/admin/scheduling", content=json.dumps(settings), headers=JSON)
        asyncio.run(_sixteen(started))
        yield started


async def _sixteen(server: Server) -> None:
    async with httpx.AsyncClient(timeout=60) as client:
        await asyncio.gather(*(client.post(
            server.url + "/v1/completions", headers={"X-Request-Id": f"r{number}"},
            json={"prompt": [10 + number] * 5, "max_tokens": 12, "ignore_eos": True}) for number in range(16)))


def ask(server: Server, body: object) -> httpx.Response:
    return server.client.post(server.url + WHAT_IF, content=json.dumps(body), headers=JSON, timeout=60)


def test_more_slots_would_have_started_requests_earlier(server: Server):
    answer = ask(server, {"changes": {"max_num_seqs": 16}, "ttft_ms": 10_000, "request_id": "cmpl-r15"})
    assert answer.status_code == 200
    found = answer.json()
    figures = found["groups"]["all requests"]
    assert found["requests"] == 16 == figures["replayed"]["served"] and figures["measured"]["ttft_p99"] > 0.2
    assert 1 / 4 < figures["replayed"]["ttft_p99"] / figures["measured"]["ttft_p99"] < 4  # the machine may be busy
    assert figures["what_if"]["ttft_p99"] < figures["replayed"]["ttft_p99"] / 2
    assert found["request"]["id"].startswith("cmpl-r15") and found["settings"]["max_num_seqs"] == 16
    assert server.get("/admin/scheduling").json()["max_num_seqs"] == 4, "nothing has changed"


@pytest.mark.parametrize(("body", "said"), [
    ({"changes": {"slots": 2}}, "there is no scheduling setting"),
    ({"changes": {"max_num_seqs": 0}}, "max_num_seqs"),
    ({"changes": {}, "ttft_ms": 0}, "ttft_ms"),
    ({"changes": {"max_num_seqs": 1 << 70}}, "changes"),
    ({"changes": {"tiers": []}}, "changes no tiers"),
    ({"changes": {}, "request_id": "none"}, "no request"),
    ({}, "changes"),
])
def test_what_cannot_be_asked_is_a_400_in_one_line(server: Server, body: object, said: str):
    answer = ask(server, body)
    assert answer.status_code == 400 and said in answer.json()["error"]["message"]


def test_it_is_the_operators(server: Server):
    answer = server.client.post(server.url + WHAT_IF, content="{}", headers=JSON | {"X-Forwarded-For": "10.0.0.1"})
    assert answer.status_code == 403 and answer.json()["error"]["code"] == "admin_key_needed"
