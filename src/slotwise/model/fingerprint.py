"""A digest that tells whether a checkpoint's files have changed, without reading the weights."""

from __future__ import annotations

import hashlib
from pathlib import Path

CONFIGS = ("config.json", "generation_config.json", "model.safetensors.index.json")
HEADER_BYTES = 64 << 10  # of a weights' file: the beginning of its table of tensors
MAX_CONFIG_BYTES = 64 << 20


def fingerprint(folder: Path) -> str:
    """Returns a digest of the folder's configs, and of name, size, time of change and header of each weights' file.

    Raises:
        OSError: a file cannot be read.
    """
    digest = hashlib.blake2b(digest_size=16)
    for path, most in [*((folder / name, MAX_CONFIG_BYTES) for name in CONFIGS),
                       *((path, HEADER_BYTES) for path in sorted(folder.glob("*.safetensors")))]:
        if not path.is_file():
            continue
        with path.open("rb") as file:
            about = path.stat()
            changed = about.st_mtime_ns if path.suffix == ".safetensors" else 0
            digest.update(repr((path.name, about.st_size, changed)).encode())
            digest.update(file.read(most))
    return digest.hexdigest()
