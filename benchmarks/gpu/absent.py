"""A GPU that is not there, for rehearsals: its steps are captured by repeating them, and its memory is counted."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from benchmarks.gpu.repeated import RepeatingGraph
from torch import Tensor

from slotwise.compute.kernels.cuda.graphs import capture_size
from slotwise.compute.kernels.interface import Kernels

TOTAL, GRAPH = 1 << 36, 700_000  # bytes of the device, and of a graph


class Capturing:
    """Kernels that capture at a GPU's sizes."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernels, name)

    def graph_size(self, tokens: int, context: int) -> tuple[int, int]:
        return capture_size(tokens, context)

    def record(self, work: Callable[[], Tensor]) -> RepeatingGraph:
        graph = RepeatingGraph(work)
        _captured.add(graph)
        return graph


_captured = weakref.WeakSet[RepeatingGraph]()


@contextmanager
def counted_memory() -> Iterator[None]:
    """Torch reads the memory of this device: what graphs take."""
    def free_and_total(device: torch.device) -> tuple[int, int]:
        return TOTAL - GRAPH * len(_captured), TOTAL

    with patch.multiple(torch.cuda, mem_get_info=free_and_total, memory_reserved=lambda device: 0,
                        synchronize=lambda device: None, empty_cache=lambda: None):
        yield
