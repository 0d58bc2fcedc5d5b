"""A checkpoint with a tokenizer, and the GGUF file of it, made once."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.checkpoints import make
from support.gguf_files import write


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Llama with a byte-level tokenizer and a chat template."""
    return make("llama3", tmp_path_factory.mktemp("llama3"), tokenizer=True)


@pytest.fixture(scope="session")
def file(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(folder, tmp_path_factory.mktemp("gguf") / "tiny.gguf")
