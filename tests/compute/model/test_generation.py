"""Which generation_config.json counts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from slotwise.compute.model.generation_config import absolute, named_file, read_generation
from slotwise.compute.model.loading import read_config
from slotwise.errors import CheckpointError


def write(folder: Path, name: str = "generation_config.json", **fields: object) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(json.dumps(fields))
    return folder / name


@pytest.mark.parametrize("setting", ["auto", "vllm"])
def test_words_that_name_no_file(setting: str) -> None:
    assert named_file(setting) is None and absolute(setting) == setting


def test_a_file_or_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, other = write(tmp_path / "a"), write(tmp_path / "a", "mine.json")
    monkeypatch.chdir(tmp_path)
    assert named_file(str(tmp_path / "a")) == named_file("a") == named_file(str(file)) == file
    assert named_file("a/mine.json") == other and absolute("a") == str(tmp_path / "a")
    (tmp_path / "link.json").symlink_to(other)
    assert read_generation(tmp_path, named_file("link.json")).values == {}


@pytest.mark.parametrize("setting", ["absent", "", ".", "/dev/null"])
def test_no_such_file(setting: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match=r"generation_config must be auto, vllm, or a file, or a folder with"):
        named_file(setting)


def test_the_end_tokens_of_a_named_file_replace_those_of_the_checkpoints(
        checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    folder = checkpoint("llama2")
    own = read_config(folder).eos_token_ids
    assert own == (2,)
    assert read_config(folder, write(tmp_path / "a", eos_token_id=[7, 8])).eos_token_ids == (2, 7, 8)
    with pytest.raises(CheckpointError, match="eos_token_id must be a token id"):
        read_config(folder, write(tmp_path / "a", eos_token_id="x"))
