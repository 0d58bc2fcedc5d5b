"""Keeps the packed weights of a quantised checkpoint on disk, where `packed_weights_cache` asks for it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import slotwise
from slotwise.engine.config import EngineConfig
from slotwise.kernels.interface import Kernels
from slotwise.kernels.select import launcher_of
from slotwise.model.checkpoint import content_digest

CODE = ("kernels/cpu/block_layout.py", "kernels/cpu/block_layout.py", "kernels/matrix.py", "model/**/*.py")
"""What determines which panels a checkpoint becomes."""


@contextmanager
def packed_weights(config: EngineConfig, kernels: Kernels, checkpoint: Path) -> Iterator[None]:
    """Takes the panels of weights that are packed meanwhile from disk, or writes them there."""
    if not config.packed_weights_cache:
        yield
        return
    from slotwise.kernels.cpu.packed_file import kept

    key = hashlib.sha256(f"{content_digest(checkpoint)} {_code_digest()}".encode()).hexdigest()
    with kept(launcher_of(kernels), key, int(config.packed_weights_cache * 2**30)):
        yield


def _code_digest() -> str:
    digest, root = hashlib.sha256(), Path(slotwise.__file__).parent
    for pattern in CODE:
        for path in sorted(root.glob(pattern)):
            digest.update(path.name.encode() + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()
