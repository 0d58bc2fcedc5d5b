"""A key's quota: what is left of it, what its holder is told, and that nobody else is bound by it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import pytest
from support.live_server import ENDLESS, ENDLESS_CONTEXT, Server, eventually, running, unanswered

from slotwise.api.http.api_errors import ApiError
from slotwise.api.limits.quotas import Quota, Quotas, duration
from slotwise.core.scheduler_limits import SchedulerLimits
from slotwise.engine.admission_control import AdmissionControl

COMPLETIONS, CHAT, SCHEDULING = "/v1/completions", "/v1/chat/completions", "/admin/scheduling"
SECOND = 10**9
LIMITS = SchedulerLimits(max_model_len=100, num_blocks=25, block_size=4)

# -- by themselves, on a clock of their own ----------------------------------------------------------------------------


class Bank:
    """Quotas, their clock, and what was refused."""

    def __init__(self, **quotas: Quota) -> None:
        self.now = SECOND
        self.of = quotas
        self.refused: list[str] = []
        self.quotas = Quotas(lambda tenant: self.of.get(tenant, Quota()), AdmissionControl(LIMITS), self.refused.append,
                             lambda: self.now)

    def ask(self, tenant: str, most: int = 0, used: int = 0) -> None:
        account = self.quotas.account(tenant)
        self.quotas.count_request(account)
        with self.quotas.reserved(account, most, lambda: used):
            pass

    def told(self, tenant: str) -> dict[str, str]:
        return {name.decode().removeprefix("x-ratelimit-"): value.decode()
                for name, value in self.quotas.account(tenant).headers()}


def test_requests_of_a_minute() -> None:
    bank = Bank(ann=Quota(requests_per_minute=3))
    assert bank.told("ann") == {"limit-requests": "3", "remaining-requests": "3", "reset-requests": "0ms"}
    for _ in range(3):
        bank.ask("ann")
    assert bank.told("ann") == {"limit-requests": "3", "remaining-requests": "0", "reset-requests": "1m0s"}
    bank.now += 5 * SECOND
    with pytest.raises(ApiError) as caught:
        bank.ask("ann")
    assert caught.value.status == 429 and caught.value.retry_after == 15 and bank.refused == ["quota_requests"]
    assert "3 requests a minute" in caught.value.message and "15s" in caught.value.message
    bank.now += 15 * SECOND
    bank.ask("ann")
    for _ in range(100):
        bank.ask("bob")
    assert bank.told("bob") == {} and len(bank.quotas._accounts) == 1  # who has no quota is not kept


def test_tokens_are_held_until_it_is_known_how_many_were_used() -> None:
    bank = Bank(ann=Quota(tokens_per_minute=600))
    account = bank.quotas.account("ann")
    with bank.quotas.reserved(account, 500, lambda: 20):
        assert bank.told("ann")["remaining-tokens"] == "100"
        with pytest.raises(ApiError) as caught:
            bank.ask("ann", 150)
        assert caught.value.status == 429 and caught.value.retry_after == 5 and bank.refused == ["quota_tokens"]
        assert "has 100 left; this request may need 150; please try again in 5s" in caught.value.message
        bank.ask("ann", 100, used=100)
    assert bank.told("ann") == {"limit-tokens": "600", "remaining-tokens": "480", "reset-tokens": "12s"}
    with pytest.raises(ZeroDivisionError), bank.quotas.reserved(account, 480, lambda: 0):
        raise ZeroDivisionError
    assert bank.told("ann")["remaining-tokens"] == "480"


def test_what_can_never_fit_is_a_mistake_and_not_a_matter_of_time() -> None:
    bank = Bank(ann=Quota(tokens_per_minute=600))
    with pytest.raises(ApiError) as caught:
        bank.ask("ann", 601)
    assert caught.value.status == 400 and caught.value.code == "quota_too_small"
    assert "600" in caught.value.message and "601" in caught.value.message and bank.refused == ["quota_tokens"]
    assert bank.told("ann")["remaining-tokens"] == "600"


def test_another_quota_is_in_force_at_once_and_keeps_what_is_left() -> None:
    bank = Bank(ann=Quota(10, 1000))
    bank.ask("ann", 900, used=900)
    bank.of["ann"] = Quota(20, 50)
    told = bank.told("ann")
    assert (told["limit-requests"], told["remaining-requests"]) == ("20", "9")
    assert (told["limit-tokens"], told["remaining-tokens"]) == ("50", "50")
    bank.of["ann"] = Quota(20)
    assert "limit-tokens" not in bank.told("ann")
    bank.ask("ann", 10**9, used=10**9)
    bank.of["ann"] = Quota(20, 70)
    assert bank.told("ann")["remaining-tokens"] == "70"


def test_a_quota_that_changes_under_a_request_takes_back_no_more_than_it_holds() -> None:
    bank = Bank(ann=Quota(tokens_per_minute=1000))
    account = bank.quotas.account("ann")
    with bank.quotas.reserved(account, 900, lambda: 0):
        bank.of["ann"] = Quota(tokens_per_minute=300)
        assert bank.told("ann")["remaining-tokens"] == "100"
    assert bank.told("ann")["remaining-tokens"] == "300"


@pytest.mark.parametrize(("room", "num_prompt", "num_choices"), [(590, 10, 1), (147, 10, 4), (1, 599, 2), (1, 900, 1)])
def test_the_room_beside_a_prompt(room: int, num_prompt: int, num_choices: int) -> None:
    bank = Bank(ann=Quota(tokens_per_minute=600))
    assert bank.quotas.account("ann").output_capacity(num_prompt, num_choices) == room
    assert bank.quotas.account("bob").output_capacity(num_prompt, num_choices) is None


@pytest.mark.parametrize(("nanoseconds", "text"), [
    (0, "0ms"), (1, "1ms"), (20_000_000, "20ms"), (999_000_001, "1s"), (1_500_000_000, "1.5s"),
    (59_999_000_000, "59.999s"), (59_999_900_000, "1m0s"), (60 * SECOND, "1m0s")])
def test_times_as_openai_writes_them(nanoseconds: int, text: str) -> None:
    assert duration(nanoseconds) == text


# -- in a real server --------------------------------------------------------------------------------------------------

FILE = """
[[tier]]
name = "gold"
api_keys = ["free"]

