"""Decode steps as CUDA graphs: kernels captured once, replayed by one call.

A step is captured at a few numbers of rows, and padding rows fill a step up to the next (as in vLLM); a graph captured
for a long context serves shorter ones.  Capturing does not run the kernels, so the current step is computed first,
kernel by kernel.  That also compiles what it needs, which is not allowed in a capture.

All graphs share one memory pool: only one runs at a time, and its result is used before the next runs.  So what a
capture allocated returns to the pool, its result included, and a graph holds its result only by address.
"""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

MAX_ROWS = 512
# Up to here sizes double; larger sizes are its multiples.
FEW_ROWS = 8
# Tokens of context of the smallest graph; each larger one has four times as many.
SHORTEST = 2048

logger = logging.getLogger(__name__)


def capture_size(rows: int, context: int) -> tuple[int, int]:
    """Rows and tokens of context of a step's graph; no rows where the cost of launching kernels is negligible."""
    longest = SHORTEST
    while longest < context:
        longest *= 4
    if rows > MAX_ROWS:
        return 0, longest
    return 1 << (rows - 1).bit_length() if rows <= FEW_ROWS else -(-rows // FEW_ROWS) * FEW_ROWS, longest


class CudaGraph:
    """A captured piece of work.

    Args:
        result: memory of the graphs' pool; it is valid until any graph runs.
    """

    def __init__(self, graph: torch.cuda.CUDAGraph, result: Tensor) -> None:
        self._graph = graph
        self.result = result

    def run(self) -> Tensor:
        """Enqueue it; returns its result."""
        self._graph.replay()
        return self.result


class CudaGraphs:
    """Captures the work of one device.  One caller at a time, always on the same stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # Captures need a stream of their own.
        self._stream: torch.cuda.Stream | None = None
        self._pool: Any = None
        self._alive = weakref.WeakSet[CudaGraph]()
        self._works = True

    def record(self, work: Callable[[], Tensor]) -> CudaGraph | None:
        """Run `work`, then capture it; None once a capture has failed."""
        if not self._works:
            return None
        result = work()
        try:
            graph, held = self._capture(work)
            alias = _alias(held)
        except RuntimeError:
            logger.exception("a decode step cannot be captured: kernels are started one by one from here on")
            self._works = False
            return None
        del held
        alias.copy_(result)
        recording = CudaGraph(graph, alias)
        self._alive.add(recording)
        return recording

    def _capture(self, work: Callable[[], Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        """A graph and its result; keep the result as long as the pool must keep its memory.

        `torch.cuda.graph` would wait for the device and collect garbage first, which takes a server too long.
        """
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)
        if not self._alive:
            self._pool = torch.cuda.graph_pool_handle()  # torch gives up a pool with its last graph
        graph = torch.cuda.CUDAGraph()
        collects = gc.isenabled()
        gc.disable()  # it could free device memory, which is not allowed in a capture
        try:
            with torch.cuda.stream(self._stream):
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    result = work()
                finally:
                    graph.capture_end()
        finally:
            if collects:
                gc.enable()
        return graph, result


class _Memory:
    """Memory by its address, in the form of `torch.as_tensor`; does not keep it alive."""

    def __init__(self, tensor: Tensor) -> None:
        size = (tensor.numel() * tensor.itemsize,)
        self.__cuda_array_interface__ = {
            "shape": size, "typestr": "|u1", "data": (tensor.data_ptr(), False), "version": 3}


def _alias(tensor: Tensor) -> Tensor:
    """Another tensor over the memory of a contiguous one.

    Raises:
        RuntimeError: the memory was copied instead.
    """
    alias = torch.as_tensor(_Memory(tensor), device=tensor.device)
    if alias.data_ptr() != tensor.data_ptr():
        raise RuntimeError("the result of a captured step cannot be found by its address")
    return alias.view(tensor.dtype).view(tensor.shape)
