"""Processes that compile kernels in parallel: compilation is mostly Python code, which threads would not share out.

A worker (`__main__.py`) needs two seconds of imports before it can compile.  So where the store of
kernels is empty, workers are started before the engine process imports anything itself, and receive their work on
standard input once a model's config was read:

    engine   call_early │ imports …………… │ set_to_work │ compiles ………
    worker              └─ imports ………………… waits ──────┘ compiles ………

Importing this file imports nothing that takes long.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

from slotwise.compute.kernels.cpu.jit.store import home
from slotwise.platform import child, spawn
from slotwise.platform.host import kernels_obstacle, num_processors

# The NVIDIA driver's device.
GPU = Path("/dev/nvidiactl")
# The most workers: no model needs more kernels.
MOST = 13

# How the names of files begin that say which kernels are compiled, in a folder of claims.
COMPILED = ".compiled-"

CompileWorker = subprocess.Popen[str]
# Workers that were started, and have no work yet.
_waiting: list[CompileWorker] = []


class Compilation:
    """Counts the kernels that this process and its workers compile before an engine is ready."""

    def __init__(self) -> None:
        self.total = 0
        self._here = 0
        self._claims: Path | None = None

    @property
    def done(self) -> int:
        shared = 0
        if (claims := self._claims) is not None:
            with contextlib.suppress(OSError):  # another thread has just removed the folder
                shared = sum(name.startswith(COMPILED) for name in os.listdir(claims))
        return min(self._here + shared, self.total)

    def begin(self, number: int) -> None:
        """Kernels are missing, and will be compiled."""
        self.total += number

    def compiled(self) -> None:
        """This process has compiled one of them."""
        self._here += 1

    @contextlib.contextmanager
    def shared(self, claims: Path, number: int) -> Iterator[None]:
        """Within this context this process and workers compile `number` of them, and mark each in the folder."""
        self._claims = claims
        try:
            yield
        finally:
            self._claims = None
            self._here += number


compilation = Compilation()


def call_early(device: str) -> None:
    """Start workers if the store of kernels is empty and `device` is the CPU, as far as can be seen without torch."""
    is_cpu = device == "cpu" or (device == "auto" and not GPU.exists())
    folder = home() if is_cpu and not kernels_obstacle() else None
    if folder is not None and not any(folder.glob("*")):
        _call(min(MOST, num_processors() - 1))


def are_waiting() -> bool:
    """Whether workers are waiting for work."""
    return bool(_waiting)


def set_to_work(number: int, claims: Path, names: list[str]) -> list[CompileWorker]:
    """Have `number` workers compile the kernels among `names` that are unclaimed; waiting workers are used first.

    Args:
        claims: a folder in which to claim work.

    Returns:
        The workers.  Each ends when there is nothing left.  One that fails reports nothing: what it leaves is compiled
        in this process, and fails in it.
    """
    _call(number - len(_waiting))
    chosen = [_waiting.pop() for _ in range(number)]
    for worker in chosen:
        _send(worker, "\n".join([str(claims), *names]))
    return chosen


def dismiss() -> None:
    """End the workers that are waiting."""
    while _waiting:
        _send(_waiting.pop(), "")


def _send(worker: CompileWorker, work: str) -> None:
    assert worker.stdin is not None
    with contextlib.suppress(OSError), worker.stdin:  # it may have ended already
        worker.stdin.write(work)


def _call(number: int) -> None:
    if number < 1:
        return
    command, free = child.python(__package__, options=("-W", "ignore")), child.environment()
    free.pop("OMP_PROC_BIND", None)  # or all would be bound to the first core
    _waiting.extend(spawn.start(command, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=free)
                    for _ in range(number))
