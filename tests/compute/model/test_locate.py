"""Finding checkpoints, here and on the hub."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from slotwise.compute.model.checkpoint import locate
from slotwise.errors import CheckpointError

UNREACHABLE = "CheckpointError: no folder owner/name here, and the hub cannot be reached"


def located(name: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """What `locate` says in a process of its own: the hub's client reads its environment when first imported."""
    script = f"from slotwise.compute.model.checkpoint import locate; print(locate({name!r}))"
    return subprocess.run(
        [sys.executable, "-c", script], env=os.environ | environment, capture_output=True, text=True, check=False
    )


def test_a_folder_is_itself(checkpoint: Callable[[str], Path]) -> None:
    folder = checkpoint("llama2")
    assert locate(folder) == locate(str(folder)) == folder


def test_offline() -> None:
    assert UNREACHABLE in located("owner/name", HF_HUB_OFFLINE="1").stderr.splitlines()[-1]


def test_unreachable() -> None:
    run = located("owner/name", HF_ENDPOINT="http://127.0.0.1:9", HF_HUB_OFFLINE="0")
    assert UNREACHABLE in run.stderr.splitlines()[-1]


@pytest.mark.parametrize("name", ["one-word", "a/b/c", "../up", "/absolute/path", "owner/..", "a b/c"])
def test_names_that_are_no_hub_ids_are_not_asked_for(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match="no folder"):
        locate(name)


def test_a_snapshot_in_the_cache_is_found_without_a_network(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    cached, commit = tmp_path / "models--owner--name", "0123456789abcdef0123456789abcdef01234567"
    snapshot = Path(shutil.copytree(checkpoint("llama2"), cached / "snapshots" / commit))
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text(commit)
    run = located("owner/name", HF_HUB_OFFLINE="1", HF_HUB_CACHE=str(tmp_path))
    assert run.stdout.strip() == str(snapshot), run.stderr
