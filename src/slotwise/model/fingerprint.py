"""A digest that tells whether a checkpoint's files have changed, without reading the weights."""

from __future__ import annotations

import hashlib
from pathlib import Path

from slotwise.gguf.model import parts_of

CONFIGS = ("config.json", "generation_config.json", "model.safetensors.index.json", "adapter_config.json")
HEADER_BYTES = 64 << 10  # of a weights' file: the beginning of its table of tensors
MAX_CONFIG_BYTES = 64 << 20


def fingerprint(checkpoint: Path) -> str:
    """Returns a digest of the configs, and of name, size, time of change and header of each weights' file.

    Raises:
        OSError: a file cannot be read.
    """
    configs = [checkpoint / name for name in CONFIGS]
    weights = parts_of(checkpoint) if checkpoint.is_file() else sorted(checkpoint.glob("*.safetensors"))
    digest = hashlib.blake2b(digest_size=16)
    for path in [*configs, *weights]:
        if not path.is_file():
            continue
        is_config = path in configs
        with path.open("rb") as file:
            about = path.stat()
            digest.update(repr((path.name, about.st_size, 0 if is_config else about.st_mtime_ns)).encode())
            digest.update(file.read(MAX_CONFIG_BYTES if is_config else HEADER_BYTES))
    return digest.hexdigest()
