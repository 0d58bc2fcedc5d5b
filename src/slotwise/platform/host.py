"""What this machine is, without torch: its processors, and whether the CPU's kernels run on it."""

from __future__ import annotations

import contextlib
import os
import platform
from pathlib import Path

SYSTEM = "Linux"
MACHINES: dict[str, tuple[str, ...]] = {"x86_64": ("AVX2", "AVX512"), "aarch64": ()}
"""Processors on which the kernels were run, each with what torch must report of them; (): anything."""

UNKNOWN_CACHE = 32 << 20  # bytes
CGROUP = Path("/sys/fs/cgroup")


def processors() -> frozenset[int]:
    """Returns the processors that this process may use, by their numbers; as many of them, where these are unknown."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def num_processors() -> int:
    """Returns the number of processors that this process may use."""
    return len(processors())


def cpu_quota(root: Path = CGROUP) -> float:
    """Returns the processors whose time this process may use, by its control group and those above; 0: no limit."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        lines = []
    named = next((line.removeprefix("0::") for line in lines if line.startswith("0::")), "/")
    parts = [part for part in named.split("/") if part]
    parts = [] if ".." in parts else parts  # a group outside of what can be seen
    quotas = []
    for depth in range(len(parts) + 1):
        with contextlib.suppress(OSError, ValueError):
            most, period = root.joinpath(*parts[:depth], "cpu.max").read_text().split()
            quotas.append(int(most) / int(period))  # ValueError: "max"
    return min(quotas, default=0.0)


def last_cache_bytes() -> int:
    """Returns the size of the largest cache of the first processor, as the system tells it; else `UNKNOWN_CACHE`."""
    sizes = []
    for told in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        with contextlib.suppress(OSError, ValueError):
            sizes.append(int(told.read_text().strip().removesuffix("K")) << 10)
    return max(sizes, default=UNKNOWN_CACHE)


def kernels_obstacle(capability: str = "") -> str:
    """Returns why the CPU's kernels do not run on this machine; empty where they do.

    Their threads sleep at the unnamed semaphores of POSIX, which macOS does not have, and they were run on no other
    systems and processors than these.  On x86-64 without AVX2 each product and sum of two numbers is a function call.

    Args:
        capability: `torch.backends.cpu.get_cpu_capability()`; empty: not known yet.
    """
    system, machine = platform.system(), platform.machine()
    if system != SYSTEM or machine not in MACHINES:
        return f"the CPU's kernels run on {SYSTEM} on {' and '.join(MACHINES)}, not on {system} on {machine}"
    if capability and MACHINES[machine] and capability not in MACHINES[machine]:
        return f"the CPU's kernels need {MACHINES[machine][0]}, which this processor does not have"
    return ""
