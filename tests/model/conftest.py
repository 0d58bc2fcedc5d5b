"""Kernels to run on, and checkpoints made once a session."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import checkpoints
import pytest

from slotwise.kernels.base import Kernels
from slotwise.kernels.select import choose


@pytest.fixture(params=["reference", "cpu"])
def kernels(request: pytest.FixtureRequest) -> Kernels:
    return choose(request.param)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with checkpoints.one_thread():
        yield


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A family's small random checkpoint in float32.  Shared: copy it before changing it."""
    return cache(lambda family: checkpoints.make(family, tmp_path_factory.mktemp(family)))
