"""A front door before two live servers: what goes through it, what is asked of all, and what it refuses."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from support.live_server import counted, eventually, frozen, unanswered
from support.scale_door import Behind, behind, door_of

PROMPT = [40 + number % 9 for number in range(200)]


def ask(first: int, count: int, **more: object) -> dict[str, object]:
    body = {"prompt": [first], "max_tokens": count, "ignore_eos": True, "temperature": 0, "return_token_ids": True}
    return body | more


def ids(answer: httpx.Response) -> list[int]:
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["token_ids"]


def streamed(two: Behind, body: dict[str, object]) -> list[int]:
    return [token for event in two.door.events("/v1/completions", body) for choice in event["choices"]
            for token in choice["token_ids"]]


def sent(two: Behind) -> dict[str, int]:
    """Requests sent to each replica so far."""
    lines = two.door.get("/metrics").text.splitlines()
    return {line.split('"')[1]: int(line.split()[-1]) for line in lines
            if line.startswith("slotwise:router_requests_total{")}


def test_whole_and_streamed_responses_are_the_replicas(two: Behind) -> None:
    assert ids(two.door.post("/v1/completions", ask(40, 9))) == counted(40, 9)
    assert streamed(two, ask(50, 9)) == counted(50, 9)


@pytest.mark.parametrize(("path", "body"), [
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}),
    ("/v1/messages", {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}),
    ("/v1/embeddings", {"input": [40, 41]}), ("/tokenize", {"prompt": "the fox"}), ("/detokenize", {"tokens": [40]})])
def test_every_route_answers_as_a_replica_does(two: Behind, path: str, body: dict[str, object]) -> None:
    here, there = two.door.post(path, body), two.replicas[0].post(path, body)
    assert here.status_code == there.status_code == 200
    assert here.json().keys() == there.json().keys()
    assert here.headers["content-type"] == there.headers["content-type"]


def test_both_replicas_are_used_and_a_shared_prefix_stays_together(two: Behind) -> None:
    before = sent(two)
    for first in range(60, 72):
        ids(two.door.post("/v1/completions", ask(first, 2, prompt=[first] * 300)))
    after = sent(two)
    assert all(after[name] > before.get(name, 0) for name in after) and len(after) == 2
    # Where reports come late, the router does not yet know how long the pieces of prompts are.
    assert any(stays_together(two, [token] * 300) for token in range(77, 82))


def stays_together(two: Behind, prompt: list[int]) -> bool:
    """Whether all of many requests with a prompt go to one replica."""
    before = sent(two)
    for _ in range(16):
        ids(two.door.post("/v1/completions", ask(0, 2, prompt=prompt)))
    return sorted(count - before[name] for name, count in sent(two).items()) == [0, 16]


def test_a_prefix_that_a_replica_tells_of_is_followed(two: Behind) -> None:
    """Computed through the door, told by the replica, and then found by a prompt that only begins alike."""
    ids(two.door.post("/v1/completions", ask(0, 2, prompt=[88] * 400)))
    eventually(lambda: any(one["num_cached_pieces"] >= 4 for one in two.states()))
    answer = two.door.post("/v1/completions", ask(0, 2, prompt=[88] * 400 + [9, 9]))
    assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] >= 384


def test_a_client_that_leaves_is_aborted_in_the_engine(folder: Path, tmp_path: Path) -> None:
    with behind(folder, tmp_path, "seconds_per_step=0.05", number=1) as one:
        for stream in (False, True):
            with unanswered(one.door, "/v1/completions", ask(40, 400, stream=stream)):
                eventually(lambda: one.replicas[0].get("/health").json()["num_live"] == 1)
            eventually(lambda: one.replicas[0].get("/health").json()["num_live"] == 0)
        eventually(lambda: one.door.get("/health").json()["num_live"] == 0)


def test_a_response_is_found_where_it_is_and_continued_there(two: Behind) -> None:
    body = {"input": "hello", "max_output_tokens": 2, "store": True}
    for _ in range(4):
        first = two.door.post("/v1/responses", body).json()
        assert two.door.get(f"/v1/responses/{first['id']}").json()["id"] == first["id"]
        answer = two.door.post("/v1/responses", body | {"previous_response_id": first["id"]})
        assert answer.status_code == 200, answer.text
    assert two.door.client.delete(f"{two.door.url}/v1/responses/{first['id']}").json()["deleted"]
    assert two.door.get(f"/v1/responses/{first['id']}").status_code == 404
    unknown = body | {"previous_response_id": "resp_none"}
    assert two.door.post("/v1/responses", unknown).json() == two.replicas[0].post("/v1/responses", unknown).json()


def test_an_abort_reaches_the_replica_that_has_the_request(folder: Path, tmp_path: Path) -> None:
    with behind(folder, tmp_path, "seconds_per_step=0.05") as two, httpx.Client(timeout=60) as client:
        with client.stream("POST", two.door.url + "/v1/completions", json=ask(40, 400, stream=True),
                           headers={"X-Request-Id": "mine"}) as response:
            lines = response.iter_lines()
            next(lines)
            told = two.door.post("/abort_requests", {"request_ids": ["mine", "unknown"]}).json()
            assert told == {"aborted": ["mine"], "not_found": ["unknown"]}
            rest = [line for line in lines if line]
        assert json.loads(rest[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "abort"


def test_metrics_are_the_doors_and_the_replicas_with_their_names(two: Behind) -> None:
    text = two.door.get("/metrics").text
    names = [one["name"] for one in two.states()]
    assert 'slotwise:replicas{state="up"} 2' in text
    for name in names:
        assert f'slotwise:num_requests_running{{replica="{name}",' in text or (
            f'slotwise:num_requests_running{{replica="{name}"}}' in text)
    assert text.count("# TYPE slotwise:num_requests_running ") == 1


def test_bad_requests_are_refused_with_the_replicas_words(two: Behind) -> None:
    answer = two.door.post("/v1/completions", {"prompt": [40], "max_tokens": -1})
    assert answer.status_code == 400 and "max_tokens" in answer.json()["error"]["message"]
    assert two.door.post("/v1/completions", "{").status_code == 400
    missing = two.door.get("/zebra")
    assert missing.status_code == 404 and "PUT /admin/replicas" in missing.json()["error"]["message"]
    assert two.door.client.put(two.door.url + "/admin/replicas", json={"replicas": 3}).status_code == 400


def test_a_body_that_is_too_large_is_refused_at_the_door(two: Behind) -> None:
    assert two.door.post("/v1/completions", b'"' + b"x" * (5 << 20) + b'"').status_code == 413


def test_keys_pass_through_and_others_are_refused_at_the_door(folder: Path, tmp_path: Path) -> None:
    with behind(folder, tmp_path, number=1, key="good") as one:
        key = {"Authorization": "Bearer good"}
        assert one.door.post("/v1/completions", ask(40, 2), **key).status_code == 200
        assert one.door.post("/v1/completions", ask(40, 2)).status_code == 401
        assert one.door.get("/metrics").status_code == 401
        assert one.door.get("/health").status_code == 200


def test_without_replicas_there_is_an_error_and_no_waiting(tmp_path: Path) -> None:
    with door_of("--replica-url", "http://127.0.0.1:9", log=tmp_path / "door") as door:
        assert door.get("/health").status_code == 503
        answer = door.post("/v1/completions", ask(40, 2))
        assert answer.status_code == 503 and answer.json()["error"]["code"] == "no_replica"
        assert int(answer.headers["retry-after"]) >= 1


def test_a_queue_that_would_take_too_long_is_refused_with_the_time(folder: Path, tmp_path: Path) -> None:
    """Two slots, and a measured rate of starts: the predicted wait decides, not the length of a queue."""
    with (behind(folder, tmp_path, "seconds_per_step=0.05", "max_num_seqs=2", number=1,
                 arguments=("--max-wait", "1")) as one, ThreadPoolExecutor(16) as pool):
        # Each of 20 steps of 50 ms, two at a time.
        with frozen(one.replicas[0].engine_pid):  # until all are in: once some have started, others may be refused
            flood = [pool.submit(one.door.post, "/v1/completions", ask(40, 20)) for _ in range(16)]
            eventually(lambda: one.replicas[0].get("/health").json()["num_live"] == 16)
        eventually(lambda: one.door.get("/load").json()["predicted_wait_s"] > 1)
        refused = one.door.post("/v1/completions", ask(40, 1))
        assert refused.status_code == 503 and "predicted" in refused.json()["error"]["message"]
        assert 1 <= int(refused.headers["retry-after"]) <= 60
        assert {answer.result().status_code for answer in flood} == {200}
