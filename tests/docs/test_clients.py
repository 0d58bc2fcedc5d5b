"""The table of clients tells what happened: a run of the plugin over tests of every outcome, rendered."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT))  # `docs` is run from the repository's root and never installed

from docs.generate import clients  # noqa: E402

CONFTEST = """
from pathlib import Path
from table import Table

def pytest_configure(config):
    config.pluginmanager.register(Table(Path("clients.json")))
"""
TESTS = '''
import pytest

CLIENT, VERSION, SETTING = "`one`", "1.0", "Its `base_url`."

@pytest.mark.parametrize("way", ["a", "b"])
def test_works(way):
    """Asks by {way}.

    Not this."""

def test_refused(record_property):
    """Asks for `x | y`."""
    record_property("refused", "x | y is not supported")

def test_fails():
    """Asks for more."""
    assert [1] == [2], "too little"

def test_skipped():
    """Asks for nothing."""
    pytest.skip("There is nothing.")

@pytest.fixture
def broken():
    raise OSError("no server")

def test_broken(broken):
    """Asks a server that is not there."""

def test_after_the_end():
    """Asks no more."""
'''


ANOTHER = {"client": "Another", "version": "2.0", "setting": "A URL.", "date": "2026-01-02", "python": "3.11",
           "rows": [{"does": "Answers.", "result": "works", "reason": ""}]}


@pytest.fixture(scope="module")
def content(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The table after a run of one client, whose results of an earlier run it had, and those of another one."""
    folder = tmp_path_factory.mktemp("clients")
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "test_one.py").write_text(TESTS)
    (folder / "clients.json").write_text(json.dumps([ANOTHER, ANOTHER | {"client": "`one`", "version": "0.9"}]))
    options = ["--maxfail=2", "-p", "no:cacheprovider", "-o", f"pythonpath={ROOT / 'clients'}"]
    done = subprocess.run([sys.executable, "-m", "pytest", *options, "test_one.py"], cwd=folder, capture_output=True,
                          text=True, timeout=120)
    assert "1 failed, 3 passed, 1 skipped, 1 error" in done.stdout, done.stdout + done.stderr
    return json.loads((folder / "clients.json").read_text())


def test_every_test_is_a_row_with_its_outcome(content: list[dict[str, Any]]) -> None:
    (one,) = [client for client in content if client["client"] == "`one`"]
    assert (one["version"], one["setting"]) == ("1.0", "Its `base_url`.")
    assert [(row["does"], row["result"]) for row in one["rows"]] == [
        ("Asks by a.", "works"), ("Asks by b.", "works"), ("Asks for `x | y`.", "refused"),
        ("Asks for more.", "fails"), ("Asks for nothing.", "not run"), ("Asks a server that is not there.", "fails"),
        ("Asks no more.", "not run")]
    reasons = [row["reason"] for row in one["rows"]]
    assert reasons[:3] == ["", "", "x | y is not supported"] and reasons[4] == "There is nothing."
    assert "too little" in reasons[3] and "no server" in reasons[5] and "ended" in reasons[6]


def test_clients_that_were_not_run_stay(content: list[dict[str, Any]]) -> None:
    assert content[0] == ANOTHER and len(content) == 2


def test_the_page_shows_all_of_them(
    content: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "clients.json").write_text(json.dumps(content))
    monkeypatch.setattr(clients, "ROOT", tmp_path)
    assert clients.clients().splitlines()[2:] == [
        "| Another | 2.0 | A URL. | works: 1 |",
        "| `one` | 1.0 | Its `base_url`. | works: 2, refused: 1, fails: 2, not run: 2 |"]
    head, *lines = clients.what_clients_do().splitlines()
    assert head.startswith("Run on 2026-01-02 and 2") and head.endswith(
        "; 8 rows (works: 3, refused: 1, fails: 2, not run: 2).")
    shown = [line for line in lines if line.startswith("| `one` |")]
    assert len(shown) == 7 and all(line.replace(r"\|", "").count("|") == 4 for line in shown)
    assert shown[2].endswith(r"Refused: `x \| y is not supported`. |") and "**Fails**: `" in shown[3]


def test_the_table_has_the_clients_that_are_tested() -> None:
    modules = {path: path.read_text() for path in sorted((ROOT / "clients").rglob("test_*.py"))
               if "node_modules" not in path.parts}
    named = {re.search(r'^CLIENT = "(.+)"$', text, re.MULTILINE)[1]: path for path, text in modules.items()}
    told = json.loads((ROOT / "docs" / "clients.json").read_text())
    assert len(named) == len(modules) and set(named) == {client["client"] for client in told}
    assert all(client["rows"] for client in told)
