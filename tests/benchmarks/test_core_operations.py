"""Random operations on the scheduler, in short; and that a broken law ends them."""

from __future__ import annotations

import importlib
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest

from slotwise.core.kv_manager import KVManager

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def core_operations() -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT))
        return importlib.import_module("benchmarks.core_operations")


def test_lives_come_to_an_end_and_drafts_are_among_them(
    core_operations: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", [sys.argv[0], "--operations", "2500", "--seed", "8"])
    assert core_operations.main() == 0
    said = capsys.readouterr().out
    assert "no law broken" in " ".join(said.split()) and "drafts accepted" in said


def test_blocks_that_are_not_released_are_seen(
    core_operations: ModuleType, monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(KVManager, "release", lambda self, request: None)
    with pytest.raises(AssertionError):
        for seed in range(8, 12):
            core_operations.Life(seed, Counter()).live()
