"""Tiers over HTTP: which one a request is served as, what it may ask for, and who may change them."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.live_server import ENDLESS, ENDLESS_CONTEXT, Server, counted, eventually, running

from slotwise.api.limits.tiers import TiersError, load_tiers

COMPLETIONS, CHAT, SCHEDULING = "/v1/completions", "/v1/chat/completions", "/admin/scheduling"
FILE = """
[[tier]]
name = "gold"
ttft_ms = 500
priority = -5
weight = 4
share = 0.5
api_keys = ["g"]

[[tier]]
name = "silver"
max_num_queued_reqs = 3

[[tier]]
name = "bronze"
ttft_ms = 5000
priority = 5
"""


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    path = tmp_path_factory.mktemp("log")
    (path / "tiers.toml").write_text(FILE)
    with running(folder, path / "engine", "seconds_per_step=0.01", "max_num_seqs=4", f"tiers={path}/tiers.toml",
                 ENDLESS_CONTEXT, "api_keys=plain,other", "admin_api_key=root") as started:
        yield started


def ask(server: Server, key: str, path: str = COMPLETIONS, **more: Any) -> httpx.Response:
    what = {"messages": [{"role": "user", "content": "x"}]} if path == CHAT else {"prompt": [40]}
    return server.post(path, what | {"max_tokens": 2} | more, Authorization=f"Bearer {key}")


def put(server: Server, key: str, body: Any) -> httpx.Response:
    return server.client.put(server.url + SCHEDULING, json=body, headers={"Authorization": f"Bearer {key}"})


@pytest.mark.parametrize(("key", "asked", "served"), [
    ("g", None, "gold"), ("g", "auto", "gold"), ("g", "default", "gold"), ("g", "gold", "gold"),
    ("g", "silver", "silver"), ("g", "bronze", "bronze"), ("plain", None, "silver"), ("plain", "auto", "silver"),
    ("plain", "bronze", "bronze"), ("root", None, "gold"), ("root", "bronze", "bronze")])
def test_a_request_is_served_as_the_best_its_key_allows_or_as_it_asks(
        server: Server, key: str, asked: str | None, served: str) -> None:
    more = {} if asked is None else {"service_tier": asked}
    answer = ask(server, key, **more)
    assert answer.status_code == 200 and answer.json()["service_tier"] == served
    assert ask(server, key, CHAT, **more).json()["service_tier"] == served


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_every_chunk_of_a_stream_says_its_tier(server: Server, path: str) -> None:
    answer = ask(server, "g", path, stream=True, service_tier="silver", max_tokens=40,
                 stream_options={"include_usage": True})
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    assert events and all(event["service_tier"] == "silver" for event in events)


def test_nobody_is_served_above_what_the_key_allows(server: Server) -> None:
    refused = ask(server, "plain", service_tier="gold")
    error = refused.json()["error"]
    assert refused.status_code == 403 and error["type"] == "permission_error" and error["code"] == "tier_not_allowed"
    assert error["param"] == "service_tier" and "it allows silver, bronze" in error["message"]
    unknown = ask(server, "g", service_tier="platinum")
    assert unknown.status_code == 400 and unknown.json()["error"]["code"] == "unknown_tier"
    assert "gold, silver, bronze" in unknown.json()["error"]["message"]


@pytest.mark.parametrize(("key", "more", "param"), [
    ("g", {"priority": -6}, "priority"), ("plain", {"priority": -1}, "priority"),
    ("g", {"ttft_ms": 499}, "ttft_ms"), ("plain", {"ttft_ms": 1e6}, "ttft_ms"), ("g", {"tpot_ms": 50}, "tpot_ms"),
    ("plain", {"service_tier": "bronze", "ttft_ms": 100}, "ttft_ms")])
def test_a_request_may_ask_for_less_than_its_tier_promises_not_for_more(
        server: Server, key: str, more: dict[str, Any], param: str) -> None:
    refused = ask(server, key, **more)
    assert refused.status_code == 400, refused.text
    assert refused.json()["error"]["param"] == param and refused.json()["error"]["code"] == "above_tier"


@pytest.mark.parametrize("more", [
    {"priority": "high"}, {"priority": 1001}, {"priority": 1.5}, {"ttft_ms": 0}, {"ttft_ms": "soon"}, {"tpot_ms": -1},
    {"tpot_ms": 1e9}, {"user": 5}, {"user": "x" * 513}, {"service_tier": 3}])
def test_extras_that_mean_nothing_are_named(server: Server, more: dict[str, Any]) -> None:
    refused = ask(server, "g", **more)
    assert refused.status_code == 400 and refused.json()["error"]["param"] == next(iter(more))


def test_the_engine_is_told_the_terms(server: Server) -> None:
    ask(server, "g", request_id="mine", user="somebody")
    ask(server, "g", request_id="later", priority=7, ttft_ms=800)
    ask(server, "g", request_id="lower", service_tier="bronze")
    lines = server.get("/events?follow=0", Authorization="Bearer g").text.splitlines()
    adds = [entry["add"] for entry in map(json.loads, lines) if entry["kind"] == "request"]
    found = {add["name"].split("-")[1]: add["spec"]["slo"] for add in adds if add.get("name")}
    gold = {"tenant": "", "tier": "gold", "priority": -5, "ttft": 0.5, "tpot": None}  # whose it is, nobody is told
    assert found["mine"] == gold and found["later"] == gold | {"priority": 7, "ttft": 0.8}
    assert found["lower"] == gold | {"tier": "bronze", "priority": 5, "ttft": 5.0}


def test_only_the_admin_key_may_change_scheduling(server: Server) -> None:
    for key in ("g", "plain"):
        refused = put(server, key, {"scheduling_policy": "fair"})
        assert refused.status_code == 403 and refused.json()["error"]["code"] == "admin_key_needed"
        assert server.get(SCHEDULING, Authorization=f"Bearer {key}").status_code == 403
    assert server.get(SCHEDULING).status_code == 401 and put(server, "wrong", {}).status_code == 401
    before = server.get(SCHEDULING, Authorization="Bearer root")
    assert [(tier["name"], tier["slots"], tier["ttft_ms"]) for tier in before.json()["tiers"]] == [
        ("gold", 2, 500), ("silver", 0, None), ("bronze", 0, 5000)]
    assert "api_keys" not in before.text


def test_tiers_change_while_the_server_runs_and_keys_stay_with_their_names(server: Server) -> None:
    before = server.get(SCHEDULING, Authorization="Bearer root").json()["tiers"]
    gold, silver, _ = before
    try:
        assert put(server, "root", {"tiers": [silver, gold, {"name": "new"}]}).status_code == 200
        assert ask(server, "plain").json()["service_tier"] == "silver"
        assert ask(server, "plain", service_tier="bronze").status_code == 400
        assert ask(server, "plain", service_tier="gold").json()["service_tier"] == "gold"  # it is below silver now
        assert ask(server, "g").json()["service_tier"] == "gold"
        assert ask(server, "g", service_tier="silver").status_code == 403
        for wrong in ([silver, silver], [{"name": "x", "slots": 5}], [{"name": ""}], [{"weight": 2}], "gold", [3],
                      [{"name": "auto"}], [{"name": "x", "ttft": 1}], [{"name": "x", "api_keys": ["k"]}],
                      [{"name": "x", "ttft_ms": 0}], [{"name": "x", "requests_per_minute": 0}], [{"name": "x"}] * 65):
            refused = put(server, "root", {"tiers": wrong, "scheduling_policy": "fair"})
            assert refused.status_code == 400, wrong
            assert server.get(SCHEDULING, Authorization="Bearer root").json()["scheduling_policy"] == "fcfs"
        assert put(server, "root", {"tiers": []}).status_code == 200
        assert "service_tier" not in ask(server, "plain").json()
        assert ask(server, "plain", service_tier="flex", priority=-9).json()["service_tier"] == "default"
    finally:
        assert put(server, "root", {"tiers": before}).status_code == 200


def metric(server: Server, name: str) -> float:
    for line in server.get("/metrics", Authorization="Bearer g").text.splitlines():
        if line.startswith(f"slotwise:{name}{{"):
            return float(line.rpartition(" ")[2])
    raise AssertionError(f"no metric {name}")


def in_it(server: Server) -> tuple[float, float]:
    """Who runs, who waits."""
    return metric(server, "num_requests_running"), metric(server, "num_requests_waiting")


@contextmanager
def occupied(server: Server) -> Iterator[None]:
    """The two slots that are not kept for gold are taken, and two more of silver wait."""
    client = httpx.Client(timeout=120, headers={"Authorization": "Bearer other"})

    def occupy(number: int) -> None:
        client.post(server.url + COMPLETIONS, json=ENDLESS | {"request_id": f"busy-{number}", "service_tier": "silver"})

    threads = [threading.Thread(target=occupy, args=(number,)) for number in range(4)]
    for number, thread in enumerate(threads, 1):
        thread.start()
        eventually(lambda number=number: sum(in_it(server)) == number)
    try:
        yield
    finally:
        names = [f"busy-{number}" for number in range(4)]
        client.post(server.url + "/abort_requests", json={"request_ids": names})
        for thread in threads:
            thread.join()


def test_a_tiers_queue_is_bounded_and_its_slots_are_its_own(server: Server, tokenizer: Any) -> None:
    with occupied(server):
        assert in_it(server) == (2, 2)
        full = ask(server, "other", service_tier="silver")
        assert full.status_code == 503 and full.json()["error"]["code"] == "queue_full"
        assert "the tier silver is full: 2 requests wait, 2 of them this client's" in full.json()["error"]["message"]
        assert ask(server, "plain", queue_timeout=0.1).status_code == 504, "a place is left to another client: it waits"
        assert 1 <= int(full.headers["retry-after"]) <= 60 and full.headers["x-queue-position"] == "2"
        late = ask(server, "plain", queue_timeout=0.1, service_tier="bronze")  # another queue: it waits
        assert late.status_code == 504
        gold = ask(server, "g", max_tokens=5)
        assert gold.json()["choices"][0]["text"] == tokenizer.decode(counted(40, 5))
        text = server.get("/metrics", Authorization="Bearer g").text
        assert 'request_wait_seconds_total{model_name="toy",reason="tier_cap"}' in text


def test_what_is_told_of_tiers_can_be_asked_for_and_replaces_what_was(server: Server) -> None:
    before = server.get(SCHEDULING, Authorization="Bearer root").json()
    assert before["tiers"][1] == {
        "name": "silver", "ttft_ms": None, "tpot_ms": None, "priority": 0, "weight": 1.0, "slots": 0,
        "max_num_queued_reqs": 3, "requests_per_minute": None, "tokens_per_minute": None,
        "max_num_queued_reqs_per_key": None}
    assert put(server, "root", {"tiers": before["tiers"]}).json() == before
    try:
        told = put(server, "root", {"tiers": [{"name": "silver", "ttft_ms": 1.1}, {"name": "gold"}]}).json()["tiers"]
        assert [(tier["ttft_ms"], tier["max_num_queued_reqs"]) for tier in told] == [(1.1, None), (None, None)]
        assert ask(server, "plain", ttft_ms=1).status_code == 400 and ask(server, "plain", ttft_ms=2).status_code == 200
    finally:
        assert put(server, "root", {"tiers": before["tiers"]}).json() == before


# -- the file ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("content", "says"), [
    ("", "1 to 64 tables [[tier]]"), ("tier = 3", "1 to 64 tables"), ("[[tier", "Expected ']]'"),
    ('x = 1\n[[tier]]\nname = "a"', "no 'x'"),
    ("[[tier]]\nttft_ms = 5", "tier number 1: Object missing required field `name`"),
    ('[[tier]]\nname = "a"\nttft = 5', "tier a: Object contains unknown field `ttft`"),
    ('[[tier]]\nname = "a"\nttft_ms = "soon"', "tier a: Expected `float | null`, got `str` - at `ttft_ms`"),
    ('[[tier]]\nname = "a"\ntpot_ms = 0', "at `tpot_ms`"), ('[[tier]]\nname = "a"\npriority = 5000', "at `priority`"),
    ('[[tier]]\nname = "a"\nweight = 0', "at `weight`"), ('[[tier]]\nname = "a"\nshare = 1.5', "at `share`"),
    ('[[tier]]\nname = "a"\nshare = 0.5\nslots = 1', "tier a: share and slots"),
    ('[[tier]]\nname = "a"\n[[tier]]\nname = "a"', "tier a: name: there are two"),
    ('[[tier]]\nname = "auto"', "tier auto: name:"),
    ('[[tier]]\nname = "a"\nslots = 5\n[[tier]]\nname = "b"\nshare = 0.5', "tier b: slots: with it, tiers keep 9 of"),
    ('[[tier]]\nname = "a"\nmax_num_queued_reqs = 0', "at `max_num_queued_reqs`"),
    ('[[tier]]\nname = "a"\nrequests_per_minute = 0', "at `requests_per_minute`"),
    ('[[tier]]\nname = "a"\ntokens_per_minute = 1.5', "at `tokens_per_minute`"),
    ('[[tier]]\nname = "a"\nmax_num_queued_reqs_per_key = 0', "at `max_num_queued_reqs_per_key`"),
    ('[[tier]]\nname = "a"\nweight = nan', "tier a: "),
    ('[[tier]]\nname = "a"\napi_keys = ["k"]\n[[tier]]\nname = "b"\napi_keys = ["k"]', "tier b: api_keys: one of"),
    ('[[tier]]\nname = "a"\napi_keys = [""]', "tier a: api_keys: a key must not be empty"),
    *((f'[[tier]]\nname = "a"\napi_keys = ["k", "{key}"]', "tier a: api_keys: a key must not be empty, and must be of")
      for key in ("a\\n", "a\\nb", "\\u001b[31m")),
    ('[[tier]]\nname = "a"\napi_keys_env = "DAMAGED"', "tier a: api_keys_env: a key must not be empty, and must be of"),
    *((f'[[tier]]\nname = "{name}"', "name: it must be of printable characters")
      for name in ("a\\nb", "\\u001b[31m", "a\\u0000")),
    ('[[tier]]\nname = "a"\napi_keys_env = "UNHEARD"', "tier a: api_keys_env: the environment has no keys in UNHEARD")])
def test_a_file_is_refused_whole_with_one_line(tmp_path: Path, content: str, says: str) -> None:
    path = tmp_path / "tiers.toml"
    path.write_text(content)
    with pytest.raises(TiersError) as caught:
        load_tiers(str(path), 8, {"DAMAGED": "k,a\tb"})
    assert str(caught.value).isprintable()
    assert says in str(caught.value) and str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_a_file_becomes_what_the_engine_and_the_server_need(tmp_path: Path) -> None:
    path = Path(__file__).parents[2] / "examples" / "tiers.toml"
    interactive, standard, batch = load_tiers(str(path), 64, {"INTERACTIVE_KEYS": " a, b,,a"})
    assert interactive.api_keys == ("a", "b") and interactive.tier.slots == 16
    assert (interactive.tier.ttft, interactive.tier.tpot) == (1.0, 0.1) and batch.tier.weight == 1.0
    assert standard.settings.max_num_queued_reqs == 200 and not standard.api_keys
    assert load_tiers(str(path), 2, {"INTERACTIVE_KEYS": "a"})[0].tier.slots == 1  # a share is never nothing


def test_a_retired_field_is_accepted_and_said_to_have_no_effect(
        tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "tiers.toml"
    path.write_text('[[tier]]\nname = "a"\nmax_step_context = 300\n')
    with caplog.at_level("WARNING"):
        (served,) = load_tiers(str(path), 8, {})
    assert served.tier.name == "a"
    assert "tier a: max_step_context no longer has any effect" in caplog.text
