"""The path that a user had measured and kept for this processor (`slotwise bench kernels --keep-fastest`).

It is a file of one line of JSON in the user's folder of caches.  It changes only when that command is run, so that
every start on a machine computes the same; without the file, `paths.FASTEST` decides.
"""

from __future__ import annotations

import json
from pathlib import Path

from numba import config
from numba.core.codegen import get_host_cpu_features

from slotwise import folders
from slotwise.files import read_regular, write_output

MAX_BYTES = 1 << 16


def file() -> Path:
    """Where the choice is kept."""
    return folders.cache() / "slotwise" / "product-path.json"


def read() -> str:
    """The path kept for this processor; empty where there is none."""
    try:
        kept = json.loads(read_regular(file(), MAX_BYTES))
    except (OSError, ValueError, RecursionError):
        return ""
    if folders.objection(file()):  # other users may not decide what this one computes
        return ""
    matches = isinstance(kept, dict) and kept.get("features") == _features() and isinstance(kept.get("path"), str)
    return str(kept["path"]) if matches else ""


def keep(path: str) -> Path:
    """Keep `path` for this processor; returns the file."""
    target = file()
    target.parent.mkdir(parents=True, exist_ok=True)
    write_output(target, f"{json.dumps({'path': path, 'features': _features()})}\n".encode())
    return target


def _features() -> str:
    """What kernels are compiled for."""
    forced: str | None = getattr(config, "CPU_FEATURES", None)
    return str(get_host_cpu_features()) if forced is None else forced
