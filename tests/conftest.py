"""What every test finds."""

from __future__ import annotations

import atexit
import gc
import importlib
import logging
import random
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import HealthCheck, settings
from support import leftovers

# How fast a machine is proves nothing, nor does how many of a run's random draws were of use.
settings.register_profile("busy", deadline=None, suppress_health_check=[
    HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large])
settings.load_profile("busy")

earlier_threads: set[threading.Thread] = set()


def pytest_configure() -> None:
    """A shell that starts the tests in the background has Ctrl-C ignored, here and in every process started here."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    leftovers.guard()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """What a test draws is the same in each run: with other weights, rounding may send a token to another expert."""
    random.seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)
    earlier_threads.clear()
    earlier_threads.update(set(threading.enumerate()) - {threading.current_thread()})


@pytest.fixture
def caplog(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """What this test logs: a thread that outlives the test that started it, on a busy machine, may log meanwhile."""
    class OfThisTest(logging.Filter):
        def filter(self, record: logging.LogRecord) -> bool:
            return threading.current_thread() not in earlier_threads

    with caplog.filtering(OfThisTest()):
        yield caplog


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Ten thousand tests stay, and what they import: to look for garbage among them is a quarter of the work."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


def pytest_unconfigure() -> None:
    """What was left out is given back at the very end, or libraries report all of it as leaked: pytest looks before."""
    atexit.register(gc.unfreeze)


@pytest.fixture(scope="session")
def openai() -> ModuleType:
    """OpenAI's client, which takes seconds to import: a process that only collects the tests is spared them."""
    return importlib.import_module("openai")


@pytest.fixture(scope="session")
def anthropic() -> ModuleType:
    """Anthropic's client, likewise."""
    return importlib.import_module("anthropic")


LONGEST = (  # files of half a minute and more
    "test_ray", "test_rank_families", "test_gpu", "test_aarch64", "test_hostile", "test_parity",
    "test_real_weights", "test_lesser_processors", "test_exchange", "test_decoder", "test_ranks")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files first, then others with slow tests: the last process to finish decides when all have.

    The files of a folder are spread among those of others, which compute while tests of the API wait for limits.
    """
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    folders: dict[Path, dict[Path, int]] = {}
    for item in items:
        files = folders.setdefault(item.path.parent, {})
        files.setdefault(item.path, len(files))
    items.sort(key=lambda item: (
        item.path.stem not in LONGEST, item.path not in slow,
        folders[item.path.parent][item.path] / len(folders[item.path.parent]), item.path))