[[tier]]
name = "silver"
requests_per_minute = 5
api_keys = ["few", "other"]

[[tier]]
name = "tin"
requests_per_minute = 2
api_keys = ["texts"]

[[tier]]
name = "bronze"
tokens_per_minute = 6000
api_keys = ["short", "used", "fresh", "patient"]

[[tier]]
name = "copper"
tokens_per_minute = 600
api_keys = ["gone"]

[[tier]]
name = "iron"
max_num_queued_reqs_per_key = 2
"""
SLOTS = 12


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    path = tmp_path_factory.mktemp("log")
    (path / "tiers.toml").write_text(FILE)
    with running(folder, path / "engine", "seconds_per_step=0.01", f"max_num_seqs={SLOTS}", f"tiers={path}/tiers.toml",
                 ENDLESS_CONTEXT, "api_keys=plain,second", "admin_api_key=root") as started:
        yield started


def ask(server: Server, key: str, path: str = COMPLETIONS, **more: Any) -> httpx.Response:
    what = {"messages": [{"role": "user", "content": "x"}]} if path == CHAT else {"prompt": [40]}
    return server.post(path, what | {"max_tokens": 1} | more, Authorization=f"Bearer {key}")


def metric(server: Server, name: str) -> float:
    for line in server.get("/metrics", Authorization="Bearer root").text.splitlines():
        if line.startswith(f"slotwise:{name}"):
            return float(line.rpartition(" ")[2])
    return 0.0


@pytest.fixture
def client(server: Server, openai: ModuleType) -> Callable[[str], Any]:
    """Of a key, one that does not try again."""
    return lambda key: openai.OpenAI(base_url=server.url + "/v1", api_key=key, max_retries=0)


def rejections(server: Server, reason: str) -> float:
    return metric(server, f'admission_rejections_total{{model_name="toy",reason="{reason}"}}')


def test_a_key_may_send_so_many_requests_a_minute_and_others_are_not_bound(
        server: Server, openai: ModuleType, client: Callable[[str], Any]) -> None:
    before, begun, count = rejections(server, "quota_requests"), time.monotonic(), 0
    with pytest.raises(openai.RateLimitError) as caught:
        while count < 1000:
            client("few").completions.create(model="toy", prompt=[40], max_tokens=1)
            count += 1
    assert 5 <= count <= 5 + (time.monotonic() - begun) * 5 / 60
    error, headers = caught.value.body, caught.value.response.headers
    assert error["type"] == "rate_limit_error" and error["code"] == "rate_limit_exceeded"
    assert "5 requests a minute" in error["message"]
    assert 1 <= int(headers["retry-after"]) <= 12
    assert headers["x-ratelimit-limit-requests"] == "5" and headers["x-ratelimit-remaining-requests"] == "0"
    assert headers["x-ratelimit-reset-requests"].endswith("s") and "x-ratelimit-limit-tokens" not in headers
    assert rejections(server, "quota_requests") == before + 1
    assert ask(server, "other").headers["x-ratelimit-remaining-requests"] == "4", "of the same tier, another key"
    for key in ("free", "root"):
        answers = [ask(server, key, service_tier="silver") for _ in range(7)]
        assert {answer.status_code for answer in answers} == {200}, "a quota is a key's, by its own tier"
        assert not any(name.startswith("x-ratelimit") for name in answers[0].headers)


def test_a_key_without_requests_is_told_before_its_body_is_read(server: Server) -> None:
    eventually(lambda: ask(server, "few").status_code == 429)
    for path in (COMPLETIONS, CHAT, "/tokenize", "/detokenize"):
        refused = server.post(path, b"{", Authorization="Bearer few")
        assert refused.status_code == 429 and refused.headers["x-ratelimit-remaining-requests"] == "0"


def test_tokenizing_counts_as_requests(server: Server) -> None:
    for path, body, left in (("/tokenize", {"prompt": "x"}, "1"), ("/detokenize", {"tokens": [40]}, "0")):
        answer = server.post(path, body, Authorization="Bearer texts")
        assert answer.status_code == 200 and answer.headers["x-ratelimit-remaining-requests"] == left
    assert ask(server, "texts").status_code == 429


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_what_was_not_generated_comes_back(server: Server, path: str, stream: bool) -> None:
    """Ten times 490 tokens and more are asked for of 6000 a minute, and a few used."""
    for _ in range(10):
        answer = ask(server, "used", path, max_tokens=490, bench_output_tokens=3, stream=stream)
        assert answer.status_code == 200, answer.text
    assert answer.headers["x-ratelimit-limit-tokens"] == "6000"
    assert 4000 < int(answer.headers["x-ratelimit-remaining-tokens"]) < 6000


def test_tokens_that_are_held_are_not_there_and_the_client_waits_for_them(
        server: Server, openai: ModuleType, client: Callable[[str], Any]) -> None:
    """Twelve choices hold 5,881 of 6,000 tokens for as long as they run; a hundred flow in every second."""
    before, short = rejections(server, "quota_tokens"), client("short")
    with ThreadPoolExecutor(1) as pool:
        busy = pool.submit(ask, server, "short", n=SLOTS, max_tokens=490, ignore_eos=True)
        eventually(lambda: metric(server, "num_requests_running") == SLOTS)
        with pytest.raises(openai.RateLimitError, match="6000 tokens a minute") as caught:
            short.completions.create(model="toy", prompt=[40], n=SLOTS - 1, max_tokens=490)
        assert 1 <= int(caught.value.response.headers["retry-after"]) <= 60
        assert int(caught.value.response.headers["x-ratelimit-remaining-tokens"]) < (SLOTS - 1) * 490
        assert rejections(server, "quota_tokens") == before + 1
        assert busy.result().status_code == 200


def test_a_client_that_honors_the_header_gets_its_answer(
        server: Server, openai: ModuleType) -> None:
    statuses: list[int] = []
    with httpx.Client(event_hooks={"response": [lambda response: statuses.append(response.status_code)]}) as http, \
            ThreadPoolExecutor(1) as pool:
        patient = openai.OpenAI(base_url=server.url + "/v1", api_key="patient", max_retries=20, http_client=http)
        busy = pool.submit(ask, server, "patient", n=SLOTS, max_tokens=480, ignore_eos=True)
        eventually(lambda: metric(server, "num_requests_running") == SLOTS)
        answer = patient.completions.create(model="toy", prompt=[40], n=2, max_tokens=490,
                                            extra_body={"bench_output_tokens": 2})
        assert answer.usage is not None and answer.usage.completion_tokens == 2 * 2
        assert busy.result().status_code == 200
    assert statuses[-1] == 200 and 429 in statuses


def test_whoever_hangs_up_pays_for_what_was_computed(server: Server) -> None:
    before = metric(server, "generation_tokens_total")
    body = {"prompt": [40], "max_tokens": 490, "ignore_eos": True}
    with unanswered(server, COMPLETIONS, body, Authorization="Bearer gone"):
        eventually(lambda: metric(server, "generation_tokens_total") >= before + 40)
    eventually(lambda: metric(server, "num_requests_running") == 0)
    answer = ask(server, "gone", max_tokens=1)
    assert 600 - 491 < int(answer.headers["x-ratelimit-remaining-tokens"]) < 600


def test_what_can_never_fit_a_quota_is_refused_for_good_and_what_is_not_asked_for_is_made_to_fit(
        server: Server) -> None:
    refused = ask(server, "short", n=13, max_tokens=490)
    error = refused.json()["error"]
    assert refused.status_code == 400 and error["code"] == "quota_too_small" and error["param"] == "max_tokens"
    assert "6000 tokens a minute" in error["message"] and "6371" in error["message"]
    body = {"messages": [{"role": "user", "content": "x"}], "n": 20, "bench_output_tokens": 2}
    answer = server.post(CHAT, body, Authorization="Bearer fresh")
    assert answer.status_code == 200 and len(answer.json()["choices"]) == 20, answer.text


def test_so_many_of_a_key_may_wait(
        server: Server, openai: ModuleType, client: Callable[[str], Any]) -> None:
    """Whoever has all slots keeps its own queue short, and another key's stays open."""
    names = ["full", "wait-0", "wait-1"]

    def occupy(name: str, count: int) -> None:
        with httpx.Client(timeout=120) as one:
            one.post(server.url + COMPLETIONS, headers={"Authorization": "Bearer plain"},
                     json=ENDLESS | {"n": count, "request_id": name})

    threads = [threading.Thread(target=occupy, args=(name, SLOTS if name == "full" else 1)) for name in names]
    try:
        for thread, waiting in zip(threads, (0, 1, 2), strict=True):
            thread.start()
            eventually(lambda waiting=waiting: (metric(server, "num_requests_running"),
                                                metric(server, "num_requests_waiting")) == (SLOTS, waiting))
        with pytest.raises(openai.RateLimitError, match="this key's queue is full: 2 requests wait") as caught:
            client("plain").completions.create(model="toy", prompt=[40], max_tokens=1)
        assert 1 <= int(caught.value.response.headers["retry-after"]) <= 60
        assert ask(server, "plain", service_tier="iron").status_code == 429
        assert rejections(server, "quota_queue") == 2
        several = ask(server, "second", n=3, queue_timeout=0.1)
        assert several.status_code == 504, "none of it waits yet: it may"
    finally:
        server.post("/abort_requests", {"request_ids": names}, Authorization="Bearer plain")
        for thread in threads:
            thread.join()


