"""The table of clients tells what happened: a run of the plugin over tests of every outcome, rendered."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

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

CLIENT, VERSION = "`one`", "1.0"

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


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    folder = tmp_path_factory.mktemp("clients")
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "test_one.py").write_text(TESTS)
    options = ["--maxfail=2", "-p", "no:cacheprovider", "-o", f"pythonpath={ROOT / 'clients'}"]
    done = subprocess.run([sys.executable, "-m", "pytest", *options, "test_one.py"], cwd=folder, capture_output=True,
                          text=True, timeout=120)
    assert "1 failed, 3 passed, 1 skipped, 1 error" in done.stdout, done.stdout + done.stderr
    return json.loads((folder / "clients.json").read_text())["rows"]


def test_every_test_is_a_row_with_its_outcome(rows: list[dict[str, str]]) -> None:
    assert {(row["client"], row["version"]) for row in rows} == {("`one`", "1.0")}
    assert [(row["does"], row["result"]) for row in rows] == [
        ("Asks by a.", "works"), ("Asks by b.", "works"), ("Asks for `x | y`.", "refused"),
        ("Asks for more.", "fails"), ("Asks for nothing.", "not run"), ("Asks a server that is not there.", "fails"),
        ("Asks no more.", "not run")]
    reasons = [row["reason"] for row in rows]
    assert reasons[:3] == ["", "", "x | y is not supported"] and reasons[4] == "There is nothing."
    assert "too little" in reasons[3] and "no server" in reasons[5] and "ended" in reasons[6]


def test_the_page_shows_all_of_them(
    rows: list[dict[str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "clients.json").write_text(json.dumps({"date": "2026-01-02", "python": "3.11", "rows": rows}))
    monkeypatch.setattr(clients, "ROOT", tmp_path)
    head, *lines = clients.clients().splitlines()
    assert head.endswith("; 7 rows (works: 2, refused: 1, fails: 2, not run: 2).")
    shown = [line for line in lines if line.startswith("| `one` | 1.0 |")]
    assert len(shown) == 7 and all(line.replace(r"\|", "").count("|") == 5 for line in shown)
    assert shown[2].endswith(r"Refused: `x \| y is not supported`. |") and "**Fails**: `" in shown[3]
