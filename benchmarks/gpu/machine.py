"""The device's copy bandwidth and product rate, measured in the same run as the figures compared with them."""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable
from importlib import metadata
from typing import Any

import torch
from benchmarks.gpu.cost import Machine
from benchmarks.gpu.setup import Setup

from slotwise.bench.results import environment

REPEATS, FIRST = 10, 3  # runs whose median counts, and those before that do not
REHEARSED = 2, 1
PACKAGES = ("torch", "triton", "numpy", "numba", "safetensors", "tokenizers", "transformers", "pytest", "hypothesis")


def measure(setup: Setup) -> Machine:
    """Returns bytes per second of a device copy (read and written), and operations per second of a square product."""
    device = torch.device("cuda" if setup.device == "cuda" else "cpu")
    source = torch.randint(0, 255, (setup.copied,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copied = median_seconds(lambda: target.copy_(source), device)
    left, right = (
        torch.randn(setup.product, setup.product, device=device, dtype=setup.model.dtype) for _ in range(2))
    multiplied = median_seconds(lambda: left @ right, device)
    return Machine(2 * setup.copied / copied, 2 * setup.product**3 / multiplied)


def median_seconds(work: Callable[[], object], device: torch.device) -> float:
    """Returns the median of `REPEATS` runs, after `FIRST` that do not count; in a rehearsal of fewer."""
    repeats, first = (REPEATS, FIRST) if device.type == "cuda" else REHEARSED
    for _ in range(first):
        work()
    return statistics.median(_seconds(work, device) for _ in range(repeats))


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    if device.type != "cuda":
        started = time.perf_counter()
        work()
        return time.perf_counter() - started
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    before.record()
    work()
    after.record()
    after.synchronize()
    return before.elapsed_time(after) * 1e-3


def facts() -> dict[str, Any]:
    """Returns device, software versions and commit."""
    found = environment() | {"platform": platform.platform(), "packages": {name: _version(name) for name in PACKAGES}}
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        found["device"] = {
            "name": properties.name, "memory_bytes": properties.total_memory,
            "multiprocessors": properties.multi_processor_count, "cuda": torch.version.cuda,
            "capability": ".".join(map(str, torch.cuda.get_device_capability(0)))}
    return found


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""
