"""Processes that help to compile kernels: Python's work for the greater part, which threads would not share out.

A helper has two seconds of imports before it is of any use.  So where nothing was ever compiled, helpers are called
before the engine process imports anything itself, and told what there is to do once a model's description was read:

    engine   call_early │ imports …………… │ set_to_work │ compiles ………
    helper              └─ imports ………………… waits ──────┘ compiles ………

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
GPU = Path("/dev/nvidiactl")  # of the driver
MOST = 13  # beside this process; no model needs more kernels

CompileWorker = subprocess.Popen[str]
_waiting: list[CompileWorker] = []  # called, and not told yet what to do


def call_early(device: str) -> None:
    """Call helpers if nothing was ever compiled here, and `device` is the CPU, as far as can be told without torch."""
    is_cpu = device == "cpu" or (device == "auto" and not GPU.exists())
    place = home() if is_cpu else None
    if place is not None and not any(place.glob("*")):
        _call(min(MOST, len(os.sched_getaffinity(0)) - 1))


def are_waiting() -> bool:
    """Whether some were called, and not told yet what to do."""
    return bool(_waiting)


def set_to_work(number: int, claims: Path, names: list[str]) -> list[CompileWorker]:
    """Have so many helpers compile what nobody has claimed of `names`, those called early before others.

    Args:
        claims: a folder in which to claim work.

    Returns:
        Who was told.  Each ends when there is nothing left, and may have failed.
    """
    _call(number - len(_waiting))
    chosen = [_waiting.pop() for _ in range(number)]
    for helper in chosen:
        _tell(helper, "\n".join([str(claims), *names]))
    return chosen


def dismiss() -> None:
    """Let those go who wait."""
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
    free.pop("OMP_PROC_BIND", None)  # or all had the first core
    _waiting.extend(subprocess.Popen(command, stdin=subprocess.PIPE, text=True, env=free, cwd=child.HOME)
                    for _ in range(number))


def main() -> None:
    """A helper: imports, then what it is told on its standard input, which is nothing if it is not needed."""
    gc.disable()  # all that it makes is kept until it ends
    logging.disable()  # the process that called it says the same
    from slotwise.kernels.lazy_imports import spare_torch

    spare_torch()
    from slotwise.kernels.cpu.compiled import share_named

    if told := sys.stdin.read().splitlines():
        share_named(Path(told[0]), told[1:])


if __name__ == "__main__":
    main()
