"""What is known of step times outlives a server: learned once for a model on a machine, refined by each run."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from slotwise import __version__
from slotwise.core.steptime import StepTimes
from slotwise.engine.config import EngineConfig
from slotwise.engine.messages import EngineInfo

if TYPE_CHECKING:
    from slotwise.observe import steptime


def known(config: EngineConfig, info: EngineInfo, probe: Callable[[], StepTimes]) -> StepTimes:
    """What the last run of such a model learned; where there was none, what `probe` learns, for the next one too."""
    try:
        from slotwise.observe import kept
    except ImportError:  # what reads it is not installed
        return StepTimes(probe().learned())
    path = kept.place(traits(config, info))
    times = kept.load(path)
    if times.knows:
        return times
    probed = probe()
    if probed.knows:
        kept.save(path, probed)
    return StepTimes(probed.learned())


@contextmanager
def remembered(config: EngineConfig, info: EngineInfo) -> Iterator[steptime.StepTimes]:
    """What the last run of such a model learned; what this one has learned is kept in the end."""
    from slotwise.observe import kept

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
    return (shape, info.dtype, info.quantization, info.cache_dtype, info.device, info.product_path, str(info.threads),
            platform.node(), platform.machine(), __version__)
