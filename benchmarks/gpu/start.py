"""Times a process from its start until it serves, and until steps of every size are captured; weights are generated.

The batch is filled, then loses a row in every step, so that every size occurs.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.gpu.figures import tell
from benchmarks.gpu.setup import asked, load
from torch import Tensor

from slotwise.kernels.interface import Graph, Kernels


class Counted:
    """Kernels that count captures."""

    def __init__(self, kernels: Kernels) -> None:
        self.recordings = 0
        self._kernels = kernels

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernels, name)

    def record(self, work: Callable[[], Tensor]) -> Graph | None:
        recording = self._kernels.record(work)
        self.recordings += recording is not None
        return recording


def main(started: float) -> None:
    """`started` is the start of the process, in seconds of the monotonic clock that all processes share."""
    setup = asked(__doc__)
    counted: list[Counted] = []

    def wrap(kernels: Kernels) -> Kernels:
        counted.append(Counted(kernels))
        return counted[-1]

    model = load(setup, wrap)
    figures = {"weights_seconds": time.monotonic() - started}
    engine, _ = model.engine(setup.engine_config())
    figures["ready_seconds"] = time.monotonic() - started
    rows = max(setup.rows)
    for row in range(rows):
        engine.handle(setup.request(f"row-{row}", 8, row + 2, seed=row))
    while engine.has_work:
        record = engine.step()
        if record.failure:
            raise RuntimeError(record.failure)
        if any(record.token_ids) and "first_token_seconds" not in figures:
            figures["first_token_seconds"] = time.monotonic() - started
    sizes = {counted[0].graph_size(size, 1)[0] for size in range(1, rows + 1)} - {0}
    tell(start=figures | {
        "recorded_seconds": time.monotonic() - started, "recordings": counted[0].recordings, "sizes": len(sizes)})


def _process_started() -> float:
    """Returns the start of this process on the monotonic clock, in seconds."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return ticks / os.sysconf("SC_CLK_TCK") - (time.clock_gettime(time.CLOCK_BOOTTIME) - time.monotonic())


if __name__ == "__main__":
    main(_process_started())
