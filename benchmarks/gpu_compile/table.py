"""The table of all kernels, one row for each and its types, one column for each GPU."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from benchmarks.gpu_compile.architectures import ARCHITECTURES
from benchmarks.gpu_compile.results import Kernel, programs

TABLE = Path(__file__).parents[1] / "gpu-compile.md"
INTRODUCTION = """# The Triton kernels as machine code

`make gpu-compile` writes this page: every kernel of `src/slotwise/compute/kernels/cuda`, in every configuration that a
default can choose, compiled for four compute capabilities. No GPU is needed, and nothing here was run on one.

A cell: registers of a thread, KiB of shared memory, programs that a multiprocessor runs at once, tensor cores'
instruction. **Bold**: bytes that a thread spills to memory; in bfloat16 and float16 there must be none, as CI checks
(`benchmarks/gpu_compile/results.py` has all bounds). Of several kernels in one row (a launch is compiled for several
options), the one with the most registers counts.

| kernel | type | of | {columns} |
|---|---|---|{lines}|
"""


def written(kernels: Sequence[Kernel]) -> str:
    """The page."""
    columns = " | ".join(f"sm_{each.capability} ({each.devices})" for each in ARCHITECTURES.values())
    page = INTRODUCTION.format(columns=columns, lines="|".join(["---"] * len(ARCHITECTURES)))
    ordered = sorted(kernels, key=_row)
    return page + "".join(_line(row, list(group)) for row, group in groupby(ordered, key=_row))


def _row(kernel: Kernel) -> tuple[str, str, int, str]:
    number = next((int(word.strip(",")) for word in kernel["of"].split() if word.strip(",").isdigit()), 0)
    return kernel["kernel"], kernel["kind"], number, kernel["of"]


def _line(row: tuple[str, str, int, str], kernels: list[Kernel]) -> str:
    cells = []
    for capability in ARCHITECTURES:
        here = [kernel for kernel in kernels if kernel["capability"] == capability]
        cells.append(_cell(max(here, key=lambda kernel: (kernel["stack"], kernel["registers"]))) if here else "")
    name, kind, _, of = row
    return f"| {name} | {kind} | {of} | {' | '.join(cells)} |\n"


def _cell(kernel: Kernel) -> str:
    parts = [str(kernel["registers"]), f"{-(-kernel['shared'] // 1024)} KiB", f"{programs(kernel)}×",
             *kernel["products"]]
    return ", ".join(parts) + (f", **{kernel['stack']}**" if kernel["stack"] else "")
