"""What is known of each kernel's machine code, by content, and the bounds that it must keep."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.gpu_compile.architectures import ARCHITECTURES, programs_at_once

FILE = Path(__file__).parents[1] / "results" / "gpu-compile.json"
HALVES = ("bfloat16", "float16")
PRODUCT_OF = {80: "mma", 89: "mma", 90: "wgmma", 100: "tcgen05"}  # of a prefill tile: the fastest that there is
MULTIPLY = ("attend_tiles", "attend_segments", "attend_latents", "multiply_experts", "multiply_codes")
SMALLEST_OF_A_GROUP = 64  # rows of a tile: with fewer, Hopper and Blackwell have Ampere's instructions only

Kernel = dict[str, Any]


def load(path: Path = FILE) -> dict[str, Kernel]:
    """Kernels by key; none where there is no file."""
    return {kernel["key"]: kernel for kernel in json.loads(path.read_text())["kernels"]} if path.exists() else {}


def save(kernels: Iterable[Kernel], environment: dict[str, Any], path: Path = FILE) -> None:
    """Write all kernels, one a line."""
    ordered = sorted(kernels, key=lambda kernel: (kernel["capability"], kernel["kernel"], kernel["kind"], kernel["of"]))
    lines = ",\n".join(json.dumps(kernel) for kernel in ordered)
    path.write_text(f'{{"environment": {json.dumps(environment)},\n"kernels": [\n{lines}\n]}}\n')


def programs(kernel: Kernel) -> int:
    """How many programs of it a multiprocessor runs at once."""
    return programs_at_once(
        ARCHITECTURES[kernel["capability"]], kernel["warps"], kernel["registers"], kernel["shared"])


def faults(kernel: Kernel) -> list[str]:
    """The bounds that a kernel exceeds, in words; none where all is well."""
    architecture, found = ARCHITECTURES[kernel["capability"]], []
    half = kernel["kind"] in HALVES
    if half and kernel["stack"]:
        found.append(f"spills {kernel['stack']} bytes a thread")
    if kernel["shared"] > architecture.shared_of_program:
        found.append(f"takes {kernel['shared']} bytes of shared memory, of {architecture.shared_of_program}")
    elif programs(kernel) < kernel["claimed"]:
        found.append(f"{programs(kernel)} programs run at once, and its configuration claims {kernel['claimed']}")
    if kernel["kernel"] in MULTIPLY:
        if half and not kernel["products"]:
            found.append("multiplies without tensor cores")
        if not half and (kernel["products"] or kernel["tf32"]):
            found.append("rounds float32 to TF32")
    return [f"{named(kernel)}: {fault}" for fault in found]


def named(kernel: Kernel) -> str:
    """A kernel in words."""
    return f"{kernel['kernel']} ({kernel['kind']}, {kernel['of']}, sm_{kernel['capability']})"
