"""Processes forked from one that has imported the server: `start` starts a server or a command.

The tests start hundreds of them, and each would otherwise spend a third of a CPU-second on imports.

    test process ── asks ──► fork server (no torch) ── forks ──► server, or command

What is started has arguments, a current folder, an environment and streams of its own, and ends as a process that
`subprocess.Popen` has started.  How a new interpreter begins is tested in tests/cli/test_current_folder.py,
tests/test_cli.py and others.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import Any, NamedTuple, TextIO

FORKS = multiprocessing.get_context("forkserver")
# Not `slotwise.cli`, which looks at the command's arguments when it is imported.
FORKS.set_forkserver_preload(["slotwise.compose.api_server", "slotwise.fleet.run", "support.server_process"])
CLI = "slotwise.cli"


class Inherited:
    """An open descriptor of this process, which a forked one gets as well, under a number of its own."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> Any:
        return _received, (DupFd(self.number),)


def _received(sent: Any) -> Inherited:
    return Inherited(sent.detach())


class Streams(NamedTuple):
    """Where standard streams lead to; the output leads to the test."""

    stdin: str | None
    """What the process reads there; None: nothing."""
    stderr: Path | Inherited
    """The file that gets what it writes there, or what the tests write to."""

    def open(self, output: Connection) -> None:
        """Makes them the streams of this process."""
        os.dup2(output.fileno(), 1)
        output.close()
        with self.stderr.open("w") if isinstance(self.stderr, Path) else os.fdopen(self.stderr.number, "w") as file:
            os.dup2(file.fileno(), 2)
        if self.stdin is not None:
            with tempfile.TemporaryFile("w+") as file:
                file.write(self.stdin)
                file.seek(0)
                os.dup2(file.fileno(), 0)
            sys.stdin = os.fdopen(0, closefd=False)


class Forked:
    """What tests use of `subprocess.Popen`.  `stdout` is what the process writes there."""

    def __init__(self, module: str, arguments: Sequence[str], streams: Streams,
                 before: Callable[[], object] | None, environment: Mapping[str, str]) -> None:
        ours, theirs = FORKS.Pipe(duplex=False)
        # A daemon, for which a test process that ends does not wait.
        self._process = FORKS.Process(target=_run, daemon=True, args=(
            module, arguments, theirs, streams, before, dict(environment), os.getcwd()))
        self._process.start()
        theirs.close()
        self.stdout: TextIO = os.fdopen(os.dup(ours.fileno()), encoding="utf-8")
        ours.close()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("a forked process", timeout or 0.0)
        return self._process.exitcode

    def communicate(self, timeout: float | None = None) -> tuple[str, None]:
        output = self.stdout.read()
        self.wait(timeout)
        return output, None

    def send_signal(self, sent: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, sent)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def start(module: str, *arguments: str, stderr: Path | None = None, stdin: str | None = None,
          before: Callable[[], object] | None = None, environment: Mapping[str, str] = {}) -> Forked:
    """Starts `module` with `arguments`: the command line, or the `main` of another module.

    Args:
        stderr, stdin: see `Streams`; without `stderr` it is that of the tests.
        before: called in the process before it starts; what pickle can send to it.
        environment: variables in addition to those of this process.
    """
    return Forked(module, arguments, Streams(stdin, stderr or Inherited(2)), before, os.environ | environment)


def _run(module: str, arguments: Sequence[str], stdout: Connection, streams: Streams,
         before: Callable[[], object] | None, environment: Mapping[str, str], folder: str) -> None:
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    streams.open(stdout)
    if before is not None:
        before()
    if module == CLI:
        sys.argv = ["-m", *arguments]  # as the interpreter has them until it has found the module
        sys.path.insert(0, folder)
        runpy.run_module(CLI, run_name="__main__", alter_sys=True)
    else:
        sys.exit(importlib.import_module(module).main(*arguments))

