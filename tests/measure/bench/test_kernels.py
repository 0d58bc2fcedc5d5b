"""`slotwise bench kernels`: what it measures, and what it keeps only if that is wanted."""

from __future__ import annotations

import json

import pytest
import torch
from numba import config

from slotwise.cli import main
from slotwise.compute.kernels.cpu.kernels import CpuKernels
from slotwise.compute.kernels.cpu.products import paths
from slotwise.measure.bench import product_paths

POSSIBLE = [path for path in paths.DENSE if not paths.obstacle(path)]


@pytest.fixture(autouse=True)
def small(monkeypatch, tmp_path):
    monkeypatch.delenv(paths.VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(product_paths, "LAYERS", 1)


def product_path() -> str:
    return CpuKernels(1).product_path(torch.bfloat16)


@pytest.mark.parametrize(("quantization", "group"), [("none", paths.DENSE), ("int4", paths.QUANTIZED)])
def test_every_path_is_measured_at_every_number_of_rows_or_has_its_obstacle(quantization, group):
    watched = []
    result = product_paths.measure_paths([1, 3], 1, lambda: watched.append(1), quantization)
    possible = [path for path in group if not paths.obstacle(path)]
    assert list(result["microseconds"]) == possible
    assert {*result["microseconds"], *result["obstacles"]} == set(group)
    assert all(list(of) == [1, 3] and min(of.values()) > 0 for of in result["microseconds"].values())
    assert result["used"] == CpuKernels(1, quantization).product_path(torch.bfloat16)
    assert result["fastest"] in possible
    assert len(watched) == 2 * len(possible) == 2 * product_paths.number_of_paths(quantization)


def test_the_fastest_is_so_over_all_numbers_of_rows():
    taken = {"a": {1: 10.0, 512: 1000.0}, "b": {1: 15.0, 512: 500.0}, "c": {1: 9.0, 512: 9000.0}}
    assert product_paths.fastest(taken) == "b"


def test_measuring_changes_nothing_unless_it_is_to_be_kept(tmp_path, monkeypatch, capsys):
    before, other = product_path(), POSSIBLE[-1]
    monkeypatch.setattr(product_paths, "fastest", lambda microseconds: other)
    file = tmp_path / "result.json"
    assert main(["bench", "kernels", "--rows", "1", "--rounds", "1", "--output-json", str(file)]) == 0
    assert json.loads(file.read_text())["fastest"] == other
    assert product_path() == before and not paths.file().exists()
    assert main(["bench", "kernels", "--rows", "1", "--rounds", "1", "--keep-fastest"]) == 0
    assert str(paths.file()) in capsys.readouterr().out
    assert product_path() == other
    monkeypatch.setattr(config, "CPU_FEATURES", "+avx512f")  # another processor
    assert product_path() == "float32"


def test_paths_of_quantized_weights_are_shown_and_not_kept(capsys):
    assert main(["bench", "kernels", "--rows", "1", "--rounds", "1", "--quantization", "int8"]) == 0
    shown = capsys.readouterr().out
    assert "int8" in shown and all(path in shown for path in paths.QUANTIZED)
    assert main(["bench", "kernels", "--quantization", "int8", "--keep-fastest"]) == 1
    assert "--keep-fastest is for bfloat16" in capsys.readouterr().err and not paths.file().exists()


@pytest.mark.parametrize("text", ["", "[]", "{", '{"path": 3}', '{"path": "float32"}', "\x00" * 100_000])
def test_a_damaged_file_is_as_none(text):
    before = product_path()
    paths.file().parent.mkdir(parents=True)
    paths.file().write_text(text)
    assert product_path() == before


def test_a_kept_path_that_cannot_run_or_is_none_any_more_is_not_used(monkeypatch):
    before = product_path()
    paths.keep("abacus")
    assert product_path() == before
    paths.keep("float32")
    assert product_path() == "float32"
    paths.keep("onednn")
    monkeypatch.setattr(paths, "obstacle", lambda path: "" if path in (before, "float32") else "it cannot run")
    assert product_path() == before


def test_a_forced_path_goes_first(monkeypatch):
    paths.keep(POSSIBLE[-1])
    monkeypatch.setenv(paths.VARIABLE, "float32")
    assert product_path() == "float32"
