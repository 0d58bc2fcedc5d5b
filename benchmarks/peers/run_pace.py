"""AMD PACE's server, on Zen 4 and newer: PACE/bin/python benchmarks/peers/run_pace.py CHECKPOINT."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from same_requests import CACHE_GIB, SLOTS, Engine, main
from served import Served, free_port, running


@contextlib.contextmanager
def start(asked: argparse.Namespace) -> Iterator[Engine]:
    port = free_port()
    command = [str(Path(sys.executable).parent / "pace-server"), "--server_model", asked.model,
               "--kv_cache_type", "SLAB_POOL", "--serve_type", "continuous_batch", "--dtype", "bfloat16",
               "--server_port", str(free_port()), "--router_port", str(port), "--max_num_running_reqs", str(SLOTS),
               "--kv_cache_memory_gb", str(CACHE_GIB)]
    pace = Served("pace", metadata.version("amd-pace"), port, {"model": asked.model})
    with running(pace, command, {"HF_HUB_OFFLINE": "1"}) as server:
        yield server


if __name__ == "__main__":
    main(start, __doc__)
