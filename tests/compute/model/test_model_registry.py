"""Models by what users call them, and the names that clients get to see."""

from __future__ import annotations

import shutil
import struct
from pathlib import Path

import pytest

from slotwise import builtin
from slotwise.compute.model.model_registry import find
from slotwise.compute.model.published_models import PUBLISHED
from slotwise.errors import CheckpointError


def gguf(path: Path, title: str | None = None) -> Path:
    """Writes a file of metadata alone."""
    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value.encode())) + value.encode()

    values = {"general.architecture": "llama"} | ({} if title is None else {"general.name": title})
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, len(values)) + b"".join(
        text(key) + struct.pack("<I", 8) + text(value) for key, value in values.items()))
    return path


@pytest.mark.parametrize("typed", ["", "builtin", str(builtin.path())])
def test_the_built_in_model(typed: str) -> None:
    found = find(typed)
    assert (found.path, found.name) == (builtin.path(), "slotwise-builtin")
    assert set(found.aliases) == {typed, str(builtin.path())} - {""}


@pytest.mark.parametrize(("file", "title", "name"), [
    ("SmolLM2-135M-Instruct.Q4_1.gguf", "Smollm2 135M 8k Lc100K Mix1 Ep2", "SmolLM2-135M-Instruct"),
    ("qwen2.5-0.5b-instruct-q4_k_m.gguf", None, "qwen2.5-0.5b-instruct"),
    ("a-IQ3_XXS.gguf", None, "a"), ("a.bf16.gguf", None, "a"), ("a-UD-Q4_K_XL.gguf", None, "a"),
    ("a-Q8.gguf", None, "a"), ("a-Q4_0-tuned.gguf", None, "a-Q4_0-tuned"), ("a-MXFP4_MOE.gguf", None, "a"),
    ("a-Q4_K_M-00001-of-00001.gguf", None, "a"), ("file.gguf", "Its-Own-Name", "Its-Own-Name"),
    ("ggml-model-Q4_0.gguf", "A Title", "A-Title"), ("model.gguf", "", "model"),
    ("sha256-6a0746a1ec1a", "Tiny Model", "Tiny-Model"), ("sha256-6a0746a1ec1a", None, "sha256-6a0746a1ec1a"),
    ("file.gguf", "../etc/passwd", "file"), ("file.gguf", "C:\\model", "file"), ("file.gguf", "a\x1b[2Jb", "file"),
    ("file.gguf", "x" * 200, "file")])
def test_the_name_of_a_file(file: str, title: str | None, name: str, tmp_path: Path,
                            monkeypatch: pytest.MonkeyPatch) -> None:
    path = gguf(tmp_path / "models" / file, title)
    monkeypatch.chdir(tmp_path)
    found = find(f"models/{file}")
    assert found.name == name
    assert {f"models/{file}", str(path)} <= set(found.aliases) and name not in found.aliases
    assert find(path.parent).name == name if file.endswith(".gguf") else True


def test_the_name_of_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path(shutil.copytree(builtin.path(), tmp_path / "My-Model"))
    assert find(folder).name == find(f"{folder}/").name == "My-Model"
    monkeypatch.chdir(folder)
    found = find(".")
    assert found.name == "My-Model" and {".", str(folder)} == set(found.aliases)
    monkeypatch.chdir(tmp_path)
    assert find("~/My-Model" if Path.home() == tmp_path else "My-Model").name == "My-Model"


def test_a_folder_of_the_hubs_cache_has_the_hub_id(tmp_path: Path) -> None:
    folder = tmp_path / "models--owner--the-name" / "snapshots" / "0123456789abcdef"
    shutil.copytree(builtin.path(), folder)
    assert find(folder).name == "owner/the-name"


def test_a_name_wins_over_a_folder_in_the_current_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(builtin.path(), tmp_path / "builtin")
    monkeypatch.chdir(tmp_path)
    assert find("builtin").path == builtin.path()
    assert find("./builtin").path == Path("builtin") and find("./builtin").name == "builtin"


@pytest.mark.parametrize(("typed", "said"), [
    ("smolm2", "did you mean smollm2?"), ("whatever", f"or one of the names builtin, {', '.join(PUBLISHED)}")])
def test_a_name_that_is_none(typed: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError) as caught:
        find(typed)
    assert str(caught.value).endswith(said)
