"""Many large bodies at once, sent by clients that do not come to their end."""

from __future__ import annotations

import asyncio
import json
import re
import socket
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path

import pytest
from starlette.types import Message
from support.live_server import JSON, POSTED, Server, eventually, running

from slotwise.api.http.http_exchange import HttpExchange
from slotwise.api.limits import bodies
from slotwise.api.limits.server_settings import ServerSettings

MB = 1 << 20
LARGEST = ServerSettings("toy").max_body_bytes
MANY = 200
BEGUN = b'{"max_tokens":1,"unknown":"' + b"x" * (LARGEST - MB // 4)
UNREAD = MB // 2  # of a connection: what uvicorn and uvloop have of it before it is counted


def memory(server: Server, name: str) -> int:
    """Bytes of the API process: VmRSS now, VmHWM at most."""
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    found = re.search(rf"{name}:\s+(\d+) kB", status)
    assert found
    return int(found[1]) << 10


def connect(server: Server) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=120)


def answer(connection: socket.socket) -> bytes:
    """What there is of one."""
    connection.settimeout(0.001)
    try:
        return connection.recv(1 << 16)
    except TimeoutError:
        return b""


def begin(connection: socket.socket, is_announced: bool) -> None:
    if is_announced:
        connection.sendall(POSTED + b"%d\r\n\r\n" % LARGEST + BEGUN)
    else:
        head = POSTED.removesuffix(b"Content-Length: ") + b"Transfer-Encoding: chunked\r\n\r\n"
        connection.sendall(head + b"%x\r\n" % len(BEGUN) + BEGUN + b"\r\n")


@pytest.mark.parametrize("is_announced", [True, False], ids=["announced", "chunked"])
def test_bodies_under_way_take_a_bounded_memory(folder: Path, tmp_path: Path, is_announced: bool) -> None:
    with running(folder, tmp_path / "engine", "body_timeout=200") as server, ExitStack() as stack:
        server.post("/v1/completions", {"prompt": [2], "max_tokens": 1})
        before = memory(server, "VmRSS")
        connections = []
        for _ in range(MANY):
            connections.append(stack.enter_context(connect(server)))
            begin(connections[-1], is_announced)
        eventually(lambda: server.get("/load").json()["server_load"] <= bodies.MOST / len(BEGUN))
        told = [answer(connection) for connection in connections]
        refused = [one for one in told if one]
        assert 20 < MANY - len(refused) <= bodies.MOST / len(BEGUN)
        for one in refused:
            assert one.startswith(b"HTTP/1.1 503") and b"retry-after: " in one and b'"bodies_full"' in one
        assert server.post("/v1/completions", {"prompt": [2], "max_tokens": 1}).status_code == 200
        assert memory(server, "VmHWM") < before + bodies.MOST + MANY * UNREAD
        stack.close()
        eventually(lambda: server.get("/load").json()["server_load"] == 0)
        eventually(lambda: memory(server, "VmRSS") < before + 64 * MB)
        large = json.dumps({"prompt": [2], "max_tokens": 1, "unknown": "x" * (LARGEST - 100)})
        assert server.post("/v1/completions", large).status_code == 200


def test_small_bodies_of_many_values_take_a_bounded_memory(folder: Path, tmp_path: Path) -> None:
    """Each waits for the chat template as twenty thousand lists, which take twenty times its bytes."""
    body = json.dumps({"messages": [{"role": "user", "content": "x", "a": [[]] * 20_000}]}, separators=(",", ":"))
    assert len(body) < bodies.SMALL
    request = (b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: "
               b"%d\r\n\r\n%b" % (len(body), body.encode()))
    with running(folder, tmp_path / "engine") as server, ExitStack() as stack:
        server.post("/tokenize", {"messages": [{"role": "user", "content": "x"}]})
        before = memory(server, "VmRSS")
        connections = []
        for _ in range(2 * MANY):
            connections.append(stack.enter_context(connect(server)))
            connections[-1].sendall(request)
        told = [connection.recv(1 << 16)[9:12] for connection in connections]
        assert b"200" in told and set(told) <= {b"200", b"429", b"503"}
        assert memory(server, "VmHWM") < before + bodies.MOST


def test_a_body_that_is_served_is_not_kept(folder: Path, tmp_path: Path) -> None:
    """While its answer takes long."""
    with running(folder, tmp_path / "engine", "seconds_per_step=0.2") as server, ExitStack() as stack:
        server.post("/v1/completions", {"prompt": [2], "max_tokens": 1})
        before = memory(server, "VmRSS")
        for path, body in (("completions", {"prompt": [2]}), ("chat/completions", {"messages": [
                {"role": "user", "content": "x"}]})) * 20:
            content = json.dumps(body | {"max_tokens": 300, "unknown": "x" * (LARGEST - 200)}).encode()
            connection = stack.enter_context(connect(server))
            connection.sendall(POSTED.replace(b"completions", path.encode()) + b"%d\r\n\r\n" % len(content) + content)
        eventually(lambda: server.get("/health").json()["num_live"] == 40)
        eventually(lambda: memory(server, "VmRSS") < before + 64 * MB)


def test_the_bound_has_room_for_a_few_of_the_largest() -> None:
    for size in (1, LARGEST, 1 << 30):
        held = bodies.Bodies(ServerSettings("toy", max_body_bytes=size))
        assert held._most >= max(bodies.MOST, 4 * size)


def test_between_two_large_bodies_other_work_runs() -> None:
    """A hundred that arrive at once, as a few kilobytes of gzip each, must not stop every stream until all are read."""
    size, num = bodies.SMALL + 1, 32
    passes, read = 0, []

    async def read_one(reader: bodies.Bodies) -> None:
        async def receive() -> Message:
            return {"type": "http.request", "body": b"x" * size}

        async def send(message: Message) -> None:
            raise AssertionError(message)

        scope = {"headers": [(b"content-length", b"%d" % size)], "client": ("127.0.0.1", 1), "method": "POST"}
        async with reader.reading(HttpExchange(scope, receive, send, "one")):
            read.append(passes)

    async def run() -> None:
        nonlocal passes
        reader = bodies.Bodies(ServerSettings("toy"))
        reading = [asyncio.create_task(read_one(reader)) for _ in range(num)]
        while not all(task.done() for task in reading):
            passes += 1
            await asyncio.sleep(0)
        await asyncio.gather(*reading)

    asyncio.run(run())
    assert len(read) == num and all(after > before for before, after in pairwise(read))


def test_the_largest_body_is_taken_and_a_byte_more_is_not(folder: Path, tmp_path: Path) -> None:
    with running(folder, tmp_path / "engine", "max_body_bytes=1000") as server:
        for size, status in ((1000, 200), (1001, 413)):
            body = b'{"prompt":[2],"max_tokens":1}'.ljust(size)
            for content in (body, iter([body[:500], body[500:]])):  # of an announced length, and in chunks
                answer = server.client.post(server.url + "/v1/completions", content=content, headers=JSON)
                assert answer.status_code == status, (size, answer.text)
