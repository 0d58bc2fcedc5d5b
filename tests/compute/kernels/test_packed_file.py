"""Packed weights on disk: found again, never changed, refused where they are damaged, and bounded."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from compute.kernels.test_memory import resident
from support.quantized_matrices import random_matrix
from torch import Tensor

from slotwise.compute.kernels.cpu.kernels import CpuKernels
from slotwise.compute.kernels.cpu.memory import discard
from slotwise.compute.kernels.cpu.products import packed_file
from slotwise.compute.kernels.matrix import QuantizedMatrix
from slotwise.compute.model.gguf.block_types import BLOCK_TYPES

PLENTY = 1 << 30


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of its own, beside compiled kernels that stay where they are."""
    monkeypatch.setattr(packed_file, "home", lambda: tmp_path / "packed-weights")
    yield tmp_path / "packed-weights"


class Model:
    """Three products of a model, packed within `kept`; counts the outputs that are read."""

    def __init__(self, key: str = "key", most: int = PLENTY, *, gates: bool = True) -> None:
        self.read = 0
        kernels = CpuKernels(2)
        first, second, third = (self._matrix(kind, seed) for seed, kind in enumerate(("Q4_K", "Q6_K", "Q8_0")))
        with packed_file.kept(kernels.launcher, key, most):
            self._products = [kernels.linear(first), kernels.gated(second) if gates else kernels.linear(second),
                              kernels.linear(third, torch.ones(40))]
        self.panels = kernels.launcher.panels is kernels.launcher.weights
        self.mapped = kernels.launcher.mapped

    def _matrix(self, kind: str, seed: int) -> QuantizedMatrix:
        matrix = random_matrix(BLOCK_TYPES[kind].format, 40, 512, seed=seed)
        inner = matrix.read

        def read(first: int, end: int):
            self.read += end - first
            return inner(first, end)

        return QuantizedMatrix(matrix.format, 40, 512, read)

    def results(self) -> list[Tensor]:
        x = torch.randn(3, 512, generator=torch.Generator().manual_seed(0))
        return [product(x) for product in self._products]


@pytest.mark.parametrize("fault", ["link", "mode", "owner"])
def test_a_file_that_another_user_could_change_is_not_mapped(home: Path, fault: str) -> None:
    """Its digest is right, and it could be changed as long as it is mapped."""
    Model()
    (path,) = home.glob(f"*{packed_file.SUFFIX}")
    if fault == "link":
        path.rename(home.parent / "elsewhere")
        path.symlink_to(home.parent / "elsewhere")
    elif fault == "mode":
        path.chmod(0o666)
    elif os.geteuid() == 0:
        os.chown(path, 12345, 12345)
    else:
        pytest.skip("only root can give a file to another user")
    again = Model()
    assert again.read and not again.mapped and not path.is_symlink()
    assert not Model().read, "it was written anew"


def equal(one: Model, other: Model) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.results(), other.results(), strict=True))


def test_what_was_packed_once_is_mapped_and_nothing_is_read(home: Path) -> None:
    first, second = Model(), Model()
    assert (first.read, second.read) == (120, 0) and equal(first, second)
    assert first.panels and second.panels
    (file,) = home.iterdir()
    assert file.stat().st_mode & 0o077 == 0
    assert equal(first, Model("another key")) and len(list(home.iterdir())) == 2


def test_what_is_mapped_can_be_given_back_and_is_read_again() -> None:
    """The pages are gone, and the products are the same."""
    Model()
    model = Model()
    expected = model.results()
    (mapped,) = model.mapped
    assert resident(mapped.data_ptr()) > 0.5 * mapped.nbytes
    discard(mapped.data_ptr(), mapped.nbytes)
    assert resident(mapped.data_ptr()) == 0
    assert all(torch.equal(a, b) for a, b in zip(model.results(), expected, strict=True))


@pytest.mark.parametrize("place", [0, 1000, -1, -20, -60])
def test_a_damaged_file_is_made_anew(place: int, home: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = Model()
    (file,) = home.iterdir()
    whole = bytearray(file.read_bytes())
    whole[place] ^= 1
    file.write_bytes(whole)
    again = Model()
    assert again.read == 120 and equal(first, again) and "are damaged" in caplog.text
    assert Model().read == 0


@pytest.mark.parametrize("size", [0, 39, 100])
def test_a_file_that_was_cut_off_is_made_anew(size: int, home: Path) -> None:
    first = Model()
    (file,) = home.iterdir()
    file.write_bytes(file.read_bytes()[:size])
    assert Model().read == 120 and equal(first, Model())


@pytest.mark.parametrize("ways", [(True, False), (False, True)])
def test_a_model_that_is_built_otherwise_never_gets_panels_of_another(
    ways: tuple[bool, bool], home: Path, caplog: pytest.LogCaptureFixture,
) -> None:
    Model(gates=ways[0])
    found = Model(gates=ways[1])
    assert "are not those of this model" in caplog.text and not list(home.iterdir())
    assert equal(found, Model("another key", gates=ways[1]))


def test_nothing_is_kept_of_a_model_that_was_not_packed_to_its_end(home: Path) -> None:
    kernels = CpuKernels(1)
    with pytest.raises(KeyboardInterrupt), packed_file.kept(kernels.launcher, "key", PLENTY):
        kernels.linear(random_matrix(BLOCK_TYPES["Q8_0"].format, 40, 512))
        raise KeyboardInterrupt
    assert not list(home.iterdir()) and kernels.launcher.panels is kernels.launcher.weights


def test_the_files_used_longest_ago_go_first(home: Path) -> None:
    Model("one")
    size = next(home.iterdir()).stat().st_size
    now = time.time()
    Model("two", 3 * size)
    for age, name in enumerate(("two", "one")):
        os.utime(home / f"{name}.panels", (now - age - 10, now - age - 10))
    left = home / f"{packed_file.UNFINISHED}of a killed process"
    left.write_bytes(b"x")
    os.utime(left, (now - 2 * packed_file.HOUR,) * 2)
    assert Model("one", 3 * size).read == 0  # which makes it the one used last
    Model("three", 2 * size)
    assert sorted(path.name for path in home.iterdir()) == ["one.panels", "three.panels"]


@pytest.mark.parametrize("most", [1, 5000, 50_000])
def test_what_exceeds_the_bound_is_not_kept(most: int, home: Path, caplog: pytest.LogCaptureFixture) -> None:
    found = Model(most=most)
    assert not list(home.iterdir()) and "more than the" in caplog.text
    assert equal(found, Model(most=PLENTY))


def test_a_folder_that_others_may_write_to_is_not_used(home: Path, caplog: pytest.LogCaptureFixture) -> None:
    home.mkdir(parents=True)
    home.chmod(0o777)
    Model()
    assert not list(home.iterdir()) and "can be changed by other users" in caplog.text


def test_a_model_without_blocks_leaves_nothing(home: Path, caplog: pytest.LogCaptureFixture) -> None:
    kernels = CpuKernels(1)
    with packed_file.kept(kernels.launcher, "key", PLENTY):
        kernels.linear(torch.randn(40, 64))
    assert not list(home.iterdir()) and "none that are multiplied as blocks" in caplog.text
