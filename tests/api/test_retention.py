"""Retention: hints of Anthropic's and OpenAI's protocols are never refused, our own is where it cannot be obeyed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.live_server import JSON, Server, eventually, running

from slotwise.api.anthropic.messages_protocol import CountTokensRequest, up_to_breakpoint

COMPLETIONS, MESSAGES, RESPONSES = "/v1/completions", "/v1/messages", "/v1/responses"
EPHEMERAL = {"type": "ephemeral"}
MARK = {"cache_control": EPHEMERAL}
USED = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with a prefix cache of 100 blocks of 16 tokens, of which a tenant may retain 80."""
    with running(folder, tmp_path_factory.mktemp("log") / "engine", "enable_prefix_caching=1",
                 "num_blocks=100") as started:
        yield started


@pytest.fixture(autouse=True)
def obeys(server: Server) -> Iterator[None]:
    set_policy(server, "hinted")
    yield
    set_policy(server, "lru")


def set_policy(server: Server, policy: str) -> None:
    settings = json.dumps({"eviction_policy": policy, "tenant_cache_share": 0.8})
    assert server.client.put(server.url + "/admin/scheduling", content=settings, headers=JSON).status_code == 200


def message(text: str, ttl: str | None = None, **fields: Any) -> dict[str, Any]:
    control = EPHEMERAL | ({"ttl": ttl} if ttl else {})
    block = {"type": "text", "text": text, "cache_control": control}
    return {"messages": [{"role": "user", "content": [block]}], "max_tokens": 2, **fields}


@pytest.mark.parametrize("ttl", [None, "1h"])
def test_usage_tells_what_was_read_and_what_is_kept(server: Server, ttl: str | None) -> None:
    text = f"{ttl} " * 40
    written, read = (server.post(MESSAGES, message(text, ttl)).json()["usage"] for _ in range(2))
    kept = written["cache_creation_input_tokens"]
    assert kept >= 16 and kept % 16 == 0 and written["cache_read_input_tokens"] % 16 == 0
    assert written["cache_creation"] == {
        "ephemeral_5m_input_tokens": 0 if ttl else kept, "ephemeral_1h_input_tokens": kept if ttl else 0}
    assert read["cache_read_input_tokens"] == kept + written["cache_read_input_tokens"]
    assert read["cache_creation_input_tokens"] == 0
    totals = {sum(usage[name] for name in USED) for usage in (written, read)}
    assert len(totals) == 1


def test_what_follows_the_last_marked_part_is_not_kept(server: Server) -> None:
    """A request with another continuation finds the retained part again."""
    system = {"type": "text", "text": "system " * 20, **MARK}
    texts = [{"type": "text", "text": "one " * 20, **MARK}, {"type": "text", "text": "two " * 20}]
    said = [{"role": "user", "content": texts}, {"role": "assistant", "content": "yes"}]
    bodies: list[dict[str, Any]] = [{"system": [system]}, {"messages": said}]
    for body in bodies:
        ends = [{"role": "user", "content": f"{end} " * 20} for end in ("first", "other")]
        answers = [server.post(MESSAGES, {"max_tokens": 2, **body, "messages": [*body.get("messages", ()), end]})
                   for end in ends]
        assert [answer.status_code for answer in answers] == [200, 200], answers[0].text
        first, second = (answer.json()["usage"] for answer in answers)
        kept = first["cache_creation_input_tokens"] + first["cache_read_input_tokens"]
        assert 16 <= kept <= sum(first[name] for name in USED) - 40, body
        assert second["cache_creation_input_tokens"] == 0 and second["cache_read_input_tokens"] >= kept


def test_a_prompt_is_cut_behind_its_last_marked_part() -> None:
    """Parts are tools, system message and messages; a mark on the last part covers the whole prompt."""
    parts = [{"name": name, "input_schema": {}} for name in "ab"], [{"type": "text", "text": text} for text in "ab"]

    def cut(tools: int = 2, system: int = 2, content: int = 2) -> tuple[Any, ...]:
        """Which parts are left if those with these numbers are marked."""
        marked = [[part | (MARK if number == index else {}) for index, part in enumerate(some)]
                  for some, number in ((parts[0], tools), (parts[1], system), (parts[1], content))]
        request = CountTokensRequest(
            tools=marked[0], system=marked[1], messages=[{"role": "user", "content": marked[2]}])
        left = up_to_breakpoint(request)
        (message,) = left.messages
        return len(left.tools or ()), len(left.system or ()), len(message["content"]), left is request

    assert cut() == cut(content=1) == cut(tools=0, content=1) == (2, 2, 2, True)
    assert cut(tools=0) == (1, 2, 1, False) and cut(tools=0, system=0) == (2, 1, 1, False)
    assert cut(tools=0, system=1, content=0) == (2, 2, 1, False)


def test_a_server_that_retains_nothing_says_so_and_refuses_no_hint(server: Server) -> None:
    set_policy(server, "lru")
    answer = server.post(MESSAGES, message("other " * 40, "1h"))
    assert answer.status_code == 200 and answer.json()["usage"]["cache_creation_input_tokens"] == 0
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, "prompt_cache_key": "k"}
    assert server.post("/v1/chat/completions", chat | {"prompt_cache_retention": "24h"}).status_code == 200
    refused = server.post(COMPLETIONS, {"prompt": [2] * 40, "max_tokens": 2, "retain": 60})
    assert refused.status_code == 400 and "the eviction policy lru obeys no retention" in refused.text


def test_responses_count_what_is_retained(server: Server) -> None:
    body = {"input": "count " * 40, "max_output_tokens": 2, "prompt_cache_retention": "24h"}
    details = server.post(RESPONSES, body).json()["usage"]["input_tokens_details"]
    assert details["cache_write_tokens"] >= 16


def test_our_own_retain_is_obeyed_and_explained(server: Server) -> None:
    """From the body and from the header; the engine says how many tokens its claims cover."""
    for number, header in enumerate(({}, {"X-Retain": "90"})):
        name = f"kept{number}"
        body = {"prompt": [30 + number] * 40, "max_tokens": 2} | ({} if header else {"retain": 90})
        sent = server.post(COMPLETIONS, body, **header, **{"X-Request-Id": name, "X-Session-Id": "s"})
        assert sent.status_code == 200

        def found(name: str = f"cmpl-{name}") -> dict[str, Any]:
            return server.get(f"/explain/{name}").json()["requests"][0]

        eventually(lambda: found()["retained_tokens"] == 32)
        assert "It asked to be kept in the cache for 90 s: 32 tokens of it are" in found()["sentence"]


@pytest.mark.parametrize(("fields", "headers", "said"), [
    ({"prompt": [2] * 400, "retain": 60}, {}, "a tenant may retain 0"),
    ({"prompt": [[2], [2] * 400]}, {"X-Retain": "60"}, "a tenant may retain 0"),
    ({"prompt": [2], "retain": 90_000}, {}, "retain"),
    ({"prompt": [2]}, {"X-Retain": "soon"}, "X-Retain: must be a number of seconds"),
    ({"prompt": [2]}, {"X-Retain": "nan"}, "X-Retain: must be a number of seconds")])
def test_what_cannot_be_obeyed_is_refused(
        server: Server, fields: dict[str, Any], headers: dict[str, str], said: str) -> None:
    settings = json.dumps({"tenant_cache_share": 0})
    server.client.put(server.url + "/admin/scheduling", content=settings, headers=JSON)
    refused = server.post(COMPLETIONS, {"max_tokens": 2, **fields}, **headers)
    assert refused.status_code == 400 and said in refused.json()["error"]["message"]
