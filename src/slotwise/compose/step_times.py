"""What is known of step times outlives a server: learned once for a model on a machine, refined by each run."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from slotwise import __version__
from slotwise.engine.config import EngineConfig
from slotwise.engine.messages import EngineInfo
from slotwise.observe import kept
from slotwise.observe.steptime import StepTimes


@contextmanager
def remembered(config: EngineConfig, info: EngineInfo) -> Iterator[StepTimes]:
    """What the last run of such a model learned; what this one has learned is kept in the end."""
    path = kept.place(traits(config, info))
    times = kept.load(path)
    try:
        yield times
    finally:
        if times.num_steps:
            kept.save(path, times)


def traits(config: EngineConfig, info: EngineInfo) -> tuple[str, ...]:
    """All that makes steps faster or slower: the model's shape, what computes it, and where."""
    shape = (Path(config.model) / "config.json").read_text()
    threads = os.environ.get("OMP_NUM_THREADS") or str(_processors())
    return shape, info.dtype, info.device, threads, platform.node(), platform.machine(), __version__


def _processors() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
