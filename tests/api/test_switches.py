"""Scheduling changed over and over while requests run and wait; and who is shed by a policy that does that."""

from __future__ import annotations

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.live import serving
from support.live_server import ENDLESS, ENDLESS_CONTEXT, Server, counted, eventually, running

from slotwise.core.disciplines.batching_settings import KINDS
from slotwise.core.policies.policy_settings import POLICIES
from slotwise.core.record import StepRecord
from slotwise.observe import event_log, log_file
from slotwise.text.tokenizer import Tokenizer

COMPLETIONS, SCHEDULING = "/v1/completions", "/admin/scheduling"
SWITCHES = 80


def change(whims: random.Random) -> dict[str, Any]:
    slots = whims.randint(2, 8)
    promised = {"priority": -3, "ttft_ms": 1000}  # the requests below ask for less than that
    tiers = [promised | {"name": name, "slots": whims.randint(0, 1), "weight": whims.choice((1, 3))}
             for name in ("a", "b")]
    parts: list[dict[str, Any]] = [
        {"scheduling_policy": whims.choice(POLICIES)}, {"batching": whims.choice(KINDS)},
        {"max_num_seqs": slots, "max_num_batched_tokens": slots + whims.randint(0, 64)}, {"tiers": tiers},
        {"max_step_ms": whims.choice((None, 2, 20))}, {"max_stall_ms": whims.choice((None, 1, 30))}]
    return {name: value for part in whims.sample(parts, whims.randint(1, 3)) for name, value in part.items()}


def test_changes_lose_nobody_and_are_in_the_log(folder: Path, tmp_path: Path, tokenizer: Tokenizer) -> None:
    whims, path = random.Random(5), tmp_path / "events"
    with running(folder, tmp_path / "engine", "seconds_per_step=0.002", "max_num_seqs=8") as server, \
            ThreadPoolExecutor(12) as pool:
        changing = True
        answers: list[tuple[int, int, dict[str, Any]]] = []

        def keep_asking(seed: int) -> None:
            mine = random.Random(seed)
            with httpx.Client(timeout=120) as client:
                while changing:
                    first, length = mine.randrange(2, 300), mine.randint(1, 30)
                    body = {"prompt": [first], "max_tokens": length, "ignore_eos": True, "user": f"u{seed % 3}",
                            "priority": mine.randint(-3, 3), "ttft_ms": 5000, "logprobs": 0}
                    answers.append((first, length, client.post(server.url + COMPLETIONS, json=body).json()))

        work = [pool.submit(keep_asking, seed) for seed in range(12)]
        changed = 0
        while changed < SWITCHES:
            answer = server.client.put(server.url + SCHEDULING, json=change(whims))
            assert answer.status_code in (200, 400), answer.text
            changed += answer.status_code == 200
            assert server.get(SCHEDULING).json() == answer.json() or answer.status_code == 400
            time.sleep(0.02)
        eventually(lambda: len(answers) > SWITCHES)
        changing = False
        for one in work:
            one.result()
        path.write_bytes(server.get("/events?follow=0").content)
    for first, length, answer in answers:
        assert answer["choices"][0]["text"] == tokenizer.decode(counted(first, length)), answer
        assert len(answer["choices"][0]["logprobs"]["tokens"]) == length
    entries = list(log_file.read_file(path))
    told = [entry.scheduling for entry in entries if isinstance(entry, event_log.CommandEntry)
            and entry.scheduling is not None]
    obeyed = [entry.inputs.configured for entry in entries if isinstance(entry, StepRecord)
              and entry.inputs.configured is not None]
    assert len(told) == SWITCHES and set(map(repr, obeyed)) <= set(map(repr, told))
    assert obeyed[-1] == told[-1]


@pytest.mark.slow
def test_a_real_models_tokens_stay_the_same_through_twenty_changes(tmp_path: Path) -> None:
    """Float32, greedy: what each prompt gets alone, it gets under load and whatever the order."""
    whims = random.Random(9)
    prompts = [f"def {name}(self, {name}s):" for name in ("read", "write", "add", "close", "find", "parse", "load")]
    with serving("--dtype", "float32", "--max-num-seqs", "8", log=tmp_path / "log") as live:
        def ask(number: int) -> str:
            body = {"prompt": prompts[number] * (1 + number % 3), "max_tokens": 4 + 2 * number, "temperature": 0,
                    "ignore_eos": True, "user": f"u{number % 3}"}
            return live.client.post(COMPLETIONS, json=body).json()["choices"][0]["text"]

        alone = [ask(number) for number in range(len(prompts))]
        answers: list[tuple[int, str]] = []
        changing = threading.Event()

        def keep_asking(seed: int) -> None:
            mine = random.Random(seed)
            while not changing.is_set():
                number = mine.randrange(len(prompts))
                answers.append((number, ask(number)))

        with ThreadPoolExecutor(12) as pool:
            work = [pool.submit(keep_asking, seed) for seed in range(12)]
            changed = 0
            while changed < 20:
                changed += live.client.put(SCHEDULING, json=change(whims)).status_code == 200
                time.sleep(0.03)
            changing.set()
            for one in work:
                one.result()
    assert len(answers) >= 12
    assert [(number, text) for number, text in answers if text != alone[number]] == []


def test_who_can_no_longer_be_in_time_is_shed(folder: Path, tmp_path: Path) -> None:
    with running(folder, tmp_path / "engine", "seconds_per_step=0.02", "max_num_seqs=1", ENDLESS_CONTEXT) as server:
        assert server.client.put(server.url + SCHEDULING, json={
            "scheduling_policy": "deadline", "shed_late": True, "default_ttft_ms": 60_000}).status_code == 200
        busy = threading.Thread(target=server.post, args=(COMPLETIONS, ENDLESS | {"request_id": "busy"}))
        busy.start()
        eventually(lambda: 'num_requests_running{model_name="toy"} 1.0' in server.get("/metrics").text)
        for stream in (False, True):
            late = server.post(COMPLETIONS, ENDLESS | {"ttft_ms": 200, "stream": stream})
            error = late.json()["error"]
            assert late.status_code == 503 and error["code"] == "shed" and 1 <= int(late.headers["retry-after"]) <= 60
            assert error["type"] == "service_unavailable_error" and "0.2 s" in error["message"]
        assert server.post("/abort_requests", {"request_id": "busy"}).json()["aborted"] == ["busy"]
        busy.join()
        events = server.events(COMPLETIONS, ENDLESS | {"n": 2, "ttft_ms": 30_000, "max_tokens": 2})
        assert [event["choices"][0]["finish_reason"] for event in events if event["choices"]].count("length") == 2
        under_way(server)
        text = server.get("/metrics").text
        assert 'request_success_total{finished_reason="shed",model_name="toy"} 3.0' in text
        explained = server.get("/explain/shed-late").json()["requests"]
        shed = [one for one in explained if one["finish_reason"] == "shed"]
        assert len(shed) == 1 and [part["part"] for part in shed[0]["parts"]].count("queue") >= 1


def under_way(server: Server) -> None:
    """One choice has the slot, the other is shed when the stream has long begun."""
    events = server.events(COMPLETIONS, ENDLESS | {"n": 2, "ttft_ms": 1500, "request_id": "shed-late"})
    assert events[-1]["error"]["code"] == "shed" and events[0]["choices"][0]["text"]
