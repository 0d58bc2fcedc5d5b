"""Where compiled kernels are kept: a folder for each state of the sources, the processor and the compilers.

Numba's own cache watches one source file a function; ours inline each other and constants that follow the processor.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import platform
import shutil
from pathlib import Path

import llvmlite
import numba
import torch
from numba.core.codegen import get_host_cpu_features

from slotwise.kernels.helpers import home

KEPT = 6  # folders; more are only left by those who change kernels


def key() -> str:
    """Names what compiled code depends on: our sources, versions, the processor as Numba and torch see it."""
    sources = b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py")))
    config = numba.config
    cpu = config.CPU_NAME or llvmlite.binding.get_host_cpu_name()
    features = get_host_cpu_features() if config.CPU_FEATURES is None else config.CPU_FEATURES
    told = (numba.__version__, llvmlite.__version__, platform.python_version(), cpu, features,
            torch.backends.cpu.get_cpu_capability())
    return hashlib.sha256(sources + "\0".join(told).encode()).hexdigest()[:16]


@functools.cache
def folder() -> Path:
    """This process' folder of compiled kernels, made known to Numba.  It may not exist, or not be writable."""
    root = home()
    ours = root / key()
    with contextlib.suppress(OSError):
        ours.mkdir(parents=True, exist_ok=True)
        os.utime(ours)
        if not numba.config.CACHE_DIR:  # a folder of somebody else's choice may hold more than ours
            remove_unused(root)
    numba.config.CACHE_DIR = str(ours)
    return ours


def remove_unused(root: Path) -> None:
    """Leave the `KEPT` folders that were used last."""
    folders = sorted((path for path in root.iterdir() if path.is_dir()), key=lambda path: path.stat().st_mtime)
    for unused in folders[:-KEPT]:
        shutil.rmtree(unused, ignore_errors=True)
