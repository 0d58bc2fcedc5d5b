"""Several keys, several tenants: who may come in, and that nobody profits from what another has asked."""

from __future__ import annotations

import hmac
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.live_server import Server, running

from slotwise.api.app import ROUTES
from slotwise.api.asgi import App
from slotwise.api.http.api_errors import ApiError
from slotwise.api.limits import api_keys
from slotwise.api.limits.api_keys import ApiKeys

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
PROMPT = list(range(100, 200))  # six blocks of sixteen and some more
CACHED = 96
# Stated again: a path that is opened by mistake shows here.
OPEN = ("/", "/docs", "/health", "/links", "/ping", "/timeline")


def cached(server: Server, key: str = "", path: str = COMPLETIONS, **more: Any) -> int:
    body = {"messages": [{"role": "user", "content": "the quick brown fox " * 8}]} if path == CHAT else {
        "prompt": PROMPT}
    answer = server.post(path, body | {"max_tokens": 1} | more, **({"Authorization": f"Bearer {key}"} if key else {}))
    assert answer.status_code == 200, answer.text
    return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_tenants_never_share_what_is_cached(folder: Path, tmp_path: Path, path: str) -> None:
    with running(folder, tmp_path / "engine", "api_keys=one,two", "enable_prefix_caching=1") as server:
        assert cached(server, "one", path) == 0
        assert cached(server, "two", path) == 0
        assert cached(server, "one", path) >= 16 and cached(server, "two", path) >= 16


def test_a_salt_divides_a_tenant_and_joins_none(folder: Path, tmp_path: Path) -> None:
    with running(folder, tmp_path / "engine", "api_keys=one,two", "enable_prefix_caching=1") as server:
        assert [cached(server, "one", cache_salt=salt) for salt in "aab"] == [0, CACHED, 0]
        assert cached(server, "one") == 0 and cached(server, "two", cache_salt="a") == 0


def test_without_keys_all_share_but_for_their_salts(folder: Path, tmp_path: Path) -> None:
    with running(folder, tmp_path / "engine", "enable_prefix_caching=1") as server:
        assert [cached(server), cached(server), cached(server, "whoever")] == [0, CACHED, CACHED]
        assert [cached(server, cache_salt=salt) for salt in ("x", "x", ":x")] == [0, CACHED, 0]
        for salt in ("", "x" * 257, 5):
            refused = server.post(COMPLETIONS, {"prompt": [2], "cache_salt": salt})
            assert refused.status_code == 400 and refused.json()["error"]["param"] == "cache_salt"


def test_every_route_but_the_health_checks_needs_one_of_the_keys(folder: Path, tmp_path: Path) -> None:
    """And but the page: a browser cannot send a key with an address, and the page holds nothing that a key protects."""
    with running(folder, tmp_path / "engine", "api_keys=one,two") as server:
        for method, path, _ in [*ROUTES, ("GET", "/no/such/path", None)]:
            url = server.url + path.replace("{model:path}", "toy").replace("{request_id:path}", "nobody")
            for header in ("", "Bearer", "Bearer three", "Bearer on", "Bearer one,two", "one", "Basic one"):
                answer = server.client.request(method, url, headers={"Authorization": header} if header else {})
                assert answer.status_code == (200 if path in OPEN else 401), (method, path, header)
                assert path in OPEN or answer.headers["www-authenticate"] == "Bearer"
            for key in ("one", "two"):
                with server.client.stream(method, url, headers={"Authorization": f"Bearer {key}"}) as answer:
                    assert answer.status_code != 401, (method, path)


def test_the_routes_that_are_listed_are_those_that_answer() -> None:
    """So that enumerating them is enumerating all."""
    routes = App(SimpleNamespace(), ROUTES).router.routes
    answering = {(method, route.path) for route in routes for method in route.methods - {"HEAD"}}
    assert answering == {(method, path) for method, path, _ in ROUTES}


def test_a_name_is_no_key_and_changes_with_the_process() -> None:
    names = [ApiKeys(["secret", "other"]).tenant(b"Bearer secret") for _ in range(2)]
    assert names[0] != names[1] and all("secret" not in name and len(name) == 32 for name in names)
    assert ApiKeys([]).tenant(b"anything") == ""


def test_keys_of_all_bytes() -> None:
    ours = ApiKeys(["käse", "a b"])
    assert ours.tenant("Bearer käse".encode()) != ours.tenant(b"bearer  a b ")
    for header in (b"", b"Bearer \xff", b"Bearer " + "käse".encode("latin-1"), b"Bearer a"):
        with pytest.raises(ApiError) as caught:
            ours.tenant(header)
        assert caught.value.status == 401 and "käse" not in json.dumps(caught.value.message)


def test_a_key_is_compared_with_all_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[str, str]] = []

    class Watched:
        @staticmethod
        def compare_digest(one: str, other: str) -> bool:
            compared.append((one, other))
            return hmac.compare_digest(one, other)

    monkeypatch.setattr(api_keys, "hmac", Watched)
    ours = ApiKeys(["first", "second", "third"])
    for header in (b"Bearer first", b"Bearer third"):
        compared.clear()
        ours.tenant(header)
        assert len(compared) == 3 and len({len(one) for pair in compared for one in pair}) == 1
