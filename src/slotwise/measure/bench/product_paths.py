"""Times the products of a layer by every path for its weights that this processor has, by number of rows.

Caches are cold: each call reads another layer's weights.  The paths take turns, for a machine's speed may change.  The
geometry is that of SmolLM2-135M.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from slotwise.compute.kernels.cpu.kernels import CpuKernels
from slotwise.compute.kernels.cpu.products import paths
from slotwise.compute.kernels.interface import Linear

HIDDEN, INTERMEDIATE = 576, 1536
SHAPES = ((960, HIDDEN), (HIDDEN, HIDDEN), (2 * INTERMEDIATE, HIDDEN), (HIDDEN, INTERMEDIATE))  # [out, in]
LAYERS = 16  # whose weights together exceed the caches

Layers = list[list[Linear]]


@torch.inference_mode()
def measure_paths(
    rows: Sequence[int], rounds: int, watch: Callable[[], None], quantization: str = "none"
) -> dict[str, Any]:
    """Microseconds of a layer's four products, by path and rows; the path in use, and the fastest of all.

    Args:
        rows: at least one number of rows.
        watch: called after each path of a round.
    """
    obstacles = {path: paths.obstacle(path) for path in _group(quantization)}
    torch.manual_seed(0)
    weights = [torch.randn(shape).bfloat16() for shape in SHAPES]
    inputs = {count: [torch.randn(count, depth).bfloat16() for _, depth in SHAPES] for count in rows}
    packed = {path: _layers(path, quantization, weights) for path, why in obstacles.items() if not why}
    taken: dict[str, dict[int, list[float]]] = {path: {count: [] for count in rows} for path in packed}
    for turn in range(rounds + 1):  # the first only warms up
        for path, layers in packed.items():
            for count in rows:
                seconds = _seconds(layers, inputs[count])
                if turn:
                    taken[path][count].append(seconds * 1e6)
            watch()
    medians = {path: {count: statistics.median(each) for count, each in of.items()} for path, of in taken.items()}
    return {"rows": list(rows), "microseconds": medians, "obstacles": {p: why for p, why in obstacles.items() if why},
            "quantization": quantization,
            "used": CpuKernels(quantization=quantization).product_path(torch.bfloat16), "fastest": fastest(medians)}


def number_of_paths(quantization: str = "none") -> int:
    """How many paths are measured."""
    return sum(not paths.obstacle(path) for path in _group(quantization))


def _group(quantization: str) -> tuple[str, ...]:
    return paths.DENSE if quantization == "none" else paths.QUANTIZED


def fastest(microseconds: Mapping[str, Mapping[int, float]]) -> str:
    """The path with the least geometric mean over all numbers of rows."""
    return min(microseconds, key=lambda path: math.prod(microseconds[path].values()) ** (1 / len(microseconds[path])))


def _layers(path: str, quantization: str, weights: Sequence[Tensor]) -> Layers:
    kernels = CpuKernels(quantization=quantization, path=path)
    return [[kernels.linear(weight) for weight in weights] for _ in range(LAYERS)]


def _seconds(layers: Layers, inputs: Sequence[Tensor]) -> float:
    """Seconds of a layer's products, the mean of all layers."""
    began = time.perf_counter()
    for layer in layers:
        for product, x in zip(layer, inputs, strict=True):
            product(x)
    return (time.perf_counter() - began) / len(layers)
