"""The device's rates, measured in the same run as the figures compared with them, and the roofline of a step.

Williams et al., 2009: the bytes of weights and cache that a step reads, and its operations.
"""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable
from importlib import metadata
from math import prod
from typing import Any, NamedTuple

import torch
from benchmarks.gpu.setup import Setup

from slotwise.compute.model.family_table import tensor_shapes
from slotwise.compute.model.model_config import ModelConfig
from slotwise.core.record import StepRecord
from slotwise.measure.bench.results import environment


class Machine(NamedTuple):
    """The measured rates of the device."""

    bytes_per_second: float  # of a copy, those read and those written
    operations_per_second: float  # of a large product


class Bounds:
    """Lower bounds of steps, for a model whose head is not its embedding table, of which a step reads few rows."""

    def __init__(self, config: ModelConfig) -> None:
        self._weights = config.dtype.itemsize * sum(
            prod(shape) for name, shape in tensor_shapes(config).items() if name != "model.embed_tokens.weight")
        self._cached = 2 * config.num_layers * config.num_kv_heads * config.head_dim * config.dtype.itemsize
        self._inner, self._head = config.layer_weights, config.hidden_size * config.vocab_size
        self._pair = 4 * config.num_layers * config.num_heads * config.head_dim

    def bytes(self, record: StepRecord) -> int:
        """Returns the bytes of all weights, and of the keys and values of every row's context."""
        return self._weights + self._cached * sum(record.plan.starts + record.plan.counts)

    def operations(self, record: StepRecord) -> int:
        """Returns the operations: two per weight and token, the head's for rows that sample; four per pair of a query
        and a key, head and dimension."""
        ends = [start + count for start, count in zip(record.plan.starts, record.plan.counts, strict=True)]
        pairs = sum(count * (2 * end - count + 1) // 2 for count, end in zip(record.plan.counts, ends, strict=True))
        sampled = sum(1 for tokens in record.tokens if tokens)
        return 2 * (sum(record.plan.counts) * self._inner + sampled * self._head) + pairs * self._pair


REPEATS, FIRST = 10, 3  # runs whose median counts, and those before that do not
REHEARSED = 1, 0
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
