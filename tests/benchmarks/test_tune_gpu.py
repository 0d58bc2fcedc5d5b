"""The search for sizes that make attention fast.  What is fast, only a GPU can say."""

from __future__ import annotations

import importlib
import math
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest


@dataclass(frozen=True)
class Sizes:
    a: int
    b: int


@pytest.fixture
def tune_gpu(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2]))
    return importlib.import_module("benchmarks.gpu.tune")


def test_it_descends_until_nothing_improves_and_asks_for_nothing_twice(tune_gpu):
    asked: list[Sizes] = []

    def cost(sizes: Sizes) -> float:
        asked.append(sizes)
        return math.inf if sizes.a == 4 else (sizes.a - 3) ** 2 + (sizes.b - 2 * sizes.a) ** 2

    found = tune_gpu.descend(Sizes(1, 1), {"a": (1, 2, 3, 4), "b": (1, 2, 4, 6)}, cost)
    assert cost(found) <= min(cost(Sizes(a, found.b)) for a in (1, 2, 3))
    assert cost(found) <= min(cost(Sizes(found.a, b)) for b in (1, 2, 4, 6))
    assert cost(found) < cost(Sizes(1, 1))
    searched = asked[: asked.index(found) + 1]
    assert len(searched) == len(set(searched))


def test_every_choice_can_be_launched(tune_gpu):
    tiles = tune_gpu.PREFILL["block_n"] + tune_gpu.DECODE["block_n"]
    assert all(segment % block == 0 for segment in tune_gpu.SEGMENTS["segment"] for block in tiles)
    for name, values in (tune_gpu.PREFILL | tune_gpu.DECODE | tune_gpu.SEGMENTS).items():
        assert name == "num_stages" or all(value & (value - 1) == 0 for value in values)


def test_it_says_so_where_there_is_no_gpu(tune_gpu, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["tune_gpu"])
    monkeypatch.setattr(tune_gpu.torch.cuda, "is_available", lambda: False)
    tune_gpu.main()
    assert "skipped" in capsys.readouterr().out
