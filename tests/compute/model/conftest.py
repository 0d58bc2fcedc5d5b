"""Kernels to run on, and checkpoints made once a session."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import cache
from pathlib import Path

import pytest
from support.checkpoints import make, one_thread

from slotwise.compute.kernels.interface import Kernels
from slotwise.compute.kernels.select import choose


@pytest.fixture(params=["reference", "cpu"])
def kernels(request: pytest.FixtureRequest) -> Iterator[Kernels]:
    # The CPU kernels keep their threads: how they share out the work is part of what is compared.
    with one_thread() if request.param == "reference" else nullcontext():
        yield choose(request.param)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A family's small random checkpoint in float32.  Shared: copy it before changing it."""
    return cache(lambda family: make(family, tmp_path_factory.mktemp(family)))
