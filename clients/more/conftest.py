"""The real model that the clients of `make clients-more` talk to."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from environments import Calls
from servers import Server, started


@pytest.fixture(scope="session")
def smol(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """SmolLM2-135M-Instruct, a chat model whose answers are sentences, behind a key."""
    log = tmp_path_factory.mktemp("smol") / "log"
    with started("smollm2", "SmolLM2-135M-Instruct", "key-of-clients", log) as server:
        yield server


@pytest.fixture(scope="module")
def calls(request: pytest.FixtureRequest, smol: Server, tmp_path_factory: pytest.TempPathFactory) -> Calls:
    """What the calls of the module's client returned; the module names its environment in INSTALLED."""
    return request.module.INSTALLED.calls(smol, tmp_path_factory.mktemp("home"))
