"""Loads and saves step-time models: learned once for a model on a machine, refined by each run."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from slotwise import __version__
from slotwise.core.step_time import StepTimeModel
from slotwise.engine.config import EngineConfig
from slotwise.engine.messages import EngineInfo

if TYPE_CHECKING:
    from slotwise.observe import step_time


def known(config: EngineConfig, info: EngineInfo, warmup: Callable[[], StepTimeModel]) -> StepTimeModel:
    """Returns the step-time model saved for these traits; if there is none, the one `warmup` learns, and saves it."""
    try:
        from slotwise.observe import step_time_store
    except ImportError:  # msgspec is not installed
        return StepTimeModel(warmup().learned())
    path = step_time_store.place(traits(config, info))
    times = step_time_store.load(path)
    if times.knows:
        return times
    measured = warmup()
    if measured.knows:
        step_time_store.save(path, measured)
    return StepTimeModel(measured.learned())


@contextmanager
def remembered(config: EngineConfig, info: EngineInfo) -> Iterator[step_time.StepTimeModel]:
    """Yields the step-time model saved for these traits, and saves it at the end if it has learned."""
    from slotwise.observe import step_time_store

    path = step_time_store.place(traits(config, info))
    times = step_time_store.load(path)
    try:
        yield times
    finally:
        if times.num_steps:
            step_time_store.save(path, times)


def traits(config: EngineConfig, info: EngineInfo) -> tuple[str, ...]:
    """Returns all that determines the speed of steps: the model's shape, types, kernels, threads and machine."""
    shape = (Path(config.model) / "config.json").read_text()
    return (shape, info.dtype, info.quantization, info.cache_dtype, info.device, info.product_path, str(info.threads),
            platform.node(), platform.machine(), __version__)
