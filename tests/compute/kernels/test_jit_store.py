"""Where compiled kernels are kept, and when they are compiled anew."""

from __future__ import annotations

import errno
import os
import random
import shutil
import stat
import subprocess
import sys
import tempfile

import numba
import pytest
import torch

from slotwise.compute.kernels.cpu.jit import compiler, store
from slotwise.compute.kernels.cpu.jit.store import KernelStore, ObjectCode

KEY = "0123456789abcdef"
COMPILE = """
import logging
import torch
logging.basicConfig(format="%(message)s")
from slotwise.compute.kernels.cpu import pointwise
from slotwise.compute.kernels.cpu.jit import compiler
from slotwise.compute.kernels.cpu.kernels import CpuKernels
codes = [pointwise.NORM[torch.float32, torch.float32], pointwise.SILU_MUL[torch.float32]]
print(*(code.is_on_disk for code in codes))
compiler.compile_all(codes)
print(*(code.is_on_disk for code in codes))
kernels, x = CpuKernels(2), torch.randn(50, 64)
kernels.rms_norm(x, torch.ones(64), 1e-5)
print(torch.allclose(kernels.silu_mul(x), torch.nn.functional.silu(x[:, :32]) * x[:, 32:], atol=1e-5))
"""


def told(script: str, **environment: str) -> tuple[list[str], list[str]]:
    """What a fresh interpreter prints, and what it logs."""
    done = subprocess.run([sys.executable, "-c", script], env=os.environ | environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines(), done.stderr.splitlines()


def run(script: str, **environment: str) -> list[str]:
    """What a fresh interpreter prints."""
    return told(script, **environment)[0]


@pytest.mark.parametrize(("where", "name", "value"), [
    (numba.config, "CPU_NAME", "another"), (numba.config, "CPU_FEATURES", "+another"),
    (torch.backends.cpu, "get_cpu_capability", lambda: "ANOTHER")],
    ids=["processor", "features", "torch's capability"])
def test_code_for_another_processor_has_a_folder_of_its_own(monkeypatch, where, name, value):
    key_here = compiler.key()
    assert compiler.key() == key_here
    monkeypatch.setattr(where, name, value)
    assert compiler.key() != key_here


@pytest.mark.slow
def test_kernels_are_compiled_where_nothing_can_be_kept(tmp_path):
    nowhere = tmp_path / "file"
    nowhere.touch()
    (tmp_path / f"slotwise-{os.geteuid()}").touch()
    assert run(COMPILE, XDG_CACHE_HOME=str(nowhere), TMPDIR=str(tmp_path)) == ["False False", "False False", "True"]


def test_only_folders_used_last_are_kept(tmp_path):
    for age in range(store.KEPT + 3):
        (tmp_path / f"{age}").mkdir()
        (tmp_path / f"{age}" / "code").touch()
        os.utime(tmp_path / f"{age}", (1000 - age, 1000 - age))
    store.remove_unused(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"{age}" for age in range(store.KEPT)]


# Ways in which a file of LENGTH bytes is harmed; its index is in the first 200, after a digest of 64.
DAMAGE = {
    "emptied": lambda data: b"",
    "halved": lambda data: data[: len(data) // 2],
    "digest flipped": lambda data: flipped(data, 10),
    "index flipped": lambda data: flipped(data, 80),
    "code flipped": lambda data: flipped(data, len(data) - 500),
    "longer": lambda data: data + b"x",
}


def flipped(data: bytes, place: int) -> bytes:
    return data[:place] + bytes([data[place] ^ 1 << random.randrange(8)]) + data[place + 1 :]


@pytest.fixture
def place(monkeypatch, tmp_path):
    """The folder of the store `KEY`, which does not exist yet."""
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    return tmp_path / "cache" / "slotwise" / "kernels" / KEY


OBJECT = ObjectCode("entry", bytes(range(256)) * 40)


def test_what_is_written_is_read(place):
    assert KernelStore(KEY).read("one") is None
    KernelStore(KEY).write("one", OBJECT)
    assert KernelStore(KEY).read("one") == OBJECT
    assert [path.name for path in place.iterdir()] == ["one"], "a temporary file was left"
    for folder in (place, place.parent, place.parents[1], place.parents[2]):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((place / "one").stat().st_mode) == 0o600


@pytest.mark.parametrize("damage", DAMAGE)
def test_what_was_harmed_counts_as_missing_and_is_said(place, damage, caplog):
    KernelStore(KEY).write("one", OBJECT)
    for seed in range(20):
        random.seed(seed)
        (place / "one").write_bytes(DAMAGE[damage]((place / "one").read_bytes()))
        caplog.clear()
        assert KernelStore(KEY).read("one") is None
        assert caplog.messages == [f"the compiled kernel {place / 'one'} is damaged: it is compiled anew"]
        KernelStore(KEY).write("one", OBJECT)
        assert KernelStore(KEY).read("one") == OBJECT


def test_a_kernel_under_another_s_name_is_not_run(place):
    KernelStore(KEY).write("one", OBJECT)
    (place / "one").rename(place / "two")
    assert KernelStore(KEY).read("two") is None


def test_a_full_disk_leaves_what_was_there(place, monkeypatch):
    KernelStore(KEY).write("one", OBJECT)

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "no space left on device")

    monkeypatch.setattr(os, "fsync", full)
    KernelStore(KEY).write("one", ObjectCode("other", b"x"))
    assert KernelStore(KEY).read("one") == OBJECT
    assert len(list(place.iterdir())) == 1


@pytest.mark.parametrize("mode", [0o620, 0o602])
def test_a_file_that_others_can_write_is_not_run(place, mode, caplog):
    KernelStore(KEY).write("one", OBJECT)
    (place / "one").chmod(mode)
    assert KernelStore(KEY).read("one") is None
    assert "can be changed by other users: it is compiled anew" in caplog.text
    KernelStore(KEY).write("one", OBJECT)
    assert KernelStore(KEY).read("one") == OBJECT


def test_no_link_is_followed(place, tmp_path):
    KernelStore(KEY).write("one", OBJECT)
    (place / "one").rename(tmp_path / "elsewhere")
    (place / "one").symlink_to(tmp_path / "elsewhere")
    assert KernelStore(KEY).read("one") is None
    KernelStore(KEY).write("one", OBJECT)
    assert KernelStore(KEY).read("one") == OBJECT and not (place / "one").is_symlink()


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o1777])
@pytest.mark.parametrize("above", [0, 1])
def test_a_folder_that_others_can_write_is_refused_for_a_private_one(place, tmp_path, mode, above, caplog):
    refused = (place, place.parent)[above]
    place.mkdir(parents=True)
    refused.chmod(mode)
    if above and mode & stat.S_ISVTX:
        assert KernelStore(KEY).folder == place, "there a sticky bit keeps others from replacing what is this user's"
        return
    private = tmp_path / "temporary" / f"slotwise-{os.geteuid()}" / "kernels"
    assert KernelStore(KEY).folder == private / place.name
    assert stat.S_IMODE(private.stat().st_mode) == 0o700
    assert caplog.messages == [
        f"{refused} can be changed by other users (mode {mode:o}): compiled kernels are not loaded from there; they "
        f"are kept in {private}"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user")
def test_what_belongs_to_another_user_is_refused(place, tmp_path, caplog):
    KernelStore(KEY).write("one", OBJECT)
    os.chown(place / "one", 12345, 12345)
    assert KernelStore(KEY).read("one") is None
    assert "belongs to another user (uid 12345): it is compiled anew" in caplog.text
    os.chown(place, 12345, 12345)
    private = tmp_path / "temporary" / f"slotwise-{os.geteuid()}"
    assert KernelStore(KEY).folder == private / "kernels" / place.name
    assert f"{place} belongs to another user (uid 12345): compiled kernels are not loaded from there" in caplog.text
    os.chown(private, 12345, 12345)
    assert KernelStore(KEY).folder is None, "the private one is looked at in the same way"
    assert "compiled kernels are not kept, and every start compiles them again" in caplog.messages[-1]
    KernelStore(KEY).write("one", OBJECT)
    assert KernelStore(KEY).read("one") is None


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a link to another user")
def test_a_link_of_another_user_is_not_followed(place, tmp_path):
    mine = tmp_path / "mine"
    mine.mkdir(mode=0o700)
    place.parents[1].mkdir(parents=True)
    place.parent.symlink_to(mine)
    assert KernelStore(KEY).folder == place, "a link of this user's own"
    os.chown(place.parent, 12345, 12345, follow_symlinks=False)
    assert KernelStore(KEY).folder != place


@pytest.mark.slow
def test_processes_that_compile_at_once_share_and_a_start_after_damage_compiles_what_was_harmed(tmp_path):
    folder = {"XDG_CACHE_HOME": str(tmp_path)}
    processes = [subprocess.Popen([sys.executable, "-c", COMPILE], env=os.environ | folder, stdout=subprocess.PIPE,
                                  stderr=subprocess.STDOUT, text=True) for _ in range(2)]
    assert [process.communicate()[0].splitlines()[1:] for process in processes] == [["True True", "True"]] * 2
    _, harmed = sorted((path for path in tmp_path.rglob("*") if path.is_file()), key=lambda path: "silu" in path.name)
    harmed.write_bytes(DAMAGE["code flipped"](harmed.read_bytes()))  # other damage: see `DAMAGE`, above
    printed, logged = told(COMPILE, **folder)
    assert printed == ["True False", "True True", "True"]
    assert logged and all(f"{harmed} is damaged: it is compiled anew" in line for line in logged)


def test_a_folder_that_cannot_be_written_is_told_once_with_what_it_costs(place, tmp_path, caplog):
    """The folder for temporary files takes its place, if that can be written."""
    place.parent.parent.mkdir(parents=True)
    place.parent.write_text("a file")
    private = tmp_path / "temporary" / f"slotwise-{os.geteuid()}"
    assert KernelStore(KEY).folder == private / "kernels" / place.name
    assert "cannot be written" in caplog.text and f"they are kept in {private}" in caplog.text
    shutil.rmtree(private)
    private.write_text("a file")
    caplog.clear()
    store = KernelStore(KEY)
    for _ in range(2):
        store.write("one", OBJECT)
        assert store.folder is None and store.read("one") is None
    (message,) = caplog.messages
    assert f"{place.parent} cannot be written" in message and "every start compiles them again" in message
