"""Digests of a checkpoint: whether its files have changed, without reading the weights, and of all their content."""

from __future__ import annotations

import hashlib
import itertools
from pathlib import Path

from slotwise.gguf.model import parts_of

CONFIGS = ("config.json", "generation_config.json", "model.safetensors.index.json", "adapter_config.json")
HEADER_BYTES = 64 << 10  # of a weights' file: the beginning of its table of tensors
MAX_CONFIG_BYTES = 64 << 20


def fingerprint(checkpoint: Path, *, is_timed: bool = True) -> str:
    """Returns a digest of the configs, and of name, size, time of change and header of each weights' file.

    Args:
        is_timed: times of change count; without them copies of a checkpoint have one digest.

    Raises:
        OSError: a file cannot be read.
    """
    configs, weights = _files(checkpoint)
    digest = hashlib.blake2b(digest_size=16)
    for path in [*configs, *weights]:
        if not path.is_file():
            continue
        is_config = path in configs
        with path.open("rb") as file:
            about = path.stat()
            changed = about.st_mtime_ns if is_timed and not is_config else 0
            digest.update(repr((path.name, about.st_size, changed)).encode())
            digest.update(file.read(MAX_CONFIG_BYTES if is_config else HEADER_BYTES))
    return digest.hexdigest()


def content_digest(checkpoint: Path) -> str:
    """Returns a digest of all that the configs and the weights' files hold, at the speed of SHA-256.

    Raises:
        OSError: a file cannot be read.
    """
    digest = hashlib.sha256()
    for path in itertools.chain(*_files(checkpoint)):
        if path.is_file():
            with path.open("rb") as file:
                digest.update(path.name.encode() + hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def _files(checkpoint: Path) -> tuple[list[Path], list[Path]]:
    """Configs, which may be missing, and weights."""
    weights = parts_of(checkpoint) if checkpoint.is_file() else sorted(checkpoint.glob("*.safetensors"))
    return [checkpoint / name for name in CONFIGS], weights
