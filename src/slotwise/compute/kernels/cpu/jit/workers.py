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
import subprocess
from pathlib import Path

from slotwise.compute.kernels.cpu.jit.store import home
from slotwise.platform import child, spawn
from slotwise.platform.host import kernels_obstacle, num_processors

# The NVIDIA driver's device.
GPU = Path("/dev/nvidiactl")
# The most workers: no model needs more kernels.
MOST = 13

CompileWorker = subprocess.Popen[str]
# Workers that were started, and have no work yet.
_waiting: list[CompileWorker] = []


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
