"""A live server in two processes on a free port, and helpers that read its answers."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from support import fork_server
from support.fork_server import Forked

JSON = {"Content-Type": "application/json"}
POSTED = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: "
ENDLESS_CONTEXT = "max_model_len=32000"  # of a server that gets what is endless
ENDLESS = {"prompt": [2], "max_tokens": 30_000, "ignore_eos": True}  # runs until it is aborted


@dataclass
class Server:
    url: str
    process: Forked
    engine_pid: int
    engine_log: Path
    client: httpx.Client = field(default_factory=lambda: httpx.Client(timeout=120))

    def post(self, path: str, body: Any, **headers: str) -> httpx.Response:
        content = body if isinstance(body, (bytes, str)) else json.dumps(body)
        return self.client.post(self.url + path, content=content, headers=JSON | headers)

    def get(self, path: str, **headers: str) -> httpx.Response:
        return self.client.get(self.url + path, headers=headers)

    def events(self, path: str, body: Any) -> list[dict[str, Any]]:
        """The events of a stream, which must end as OpenAI's do."""
        with self.client.stream("POST", self.url + path, json=body | {"stream": True}) as response:
            assert response.status_code == 200, response.read()
            assert response.headers["content-type"].startswith("text/event-stream")
            lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
        assert lines[-1] == "[DONE]"
        return [json.loads(line) for line in lines[:-1]]


@contextmanager
def running(folder: Path, log: Path, *settings: str, before: Callable[[], None] | None = None,
            stderr: Path | None = None) -> Iterator[Server]:
    """
    Args:
        before, stderr: see `fork_server.start`.
    """
    process = fork_server.start(
        "support.server_process", str(folder), str(log), *settings, stderr=stderr, before=before)
    try:
        url, pid = process.stdout.readline().split()
        yield Server(url, process, int(pid), log)
    finally:
        if process.poll() is None:
            process.terminate()
        try:
            process.wait(timeout=120)
        except subprocess.TimeoutExpired:
            process.kill()


@contextmanager
def unanswered(server: Server, path: str, body: dict[str, Any], **headers: str) -> Iterator[socket.socket]:
    """The socket of a client that has sent a request, and leaves without its answer when the block ends."""
    host, port = server.url.removeprefix("http://").split(":")
    content = json.dumps(body).encode()
    fields = JSON | headers | {"Host": host, "Content-Length": str(len(content))}
    head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    with socket.create_connection((host, int(port)), timeout=120) as connection:
        connection.sendall(f"POST {path} HTTP/1.1\r\n{head}\r\n".encode() + content)
        yield connection


@contextmanager
def frozen(pid: int) -> Iterator[None]:
    """A process that does nothing until the block ends, such as an engine whose requests must not end sooner."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def counted(first: int, count: int) -> list[int]:
    """The tokens that follow `first`, as the toy engine has it."""
    return [(first + 1 + i) % 400 for i in range(count)]


def eventually(holds: Callable[[], Any]) -> None:
    """Wait for what must come; two minutes are for machines that do other things too."""
    for _ in range(2400):
        if holds():
            return
        time.sleep(0.05)
    raise AssertionError("it never came")


def children(parent: int, module: bytes) -> list[int]:
    """Child processes of `parent` that run `module`."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError, IndexError):
            if int((entry / "stat").read_text().rpartition(")")[2].split()[1]) == parent \
                    and module in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
    return found
