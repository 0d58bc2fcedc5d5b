"""The code of docs/tutorial.md runs as it stands, section by section."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.toy_checkpoint import write_checkpoint

from slotwise.api import app
from slotwise.compute.model.family_table import FAMILIES

ROOT = Path(__file__).resolve().parents[2]
CODE = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
SECTIONS = dict(part.split("\n", 1) for part in (ROOT / "docs" / "tutorial.md").read_text().split("\n## ")[1:])
SLOW = ("A model family",)  # loads a model three times


@pytest.fixture(autouse=True)
def _unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the tutorial registers is gone afterwards."""
    monkeypatch.setattr(app, "ROUTES", app.ROUTES)
    monkeypatch.setitem(FAMILIES, "AlternatingForCausalLM", None)


@pytest.mark.parametrize(
    "title", [pytest.param(title, marks=pytest.mark.slow) if title in SLOW else title for title in SECTIONS])
def test_the_code_runs(title: str, tmp_path: Path) -> None:
    parts = CODE.findall(SECTIONS[title])
    assert len(parts) >= 2
    (folder := tmp_path / "tokenizer").mkdir()
    names: dict[str, object] = {"tmp_path": tmp_path, "folder": write_checkpoint(folder), "__name__": "tutorial"}
    for part in parts:
        exec(compile(part, f"docs/tutorial.md, {title}", "exec", dont_inherit=True), names)
