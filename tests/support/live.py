"""A live `slotwise serve` on a free port, started as a user would."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx

CLI = (sys.executable, "-m", "slotwise.cli")
READY = re.compile(r"Ready after .* on (https?://\S+)")


@dataclass
class Live:
    process: subprocess.Popen[str]
    url: str
    client: httpx.Client  # one for all that is asked: to make one takes longer than most answers


@contextlib.contextmanager
def serving(*arguments: str, log: Path, program: Sequence[str] = CLI) -> Iterator[Live]:
    """Run the command line with `arguments`; what it writes to stderr goes to `log`."""
    with log.open("w") as stderr:
        process = subprocess.Popen(
            [*program, "serve", "--port", "0", *arguments], stdout=subprocess.PIPE, stderr=stderr, text=True)
        try:
            url = _address_in(log, process) if "json" in arguments else _address(process, log)
            with httpx.Client(base_url=url, timeout=120) as client:
                yield Live(process, url, client)
        finally:
            process.terminate()
            try:
                process.wait(120)
            except subprocess.TimeoutExpired:
                process.kill()
                raise


def _address(process: subprocess.Popen[str], log: Path) -> str:
    assert process.stdout is not None
    for line in process.stdout:
        if found := READY.search(line):
            return found[1]
    raise AssertionError(f"the server ended before it was ready: {log.read_text()}")


def _address_in(log: Path, process: subprocess.Popen[str]) -> str:
    """With `--log-format json` the address is in a line of the log."""
    while process.poll() is None:
        for line in log.read_text().split("\n")[:-1]:
            if "url" in (told := json.loads(line)):
                return str(told["url"])
        time.sleep(0.1)
    raise AssertionError(f"the server ended before it was ready: {log.read_text()}")


def cli(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*CLI, *arguments], input=stdin, capture_output=True, text=True, timeout=120)
