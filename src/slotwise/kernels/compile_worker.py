"""Processes that compile kernels in parallel: compilation is mostly Python code, which threads would not share out.

A worker needs two seconds of imports before it can compile.  So where the cache of kernels is empty, workers are
started before the engine process imports anything itself, and receive their work once a model's config was read:

    engine   call_early │ imports …………… │ set_to_work │ compiles ………
    worker              └─ imports ………………… waits ──────┘ compiles ………

Nothing here imports what takes long.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import subprocess
import sys
from pathlib import Path

from slotwise import child
from slotwise.kernels.home import home

HELPER = "slotwise.kernels.compile_worker"  # this module
GPU = Path("/dev/nvidiactl")  # the NVIDIA driver's
MOST = 13  # workers; no model needs more kernels

CompileWorker = subprocess.Popen[str]
_waiting: list[CompileWorker] = []  # started, without work so far


def call_early(device: str) -> None:
    """Start workers if the kernel cache is empty and `device` is the CPU, as far as can be seen without torch."""
    is_cpu = device == "cpu" or (device == "auto" and not GPU.exists())
    place = home() if is_cpu else None
    if place is not None and not any(place.glob("*")):
        _call(min(MOST, len(os.sched_getaffinity(0)) - 1))


def are_waiting() -> bool:
    """Whether workers are waiting for work."""
    return bool(_waiting)


def set_to_work(number: int, claims: Path, names: list[str]) -> list[CompileWorker]:
    """Have `number` workers compile the kernels among `names` that are unclaimed; waiting workers are used first.

    Args:
        claims: a folder in which to claim work.

    Returns:
        The workers.  Each ends when there is nothing left, and may have failed.
    """
    _call(number - len(_waiting))
    chosen = [_waiting.pop() for _ in range(number)]
    for helper in chosen:
        _tell(helper, "\n".join([str(claims), *names]))
    return chosen


def dismiss() -> None:
    """End the workers that are waiting."""
    while _waiting:
        _tell(_waiting.pop(), "")


def _tell(helper: CompileWorker, work: str) -> None:
    assert helper.stdin is not None
    with contextlib.suppress(OSError), helper.stdin:  # it may have ended already
        helper.stdin.write(work)


def _call(number: int) -> None:
    if number < 1:
        return
    command, free = child.python(HELPER, options=("-W", "ignore")), child.environment()
    free.pop("OMP_PROC_BIND", None)  # or all would be bound to the first core
    _waiting.extend(subprocess.Popen(command, stdin=subprocess.PIPE, text=True, env=free, cwd=child.HOME)
                    for _ in range(number))


def main() -> None:
    """A worker: imports, then compiles what it reads on its standard input; nothing if that is empty."""
    gc.disable()  # all its objects are kept until it ends
    logging.disable()  # the parent process logs the same
    from slotwise.kernels.lazy_imports import spare_torch

    spare_torch()
    from slotwise.kernels.cpu.compiled import share_named

    if told := sys.stdin.read().splitlines():
        share_named(Path(told[0]), told[1:])


if __name__ == "__main__":
    main()
