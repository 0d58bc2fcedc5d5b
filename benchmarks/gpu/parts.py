"""The parts of the check, each a process with a time limit of its own, so that no part can end another."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu.figures import MARK, told

from slotwise.platform.spawn import end_with_parent

ROOT = Path(__file__).resolve().parents[2]
WORTHWHILE = 5.0  # seconds; with less left a part is not begun
REHEARSAL_PATIENCE = 6  # times the limit of a part, for the slow machines on which rehearsals run
KEPT = 3000  # characters of the end of a failed part's output
OK, FAILED, OUT_OF_TIME, SKIPPED = "ok", "failed", "out of time", "skipped"


@dataclass(frozen=True, slots=True)
class Part:
    """Arguments for Python, and their time limit in seconds."""

    name: str
    arguments: tuple[str, ...]
    rehearsal: tuple[str, ...]
    seconds: float


def _tests(name: str, on_gpu: str, rehearsal: str, seconds: float) -> Part:
    """Returns a part that runs tests, in several processes where pytest-xdist is installed: compiling dominates."""
    command = ("-m", "pytest", "-q", "-p", "no:cacheprovider")
    together = ("-n", str(min(8, os.cpu_count() or 1))) if importlib.util.find_spec("xdist") else ()
    return Part(name, (*command, *together, *on_gpu.split(" ", 2)), (*command, *rehearsal.split(" ", 2)), seconds)


def _measured(name: str, seconds: float) -> Part:
    command = ("-m", f"benchmarks.gpu.{name}")
    return Part(name, command, (*command, "--rehearse"), seconds)


PARTS = (  # correctness first
    _tests("kernels", "tests/compute/kernels/cuda", "tests/compute/kernels/cuda/test_graphs.py", 90.0),
    _tests("parity", "tests/test_parity.py -k random_steps or preempted or alone",
           "tests/compute/runner/sampling/test_cpu.py -k greedy", 50.0),
    _measured("serve", 40.0),
    _measured("ranks", 30.0),
    _measured("shares", 40.0),
    _measured("steps", 90.0),
    _measured("trace", 45.0),
    _measured("peer", 65.0),
    _measured("start", 30.0),
    _measured("vllm", 120.0),  # of what the others leave
)


def run(part: Part, *, rehearse: bool, time_left: float) -> dict[str, Any]:
    """Returns a part's status, seconds and figures, and the end of its output if it failed."""
    budget = min(part.seconds * (REHEARSAL_PATIENCE if rehearse else 1), time_left)
    if budget < WORTHWHILE:
        return {"status": SKIPPED, "why": f"{max(time_left, 0.0):.0f} s of the check are left"}
    started = time.monotonic()
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as output:
        status = _finished(part.rehearsal if rehearse else part.arguments, output.fileno(), budget)
        output.seek(0)
        text = output.read()
    found = {"status": status, "seconds": round(time.monotonic() - started, 2), "figures": told(text)}
    if counts := _counts(text):
        found["figures"]["tests"] = counts
    if status != OK:
        said = "\n".join(line for line in text.splitlines() if not line.startswith(MARK))
        found["said"] = said[-KEPT:]
    return found


def _finished(arguments: tuple[str, ...], output: int, budget: float) -> str:
    """Runs Python until it ends or its time is over; it ends with this process, too, and leaves the device free."""
    paths = os.pathsep.join(filter(None, (str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", ""))))
    process = subprocess.Popen(
        [sys.executable, *arguments], cwd=ROOT, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
        env=os.environ | {"PYTHONPATH": paths}, start_new_session=True, preexec_fn=end_with_parent)
    try:
        return OK if process.wait(budget) == 0 else FAILED
    except subprocess.TimeoutExpired:
        return OUT_OF_TIME
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _counts(text: str) -> dict[str, int]:
    """Returns the number of tests by outcome, from pytest's summary; libraries may write behind it."""
    *_, summary = ["", *(line for line in text.splitlines() if re.search(r" in \d+\.\d+s", line))]
    return {outcome: int(number) for number, outcome in re.findall(r"(\d+) (passed|failed|errors?|skipped)", summary)}
