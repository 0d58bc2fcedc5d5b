"""Why a prompt missed the prefix cache, as the clients of a live server with the built-in model see it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.live import Live, cli, serving

BLOCK = 16
NUM_BLOCKS = 40  # of the cache
CACHE = NUM_BLOCKS * BLOCK * 4 * 2 * 2 * 64 * 4  # bytes: layers, keys and values, heads, their size, float32
TEXT = """def read_lines(path):
    \"\"\"Returns the lines of a file, without their ends, for a caller who wants them as a list of strings.\"\"\"
    with open(path) as file:
        return [line.rstrip() for line in file]


def write_lines(path, lines):
    \"\"\"Writes the lines to a file, each with its end, for a caller who has them as a list of strings.\"\"\"
    with open(path, "w") as file:
        file.writelines(line + chr(10) for line in lines)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("misses")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Live]:
    with serving("builtin", "--api-key", "one", "--api-key", "two", "--admin-api-key", "root", "--max-num-seqs", "2",
                 "--max-model-len", "512", "--block-size", str(BLOCK), "--kv-cache-memory", str(CACHE),
                 "--dtype", "float32", "--event-log", str(folder / "log"), log=folder / "stderr") as live:
        yield live


def get(server: Live, path: str, key: str = "root") -> Any:
    answer = server.client.get(path, headers={"Authorization": f"Bearer {key}"})
    return answer.raise_for_status()


def ask(server: Live, prompt: str | list[int], key: str = "one", **fields: Any) -> dict[str, Any]:
    """The explanation of a request."""
    body = {"prompt": prompt, "max_tokens": 1, "temperature": 0, **fields}
    answer = server.client.post("/v1/completions", json=body, headers={"Authorization": f"Bearer {key}"})
    (explanation,) = get(server, f"/explain/{answer.raise_for_status().json()['id']}", key).json()["requests"]
    return explanation


def causes(explanation: dict[str, Any]) -> list[str]:
    """Its causes, in order; each span takes a predicted time, and they cover the prompt."""
    spans = explanation["cache"]["spans"]
    assert all(span["seconds"] > 0 and span["tokens"] == span["to"] - span["from"] for span in spans)
    assert [0, *[span["to"] for span in spans]] == [*[span["from"] for span in spans], explanation["prompt_tokens"]]
    return [span["cause"] for span in spans]


def metric(server: Live, cause: str) -> float:
    families = text_string_to_metric_families(get(server, "/metrics").text)
    return next(sample.value for family in families for sample in family.samples
                if sample.name == "slotwise:prompt_tokens_by_cause_total" and sample.labels["cause"] == cause)


