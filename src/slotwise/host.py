"""What this machine is, without torch: its processors, and whether the CPU's kernels run on it."""

from __future__ import annotations

import os
import platform

SYSTEM, MACHINES = "Linux", ("x86_64", "aarch64")  # on which the kernels were run


def num_processors() -> int:
    """Returns the number of processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def kernels_obstacle() -> str:
    """Returns why the CPU's kernels do not run on this machine; empty where they do.

    Their threads sleep at the unnamed semaphores of POSIX, which macOS does not have, and they were run on no other
    systems and processors than these.
    """
    system, machine = platform.system(), platform.machine()
    if system == SYSTEM and machine in MACHINES:
        return ""
    return f"the CPU's kernels run on {SYSTEM} on {' and '.join(MACHINES)}, not on {system} on {machine}"
