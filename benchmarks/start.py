"""Times a server's start: from its command to "Ready" to the first token of its first answer.

The first run has an empty folder of compiled kernels, as on a machine that never ran Slotwise; --repeats further runs
find the kernels of the first.  Weights are in the system's file cache, and Python's bytecode is compiled, in all runs.

    python -m benchmarks.start                             the built-in model
    python -m benchmarks.start FOLDER --repeats 5          a checkpoint
"""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import NamedTuple
from urllib.parse import urlsplit

from benchmarks.commands import bar, parser_of

BODY = {"prompt": "def area(self):", "max_tokens": 4, "ignore_eos": True, "stream": True}


class Start(NamedTuple):
    """Seconds since the command started."""

    ready: float
    first_token: float


def start(command: Sequence[str], environment: dict[str, str]) -> Start:
    """Starts a server, sends one request, and stops it.

    Raises:
        RuntimeError: the server did not become ready, or did not respond.
    """
    began = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | environment) as server:
        try:
            address = _address(server)
            ready = time.perf_counter() - began
            _await_token(address)
            return Start(ready, time.perf_counter() - began)
        finally:
            server.send_signal(signal.SIGTERM)
            server.communicate()


def _address(server: subprocess.Popen[str]) -> str:
    assert server.stdout is not None
    for line in server.stdout:
        if found := re.search(r"^Ready after .* on (\S+)", line):
            return found[1]
    raise RuntimeError("the server ended before it was ready")


def _await_token(address: str) -> None:
    connection = http.client.HTTPConnection(urlsplit(address).netloc, timeout=60)
    connection.request("POST", "/v1/completions", json.dumps(BODY), {"Content-Type": "application/json"})
    answer = connection.getresponse()
    while line := answer.readline():
        if line.startswith(b"data: {") and json.loads(line[6:]).get("choices"):
            return connection.close()
    raise RuntimeError(f"no token came, but status {answer.status}")


def main() -> None:
    """Parse the command line and print the table."""
    parser = parser_of(__doc__)
    parser.add_argument("model", nargs="?", help="a checkpoint's folder")
    parser.add_argument("--repeats", type=int, default=3, help="second starts, of which the median is taken")
    parser.add_argument("--no-first", action="store_true", help="leave out the first start ever")
    asked = parser.parse_args()
    command = [sys.executable, "-m", "slotwise.cli", "serve", *([asked.model] if asked.model else []), "--port", "0"]
    print(f"{'start':<24}{'ready':>8}{'first token':>14}   seconds")
    with tempfile.TemporaryDirectory() as nothing:
        kernels = {} if asked.no_first else {"XDG_CACHE_HOME": nothing}
        first = start(command, kernels)
        if not asked.no_first:
            print(f"{'first ever':<24}{first.ready:8.2f}{first.first_token:14.2f}", flush=True)
        later = [start(command, kernels) for _ in bar(range(asked.repeats), "starts")]
    for name, pick in (("second, median", statistics.median), ("second, worst", max)):
        ready, token = (pick(values) for values in zip(*later, strict=True))
        print(f"{name:<24}{ready:8.2f}{token:14.2f}", flush=True)


if __name__ == "__main__":
    main()
