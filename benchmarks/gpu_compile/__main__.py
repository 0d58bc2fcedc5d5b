"""Compiles every Triton kernel for sm_80, sm_89, sm_90 and sm_100, and checks what came of it: `make gpu-compile`.

    python -m benchmarks.gpu_compile                  what is not in the results file yet, by content; writes both files
    python -m benchmarks.gpu_compile --all            everything anew
    python -m benchmarks.gpu_compile --check          writes nothing: for CI

The results are benchmarks/results/gpu-compile.json and the table benchmarks/gpu-compile.md.  No GPU is needed: Triton's
wheel carries the assembler.  Exits with 1 where a bound is exceeded, and names the kernel.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

from benchmarks.gpu_compile.architectures import ARCHITECTURES
from benchmarks.gpu_compile.results import Kernel, faults, load, save
from benchmarks.gpu_compile.table import TABLE, written

ROOT = Path(__file__).parents[2]
SAVED_AFTER = 20  # kernels compiled


def main() -> int:
    """Returns 1 where a bound is exceeded or the results are not those of the sources."""
    asked = _parse()
    known = {} if asked.all else load()
    found: dict[str, Kernel] = {}
    missing: set[str] = set()
    for kernel in compiled(frozenset(known), asked.capabilities, asked.processes):
        key = kernel["key"]
        if key not in known:
            missing.add(key)
        found[key] = known.get(key, kernel)
        if key in missing and not len(missing) % SAVED_AFTER and not asked.check:
            save((known | found).values(), _environment())  # what is cut short goes on from here
    others = {key: kernel for key, kernel in known.items() if kernel["capability"] not in asked.capabilities}
    print(f"{len(found)} kernels, {len(missing)} of them compiled now")
    if not asked.check:
        save([*found.values(), *others.values()], _environment())
        TABLE.write_text(written([*found.values(), *others.values()]))
    wrong = [fault for kernel in found.values() for fault in faults(kernel)]
    print("\n".join(wrong) or "all bounds hold")
    return int(bool(wrong))


def _environment() -> dict[str, str]:
    import triton

    return {"triton": triton.__version__}


def compiled(known: frozenset[str], capabilities: list[int], processes: int) -> Iterator[Kernel]:
    """Every kernel, once; of a kernel whose key is known, the key only.  Shows progress on a terminal."""
    lines: SimpleQueue[Kernel | None] = SimpleQueue()
    with ThreadPoolExecutor(processes) as pool:
        shares = [pool.submit(_share, known, [share, processes, *capabilities], lines) for share in range(processes)]
        ended, seen = 0, set[str]()
        while ended < processes:
            kernel = lines.get()
            if kernel is None:
                ended += 1
            elif kernel["key"] not in seen:  # two shares may have launches of the same kernel
                seen.add(kernel["key"])
                if sys.stderr.isatty():
                    print(f"\r{len(seen)} kernels", end="", file=sys.stderr)
                yield kernel
    for share in shares:
        share.result()


def _share(known: frozenset[str], arguments: list[int], lines: SimpleQueue[Kernel | None]) -> None:
    """Run a worker, and put each of its kernels; then None.

    Raises:
        SystemExit: a kernel does not compile.
    """
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.gpu_compile.worker", *map(str, arguments)]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join((str(ROOT / "src"), str(ROOT)))
    with tempfile.TemporaryFile("w+") as errors, tempfile.TemporaryFile("w+") as keys:
        json.dump(sorted(known), keys)
        keys.seek(0)
        with subprocess.Popen(command, env=environment, cwd=ROOT, stdin=keys, stdout=subprocess.PIPE, stderr=errors,
                              text=True) as process:
            for line in process.stdout or ():
                lines.put(json.loads(line))
        lines.put(None)
        if process.returncode:
            errors.seek(0)
            raise SystemExit(f"a kernel does not compile:\n{errors.read()[-3000:]}")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_compile", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="compile what is known, too")
    parser.add_argument("--check", action="store_true", help="write nothing")
    parser.add_argument("--capabilities", type=int, nargs="+", choices=list(ARCHITECTURES), default=list(ARCHITECTURES),
                        metavar="N", help=f"of {', '.join(map(str, ARCHITECTURES))} (default: all)")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="at once (default: one a core)")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
