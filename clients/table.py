"""The table of what each client did: a pytest plugin that writes it as JSON.

A test is a row: its module's CLIENT names the client and DISTRIBUTION its package (none where calls are replayed), and
the first line of its docstring is what was done.  A row works, is refused (a test may report the server's error, by
`refused` among its properties), fails, or was not run.
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


def describe(item: pytest.Function) -> dict[str, str]:
    """What the table has of a test before it runs."""
    module: Any = item.module
    values = item.callspec.params if hasattr(item, "callspec") else {}
    done = (inspect.getdoc(item.function) or item.name).splitlines()[0]
    return {"client": module.CLIENT, "version": module.VERSION, "does": done.format(**values)}


class Table:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._rows: dict[str, Row] = {}

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        for item in session.items:
            if isinstance(item, pytest.Function):
                self._rows[item.nodeid] = describe(item) | {"result": "not run", "reason": "The run ended before it."}

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
        content = {"date": time.strftime("%Y-%m-%d"), "python": platform.python_version(),
                   "rows": list(self._rows.values())}
        self._path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")


def _reason(report: pytest.TestReport) -> str:
    if isinstance(report.longrepr, tuple):  # a skip: file, line, reason
        return report.longrepr[2].removeprefix("Skipped: ")[:LONGEST]
    crash = getattr(report.longrepr, "reprcrash", None)
    text = crash.message if crash else str(report.longrepr)
    return (text.splitlines() or ["?"])[0][:LONGEST]
