"""What holds for every route that uses the model: quotas, the bound of the queue, and bodies of any size."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from support.live_server import JSON, Server, eventually, running, unanswered

from slotwise.api.generate.request_log import GENERATING

HELLO = [{"role": "user", "content": "hello"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": [40], "max_tokens": 2},
    "/v1/chat/completions": {"messages": HELLO, "max_tokens": 2},
    "/v1/responses": {"input": "hello", "max_output_tokens": 2},
    "/v1/messages": {"messages": HELLO, "max_tokens": 2},
    **{path: {"input": [40]} for path in ("/v1/embeddings", "/v1/classify", "/classify")},
    "/v2/embed": {"texts": ["a"]},
    **{path: {"query": "a", "documents": ["b"]} for path in ("/v1/rerank", "/rerank", "/v2/rerank")},
    **{path: {"text_1": "a", "text_2": "b"} for path in ("/v1/score", "/score")},
    "/v1/systemone": {"state": "a", "questions": {"b": {"type": "choice", "criteria": {"c": None}}}}}
ONE_LABEL = 'pooling_defaults={"labels": ["fits"]}'  # for the routes that need a head of labels
TIERS = """
[[tier]]
name = "few"
requests_per_minute = 2
api_keys = ["requests"]

[[tier]]
name = "short"
tokens_per_minute = 300
api_keys = ["tokens"]
"""

assert BODIES.keys() == set(GENERATING)


@pytest.fixture(scope="module")
def keyed(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    path = tmp_path_factory.mktemp("log")
    (path / "tiers.toml").write_text(TIERS)
    with running(folder, path / "engine", f"tiers={path}/tiers.toml", "api_keys=plain", ONE_LABEL) as started:
        yield started


def kind_of(answer: dict[str, Any]) -> str:
    """The kind of an error, in OpenAI's form or in Anthropic's."""
    return answer["error"]["type"]


def test_a_quota_of_requests_counts_every_route(keyed: Server) -> None:
    key = {"Authorization": "Bearer requests"}
    paths = list(BODIES)
    answers = [keyed.post(path, BODIES[path], **key) for path in paths]
    assert [answer.status_code for answer in answers] == [200, 200, *[429] * (len(paths) - 2)]
    assert {kind_of(answer.json()) for answer in answers[2:]} == {"rate_limit_error"}
    for path in paths[:2]:
        assert keyed.post(path, BODIES[path], **key).status_code == 429
    assert all(int(answer.headers["retry-after"]) >= 1 for answer in answers[2:])


def test_a_quota_of_tokens_is_charged_with_what_was_used(keyed: Server) -> None:
    key = {"Authorization": "Bearer tokens"}

    def left() -> int:
        return int(keyed.post("/tokenize", {"prompt": "x"}, **key).headers["x-ratelimit-remaining-tokens"])

    for path, body in BODIES.items():
        before, began = left(), time.monotonic()
        answer = keyed.post(path, body, **key).json()
        usage = answer["usage"] if "usage" in answer else answer["meta"]["tokens"]
        used = usage.get("total_tokens") or sum(
            usage.get(name, 0) for name in ("input_tokens", "cache_read_input_tokens", "output_tokens"))
        now = left()
        back = (time.monotonic() - began) * 300 / 60  # of 300 tokens a minute
        assert before - used - 1 <= now <= before - used + 1 + back, path
    too_long = keyed.post("/v1/embeddings", {"input": [40] * 301}, **key)
    assert too_long.status_code == 400 and too_long.json()["error"]["code"] == "quota_too_small"


def test_a_full_queue_refuses_before_a_body_is_read(folder: Path, tmp_path: Path) -> None:
    with running(folder, tmp_path / "engine", "seconds_per_step=0.3", "max_num_seqs=1",
                 "max_num_queued_reqs=2") as server, ExitStack() as waiting:
        for _ in range(3):  # one runs, two wait
            waiting.enter_context(unanswered(server, "/v1/completions", {"prompt": [40], "max_tokens": 400}))
        eventually(lambda: server.get("/health").json()["num_live"] == 3)
        for path in BODIES:
            response = server.post(path, b"{")
            assert response.status_code == 503, path
            assert kind_of(response.json()) in ("service_unavailable_error", "overloaded_error")
            assert 1 <= int(response.headers["retry-after"]) <= 60


LONG = "a,[{" * 20_000  # what counts as values outside of texts
TOO_MANY = [{"x": [1] * 50}] * 4000
LARGE: dict[str, tuple[str, dict[str, Any], bool]] = {
    "system": ("/v1/messages", {"system": [{"type": "text", "text": LONG}], "messages": HELLO, "max_tokens": 2}, True),
    "system text": ("/v1/messages", {"system": LONG, "messages": HELLO, "max_tokens": 2}, True),
    "result": ("/v1/messages", {"max_tokens": 2, "messages": [{"role": "user", "content": [
        {"type": "tool_result", "tool_use_id": "a", "content": LONG + LONG}]}]}, True),
    "values": ("/v1/messages", {"max_tokens": 2, "messages": [{"role": "user", "content": "a", "x": TOO_MANY}]}, False),
    "instructions": ("/v1/responses", {"instructions": LONG, "input": "a"}, True),
    "items": ("/v1/responses", {"input": [{"role": "user", "content": [{"type": "input_text", "text": LONG}]}]}, True),
    "output": ("/v1/responses", {"input": [
        {"type": "function_call_output", "call_id": "a", "output": LONG + LONG}]}, True),
    "item values": ("/v1/responses", {"input": [{"role": "user", "content": "a", "x": TOO_MANY}]}, False),
    "many items": ("/v1/responses", {"input": [{"role": "user", "content": "aaaaaaaaaa"}] * 5000}, False),
    "metadata": ("/v1/responses", {"input": "a", "metadata": {"a": LONG}}, False),
    "many inputs": ("/v1/embeddings", {"input": ["aaaaaaaaaaaaaaaaaaaa"] * 5000}, False)}


@pytest.mark.parametrize("name", LARGE)
def test_large_bodies_are_bounded_by_what_they_hold(server: Server, name: str) -> None:
    """A long text is only too long for the model; a field that holds too much is refused before it is decoded."""
    path, body, is_text = LARGE[name]
    response = server.client.post(server.url + path, json=body, headers=JSON)
    assert response.status_code == 400
    assert bool(re.search("maximum context length|prompt is too long", response.text)) == is_text, response.text
    assert server.post("/v1/embeddings", {"input": "a"}).status_code == 200
