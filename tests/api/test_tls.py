"""HTTPS: certificates of the server and of clients, handshakes that do not end, and what is wrong with files."""

from __future__ import annotations

import json
import os
import resource
import socket
import ssl
from collections.abc import Iterator
from contextlib import ExitStack
from functools import cached_property, partial
from pathlib import Path

import httpx
import pytest
import trustme
from cryptography.hazmat.primitives import serialization
from support.live import cli, serving
from support.live_server import ENDLESS, ENDLESS_CONTEXT, JSON, Server, eventually, running

from slotwise.api.http.listener import context_of
from slotwise.api.limits.server_settings import ServerSettings
from slotwise.cli import build_parser
from slotwise.cli.options_of_settings import given_settings
from slotwise.core.setting_fields import make

BODY = {"prompt": [2], "max_tokens": 2}
FILES = 256
few_files = partial(resource.setrlimit, resource.RLIMIT_NOFILE, (FILES // 2, FILES))
CLIENT_HELLO = b"\x16\x03\x01\x02\x00\x01"  # how one begins


class Authority:
    """A certificate authority, a certificate of the server, and their files."""

    def __init__(self, folder: Path) -> None:
        self.ca, self.folder = trustme.CA(), folder
        self.cert = self.ca.issue_cert("127.0.0.1", "localhost")
        self.certfile, self.keyfile, self.ca_certs = folder / "cert.pem", folder / "key.pem", folder / "ca.pem"
        self.cert.private_key_pem.write_to_path(self.keyfile)
        self.ca.cert_pem.write_to_path(self.ca_certs)
        for pem in self.cert.cert_chain_pems:
            pem.write_to_path(self.certfile, append=True)

    @property
    def settings(self) -> tuple[str, ...]:
        return f"ssl_certfile={self.certfile}", f"ssl_keyfile={self.keyfile}"

    @cached_property
    def plain(self) -> ssl.SSLContext:
        """The context of a client without a certificate, made once: that takes longer than a handshake."""
        return self.context()

    def context(self, client: trustme.LeafCert | None = None) -> ssl.SSLContext:
        """A client's."""
        context = ssl.create_default_context()
        self.ca.configure_trust(context)
        if client is not None:
            client.configure_cert(context)
        return context


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("pem"))


@pytest.fixture(scope="module")
def secure(folder: Path, authority: Authority, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("log") / "engine"
    with running(folder, log, *authority.settings, "seconds_per_step=0.005", ENDLESS_CONTEXT) as started:
        started.client = httpx.Client(timeout=120, verify=authority.plain)
        yield started


def connect(server: Server, source: str = "127.0.0.1") -> socket.socket:
    """A connection without TLS."""
    host, port = server.url.removeprefix("https://").split(":")
    return socket.create_connection((host, int(port)), timeout=120, source_address=(source, 0))


def wrapped(server: Server, authority: Authority) -> ssl.SSLSocket:
    return authority.plain.wrap_socket(connect(server), server_hostname="127.0.0.1")


def posted(body: dict[str, object]) -> bytes:
    content = json.dumps(body).encode()
    return (b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n" % len(content)) + content


def test_requests_streams_and_large_bodies_over_tls(secure: Server) -> None:
    assert secure.url.startswith("https://")
    assert secure.post("/v1/completions", BODY).json()["usage"]["completion_tokens"] == 2
    assert secure.events("/v1/completions", BODY | {"max_tokens": 20})[-1]["choices"][0]["finish_reason"] == "length"
    assert secure.post("/v1/completions", BODY | {"unknown": "x" * (3 << 20)}).status_code == 200
    assert secure.get("/timeline").status_code == 200 and secure.get("/nowhere").status_code == 404
    assert b"plan" in secure.get("/events?follow=0").content


def test_tls_begins_as_http_1_1_and_no_older_than_1_2(secure: Server, authority: Authority) -> None:
    context = authority.context()
    context.set_alpn_protocols(["h2", "http/1.1"])
    with context.wrap_socket(connect(secure), server_hostname="127.0.0.1") as connection:
        assert connection.selected_alpn_protocol() == "http/1.1" and connection.version() in ("TLSv1.2", "TLSv1.3")
    assert context_of(str(authority.certfile), str(authority.keyfile)).minimum_version == ssl.TLSVersion.TLSv1_2


def test_requests_behind_one_that_is_answered(secure: Server, authority: Authority) -> None:
    with wrapped(secure, authority) as connection:
        connection.sendall(posted(BODY) * 3 + b"GET /nowhere HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        told = b"".join(iter(lambda: connection.recv(1 << 16), b""))
    assert told.count(b"HTTP/1.1 200") == 3 and told.count(b"HTTP/1.1 404") == 1


@pytest.mark.parametrize("leaves", ["close", "unwrap"])
def test_a_client_that_leaves_a_stream_is_noticed(secure: Server, authority: Authority, leaves: str) -> None:
    connection = wrapped(secure, authority)
    connection.sendall(posted(ENDLESS | {"stream": True}))
    assert connection.recv(1000).startswith(b"HTTP/1.1 200")
    eventually(lambda: secure.get("/health").json()["num_live"] == 1)
    if leaves == "unwrap":  # says that it sends no more, and reads on
        connection.settimeout(120)
        with pytest.raises((OSError, ValueError)):
            connection.unwrap()
            connection.recv(1)
    connection.close()
    eventually(lambda: secure.get("/health").json()["num_live"] == 0)


def test_what_is_not_tls_is_closed_and_is_one_warning(
        folder: Path, tmp_path: Path, authority: Authority, capfd: pytest.CaptureFixture[str]) -> None:
    with running(folder, tmp_path / "engine", *authority.settings) as server:
        server.client = httpx.Client(timeout=120, verify=authority.plain)
        for _ in range(5):
            with connect(server) as connection:
                connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
                assert b"HTTP/1.1" not in b"".join(iter(lambda: received(connection), b""))
        assert server.get("/health").status_code == 200
    logged = capfd.readouterr().err
    assert logged.count("a connection could not begin") == 1 and "Traceback" not in logged


def received(connection: socket.socket) -> bytes:
    try:
        return connection.recv(1000)
    except ConnectionResetError:
        return b""


def test_a_client_needs_a_certificate_where_there_are_authorities(
        folder: Path, tmp_path: Path, authority: Authority) -> None:
    with running(folder, tmp_path / "engine", *authority.settings, f"ssl_ca_certs={authority.ca_certs}") as server:
        for client in (None, trustme.CA().issue_cert("client.example")):
            with httpx.Client(verify=authority.context(client), timeout=120) as asks, \
                    pytest.raises(httpx.TransportError):
                asks.get(f"{server.url}/health")
        with httpx.Client(verify=authority.context(authority.ca.issue_cert("client.example")), timeout=120) as asks:
            assert asks.post(f"{server.url}/v1/completions", json=BODY, headers=JSON).status_code == 200


def answered(server: Server, authority: Authority, path: str, source: str) -> int:
    """The status of an answer over a connection of its own; 0 without one."""
    transport = httpx.HTTPTransport(local_address=source, verify=authority.plain)
    with httpx.Client(transport=transport, timeout=120) as client:
        try:
            return client.get(server.url + path).status_code
        except httpx.TransportError:
            return 0


@pytest.mark.slow
def test_handshakes_that_do_not_end_shut_no_client_out(
        folder: Path, tmp_path: Path, authority: Authority, capfd: pytest.CaptureFixture[str]) -> None:
    with running(folder, tmp_path / "engine", *authority.settings, "header_timeout=12", before=few_files) as server, \
            ExitStack() as stack:
        silent = [stack.enter_context(connect(server)) for _ in range(FILES + 40)]
        for connection in silent[::2]:
            connection.sendall(CLIENT_HELLO)
        assert answered(server, authority, "/version", "127.0.0.2") == 200, "the crowd is one client's"
        eventually(lambda: answered(server, authority, "/health", "127.0.0.1") == 200)
        assert len(os.listdir(f"/proc/{server.process.pid}/fd")) < FILES
        for connection in silent:
            assert received(connection) == b""
        assert answered(server, authority, "/version", "127.0.0.1") == 200
    logged = capfd.readouterr().err
    assert "too many connections" in logged and "Traceback" not in logged


def test_a_server_ends_while_handshakes_wait(folder: Path, tmp_path: Path, authority: Authority) -> None:
    with running(folder, tmp_path / "engine", *authority.settings, "header_timeout=1000") as server, \
            connect(server) as silent:
        silent.sendall(CLIENT_HELLO)
        assert answered(server, authority, "/health", "127.0.0.1") == 200
        server.process.terminate()
        assert received(silent) == b""
        assert server.process.wait(120) == 0


@pytest.mark.slow
def test_places_are_free_again_after_handshakes_that_succeed_or_fail(
        folder: Path, tmp_path: Path, authority: Authority) -> None:
    """One after the other there are more connections of each kind than the server has places."""
    with running(folder, tmp_path / "engine", *authority.settings, before=few_files) as server:
        for _ in range(FILES // 2 + 32):
            with connect(server) as connection:
                connection.sendall(b"no such thing\r\n")
                assert b"HTTP" not in received(connection)
            with wrapped(server, authority) as connection:
                connection.sendall(b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n")
                assert b"200 OK" in connection.recv(1000)


def encrypted(authority: Authority) -> bytes:
    key = serialization.load_pem_private_key(authority.keyfile.read_bytes(), None)
    return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8,
                             serialization.BestAvailableEncryption(b"secret"))


def test_files_that_cannot_be_used_are_one_line(authority: Authority, tmp_path: Path) -> None:
    cert, key, ours = str(authority.certfile), str(authority.keyfile), tmp_path / "file.pem"
    faults: tuple[tuple[bytes | None, str], ...] = (
        (None, "No such file"), (b"", "no certificate in PEM"), (b"\x00garbage", "no certificate in PEM"),
        (trustme.CA().issue_cert("a.example").private_key_pem.bytes(), "no certificate in PEM with the private key"),
        (encrypted(authority), "the private key is encrypted"))
    for content, told in faults:
        if content is not None:
            ours.write_bytes(content)
        with pytest.raises(ValueError, match=told) as wrong:
            context_of(cert, str(ours))
        assert "\n" not in str(wrong.value) and "--ssl-keyfile" in str(wrong.value)
    ours.write_bytes(b"garbage")
    for files, option in (((str(ours), key), "--ssl-certfile"), ((cert, key, str(ours)), "--ssl-ca-certs")):
        with pytest.raises(ValueError, match=option):
            context_of(*files)
    with ours.open("wb") as large:
        large.truncate(1 << 40)
    with pytest.raises(ValueError, match="larger than"):
        context_of(str(ours))
    (both := tmp_path / "both.pem").write_bytes(authority.certfile.read_bytes() + authority.keyfile.read_bytes())
    assert context_of(str(both)).verify_mode == ssl.CERT_NONE
    assert context_of(cert, key, str(authority.ca_certs)).verify_mode == ssl.CERT_REQUIRED


@pytest.mark.parametrize("option", ["--ssl-keyfile", "--ssl-ca-certs"])
def test_what_says_nothing_without_a_certificate_is_refused(authority: Authority, option: str) -> None:
    found = build_parser("serve").parse_args(["serve", option, str(authority.keyfile)])
    name = option.removeprefix("--").replace("-", "_")
    with pytest.raises(ValueError, match=f"{name} needs ssl_certfile"):
        make(ServerSettings, given_settings(found, ServerSettings) | {"served_model_name": "m"})
    wrong = cli("serve", option, str(authority.keyfile))
    assert f"{option} needs --ssl-certfile" in wrong.stderr


def test_a_command_serves_https_and_a_fault_is_one_line(authority: Authority, tmp_path: Path) -> None:
    wrong = cli("serve", "--ssl-certfile", str(authority.certfile), "--ssl-keyfile", str(tmp_path / "nowhere"))
    assert (wrong.returncode, wrong.stderr.count("\n")) == (1, 1) and "--ssl-keyfile" in wrong.stderr
    with serving("--ssl-certfile", str(authority.certfile), "--ssl-keyfile", str(authority.keyfile),
                 log=tmp_path / "log") as live, httpx.Client(verify=authority.context(), timeout=120) as client:
        assert live.url.startswith("https://")
        body = {"prompt": "def f", "max_tokens": 2}
        assert client.post(f"{live.url}/v1/completions", json=body).json()["usage"]["completion_tokens"] == 2