def test_each_cause_with_its_seconds_and_its_words(server: Live) -> None:
    tokens = server.client.post("/tokenize", json={"prompt": TEXT}, headers={"Authorization": "Bearer one"}).json()[
        "tokens"]
    assert 5 * BLOCK < len(tokens) < NUM_BLOCKS * BLOCK // 2
    end = (len(tokens) - 1) // BLOCK * BLOCK

    assert causes(ask(server, tokens[:5])) == ["too_short"]
    first = ask(server, tokens)
    assert causes(first) == ["new", "last_block"]
    assert "they were not cached: the engine started" in first["cache"]["sentence"]

    before = metric(server, "found")
    again = ask(server, tokens)
    assert causes(again) == ["found", "last_block"] and again["cached_tokens"] == end
    assert metric(server, "found") - before == end

    changed = [*tokens[: BLOCK + 3], tokens[BLOCK + 3] + 1, *tokens[BLOCK + 4 :]]
    diverged = ask(server, changed)
    assert causes(diverged) == ["found", "diverged", "last_block"]
    span = diverged["cache"]["spans"][1]
    assert span["diverged_at"] == BLOCK + 3 and f"from token {BLOCK + 3} on" in diverged["cache"]["sentence"]
    assert span["text"]["before"] + span["text"]["nearest"] in "<|begin|>" + TEXT
    assert span["text"]["own"] != span["text"]["nearest"] and span["same_behind"] > 0.8
    assert "is the same: move what changes to the end" in span["advice"]

    assert causes(ask(server, tokens, cache_salt="other")) == ["other_salt", "last_block"]
    assert causes(ask(server, tokens, prompt_logprobs=0)) == ["whole_prompt"]

    strange = [[number + 40] * (NUM_BLOCKS * BLOCK // 2) for number in range(3)]
    number = [ask(server, prompt)["number"] for prompt in strange][-1]
    evicted = ask(server, tokens)
    assert causes(evicted)[-2:] == ["evicted", "last_block"]
    span = evicted["cache"]["spans"][-2]
    assert 0 < span["evicted_for"] <= number and span["evicted_s_before"] >= 0


def test_a_key_learns_nothing_of_another_ones_prompts(server: Live) -> None:
    own = [token + 500 for token in range(6 * BLOCK)]
    assert causes(ask(server, own, "two")) == ["new", "last_block"]
    assert causes(ask(server, own, "one")) == ["new", "last_block"]
    assert causes(ask(server, [*own[: 2 * BLOCK], *own], "one")) == ["found", "diverged", "last_block"]
    ask(server, [*own[: 2 * BLOCK], *own], "two")
    for number in range(3):
        ask(server, [number + 50] * (NUM_BLOCKS * BLOCK // 2), "one")
    evicted = ask(server, own, "two")
    spans = [span for span in evicted["cache"]["spans"] if span["cause"] == "evicted"]
    assert [span["evicted_for"] for span in spans] == ["another request"] and "text" not in spans[0]

    entries = [json.loads(line) for line in get(server, "/events?follow=0", "two").text.splitlines()]
    named = {entry["add"]["request_id"] for entry in entries if entry["kind"] == "request" and entry["add"].get("name")}
    looked = {lookup[0] for entry in entries if entry["kind"] == "step"
              for plan in entry.get("plans", []) for lookup in plan.get("lookups", [])}
    assert looked and looked <= named, "the stream has the spans of its own requests only"

    report = get(server, "/cache/report", "two").json()
    assert report["requests"] == 3 and len(report["divergences"]) <= 1
    everyones = get(server, "/cache/report").json()
    assert everyones["requests"] > report["requests"]


def test_the_report_names_what_costs_most_and_what_to_change(server: Live) -> None:
    dates = ["Today is 2026-11-28. ", "Today is 2026-11-29. ", "Today is 2026-12-01. "]
    for date in dates:
        ask(server, "You are a careful assistant who writes Python. " + date + TEXT, "two")
    for question in ("What is a monad, and who needs one?", "Sort a list of numbers, please, in two ways."):
        ask(server, "You are a careful assistant who writes Python. " + question * 12, "two")
    report = get(server, "/cache/report", "two").json()
    costs = [(one["avoidable_seconds"], one["seconds"]) for one in report["divergences"]]
    assert costs == sorted(costs, reverse=True)
    dated = next(one for one in report["divergences"] if one["advice"].startswith("A date or time changes"))
    assert dated["text"]["own"] != dated["text"]["nearest"] and dated["avoidable_seconds"] > 0
    other = [one for one in report["divergences"] if "these are different prompts" in one["advice"]]
    assert other and all(one["avoidable_seconds"] < dated["avoidable_seconds"] for one in other)
    total = sum(cause["tokens"] for cause in report["causes"].values())
    assert total > 0 and report["causes"]["diverged"]["seconds"] > 0


def test_what_was_cached_before_a_sleep(server: Live) -> None:
    prompt = [token + 300 for token in range(4 * BLOCK)]
    ask(server, prompt)
    for path in ("/sleep?level=1", "/wake_up"):
        server.client.post(path, headers={"Authorization": "Bearer root"}).raise_for_status()
    slept = ask(server, prompt)
    assert causes(slept) == ["reset", "last_block"] and "the model slept" in slept["cache"]["sentence"]
    assert causes(ask(server, prompt)) == ["found", "last_block"]


def test_the_log_replays_and_explains_the_same(server: Live, folder: Path) -> None:
    online = ask(server, [9] * (3 * BLOCK))
    server.process.terminate()
    server.process.wait(120)
    replayed = cli("replay", str(folder / "log"))
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr
    offline = cli("explain", str(folder / "log"), online["id"])
    assert "because the last block of a prompt is always computed" in " ".join(offline.stdout.split())
