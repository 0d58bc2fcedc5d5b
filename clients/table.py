"""The table of what each client did: a pytest plugin that writes it as JSON.

A test is a row: the first line of its docstring is what was done.  A row works, is refused (a test may report the
server's error, by `refused` among its properties), fails, or was not run.  Constants of the test's module describe the
client: CLIENT is its name, VERSION its version, and SETTING how to point it at a server.  A run replaces the clients
that it collects and leaves the others in the file as they are.
"""

from __future__ import annotations

import inspect
import json
import platform
import time
from pathlib import Path
from typing import Any

import pytest

LONGEST = 300  # characters of a reason
Row = dict[str, str]


def describe(module: Any) -> dict[str, Any]:
    """What the table has of a client whose tests are in `module`."""
    return {"client": module.CLIENT, "version": module.VERSION, "setting": module.SETTING,
            "date": time.strftime("%Y-%m-%d"), "python": platform.python_version(), "rows": []}


def done(item: pytest.Function) -> str:
    """What a test does, with the values of its parameters."""
    values = item.callspec.params if hasattr(item, "callspec") else {}
    return (inspect.getdoc(item.function) or item.name).splitlines()[0].format(**values)


class Table:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._clients: dict[str, dict[str, Any]] = {}
        self._rows: dict[str, Row] = {}

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        for item in session.items:
            if isinstance(item, pytest.Function):
                client = describe(item.module)
                row = {"does": done(item), "result": "not run", "reason": "The run ended before it."}
                self._clients.setdefault(client["client"], client)["rows"].append(row)
                self._rows[item.nodeid] = row

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        row = self._rows[report.nodeid]
        if report.failed:
            row |= {"result": "fails", "reason": _reason(report)}
        elif report.skipped:
            row |= {"result": "not run", "reason": _reason(report)}
        elif report.when == "call":
            refusal = dict(report.user_properties).get("refused", "")
            row |= {"result": "refused" if refusal else "works", "reason": str(refusal)[:LONGEST]}

    def pytest_sessionfinish(self) -> None:
        before = json.loads(self._path.read_text()) if self._path.exists() else []
        clients = {client["client"]: client for client in before} | self._clients
        content = sorted(clients.values(), key=lambda client: client["client"].strip("`").lower())
        self._path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")


def _reason(report: pytest.TestReport) -> str:
    if isinstance(report.longrepr, tuple):  # a skip: file, line, reason
        return report.longrepr[2].removeprefix("Skipped: ")[:LONGEST]
    crash = getattr(report.longrepr, "reprcrash", None)
    text = crash.message if crash else str(report.longrepr)
    return (text.splitlines() or ["?"])[0][:LONGEST]
