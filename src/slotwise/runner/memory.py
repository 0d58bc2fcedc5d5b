"""How much memory the cache may take."""

from __future__ import annotations

from pathlib import Path

SHARE = 0.4  # of the memory free once the weights are loaded; the rest is for activations and for others

UNLIMITED = 1 << 62  # bytes

_CGROUP = Path("/sys/fs/cgroup")


def available_bytes() -> int:
    """Memory this process may still take: the machine's, or its control group's where that is less."""
    return min(_machine_available(), _cgroup_available())


def num_blocks(bytes_per_block: int, useful_blocks: int, asked: int | None) -> int:
    """Blocks the cache gets.

    Args:
        bytes_per_block: over all layers.
        useful_blocks: more than this could never be in use.
        asked: bytes; None: a share of what is available.

    Raises:
        MemoryError: not even one block fits.
    """
    budget = int(available_bytes() * SHARE) if asked is None else asked
    blocks = min(budget // bytes_per_block, useful_blocks)
    if blocks < 1:
        raise MemoryError(f"a cache of {budget} bytes holds no block of {bytes_per_block} bytes: raise kv_cache_memory")
    return blocks


def _machine_available() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines() if Path("/proc/meminfo").exists() else ():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 8 << 30  # not Linux: a modest guess, which kv_cache_memory overrules


def _cgroup_available() -> int:
    try:
        limit = (_CGROUP / "memory.max").read_text().strip()
        if limit == "max":
            return UNLIMITED
        used = int((_CGROUP / "memory.current").read_text())
        stat = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return UNLIMITED  # no control group to speak of
    files = int(stat.get("active_file", 0)) + int(stat.get("inactive_file", 0))  # given up when memory is wanted
    return max(0, int(limit) - used + files)
