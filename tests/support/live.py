"""A live `slotwise serve` on a free port, and other commands: in forked processes, or as a user would start them."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx

from support import fork_server
from support.fork_server import Forked

CLI = (sys.executable, "-m", "slotwise.cli")
READY = re.compile(r"Ready after .* on (https?://\S+)")


@dataclass
class Live:
    process: Forked | subprocess.Popen[str]
    url: str
    client: httpx.Client  # one for all that is asked: to make one takes longer than most answers


@contextlib.contextmanager
def serving(*arguments: str, log: Path, program: Sequence[str] = ()) -> Iterator[Live]:
    """Runs `slotwise serve` with `arguments`; what it writes to stderr goes to `log`.

    Args:
        program: `CLI`, or the command of another environment, started anew; none: a forked process.
    """
    with log.open("w") as stderr:
        words = ("serve", "--port", "0", *arguments)
        process = subprocess.Popen([*program, *words], stdout=subprocess.PIPE, stderr=stderr, text=True) if program \
            else fork_server.start(fork_server.CLI, *words, stderr=log)
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


def _address(process: Forked | subprocess.Popen[str], log: Path) -> str:
    assert process.stdout is not None
    for line in process.stdout:
        if found := READY.search(line):
            return found[1]
    raise AssertionError(f"the server ended before it was ready: {log.read_text()}")


def _address_in(log: Path, process: Forked | subprocess.Popen[str]) -> str:
    """With `--log-format json` the address is in a line of the log."""
    while process.poll() is None:
        for line in log.read_text().split("\n")[:-1]:
            if "url" in (told := json.loads(line)):
                return str(told["url"])
        time.sleep(0.1)
    raise AssertionError(f"the server ended before it was ready: {log.read_text()}")


def cli(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """Runs a command in a forked process."""
    with tempfile.NamedTemporaryFile("r") as errors:
        process = fork_server.start(fork_server.CLI, *arguments, stderr=Path(errors.name), stdin=stdin)
        output, _ = process.communicate(timeout=120)
        return subprocess.CompletedProcess(arguments, process.wait(), output, errors.read())