def test_quotas_change_while_the_server_runs(server: Server) -> None:
    def put(tiers: Any) -> httpx.Response:
        return server.client.put(
            server.url + SCHEDULING, json={"tiers": tiers}, headers={"Authorization": "Bearer root"})

    before = server.get(SCHEDULING, Authorization="Bearer root").json()["tiers"]
    gold, silver, *others = before
    try:
        eventually(lambda: ask(server, "few").status_code == 429)
        assert put([gold, silver | {"requests_per_minute": 50}, *others]).status_code == 200
        told = ask(server, "few").headers
        assert told["x-ratelimit-limit-requests"] == "50" and int(told["x-ratelimit-remaining-requests"]) < 40
        assert put([gold, silver | {"requests_per_minute": None}, *others]).status_code == 200
        answer = ask(server, "few")
        assert answer.status_code == 200 and "x-ratelimit-limit-requests" not in answer.headers
        assert put([gold | {"requests_per_minute": 7}, *before[1:]]).json()["tiers"][0]["requests_per_minute"] == 7
        assert ask(server, "free").headers["x-ratelimit-remaining-requests"] == "6"
        assert "x-ratelimit-limit-requests" not in ask(server, "root").headers
    finally:
        assert put(before).status_code == 200


def test_where_nobody_has_keys_a_quota_is_refused(folder: Path, tmp_path: Path) -> None:
    with running(folder, tmp_path / "engine") as server:
        answer = server.client.put(server.url + SCHEDULING, json={"tiers": [{"name": "a", "requests_per_minute": 1}]})
        assert answer.status_code == 400 and "a quota is a key's, and the server has no keys" in answer.text
        assert server.get(SCHEDULING).json()["tiers"] == []
        assert [server.post(COMPLETIONS, {"prompt": [40], "max_tokens": 1, "user": "a"}).status_code
                for _ in range(3)] == [200] * 3
