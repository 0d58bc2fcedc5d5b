"""Results on disk, with what ran where, so that two files can be compared."""

from __future__ import annotations

import contextlib
import json
import platform
import subprocess
import sys
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from tqdm import tqdm

import slotwise
from slotwise.measure.bench.theory import coefficient_of_variation
from slotwise.measure.workload.workloads import Workload
from slotwise.platform.files import write_output
from slotwise.platform.host import num_processors
from slotwise.version import __version__


class ProgressBar:
    """Counts up to a total; what counts from zero again, as a second run does, is added."""

    def __init__(self, bar: tqdm[Any], label: str) -> None:
        self._bar = bar
        self._label = label
        self._last = 0

    def show(self, done: int) -> None:
        self._bar.update(max(0, done - self._last))
        self._last = done

    def count(self, _: object = None) -> None:
        """One more is done."""
        self._bar.update()

    def say(self, what: str) -> None:
        """Name the part that begins."""
        if self._bar.disable:
            print(f"{self._label}: {what}", file=sys.stderr)
        self._bar.set_description(what)


@contextlib.contextmanager
def progress(label: str = "", total: int | None = None, unit: str = "it") -> Iterator[ProgressBar]:
    """Args: total: in `unit`s; None: unknown."""
    with tqdm(desc=label, total=total, unit=unit, leave=False, disable=not sys.stderr.isatty()) as bar:
        yield ProgressBar(bar, label)


GIT_SECONDS = 5.0


def environment() -> dict[str, Any]:
    """Software and machine.  `commit` is empty outside a checkout, and ends in "-dirty" with uncommitted changes."""
    return {
        "slotwise": __version__, "python": platform.python_version(), "torch": _installed("torch"),
        "commit": commit(), "machine": machine(), "cores": num_processors(),
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def workload_facts(
    workload: Workload, prompt_tokens: int | None = None, outputs: Sequence[int] = (),
) -> dict[str, Any]:
    """The description of a workload in a result; null for what is unknown until the model has run.

    Args:
        prompt_tokens: as a server has counted them.
        outputs: tokens of each output, where the model ends them.
    """
    if not workload.ends_by_itself:
        outputs = [request.num_output for request in workload.requests]
    if prompt_tokens is None and (workload.prompts or not workload.conversations):
        prompt_tokens = workload.prompt_tokens
    return {
        "description": workload.description, "num_requests": len(workload.requests), "max_tokens": workload.max_tokens,
        "prompt_tokens": prompt_tokens, "output_tokens": sum(outputs) if outputs else None,
        "output_cv": coefficient_of_variation(outputs) if outputs else None,
    }


def commit(folder: Path | None = None) -> str:
    """The commit checked out in `folder`, by default that of this package's source; empty if there is none."""
    folder = folder or Path(slotwise.__file__).parents[2]
    if not (folder / ".git").exists():
        return ""
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--exclude=*", "--abbrev=12"]
    try:
        return subprocess.run(
            command, capture_output=True, text=True, timeout=GIT_SECONDS, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def machine() -> str:
    """The processor's model, as far as the system reports it."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def write_json(path: Path | str, result: dict[str, Any]) -> None:
    """Write the whole file or nothing.

    Raises:
        OSError: the folder cannot be written to.
        ValueError: the result holds NaN or an infinity.
    """
    write_output(path, f"{json.dumps(result, allow_nan=False)}\n".encode())


def default_filename(kind: str, model: str) -> str:
    """A name with kind, model and time."""
    name = "".join(letter if letter.isalnum() or letter in "-_." else "-" for letter in Path(model).name)
    return f"{kind}-{name}-{datetime.now(UTC):%Y%m%d-%H%M%S}.json"


def _installed(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""
