"""Runs the tests in processes that are forked after one collection: a pytest plugin, `-p support.forked --forks N`.

Collection imports torch, transformers and every test: seven seconds of a core, which each worker of xdist repeats.
Here the tests are collected once, and N forked processes, which share the imported modules' memory, run one file after
another.  A process gets its next file when it has finished the last one, so a file never waits for a long test while
another process is idle.  This needs fork, and libraries that do not start threads when they are imported: Linux.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import signal
import sys
import threading
import time
import warnings
from collections import deque
from collections.abc import Iterator
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from types import SimpleNamespace
from typing import Any

import pytest
from _pytest.config import create_terminal_writer
from _pytest.reports import TestReport

from support import leftovers

GRACE = 10.0  # seconds in which a process may tear down its fixtures and end its threads


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--forks", type=int, default=0, metavar="N",
                     help="run the tests in N processes, forked after collection (default: in this process)")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--forks") < 0 or (config.getoption("--forks") and not hasattr(os, "fork")):
        raise pytest.UsageError("--forks needs a number of processes, on a system that can fork them")


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    count, config = session.config.getoption("--forks"), session.config
    errors = session.testsfailed and not config.option.continue_on_collection_errors
    if not count or errors or config.option.collectonly or config.option.usepdb:
        return None
    indices_by_file: dict[str, list[int]] = {}
    for index, item in enumerate(session.items):
        indices_by_file.setdefault(item.nodeid.split("::")[0], []).append(index)
    if (reporter := config.pluginmanager.get_plugin("terminalreporter")) and config.option.verbose <= 0:
        reporter.showfspath = False  # results of several files take turns
    Parent(session, deque(indices_by_file.values())).run(count)
    return True


class Parent:
    """Distributes files among its children, and passes their reports to the plugins of this process.

    A child sends None to request a file, then a list of reports for each test in it.
    """

    def __init__(self, session: pytest.Session, files: deque[list[int]]) -> None:
        self._session = session
        self._files = files
        self._children: dict[Connection, ForkProcess] = {}
        self._left: dict[Connection, deque[int]] = {}
        """Tests of a child's current file that have not reported a result."""

    def run(self, count: int) -> None:
        self._session.config._tmp_path_factory.getbasetemp()  # made once, for the folders of all children
        for number in range(min(count, len(self._files))):
            self._fork(number)
        try:
            while self._children:
                for connection in wait(list(self._children)):
                    self._receive(connection)
                if self._session.shouldfail:
                    raise self._session.Failed(self._session.shouldfail)
                if self._session.shouldstop:
                    raise self._session.Interrupted(self._session.shouldstop)
        finally:
            self._end_all()

    def _end_all(self) -> None:
        """Give running tests time to tear down their fixtures; a second Ctrl-C ends them at once."""
        for connection, child in self._children.items():
            connection.close()  # a child does not wait for its reports to be read
            os.kill(child.pid, signal.SIGINT)
        try:
            ends = time.monotonic() + GRACE
            for child in self._children.values():
                child.join(max(0.0, ends - time.monotonic()))
        finally:
            for child in self._children.values():
                child.kill()

    def _fork(self, number: int) -> None:
        ours, theirs = multiprocessing.Pipe()
        child = multiprocessing.get_context("fork").Process(
            target=Child(self._session, theirs).run, name=f"fork{number}")
        child.start()
        theirs.close()
        self._children[ours], self._left[ours] = child, deque()

    def _receive(self, connection: Connection) -> None:
        try:
            message = connection.recv()
        except (EOFError, ConnectionResetError):
            message = EOFError
        match message:
            case type():
                self._ended(connection)
            case None:
                self._left[connection] = deque(self._files.popleft() if self._files else ())
                with contextlib.suppress(BrokenPipeError):  # it has just died, and the end of its pipe comes next
                    connection.send(list(self._left[connection]))
            case str(error):
                raise RuntimeError(error)
            case list(calls):
                self._left[connection].popleft()
                for name, arguments in calls:
                    self._pass_on(name, arguments)

    def _pass_on(self, name: str, arguments: dict[str, Any]) -> None:
        hook = self._session.config.hook
        if name == "pytest_runtest_logreport":
            arguments = {"report": hook.pytest_report_from_serializable(config=self._session.config, data=arguments)}
        elif name == "pytest_warning_recorded":
            category, message, filename, number = arguments.pop("warning")
            arguments["warning_message"] = warnings.WarningMessage(
                message, type(category, (Warning,), {}), filename, number)
            hook.pytest_warning_recorded.call_historic(kwargs=arguments)
            return
        getattr(hook, name)(**arguments)

    def _ended(self, connection: Connection) -> None:
        """If a child ended early, fail the test that it ran, and give the rest of its file to another child."""
        child, left = self._children.pop(connection), self._left.pop(connection)
        connection.close()
        child.join(GRACE)
        child.kill()  # one that waits for a thread of a test
        child.join()
        if not left:
            return
        item = self._session.items[left.popleft()]
        self._session.config.hook.pytest_runtest_logreport(report=TestReport(
            item.nodeid, item.location, {}, "failed", f"its process ended with exit code {child.exitcode}", "call"))
        if left:
            self._files.appendleft(list(left))
        if self._files:
            self._fork(int(child.name.removeprefix("fork")))


