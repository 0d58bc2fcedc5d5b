"""Real clients against live servers: `make clients` runs these in an environment of their own.

Nothing is downloaded: hubs are told to be offline, and tokenizers and tasks come from folders.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from servers import Server, started
from support import leftovers
from table import Table

SET = {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
UNSET = ("OPENAI_API_KEY", "OPENAI_BASE_URL", "OPENAI_API_BASE", "LANGCHAIN_TRACING_V2", "LANGSMITH_TRACING")
HOMES = ("HF_HOME", "LLM_USER_PATH")  # folders of caches and settings
HOME = pytest.StashKey[str]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--table", type=Path, help="write what every client did to this file, as JSON")


def pytest_configure(config: pytest.Config) -> None:
    """The environment is set before a test file imports its client."""
    home = config.stash[HOME] = tempfile.mkdtemp(prefix="clients-")
    os.environ.update(SET | {name: os.path.join(home, name.lower()) for name in HOMES})
    for name in UNSET:
        os.environ.pop(name, None)
    leftovers.guard()
    if path := config.getoption("--table"):
        config.pluginmanager.register(Table(path))


def pytest_unconfigure(config: pytest.Config) -> None:
    shutil.rmtree(config.stash[HOME], ignore_errors=True)


@pytest.fixture(scope="session")
def builtin(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The built-in model, without a key."""
    with started(None, "slotwise-builtin", "", tmp_path_factory.mktemp("builtin") / "log") as server:
        yield server


@pytest.fixture(scope="session")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A random checkpoint of transformers' whose template has all roles and turns, behind a key."""
    from support import checkpoints

    folder = checkpoints.make("smollm2", tmp_path_factory.mktemp("checkpoint"), tokenizer=True)
    with started(folder, "tiny-chat", "key-of-clients", tmp_path_factory.mktemp("chat") / "log") as server:
        yield server


@pytest.fixture(scope="session")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A checkpoint of transformers' whose weights say what a test wants, tool calls among it: see tests/scripted.py."""
    from support import scripted as checkpoint

    folder = checkpoint.write(tmp_path_factory.mktemp("scripted"))
    with started(folder, "scripted", "", tmp_path_factory.mktemp("scripts") / "log", "--reasoning-parser",
                 "qwen3") as server:
        yield server
