"""Which file is meant: a path, a folder with one model, a part of a split one, a quantization of a hub model."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from slotwise.compute.model import checkpoint as module
from slotwise.compute.model.checkpoint import fingerprint, locate
from slotwise.errors import CheckpointError


def refusal(model: Path | str) -> str:
    with pytest.raises(CheckpointError) as caught:
        locate(model)
    return str(caught.value)


def test_a_file_is_itself(file: Path, tmp_path: Path) -> None:
    """Also under a name that tells nothing, as in Ollama's store, and as a link."""
    assert locate(file) == file
    assert locate(shutil.copy(file, tmp_path / "sha256-6a0746a1ec1a")) == tmp_path / "sha256-6a0746a1ec1a"
    (tmp_path / "link.gguf").symlink_to(file)
    assert locate(tmp_path / "link.gguf") == tmp_path / "link.gguf"


def test_a_folder_with_one_model_stands_for_it(file: Path, tmp_path: Path) -> None:
    shutil.copy(file, tmp_path / "model.gguf")
    (tmp_path / "mmproj-model.gguf").write_bytes(b"GGUF")  # reads pictures
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    assert locate(tmp_path) == tmp_path / "model.gguf"


def test_a_folder_with_several_models_is_refused(tmp_path: Path) -> None:
    for name in ("a-Q4_K_M.gguf", "a-Q8_0.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    assert "holds 2 models in GGUF: give the path of one (a-Q4_K_M.gguf, a-Q8_0.gguf)" in refusal(tmp_path)


def test_a_link_out_of_a_folder_is_refused(file: Path, tmp_path: Path) -> None:
    (tmp_path / "model.gguf").symlink_to(file)
    assert "outside of the checkpoint" in refusal(tmp_path)


def test_a_safetensors_checkpoint_wins(folder: Path, file: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "both")
    shutil.copy(file, tmp_path / "both" / "model.gguf")
    assert locate(tmp_path / "both") == tmp_path / "both"


def test_a_file_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"PK")
    assert "x.gguf does not begin as a GGUF file does" in refusal(tmp_path / "x.gguf")
    assert "no folder and no file" in refusal(tmp_path / "missing.gguf")


@pytest.mark.parametrize(("names", "found"), [
    (["Tiny-Q4_K_M.gguf"], "Tiny-Q4_K_M.gguf"), (["tiny.q4_k_m.gguf"], "tiny.q4_k_m.gguf"),
    (["Q4_K_M/tiny-Q4_K_M-00001-of-00002.gguf", "Q4_K_M/tiny-Q4_K_M-00002-of-00002.gguf"],
     "Q4_K_M/tiny-Q4_K_M-00001-of-00002.gguf"),
])
def test_a_quantization_of_a_hub_model(
    names: list[str], found: str, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The hub itself is out of reach here: its client is replaced by a folder that has what was asked for."""
    asked: list[tuple[str, ...]] = []

    def download(name: str, patterns: tuple[str, ...], skipped: tuple[str, ...]) -> Path:
        asked.append((name, *patterns))
        return tmp_path

    monkeypatch.setattr(module, "_download", download)
    for name in [*names, "other-Q8_0.gguf"]:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(file, tmp_path / name)
    assert locate("owner/tiny:Q4_K_M") == tmp_path / found
    assert asked[0][0] == "owner/tiny" and all("Q4_K_M" in one or "q4_k_m" in one for one in asked[0][1:])
    assert "has no GGUF file" in refusal("owner/tiny:Q5_K_S")


def test_a_hub_model_with_nothing_but_gguf_needs_a_quantization(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr(module, "_download", lambda *asked: tmp_path)
    assert "owner/tiny has no safetensors weights" in (said := refusal("owner/tiny")) and "owner/tiny:Q4_K_M" in said


def test_a_changed_file_has_another_fingerprint(file: Path, tmp_path: Path) -> None:
    path = Path(shutil.copy(file, tmp_path / "model.gguf"))
    before = fingerprint(path)
    assert fingerprint(path) == before
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert fingerprint(path) != before
