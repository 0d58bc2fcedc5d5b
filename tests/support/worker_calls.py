"""Functions for a worker process of the tests (`api/http/worker_process.py`)."""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any


def echo(value: Any) -> Any:
    return value


def lengths(*values: bytes) -> list[int]:
    return [len(value) for value in values]


def sleep(seconds: float) -> None:
    time.sleep(seconds)


def compute(seconds: float) -> None:
    begun = time.process_time()
    while time.process_time() < begun + seconds:
        pass


def refuse() -> None:
    raise ValueError("not today")


def fail() -> None:
    raise KeyError("missing")


def crash() -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def eat(num_bytes: int) -> int:
    return len(bytearray(num_bytes))


def give(num_bytes: int) -> bytes:
    return b"x" * num_bytes


def once_slow(pid: int) -> int:
    """Returns this process' id; takes a second in the process `pid`, which the test ends or stops meanwhile."""
    if os.getpid() == pid:
        time.sleep(1.0)
    return os.getpid()


def process() -> dict[str, Any]:
    return {"pid": os.getpid(), "nice": os.nice(0), "fds": len(os.listdir("/proc/self/fd")) - 1,
            "heavy": [name for name in ("torch", "numpy", "numba") if name in sys.modules]}


CALLS = {function.__name__: function for function in (
    echo, lengths, sleep, compute, refuse, fail, crash, eat, give, once_slow, process)}
