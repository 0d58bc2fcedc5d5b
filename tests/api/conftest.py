"""A live server that all modules of a process share, and its tokenizer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
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


class Shared:
    """The server with default settings, started for the first module that needs it and again after a test ended it."""

    def __init__(self, folder: Path, log: Path) -> None:
        self._folder, self._log, self._stack = folder, log, ExitStack()
        self._server: Server | None = None

    def server(self) -> Server:
        if self._server is None or not self._is_whole(self._server):
            self.close()
            self._server = self._stack.enter_context(running(self._folder, self._log))
        self._log.write_text("")  # the engine appends
        return self._server

    def _is_whole(self, server: Server) -> bool:
        """Whether its first engine still runs, and is idle."""
        if server.process.poll() is not None or not Path(f"/proc/{server.engine_pid}").exists():
            return False
        health = server.get("/health")
        return health.status_code == 200 and health.json()["num_live"] == 0

    def close(self) -> None:
        self._stack.close()


@pytest.fixture(scope="session")
def shared(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shared]:
    found = Shared(folder, tmp_path_factory.mktemp("log") / "engine")
    yield found
    found.close()


@pytest.fixture(scope="module")
def server(shared: Shared) -> Server:
    return shared.server()
