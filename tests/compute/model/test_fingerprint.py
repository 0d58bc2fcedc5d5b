"""The digest of a checkpoint's files."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from slotwise import builtin
from slotwise.compute.model.checkpoint import fingerprint


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(builtin.path(), tmp_path / "model"))


def test_it_stays_while_the_files_stay(folder: Path) -> None:
    before = fingerprint(folder)
    os.utime(folder / "config.json")
    (folder / "README.md").write_text("changed")
    assert fingerprint(folder) == before != fingerprint(folder.parent)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "model.safetensors"])
def test_it_changes_with_each_file_of_the_model(folder: Path, name: str) -> None:
    before, path = fingerprint(folder), folder / name
    content, times = path.read_bytes(), path.stat()
    path.write_bytes(content.replace(b"1", b"2", 1))
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert fingerprint(folder) != before
    path.write_bytes(content[:-1] + b"\x01")  # weights of the same shapes: the time tells
    assert fingerprint(folder) != before
    path.unlink()
    assert fingerprint(folder) != before
