"""Two replicas with toy engines in processes of their own, and a front door before them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.scale_door import Behind, behind
from support.toy_checkpoint import write_checkpoint


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def two(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Behind]:
    with behind(folder, tmp_path_factory.mktemp("logs"), "enable_prefix_caching=1") as found:
        yield found
