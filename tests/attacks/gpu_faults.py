"""Faults put into the Triton kernels, one at a time, and the check that catches each.

A fault is a change of one place in a copy of the sources.  The tests of the kernels run on the copy, interpreted on the
CPU; a fault that costs only speed is for the bounds of `benchmarks/gpu_compile`.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from benchmarks.gpu_compile.results import faults, load

from attacks import ROOT

KERNELS = Path("src/slotwise/compute/kernels/cuda")
SECONDS = 600  # of the checks of one fault
CAPABILITY = "80"


class Fault(NamedTuple):
    """A change, and the tests that should fail: none for a fault of speed."""

    what: str
    file: str
    before: str
    after: str
    tests: str = ""


FAULTS = (
    Fault("a wrong stride: values of the next key head", "attention.py",
          "pointers + KV_HEADS * BLOCK_SIZE * HEAD_DIM", "pointers + (KV_HEADS - 1) * BLOCK_SIZE * HEAD_DIM",
          "test_attention.py -k decode_rows"),
    Fault("a missing mask: queries see the future", "attention.py",
          "visible = (place[None, :] <= positions[:, None]) & readable[None, :]",
          "visible = readable[None, :] & (positions[:, None] >= 0)",
          "test_attention.py -k edges_of_tiles"),
    Fault("a window one token too long", "attention.py",
          "place[None, :] > positions[:, None] - WINDOW", "place[None, :] >= positions[:, None] - WINDOW",
          "test_attention.py -k windows_around"),
    Fault("the first of two segments is forgotten", "attention.py",
          "tl.fma(part, tl.broadcast_to(share[:, None], [BLOCK_M, BLOCK_D]), total * keep[:, None])",
          "part * share[:, None]",
          "test_attention.py -k position_does_not_depend"),
    Fault("sums of weights are not rescaled", "attention.py",
          "weight = weight * shrink + tl.sum(shares, 1)", "weight = weight + tl.sum(shares, 1)",
          "test_attention.py -k every_size_of_head"),
    Fault("sinks counted in every segment", "attention.py",
          "is_first = first // SEGMENT == segment", "is_first = first // SEGMENT <= segment",
          "test_attention.py -k sinks"),
    Fault("the wrong block of the cache is written", "rotary.py",
          "(slot // BLOCK_SIZE * (2 * KV_HEADS) + head - HEADS)", "(slot // BLOCK_SIZE * KV_HEADS + head - HEADS)",
          "test_tokens.py"),
    Fault("a norm divides by the padded size", "pointwise.py",
          "tl.rsqrt(tl.sum(values * values, 0) / SIZE + eps)",
          "tl.rsqrt(tl.sum(values * values, 0) / (SIZE + 1) + eps)",
          "test_tokens.py"),
    Fault("draws repeat: the output's index is not used", "sampling.py",
          "_uniform(tl.load(seeds + row), tl.load(indices + row))",
          "_uniform(tl.load(seeds + row), tl.load(seeds + row))",
          "test_sampling.py -k every_kind"),
    Fault("an expert multiplies with the weights of the next", "experts.py",
          "matrix = weight + expert * OUTPUTS * DEPTH",
          "matrix = weight + (expert + 1) % num_experts * OUTPUTS * DEPTH",
          "test_experts.py -k contract"),
    Fault("codes of the second half of a byte are the first's", "packed.py",
          "code = (packed >> half * 4) & 15 if NIBBLES else packed", "code = packed & 15 if NIBBLES else packed",
          "test_quantized.py -k products_of_every_format"),
    Fault("a mask's bits are read one token too far", "sampling.py",
          "token = word[:, None] * 32 + place[None, :]", "token = word[:, None] * 32 + place[None, :] + 1",
          "test_masks.py"),
    Fault("results of a row's drafts lie over those of the next row", "attention.py",
          "return tl.where(short == 1, row, start)", "return row",
          "test_attention.py -k drafts"),
    Fault("the last part of a split product is forgotten", "packed.py",
          "for part in tl.static_range(PARTS):", "for part in tl.static_range(PARTS - 1):",
          "test_quantized.py -k split_along"),
    Fault("a tile too large: registers spill", "configs.py",
          "return PrefillConfig(128 if 32 < head_dim <= 64 else 64, 32, 8, 3)",
          "return PrefillConfig(128, 128, 4, 3)"),
    Fault("tensor cores round float32", "attention.py",
          'tl.dot(query, tl.trans(keys), input_precision="ieee")',
          'tl.dot(query, tl.trans(keys), input_precision="tf32")'),
)  # fmt: skip


def caught_by(fault: Fault) -> str:
    """The check that fails on sources with the fault; "" where none does."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for name in ("src", "tests", "benchmarks"):
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", copy)
        path = copy / KERNELS / fault.file
        source = path.read_text()
        if source.count(fault.before) < 1:
            raise SystemExit(f"{fault.file} no longer holds {fault.before!r}")
        path.write_text(source.replace(fault.before, fault.after, 1))
        return _failing_tests(copy, fault.tests) if fault.tests else _exceeded(copy)


def _failing_tests(copy: Path, tests: str) -> str:
    """The first failing test.

    Raises:
        SystemExit: the tests did not run.
    """
    name, *chosen = tests.split(" ", 2)
    ended = _python(
        copy, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", f"tests/compute/kernels/cuda/{name}", *chosen)
    failed = [line for line in ended.stdout.splitlines() if line.startswith("FAILED")]
    if ended.returncode and not failed:
        raise SystemExit(f"{tests} did not run:\n{ended.stdout[-2000:]}{ended.stderr[-2000:]}")
    return f"`{failed[0].split(' ')[1].partition('[')[0].removeprefix('tests/')}`" if failed else ""


def _exceeded(copy: Path) -> str:
    """The first bound that machine code for one compute capability exceeds, of kernels that the fault has changed."""
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.gpu_compile.worker", "0", "1", CAPABILITY]
    with tempfile.TemporaryFile("w+") as known:
        json.dump(sorted(load()), known)
        known.seek(0)
        with subprocess.Popen(command, cwd=copy, env=_environment(copy), stdin=known, stdout=subprocess.PIPE,
                              text=True) as worker:
            for line in worker.stdout or ():
                kernel = json.loads(line)
                if "kernel" in kernel and (found := faults(kernel)):
                    worker.kill()
                    return f"`make gpu-compile`: {found[0]}"
    return ""


def _python(copy: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-W", "ignore", *arguments], cwd=copy, env=_environment(copy),
                          capture_output=True, text=True, timeout=SECONDS)


def _environment(copy: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return kept | {"PYTHONPATH": os.pathsep.join((str(copy / "src"), str(copy)))}