class Child:
    """Runs files of tests in a process of its own."""

    def __init__(self, session: pytest.Session, connection: Connection) -> None:
        self._session = session
        self._connection = connection
        self._calls: list[tuple[str, dict[str, Any]]] = []

    def run(self) -> None:
        session = self._session
        try:
            self._separate()
            for item in self._items():
                # At the end of a file, only fixtures of the session survive.
                following = session.items[item + 1] if item + 1 < len(session.items) else session
                if following is not session and following.path != session.items[item].path:
                    following = session
                session.config.hook.pytest_runtest_protocol(item=session.items[item], nextitem=following)
                self._connection.send(self._calls)
                self._calls = []
                if session.shouldfail or session.shouldstop:
                    break
        except (KeyboardInterrupt, BrokenPipeError):  # the parent ends
            pass
        finally:
            try:
                session._setupstate.teardown_exact(None)
            except BaseException as error:  # there is no test that could fail
                with contextlib.suppress(BrokenPipeError):
                    self._connection.send(f"fixtures of a session were torn down: {error!r}")
            self._connection.close()

    def _items(self) -> Iterator[int]:
        while True:
            self._connection.send(None)
            file = self._connection.recv()
            if not file:
                return
            yield from file

    def _separate(self) -> None:
        """Shares neither the terminal nor captured output nor temporary directories with other processes."""
        config = self._session.config
        plugins = config.pluginmanager
        plugins.unregister(name="terminalreporter")
        if capture := plugins.get_plugin("capturemanager"):
            capture.stop_global_capturing()
            capture.start_global_capturing()
        plugins.register(SimpleNamespace(_tw=create_terminal_writer(config, sys.__stderr__)), "terminalreporter")
        plugins.register(self)
        self._calls.clear()  # of warnings that the parent has seen
        temporary = config._tmp_path_factory
        temporary._basetemp = temporary.getbasetemp() / multiprocessing.current_process().name
        temporary._basetemp.mkdir(mode=0o700, exist_ok=True)
        random.seed()  # else all processes would draw the same numbers
        signal.signal(signal.SIGINT, signal.default_int_handler)
        leftovers.guard()
        threading.Thread(target=self._end_with_parent, daemon=True).start()

    @staticmethod
    def _end_with_parent() -> None:
        if parent := multiprocessing.parent_process():
            parent.join()
            os.kill(os.getpid(), signal.SIGKILL)

    def pytest_runtest_logstart(self, nodeid: str, location: tuple[str, int | None, str]) -> None:
        self._calls.append(("pytest_runtest_logstart", {"nodeid": nodeid, "location": location}))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        config = self._session.config
        data = config.hook.pytest_report_to_serializable(config=config, report=report)
        self._calls.append(("pytest_runtest_logreport", data))

    def pytest_runtest_logfinish(self, nodeid: str, location: tuple[str, int | None, str]) -> None:
        self._calls.append(("pytest_runtest_logfinish", {"nodeid": nodeid, "location": location}))

    def pytest_warning_recorded(self, warning_message: warnings.WarningMessage, when: str, nodeid: str,
                                location: tuple[str, int, str] | None) -> None:
        warning = (warning_message.category.__name__, str(warning_message.message), warning_message.filename,
                   warning_message.lineno)
        self._calls.append(("pytest_warning_recorded", {
            "warning": warning, "when": when, "nodeid": nodeid, "location": location}))
