"""What pages of chosen sites may send, and what their browsers are told."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from support.live_server import JSON, Server, running

from slotwise.api.limits.server_settings import ServerSettings
from slotwise.cli import build_parser
from slotwise.cli.options_of_settings import given_settings
from slotwise.core.setting_fields import make

SITE, OTHER = "https://app.example", "https://attacker.example"
BODY = json.dumps({"prompt": [2], "max_tokens": 1})
SETTINGS = (f"allowed_origins={SITE}", "allowed_methods=GET,POST", "allowed_headers=content-type,x-mine",
            "allow_credentials=1")


@pytest.fixture(scope="module")
def chosen(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(folder, tmp_path_factory.mktemp("log") / "engine", *SETTINGS) as started:
        yield started


@pytest.fixture(scope="module")
def free(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(folder, tmp_path_factory.mktemp("log") / "engine", "allowed_origins=*") as started:
        yield started


def sent(server: Server, method: str, path: str, origin: str) -> httpx.Response:
    body = BODY if method == "POST" else "{}" if method == "PUT" else None
    return server.client.request(method, server.url + path, content=body, headers=JSON | {"Origin": origin})


def preflight(server: Server, origin: str, method: str = "POST", headers: str = "") -> httpx.Response:
    asks = {"Origin": origin, "Access-Control-Request-Method": method}
    if headers:
        asks["Access-Control-Request-Headers"] = headers
    return server.client.options(server.url + "/v1/completions", headers=asks)


def test_a_site_that_is_allowed_may_post_and_others_may_not(chosen: Server) -> None:
    answer = sent(chosen, "POST", "/v1/completions", SITE)
    assert answer.status_code == 200 and answer.headers["access-control-allow-origin"] == SITE
    assert answer.headers["access-control-allow-credentials"] == "true" and answer.headers["vary"] == "Origin"
    refused = sent(chosen, "POST", "/v1/completions", OTHER)
    assert refused.status_code == 403 and refused.json()["error"]["code"] == "origin_not_allowed"
    assert not [name for name in refused.headers if name.startswith("access-control")]


def test_a_site_may_use_its_methods_and_no_others(chosen: Server) -> None:
    assert sent(chosen, "GET", "/v1/models", SITE).status_code == 200
    refused = sent(chosen, "PUT", "/admin/scheduling", SITE)
    error = refused.json()["error"]
    assert refused.status_code == 403 and error["code"] == "method_not_allowed" and "--allowed-methods" in error[
        "message"]
    assert sent(chosen, "PUT", "/admin/scheduling", chosen.url).status_code == 200, "a page of this server may"


def test_a_preflight_names_what_is_allowed(chosen: Server) -> None:
    answer = preflight(chosen, SITE, headers="x-mine, authorization")
    assert answer.status_code == 200 and not answer.content
    assert answer.headers["access-control-allow-origin"] == SITE
    assert answer.headers["access-control-allow-methods"] == "GET, POST"
    assert answer.headers["access-control-allow-headers"] == "content-type, x-mine"
    assert answer.headers["access-control-allow-credentials"] == "true"
    assert int(answer.headers["access-control-max-age"]) > 0
    assert preflight(chosen, OTHER).status_code == 403


def test_without_further_options_a_site_may_send_anything(free: Server) -> None:
    answer = preflight(free, OTHER, "PUT", "x-stainless-lang,authorization")
    assert answer.status_code == 200 and answer.headers["access-control-allow-origin"] == OTHER
    assert answer.headers["access-control-allow-headers"] == "x-stainless-lang,authorization"
    assert "PUT" in answer.headers["access-control-allow-methods"]
    assert "access-control-allow-credentials" not in answer.headers
    assert sent(free, "PUT", "/admin/scheduling", OTHER).status_code == 200
    for odd in ("a(b", "x" * 5000, "a;b"):
        answer = preflight(free, OTHER, headers=odd)
        assert answer.status_code == 200 and "access-control-allow-headers" not in answer.headers


def settings(*arguments: str) -> ServerSettings:
    found = given_settings(build_parser("serve").parse_args(["serve", *arguments]), ServerSettings)
    return make(ServerSettings, found | {"served_model_name": "m"})


def test_options_are_lists_as_vllm_has_them() -> None:
    found = settings("--allowed-origins", f'["{SITE}", "{OTHER}"]', "--allowed-methods", '["GET", "POST"]',
                     "--allowed-headers", "x-a", "--allowed-headers", '["x-b"]', "--allow-credentials")
    assert found.allowed_origins == (SITE, OTHER) and found.allowed_methods == ("GET", "POST")
    assert found.allowed_headers == ("x-a", "x-b") and found.allow_credentials is True
    assert settings().allowed_methods == settings().allowed_headers == ("*",)


@pytest.mark.parametrize(("arguments", "told"), [
    (("--allow-credentials",), "allow_credentials is about pages of other sites"),
    (("--allowed-methods", "GET"), "allowed_methods is about pages of other sites"),
    (("--allowed-headers", "x"), "name them with allowed_origins"),
    (("--allow-credentials", "--allowed-origins", "*"), "needs the sites by name"),
    (("--allow-credentials", "--allowed-origins", f'["{SITE}", "null"]'), "needs the sites by name")])
def test_what_would_be_ignored_or_open_to_all_is_refused(arguments: tuple[str, ...], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        settings(*arguments)


@pytest.mark.parametrize(("option", "value"), [
    ("--allowed-methods", "get"), ("--allowed-methods", '["GET, POST"]'), ("--allowed-headers", "a b"),
    ("--allowed-headers", '["a:b"]'), ("--root-path", "llm"), ("--root-path", "/"), ("--root-path", "/a?b"),
    ("--root-path", "//a")])
def test_what_is_no_method_header_or_path_is_refused(
        capsys: pytest.CaptureFixture[str], option: str, value: str) -> None:
    with pytest.raises(SystemExit):
        settings(option, value)
    assert f"argument {option}: must be" in capsys.readouterr().err
