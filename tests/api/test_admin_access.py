"""Who may use the routes that change the server, where there is no key for them."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from api.test_containment import scenario
from support.live_server import JSON, running

from slotwise.api.asgi import App
from slotwise.api.generate import generate
from slotwise.api.http.api_errors import ApiError
from slotwise.api.limits.api_keys import ApiKeys
from slotwise.api.limits.browsers import is_local
from slotwise.engine.messages import Add
from slotwise.engine.sleep import Sleep

SCHEDULING = "/admin/scheduling"


def test_without_any_key_clients_on_this_machine_may(folder: Path, tmp_path: Path) -> None:
    with running(folder, tmp_path / "engine", "host=0.0.0.0", stderr=tmp_path / "log") as server:
        for method in ("GET", "PUT"):
            asks = {"content": "{}"} if method == "PUT" else {}
            answer = server.client.request(method, server.url + SCHEDULING, headers=JSON, **asks)
            assert answer.status_code == 200
            for header in ("X-Forwarded-For", "Forwarded", "X-Real-IP", "Via"):
                headers = JSON | {header: "10.0.0.1"}
                told = server.client.request(method, server.url + SCHEDULING, headers=headers, **asks)
                assert told.status_code == 403 and told.json()["error"]["code"] == "admin_key_needed"
                assert "--admin-api-key" in told.json()["error"]["message"]
        assert server.client.get(server.url + "/v1/models", headers={"Via": "1.1 proxy"}).status_code == 200
    (told,) = said_at_the_start(tmp_path / "log")
    assert "answer clients on this machine only: --admin-api-key" in told


def said_at_the_start(log: Path) -> list[str]:
    """Lines about who may use these routes."""
    return [line for line in log.read_text().splitlines() if "/v1/unload_lora_adapter" in line]


ADDRESSES = {
    "127.0.0.1": 200, "127.9.9.9": 200, "::1": 200, "::ffff:127.0.0.1": 200, "10.0.0.1": 403, "192.168.0.7": 403,
    "2001:db8::1": 403, "::ffff:10.0.0.1": 403, "fe80::1%eth0": 403, "": 403}


def test_a_client_of_another_machine_may_not(folder: Path) -> None:
    async def play(app: App, _: httpx.AsyncClient) -> None:
        for address, status in ADDRESSES.items():
            transport = httpx.ASGITransport(app, client=(address, 1))
            async with httpx.AsyncClient(transport=transport, base_url="http://toy") as client:
                assert (await client.get(SCHEDULING)).status_code == status, address
                assert (await client.put(SCHEDULING, json={})).status_code == status, address
                assert (await client.get("/version")).status_code == 200

    scenario(folder, play)


@pytest.mark.parametrize("is_local", [True, False])
def test_an_admin_key_is_asked_for_and_enough_anywhere(is_local: bool) -> None:
    for keys in (ApiKeys([], "root"), ApiKeys(["one"], "root")):
        assert keys.admin(b"Bearer root", is_local=is_local)
        for header, status in ((b"", 401), (b"Bearer two", 401), *([(b"Bearer one", 403)] if keys.needed else [])):
            with pytest.raises(ApiError) as refused:
                keys.admin(header, is_local=is_local)
            assert refused.value.status == status


def test_with_keys_and_no_admin_key_no_client_may(folder: Path, tmp_path: Path) -> None:
    with running(folder, tmp_path / "engine", "api_keys=one,two", stderr=tmp_path / "log") as server:
        for method in ("GET", "PUT"):
            for key, status in (("", 401), ("three", 401), ("one", 403), ("two", 403)):
                headers = JSON | ({"Authorization": f"Bearer {key}"} if key else {})
                told = server.client.request(method, server.url + SCHEDULING, headers=headers,
                                             content="{}" if method == "PUT" else None)
                assert told.status_code == status
        assert "--admin-api-key" in told.json()["error"]["message"]
        assert server.get("/admin/nowhere", Authorization="Bearer one").status_code == 403
    (line,) = said_at_the_start(tmp_path / "log")
    assert "answer no client" in line and "--admin-api-key" in line


def test_with_an_admin_key_the_log_says_nothing_of_it(folder: Path, tmp_path: Path) -> None:
    with running(folder, tmp_path / "engine", "admin_api_key=root", stderr=tmp_path / "log"):
        pass
    assert not said_at_the_start(tmp_path / "log") and "Started server process" in (tmp_path / "log").read_text()


@pytest.mark.parametrize(("address", "headers", "local"), [
    ("127.0.0.1", {}, True), ("127.0.0.1", {b"x-forwarded-for": b""}, False), ("localhost.example", {}, False),
    ("10.0.0.1", {b"x-forwarded-for": b"127.0.0.1"}, False), ("127.0.0.1", {b"x-real-ip": b"127.0.0.1"}, False)])
def test_what_comes_from_this_machine(address: str, headers: dict[bytes, bytes], local: bool) -> None:
    assert is_local(address, headers) == local


RESET, REMOTE = "/reset_prefix_cache", ("10.0.0.1", 1)


@pytest.mark.parametrize(("keys", "key", "answer"), [
    (ApiKeys([]), "", 403), (ApiKeys([], "root"), "", 401), (ApiKeys([], "root"), "root", "all"),
    (ApiKeys(["one"]), "", 401), (ApiKeys(["one"]), "two", 401), (ApiKeys(["one"]), "one", "own"),
    (ApiKeys(["one", "two"], "root"), "two", "own"), (ApiKeys(["one"], "root"), "root", "all")])
def test_each_key_may_reset_its_own_cached_prompts_and_the_admin_key_all(
        folder: Path, keys: ApiKeys, key: str, answer: int | str) -> None:
    async def play(app: App, _: httpx.AsyncClient) -> None:
        app.api.clients.keys, app.api.engine.sleep = keys, Sleep(app.api.engine.client, None)
        transport = httpx.ASGITransport(app, client=REMOTE)
        async with httpx.AsyncClient(transport=transport, base_url="http://toy") as client:
            told = await client.post(RESET, headers={"Authorization": f"Bearer {key}"} if key else {})
            assert (told.json()["tenant"] if told.status_code == 200 else told.status_code) == answer

    scenario(folder, play)


def test_a_request_that_a_reset_overtakes_belongs_to_the_time_after_it(
        folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine gets it behind the reset, so with the old generation its prompt would be found and stored again."""
    async def play(app: App, client: httpx.AsyncClient) -> None:
        sent, submit, session_of = [], app.api.engine.client.submit, generate.session_of
        sleep = app.api.engine.sleep = Sleep(app.api.engine.client, None)

        def submitted(request: Add) -> object:
            sent.append(request.spec.cache_generation)
            return submit(request)

        def overtaken(*arguments: object) -> str:
            sleep.reset_cache(None)
            return session_of(*arguments)

        monkeypatch.setattr(app.api.engine.client, "submit", submitted)
        monkeypatch.setattr(generate, "session_of", overtaken)
        await client.post("/v1/completions", json={"prompt": [1, 2], "max_tokens": 1})
        assert sent == [1]

    scenario(folder, play)
