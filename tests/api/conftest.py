"""A live server on a free port for each module, a tokenizer to go with it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.live_server import Server, running
from support.toy_checkpoint import write_checkpoint

from slotwise.text.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="session")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.load(folder)


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(folder, tmp_path_factory.mktemp("log") / "engine") as started:
        yield started
