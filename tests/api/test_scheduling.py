"""Changing the discipline of a running server, and what its clients see of it."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.live_server import JSON, Server, eventually, running

ROUTE = "/admin/scheduling"
COMPLETIONS = "/v1/completions"


@pytest.fixture(scope="module")
def running_server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(folder, tmp_path_factory.mktemp("log") / "engine", "seconds_per_step=0.01") as started:
        yield started


@pytest.fixture
def server(running_server: Server) -> Iterator[Server]:
    """Scheduled as at its start, before each test and after the last."""
    before = running_server.get(ROUTE).json()
    yield running_server
    asked = {name: value for name, value in before.items() if value is not None}
    assert put(running_server, asked).json() == before


def put(server: Server, body: Any) -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body)
    return server.client.put(server.url + ROUTE, content=content, headers=JSON)


def arrivals(server: Server, first: int, count: int) -> list[float]:
    """When each event with text of a stream came, in seconds since it was sent."""
    body = {"prompt": [first], "max_tokens": count, "ignore_eos": True, "stream": True}
    times, start = [], time.monotonic()
    with httpx.Client(timeout=120) as client, client.stream("POST", server.url + COMPLETIONS, json=body) as response:
        for line in response.iter_lines():
            if line.startswith("data: {") and json.loads(line[6:])["choices"][0]["text"]:
                times.append(time.monotonic() - start)
    return times


def test_what_is_in_force_can_be_read_and_changed(server):
    start = server.get(ROUTE).json()
    budget = start["max_num_batched_tokens"]
    assert budget >= 64 and start == {
        "batching": "continuous", "prefill": None, "batch_size": None, "max_wait_ms": None,
        "long_prefill_token_threshold": 0, "scheduling_policy": "fcfs", "ageing": None, "preemption_gap": None,
        "length_quantile": None, "length_oracle": False, "default_ttft_ms": None, "shed_late": False,
        "max_num_seqs": 64, "max_num_batched_tokens": budget, "max_step_ms": None, "max_stall_ms": None,
        "eviction_policy": "lru", "tenant_cache_share": 0.5,
        "tiers": []}
    answer = put(server, {"batching": "dynamic", "batch_size": 2, "max_wait_ms": 20})
    assert answer.status_code == 200
    assert answer.json() == start | {"batching": "dynamic", "batch_size": 2, "max_wait_ms": 20}
    assert server.get(ROUTE).json() == answer.json()
    assert server.post(COMPLETIONS, {"prompt": [40], "max_tokens": 5}).status_code == 200


@pytest.mark.parametrize(("body", "says"), [
    ({"max_num_seqs": 8, "batching": "statik"}, "batching must be one of"),
    ({"max_num_seqs": 8, "prefill": "inline", "batching": "static"}, "prefill belongs to"),
    ({"max_num_seqs": 65, "max_num_batched_tokens": 4096}, "at most the 64 slots"),
    ({"max_num_seqs": 8, "surprise": 1}, "no scheduling setting 'surprise'"),
    (b"[]", "object"), (b"{", "JSON"), (b'{"max_num_seqs": 1e400}', "out of range"),
])
def test_a_change_is_refused_whole(server, body, says):
    before = server.get(ROUTE).json()
    answer = put(server, body)
    assert answer.status_code == 400 and says.lower() in answer.json()["error"]["message"].lower()
    assert server.get(ROUTE).json() == before


def test_a_static_batch_returns_as_one_and_a_continuous_one_streams(server):
    def comes_in_parts() -> bool:
        return len(arrivals(server, 40, 200)) > 1

    eventually(comes_in_parts)  # a reader that comes late gets several tokens as one event
    put(server, {"batching": "static"})
    assert not comes_in_parts(), "all at once, when the batch has drained"
    put(server, {"batching": "continuous"})
    eventually(comes_in_parts)


def test_changes_under_load_lose_nothing(server):
    """Forty requests while the discipline changes under them: each ends once, with its own tokens."""
    answers: dict[int, Any] = {}

    def ask(number: int) -> None:
        time.sleep(0.02 * number)
        body = {"prompt": [number], "max_tokens": 20 + number, "ignore_eos": True, "logprobs": 0}
        with httpx.Client(timeout=120) as client:
            answers[number] = client.post(server.url + COMPLETIONS, json=body).json()

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(40)]
    for thread in threads:
        thread.start()
    changes = [{"batching": "static", "batch_size": 3}, {"batching": "continuous", "prefill": "alone"},
               {"batching": "dynamic", "batch_size": 4, "max_wait_ms": 30}, {"max_num_seqs": 5}, {"batching": "orca"},
               {"batching": "one_at_a_time"}, {"batching": "continuous", "max_num_seqs": 64}]
    for change in changes:
        time.sleep(0.15)
        assert put(server, change).status_code == 200, change
    for thread in threads:
        thread.join()
    for number, answer in answers.items():
        assert answer["usage"]["completion_tokens"] == 20 + number
        assert len(answer["choices"][0]["logprobs"]["tokens"]) == 20 + number
    assert len(answers) == 40


def test_a_window_of_time_closes_by_itself(server):
    put(server, {"batching": "dynamic", "batch_size": 8, "max_wait_ms": 300})
    (seconds,) = arrivals(server, 40, 3)
    assert seconds >= 0.3


def test_a_drawn_length_ends_the_answer(server):
    body = {"prompt": [40], "max_tokens": 50, "ignore_eos": True, "bench_output_tokens": 7}
    answer = server.post(COMPLETIONS, body).json()
    assert answer["usage"]["completion_tokens"] == 7 and answer["choices"][0]["finish_reason"] == "stop"
    assert server.post(COMPLETIONS, body | {"bench_output_tokens": 0}).status_code == 400


def test_each_prompt_may_have_a_drawn_length_of_its_own(server):
    body = {"prompt": [[40], [41, 42], [43]], "max_tokens": 50, "ignore_eos": True, "bench_output_tokens": [7, 2, 90]}
    choices = server.post(COMPLETIONS, body | {"logprobs": 0}).json()["choices"]
    assert [len(choice["logprobs"]["tokens"]) for choice in choices] == [7, 2, 50]
    assert [choice["finish_reason"] for choice in choices] == ["stop", "stop", "length"]
    for wrong in ([7, 2], [7, 2, 9, 4], [7, 0, 9], []):
        refused = server.post(COMPLETIONS, body | {"bench_output_tokens": wrong})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "bench_output_tokens", wrong
