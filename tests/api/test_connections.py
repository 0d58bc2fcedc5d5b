"""More connections than there are files for: silent, slow, and kept."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import httpx
import pytest
from support.live_server import POSTED, Server, eventually, running, unanswered

from slotwise.api.http.listener import Connections, backlog_within, client_of, most_within, raise_file_limit

COMPLETIONS = "/v1/completions"
FILES = 256
few_files = partial(resource.setrlimit, resource.RLIMIT_NOFILE, (FILES // 2, FILES))
GET = b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n"


def connect(server: Server, source: str = "127.0.0.1") -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=120, source_address=(source, 0))


def asked(server: Server, source: str = "127.0.0.1") -> httpx.Response:
    """For a completion, over a connection of its own; 503 where it was closed at once."""
    with httpx.Client(transport=httpx.HTTPTransport(local_address=source), timeout=120) as client:
        try:
            return client.post(server.url + COMPLETIONS, json={"prompt": [2], "max_tokens": 1})
        except httpx.TransportError:
            return httpx.Response(503)


def files(server: Server) -> int:
    return len(os.listdir(f"/proc/{server.process.pid}/fd"))


@pytest.mark.slow
def test_silent_connections_shut_no_one_out(folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with running(folder, tmp_path / "engine", "header_timeout=12", before=few_files) as server, ExitStack() as stack:
        limits = Path(f"/proc/{server.process.pid}/limits").read_text()
        assert next(line for line in limits.splitlines() if line.startswith("Max open files")).split()[3] == str(FILES)
        silent = [stack.enter_context(connect(server)) for _ in range(FILES + 40)]
        refused = asked(server)
        assert refused.status_code == 503
        if refused.content:
            assert refused.json()["error"]["code"] == "too_many_connections" and refused.headers["retry-after"]
            assert refused.headers["connection"] == "close"
        for _ in range(10):
            for path in ("/health", "/ping", "/metrics"):
                assert httpx.get(server.url + path, timeout=120).status_code == 200
            assert files(server) < FILES
        assert asked(server, "127.0.0.2").status_code == 200, "the crowd is one client's"
        eventually(lambda: asked(server).status_code == 200)
        for connection in silent:
            try:
                assert connection.recv(100) == b""
            except ConnectionResetError:
                continue
        eventually(lambda: asked(server).status_code == 200)
    logged = capfd.readouterr().err
    assert "too many connections" in logged and logged.count("too many connections") < 5
    assert "Traceback" not in logged and "system resource" not in logged, logged


def test_a_head_that_does_not_come_to_its_end(folder: Path, tmp_path: Path) -> None:
    with running(folder, tmp_path / "engine", "header_timeout=4") as server, ExitStack() as stack:
        silent, slow, second, kept = [stack.enter_context(connect(server)) for _ in range(4)]
        second.sendall(GET)
        kept.sendall(GET)
        assert b"200 OK" in second.recv(1000) and b"200 OK" in kept.recv(1000)
        second.sendall(GET[:20])
        slow.settimeout(0.25)
        told = b""
        for byte in GET[:-1] * 100:
            slow.send(bytes([byte]))
            try:
                told = slow.recv(1000)
                break
            except TimeoutError:
                continue
        assert told.startswith(b"HTTP/1.1 408")
        assert silent.recv(1000) == b""
        assert second.recv(1000).startswith(b"HTTP/1.1 408") and second.recv(1000) == b""
        kept.sendall(GET)
        assert b"200 OK" in kept.recv(1000), "one that waits between two requests has more time"


def test_what_is_left_of_a_refused_body_is_not_waited_for(folder: Path, tmp_path: Path) -> None:
    with running(folder, tmp_path / "engine", "body_timeout=0.5") as server, connect(server) as connection:
        connection.sendall(POSTED + b"1000000000\r\n\r\n{")
        told = b"".join(iter(lambda: connection.recv(1000), b""))  # to the end, which the server makes
        assert told.startswith(b"HTTP/1.1 413") and b"body_too_large" in told


def test_a_connection_whose_refused_body_comes_later_is_not_kept_for_ever(folder: Path, tmp_path: Path) -> None:
    with running(folder, tmp_path / "engine", "keep_alive_timeout=1") as server, connect(server) as connection:
        connection.sendall(b"POST /no/such/route HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\n")
        assert b"404 Not Found" in connection.recv(1000)
        connection.sendall(b"{}")
        while connection.recv(1000):
            pass


def chunked(server: Server, body: bytes, path: bytes = b"/v1/completions") -> bytes:
    """The beginning of the response to a body that is sent in chunks, as they are given."""
    with connect(server) as connection:
        connection.sendall(b"POST " + path + b" HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                           b"Transfer-Encoding: chunked\r\n\r\n")
        with contextlib.suppress(OSError):
            connection.sendall(body)
        try:
            return connection.recv(1000)
        except OSError:
            return b""


@pytest.mark.parametrize("path", [b"/v1/completions", b"/no/such/route"])
@pytest.mark.parametrize("endless", [b"a: b\r\n", b"x", b"a" * 30_000 + b": b\r\n"])
def test_trailers_are_bounded_and_no_headers(server: Server, path: bytes, endless: bytes) -> None:
    body = b'{"prompt": [2], "max_tokens": 1}'
    whole = b"%x\r\n%b\r\n0\r\n" % (len(body), body)
    answer = chunked(server, whole + b"X-Request-Id: of-a-trailer\r\nHost: other\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 200 OK") and b"of-a-trailer" not in answer
    assert not chunked(server, whole + b"a: " + endless * ((1 << 20) // len(endless)), path).startswith(
        b"HTTP/1.1 200")
    assert server.get("/health").status_code == 200


def test_a_body_of_small_chunks_is_read_and_one_of_nothing_else_is_refused(server: Server) -> None:
    body = b'{"prompt": [2], "max_tokens": 1}'
    assert chunked(server, b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n").startswith(
        b"HTTP/1.1 200 OK")
    assert b"too many chunks" in chunked(server, b"1\r\n \r\n" * 100_000)


@pytest.mark.parametrize("header", [b"a:\r\n", b"some-name: some value\r\n", b"a: " + b"x" * 10_000 + b"\r\n"])
def test_headers_are_bounded(server: Server, header: bytes) -> None:
    def told(number: int) -> bytes:
        with connect(server) as connection:
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + header * number + b"\r\n")
            try:
                return connection.recv(1000)
            except ConnectionResetError:  # it was closed before all was read
                return b"reset"

    assert told(5).startswith(b"HTTP/1.1 200 OK")
    assert told(300_000 // len(header)).startswith((b"HTTP/1.1 400", b"reset"))
    assert len(header) > 100 or b"too many headers" in told(200)


def test_a_client_that_does_not_read_is_disconnected(folder: Path, tmp_path: Path) -> None:
    body = {"prompt": [[2] * 200] * 20, "n": 8, "max_tokens": 120, "ignore_eos": True, "logprobs": 20}
    with running(folder, tmp_path / "engine", "unread_timeout=0.5", "max_choices=512") as server:
        for stream in (False, True):
            with unanswered(server, COMPLETIONS, body | {"stream": stream}) as client:
                assert client.recv(15) == b"HTTP/1.1 200 OK"
                eventually(lambda: server.get("/load").json()["server_load"] == 0)
            assert asked(server).status_code == 200


def test_a_flood_of_what_is_not_http_is_one_warning(
        folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with running(folder, tmp_path / "engine") as server:
        host, port = server.url.removeprefix("http://").split(":")
        for _ in range(5):
            with socket.create_connection((host, int(port)), timeout=60) as connection:
                connection.sendall(b"no such thing\r\n\r\n")
                assert connection.recv(100).startswith(b"HTTP/1.1 400")
    assert capfd.readouterr().err.count("Invalid HTTP request") == 1


class Held:
    """A connection that is only counted."""

    def __init__(self) -> None:
        self.deadline, self.unread_deadline, self.ended = 10.0, float("inf"), ""

    def refuse(self) -> None:
        self.ended = "refused"

    def time_out(self, now: float) -> None:
        self.ended = "late"


def test_clients_share_what_there_is() -> None:
    connections = Connections(80)  # ten of them the reserve
    flood = [Held() for _ in range(500)]
    inside = [one for one in flood if connections.enter(one, "10.0.0.1")]
    assert len(inside) == 56 and all(connections.enter(Held(), f"10.0.1.{i}") for i in range(14))
    assert not connections.enter(Held(), "10.0.2.1")
    assert [one for one in flood if not one.ended] == inside + flood[-9:], "the latest take the place of the silent"
    for one in inside:
        connections.leave(one)
    assert connections.enter(Held(), "10.0.0.1")


def test_one_of_the_reserve_that_has_asked_is_not_closed_for_another() -> None:
    connections = Connections(16)
    while connections.enter(Held(), "a"):
        pass
    asking = [Held() for _ in range(3)]
    for one in asking[1:]:
        assert not connections.enter(one, "a")
        one.deadline = float("inf")
    late = asking[0]
    assert not connections.enter(late, "a") and [one.ended for one in asking] == ["refused", "", ""]
    connections.expire(11.0)
    assert [one.ended for one in asking] == ["refused", "", ""]


@pytest.mark.parametrize(("one", "other", "same"), [
    ("10.0.0.1", "10.0.0.1", True), ("10.0.0.1", "10.0.0.2", False), ("2001:db8::1", "2001:db8::ffff:2", True),
    ("2001:db8:0:1::1", "2001:db8:0:2::1", False), ("::ffff:10.0.0.1", "10.0.0.1", True),
    ("fe80::1%eth0", "fe80::2", True),
    ("", "", True), ("/a/socket", "", False)])
def test_what_counts_as_one_client(one: str, other: str, same: bool) -> None:
    assert (client_of(one) == client_of(other)) == same


def test_there_is_room_for_files_of_our_own() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        limit = raise_file_limit()
        assert limit == resource.getrlimit(resource.RLIMIT_NOFILE)[0] >= before[0]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    for limit in (256, 1024, 4096, 1 << 20):
        assert 16 <= most_within(limit) <= limit - backlog_within(limit) - len(os.listdir("/dev/fd"))
    assert most_within(1 << 20) == most_within(1 << 16)
