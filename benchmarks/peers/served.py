"""A peer that is a server: starts it, and sends it the same requests over HTTP, each a connection of its own.

Answers are whole, not streamed: what is measured ends with the last token of all.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from same_requests import SLOTS

READY_SECONDS, ANSWER_SECONDS, EXIT_SECONDS = 280, 560, 20
SAID = 2000  # the last characters of a server's log, which an error shows


class Served:
    """A server with /v1/completions that takes token ids and `ignore_eos`."""

    def __init__(self, name: str, version: str, port: int, fields: Mapping[str, Any]) -> None:
        self.name, self.version = name, version
        self._port, self._fields = port, fields
        self._threads = ThreadPoolExecutor(SLOTS)

    def generate(self, prompts: list[list[int]], lengths: list[int]) -> int:
        return sum(self._threads.map(self._ask, prompts, lengths))

    def is_ready(self) -> bool:
        """Whether it answers, which some servers do long after /health says so."""
        try:
            return self._ask([10], 1) == 1
        except (OSError, http.client.HTTPException, SystemExit):
            return False

    def _ask(self, prompt: list[int], length: int) -> int:
        body = {"prompt": prompt, "max_tokens": length, "temperature": 0, "ignore_eos": True, **self._fields}
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=ANSWER_SECONDS)
        with contextlib.closing(connection):
            connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
            reply = connection.getresponse()
            text = reply.read()
        if reply.status != 200:
            raise SystemExit(f"{self.name} answered {reply.status}: {text[:SAID]!r}")
        tokens: int = json.loads(text)["usage"]["completion_tokens"]
        return tokens


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    return port


@contextlib.contextmanager
def running(server: Served, command: Sequence[str], variables: Mapping[str, str] | None = None) -> Iterator[Served]:
    """Runs a server until the block ends, from when it has answered.  Raises SystemExit with what it said."""
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        process = subprocess.Popen(
            [*command], stdout=log, stderr=log, start_new_session=True, env={**os.environ, **(variables or {})})
        try:
            until = time.perf_counter() + READY_SECONDS
            while not server.is_ready():
                if process.poll() is not None or time.perf_counter() > until:
                    log.seek(0)
                    raise SystemExit(f"{command[0]} did not become ready: {log.read()[-SAID:]}")
                time.sleep(0.1)
            yield server
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(EXIT_SECONDS)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
