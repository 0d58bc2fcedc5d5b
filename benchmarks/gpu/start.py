"""Times a process from its start until it serves, and until steps of every size are captured; weights are generated.

The batch is filled, then loses a row in every step, so that every size occurs.  What the graphs take of the device's
memory is predicted by the function that leaves room for them beside the cache, and measured.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from benchmarks.gpu import absent
from benchmarks.gpu.figures import tell
from benchmarks.gpu.setup import Setup, asked, load
from torch import Tensor

from slotwise.compute.kernels.interface import Graph, Kernels
from slotwise.compute.runner.memory_budget import bytes_beside_torch, measured_graph
from slotwise.engine.engine import Engine

BLOCK_SIZE = 64  # tokens


class CountingKernels:
    """Kernels that note the graphs that are alive, and the bytes of the device that each took."""

    def __init__(self, kernels: Kernels) -> None:
        self.graphs: WeakKeyDictionary[Graph, int] = WeakKeyDictionary()
        self._kernels = kernels

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernels, name)

    def record(self, work: Callable[[], Tensor]) -> Graph | None:
        before = bytes_beside_torch(self._kernels.device)
        graph = self._kernels.record(work)
        if graph is not None:
            self.graphs[graph] = bytes_beside_torch(self._kernels.device) - before
        return graph


def main(started: float) -> None:
    """`started` is the start of the process, in seconds of the monotonic clock that all processes share."""
    setup = asked(__doc__)
    with contextlib.nullcontext() if setup.device == "cuda" else absent.counted_memory():
        _main(setup, started)


def _main(setup: Setup, started: float) -> None:
    counted: list[CountingKernels] = []

    def wrap(kernels: Kernels) -> Kernels:
        counted.append(CountingKernels(kernels if setup.device == "cuda" else absent.Capturing(kernels)))
        return counted[-1]

    model, rows = load(setup, wrap), max(setup.rows)
    figures = {"weights_seconds": time.monotonic() - started}
    engine, _ = model.engine(setup.engine_config())
    figures["ready_seconds"] = time.monotonic() - started
    figures["first_token_seconds"] = _shrink(engine, setup, rows) - started
    figures["recorded_seconds"] = time.monotonic() - started
    kernels, number = counted[0], len(counted[0].graphs)
    sizes = {kernels.graph_size(size, 1)[0] for size in range(1, rows + 1)} - {0}
    tell(start=figures | {"recordings": number, "sizes": len(sizes)})
    measured = sum(kernels.graphs.values())
    predicted = number * measured_graph(model.ready(), BLOCK_SIZE, rows, setup.longest)
    tell(graphs={"captured": number, "predicted_bytes": predicted, "measured_bytes": measured})


def _shrink(engine: Engine, setup: Setup, rows: int) -> float:
    """Fills the batch, which loses a row in every step; returns when the first token came, in monotonic seconds."""
    first = 0.0
    for row in range(rows):
        engine.handle(setup.request(row, 8, row + 2, seed=row))
    while engine.has_work:
        record = engine.step()
        if record.outcome.failure:
            raise RuntimeError(record.outcome.failure)
        if any(record.tokens) and not first:
            first = time.monotonic()
    return first


def _process_started() -> float:
    """Returns the start of this process on the monotonic clock, in seconds."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return ticks / os.sysconf("SC_CLK_TCK") - (time.clock_gettime(time.CLOCK_BOOTTIME) - time.monotonic())


if __name__ == "__main__":
    main(_process_started())
