"""Why a prompt missed the prefix cache, as the clients of a live server with the built-in model see it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.cache_misses import BLOCK, NUM_BLOCKS, OPTIONS, TEXT, ask, causes, check_each_cause, get
from support.live import Live, cli, serving

CACHE = NUM_BLOCKS * BLOCK * 4 * 2 * 2 * 64 * 4  # bytes: layers, keys and values, heads, their size, float32


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("misses")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Live]:
    with serving("builtin", *OPTIONS, "--kv-cache-memory", str(CACHE), "--dtype", "float32",
                 "--event-log", str(folder / "log"), log=folder / "stderr") as live:
        yield live


def test_each_cause_with_its_seconds_and_its_words(server: Live) -> None:
    check_each_cause(server, begin="<|begin|>")


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


def test_the_log_replays_and_explains_the_same(server: Live, folder: Path) -> None:
    online = ask(server, [9] * (3 * BLOCK))
    server.process.terminate()
    server.process.wait(120)
    replayed = cli("replay", str(folder / "log"))
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr
    offline = cli("explain", str(folder / "log"), online["id"])
    assert "because the last block of a prompt is always computed" in " ".join(offline.stdout.split())
