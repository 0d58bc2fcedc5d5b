"""The thread that loads adapters: in order, and whatever happens to one, the next is loaded."""

from __future__ import annotations

import queue
import threading
from pathlib import Path

import pytest

from slotwise.compose.adapter_loading import AdapterLoading
from slotwise.engine.messages import AdapterLoaded, LoadAdapter
from slotwise.errors import CheckpointError


class Store:
    def __init__(self) -> None:
        self.loaded: list[tuple[int, str]] = []

    def load(self, number: int, folder: Path) -> None:
        self.loaded.append((number, threading.current_thread().name))
        if number == 2:
            raise CheckpointError("it is\ndamaged")
        if number == 3:
            raise KeyError("a bug")

    def unload(self, number: int) -> None:
        raise NotImplementedError


def test_adapters_are_loaded_one_after_another_on_a_thread(tmp_path: Path) -> None:
    store, reports = Store(), queue.SimpleQueue[AdapterLoaded]()
    loading = AdapterLoading(store, reports.put)
    for number in range(1, 5):
        loading.load(LoadAdapter(number, str(tmp_path)))
    found = [reports.get(timeout=100) for _ in range(4)]
    assert [(one.number, one.objection) for one in found] == [
        (1, ""), (2, "it is damaged"), (3, "KeyError: 'a bug'"), (4, "")]
    assert store.loaded == [(number, "adapters") for number in range(1, 5)]
    assert found[0].digest == found[3].digest != ""


@pytest.mark.parametrize("has_adapters", [True, False])
def test_what_is_no_folder_is_an_answer(tmp_path: Path, has_adapters: bool) -> None:
    reports = queue.SimpleQueue[AdapterLoaded]()
    loading = AdapterLoading(Store() if has_adapters else None, reports.put)
    for path in (str(tmp_path / "none"), "\0", __file__):
        loading.load(LoadAdapter(7, path))
        told = reports.get(timeout=100).objection
        assert ("local folders" in told) if has_adapters else ("no adapters" in told)
