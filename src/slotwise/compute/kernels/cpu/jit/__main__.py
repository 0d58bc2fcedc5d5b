"""A compile worker: imports, then compiles the kernels named on its standard input, if any."""

from __future__ import annotations

import contextlib
import gc
import logging
import sys
from pathlib import Path

from slotwise.compute.kernels.lazy_imports import spare_torch
from slotwise.platform import spawn


def main() -> None:
    spawn.end_with_parent()
    spawn.end_on_interrupt()  # the engine compiles what a worker leaves, or ends as well
    gc.disable()  # all objects are kept until the worker ends
    logging.disable()  # the parent process logs the same
    spare_torch()
    from slotwise.compute.kernels.cpu.jit.compiler import share_named

    if work := sys.stdin.read().splitlines():
        with contextlib.suppress(FileNotFoundError):  # the folder of claims went with the engine process
            share_named(Path(work[0]), work[1:])


if __name__ == "__main__":
    main()
