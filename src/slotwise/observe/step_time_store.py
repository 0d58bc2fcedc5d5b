"""The core's step-time model next to an engine service, and its file between runs.

A model is learned once for a checkpoint on a machine, and refined by each run: a small JSON file for each.
"""

from __future__ import annotations

import hashlib
import logging
import platform
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from slotwise.core import step_time
from slotwise.core.record import StepRecord
from slotwise.core.step_time import Learned, work_of
from slotwise.engine.messages import Observer
from slotwise.errors import described
from slotwise.platform import files
from slotwise.platform.files import PRIVATE, read_regular, write_whole
from slotwise.version import __version__

if TYPE_CHECKING:
    from slotwise.engine.config import EngineConfig
    from slotwise.engine.messages import EngineInfo

HEADER_BYTES = 4096
VERSION = 2  # of the stored model; files of other versions are ignored
MAX_BYTES = 1 << 20
NS = 1e-9

logger = logging.getLogger(__name__)


class ObservedStepTimes(step_time.StepTimeModel, Observer):
    def stepped(self, record: StepRecord) -> None:
        """Updates the model with a step of the engine."""
        work = work_of(record.plan.starts, record.plan.counts, record.plan.padding, record.plan.drafts)
        proposing = record.result.proposing.seconds if record.result.proposing else 0.0
        self.step(work, record.started_ns * NS + proposing, record.ended_ns * NS)


def load_or_learn(config: EngineConfig, info: EngineInfo, warmup: Callable[[], step_time.StepTimeModel],
                  ) -> step_time.StepTimeModel:
    """Returns the model saved for these traits; if there is none, the one `warmup` learns, and saves it."""
    try:
        import msgspec  # noqa: F401
    except ImportError:
        return ObservedStepTimes(warmup().learned())
    path = path_for(traits(config, info))
    times = load(path)
    if times.is_trained:
        return times
    measured = warmup()
    if measured.is_trained:
        save(path, measured)
    return ObservedStepTimes(measured.learned())


@contextmanager
def kept(config: EngineConfig, info: EngineInfo) -> Iterator[ObservedStepTimes]:
    """Yields the model saved for these traits, and saves it at the end if it has learned."""
    path = path_for(traits(config, info))
    times = load(path)
    try:
        yield times
    finally:
        if times.num_steps:
            save(path, times)


def traits(config: EngineConfig, info: EngineInfo) -> tuple[str, ...]:
    """Returns all that determines the speed of steps: the model's shape, types, kernels, threads and machine."""
    shape = hashlib.blake2b(_description(Path(config.model)), digest_size=16).hexdigest()
    return (shape, info.dtype, info.quantization, info.cache_dtype, info.device, info.product_path, str(info.threads),
            platform.node(), platform.machine(), __version__, *(["drafts"] if info.speculation else []))


def _description(checkpoint: Path) -> bytes:
    """A folder's config.json; of a GGUF file its size and its beginning, where the numbers of its config are."""
    if not checkpoint.is_file():
        return (checkpoint / "config.json").read_bytes()
    with checkpoint.open("rb") as file:
        return file.read(HEADER_BYTES) + str(checkpoint.stat().st_size).encode()


def path_for(traits: Sequence[str]) -> Path:
    """Returns the file for `traits`."""
    name = hashlib.blake2b("\n".join(traits).encode(), digest_size=8).hexdigest()
    return files.cache_folder() / "slotwise" / "step-times" / f"{name}-v{VERSION}.json"


def load(path: Path) -> ObservedStepTimes:
    """Returns the stored model; an empty one if there is no readable file."""
    import msgspec

    if path.exists() and (why := files.folder_objection(path)):
        logger.warning("step times are learned anew: %s", why)
        return ObservedStepTimes()
    try:
        return ObservedStepTimes(msgspec.json.decode(read_regular(path, MAX_BYTES), type=Learned))
    except FileNotFoundError:
        return ObservedStepTimes()
    except (OSError, ValueError, ArithmeticError) as error:
        logger.warning("step times are learned anew, for %s cannot be used: %s", path, error)
        return ObservedStepTimes()


def save(path: Path, times: step_time.StepTimeModel) -> None:
    """Stores `times` atomically; logs a warning if the folder is not writable."""
    import msgspec

    if why := files.folder_objection(path):
        logger.warning("step times are not kept: %s", why)
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, msgspec.json.encode(times.learned()), PRIVATE)
    except OSError as error:
        logger.warning("step times are not kept: %s", described(error))
