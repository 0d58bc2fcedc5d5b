"""Pages of other sites, opened in a browser on the server's machine: by their headers, as browsers send them."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from support.live import cli
from support.live_server import JSON, Server, eventually, running

from slotwise.api.limits import server_settings as command
from slotwise.api.limits.browsers import is_loopback

COMPLETIONS = "/v1/completions"
BODY = json.dumps({"prompt": [2], "max_tokens": 1, "request_id": "cross-site"})
SETTINGS = ("allowed_hosts=tunnel.example", "allowed_origins=https://app.example:8443")


@pytest.fixture(scope="module")
def guarded(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(folder, tmp_path_factory.mktemp("log") / "engine", *SETTINGS) as started:
        yield started


def asked(server: Server, method: str = "POST", path: str = COMPLETIONS, body: str | None = BODY,
          **headers: str) -> httpx.Response:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return server.client.request(method, server.url + path, content=body, headers=named)


@pytest.mark.parametrize("host", [
    "localhost", "LOCALHOST:8000", "localhost.:80", "app.localhost:3000", "127.0.0.1", "127.8.9.1:8000", "[::1]:8000",
    "tunnel.example", "Tunnel.Example:443"])
def test_names_of_this_machine_are_answered(guarded: Server, host: str) -> None:
    assert asked(guarded, host=host, **JSON).status_code == 200


@pytest.mark.parametrize("host", [
    "attacker.example", "attacker.example:8000", "localhost.attacker.example", "127.0.0.1.attacker.example",
    "notlocalhost", "192.168.0.1", "[::2]:8000", "0x7f000001", "", "localhost:x", "a@localhost", "x" * 5000])
@pytest.mark.parametrize(("method", "path"), [("POST", COMPLETIONS), ("GET", "/events"), ("GET", "/nowhere")])
def test_a_name_that_was_rebound_to_this_machine_is_refused(
        guarded: Server, host: str, method: str, path: str) -> None:
    refused = asked(guarded, method, path, BODY if method == "POST" else None, host=host, **JSON)
    error = refused.json()["error"]
    assert refused.status_code == 403 and error["code"] == "host_not_allowed" and "--allowed-hosts" in error["message"]
    assert len(error["message"]) < 300


def test_a_client_without_a_host_is_no_browser(guarded: Server) -> None:
    host, port = guarded.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=120) as connection:
        connection.sendall(b"GET /health HTTP/1.0\r\n\r\n")
        assert connection.recv(1000).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("hosts", [("attacker.example", "localhost"), ("localhost", "localhost")])
def test_two_hosts_in_a_request_are_refused(guarded: Server, hosts: tuple[str, str]) -> None:
    host, port = guarded.url.removeprefix("http://").split(":")
    for path in ("/health", "/nowhere"):
        with socket.create_connection((host, int(port)), timeout=120) as connection:
            lines = [f"GET {path} HTTP/1.1", *[f"Host: {name}" for name in hosts], "Connection: close", "", ""]
            connection.sendall("\r\n".join(lines).encode())
            head, _, body = b"".join(iter(lambda: connection.recv(1000), b"")).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 400") and json.loads(body)["error"]["param"] == "Host"


@pytest.mark.parametrize("settings", [("api_keys=secret",), ("host=0.0.0.0",)])
def test_with_keys_or_beyond_loopback_any_host_is_answered(folder: Path, tmp_path: Path, settings: str) -> None:
    with running(folder, tmp_path / "engine", *settings) as server:
        answer = asked(server, host="models.example", Authorization="Bearer secret", **JSON)
        assert answer.status_code == 200


@pytest.mark.parametrize("path", ["/metrics", "/explain/1", "/v1/models", "/nowhere"])
def test_a_script_or_an_image_of_another_site_is_refused(guarded: Server, path: str) -> None:
    for mode in ({"Sec_Fetch_Mode": "no-cors", "Sec_Fetch_Dest": "script"}, {},
                 {"Sec_Fetch_Mode": "navigate", "Sec_Fetch_Dest": "iframe"}):
        refused = asked(guarded, "GET", path, None, Sec_Fetch_Site="cross-site", **mode)
        assert refused.status_code == 403 and refused.json()["error"]["code"] == "origin_not_allowed"
        assert "--allowed-origins" in refused.json()["error"]["message"]


@pytest.mark.parametrize("headers", [
    {}, {"Sec_Fetch_Site": "none", "Sec_Fetch_Mode": "navigate"},
    {"Sec_Fetch_Site": "same-origin", "Sec_Fetch_Mode": "cors"},
    {"Sec_Fetch_Site": "cross-site", "Sec_Fetch_Mode": "navigate", "Sec_Fetch_Dest": "document"},
    {"Sec_Fetch_Site": "cross-site", "Sec_Fetch_Mode": "cors", "origin": "https://app.example:8443"}])
def test_links_and_pages_that_are_allowed_are_answered(guarded: Server, headers: dict[str, str]) -> None:
    answer = asked(guarded, "GET", "/v1/models", None, **headers)
    assert answer.status_code == 200 and answer.headers["x-content-type-options"] == "nosniff"


def test_where_hosts_are_not_checked_an_image_of_another_site_is_answered(folder: Path, tmp_path: Path) -> None:
    for number, settings in enumerate((["allowed_hosts=*"], ["allowed_origins=*"])):
        with running(folder, tmp_path / f"engine{number}", *settings) as server:
            assert asked(server, "GET", "/v1/models", None, Sec_Fetch_Site="cross-site").status_code == 200
            if not number:
                assert asked(server, host="models.example", **JSON).status_code == 200


@pytest.mark.parametrize("host", ["127.1", "0177.0.0.1", "localhost"])
def test_the_bound_address_decides_whether_hosts_are_checked(folder: Path, tmp_path: Path, host: str) -> None:
    with running(folder, tmp_path / "engine", f"host={host}") as server:
        assert asked(server, host=host, **JSON).status_code == 200
        assert asked(server, host="attacker.example", **JSON).status_code == 403


@pytest.mark.parametrize("kind", [
    "text/plain", "text/plain;charset=UTF-8", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x",
    "application/jsonp", "text/plain; application/json", ""])
@pytest.mark.parametrize(("method", "path"), [
    ("POST", COMPLETIONS), ("POST", "/v1/chat/completions"), ("POST", "/tokenize"), ("POST", "/abort_requests"),
    ("POST", "/detokenize"), ("PUT", "/admin/scheduling")])
def test_a_body_must_be_said_to_be_json(guarded: Server, method: str, path: str, kind: str) -> None:
    refused = asked(guarded, method, path, **({"Content-Type": kind} if kind else {}))
    error = refused.json()["error"]
    assert refused.status_code == 415 and error["code"] == "json_needed" and "application/json" in error["message"]
    assert error["param"] == "Content-Type"


def test_parameters_of_json_do_not_matter(guarded: Server) -> None:
    for kind in ("application/json; charset=utf-8", "Application/JSON ;x=y"):
        assert asked(guarded, **{"Content-Type": kind}).status_code == 200


def test_a_page_of_another_site_does_nothing(guarded: Server) -> None:
    origins = ("https://attacker.example", "null", "http://localhost:1", "https://app.example", "x", "")
    for origin in origins:
        for method, path in (("POST", COMPLETIONS), ("GET", "/metrics"), ("OPTIONS", COMPLETIONS)):
            refused = asked(guarded, method, path, BODY if method == "POST" else None, origin=origin,
                            Access_Control_Request_Method="POST", **JSON)
            assert refused.status_code == 403 and refused.json()["error"]["code"] == "origin_not_allowed"
            assert "access-control-allow-origin" not in refused.headers
    eventually(lambda: guarded.get("/load").json()["server_load"] == 0)
    assert asked(guarded, "OPTIONS", body=None).status_code == 405, "only a preflight is answered"


def test_a_page_of_this_server_or_of_one_that_is_allowed(guarded: Server) -> None:
    own = asked(guarded, origin=guarded.url, **JSON)
    assert own.status_code == 200 and "access-control-allow-origin" not in own.headers
    other = "https://app.example:8443"
    asks = asked(guarded, "OPTIONS", body=None, origin=other, Access_Control_Request_Method="POST",
                 Access_Control_Request_Headers="content-type,authorization")
    assert asks.status_code == 200 and asks.headers["access-control-allow-origin"] == other
    assert "content-type" in asks.headers["access-control-allow-headers"]
    assert "POST" in asks.headers["access-control-allow-methods"]
    answer = asked(guarded, origin=other, **JSON)
    assert answer.status_code == 200 and answer.headers["access-control-allow-origin"] == other
    assert answer.headers["vary"] == "Origin"
    failed = asked(guarded, body="{", origin=other, **JSON)
    assert failed.status_code == 400 and failed.headers["access-control-allow-origin"] == other


@pytest.mark.parametrize(("name", "local"), [
    ("::1", True), ("::ffff:127.0.0.1", True), ("::ffff:10.0.0.1", False),
    ("[::1]", True), ("127.1.2.3", True), ("localhost", True), ("0.0.0.0", False), ("::", False),
    ("10.0.0.1", False), ("", False), ("localhost.example", False)])
def test_what_means_this_machine(name: str, local: bool) -> None:
    assert is_loopback(name) == local


def test_options_that_name_hosts_and_origins() -> None:
    assert command.read_host_names("a.example") == ["a.example"] and command.read_host_names("[::1]") == ["[::1]"]
    assert command.read_host_names('["a", "*"]') == ["a", "*"]
    assert command.read_origins('["null", "https://a.example:1"]') == ["null", "https://a.example:1"]
    for option, value in (("--allowed-hosts", "a:80"), ("--allowed-hosts", "[1]"), ("--allowed-origins", "a.example"),
                          ("--allowed-origins", "https://a/b"), ("--allowed-origins", "[1]")):
        done = cli("serve", option, value)
        assert done.returncode == 2 and option in done.stderr and "Traceback" not in done.stderr
