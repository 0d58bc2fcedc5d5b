"""The paths of products with weights on a CPU: what each needs, and which one is used.

    weights      path       products
    float32      float32    in float32 (`gemm.py`)
    bfloat16     onednn     by oneDNN, through torch (`onednn.py`); decode steps are not captured
                 fp16       in half precision (`linear_fp16.py`): AVX-512 FP16, and a depth of whole chains
                 float32    widened to float32 on the way into registers (`gemm.py`)
    int8, int4   vnni       of bytes, added in fours by one instruction (`linear_int.py`): AVX-512 VNNI
                 integer    of bytes, added in pairs (`linear_int.py`)

By default the first path of a group is used that this processor can execute and, for oneDNN, that was measured to be
faster than float32.  One path can be forced, by an argument of `CpuKernels` or by the environment variable
SLOTWISE_CPU_LINEAR; the other group keeps its default.  Tests run every path without an `obstacle`.
"""

from __future__ import annotations

import os

from slotwise.kernels.cpu import linear_fp16, onednn
from slotwise.kernels.cpu.processor import has

VARIABLE = "SLOTWISE_CPU_LINEAR"
DENSE = ("onednn", "fp16", "float32")  # for weights of bfloat16
QUANTISED = ("vnni", "integer")
ALL = DENSE + QUANTISED


def obstacle(path: str) -> str:
    """Why this processor cannot execute `path`; empty where it can."""
    if path == "onednn":
        return onednn.obstacle()
    if path == "fp16" and not linear_fp16.has_fp16_gemm():
        return "it needs a processor with AVX-512 FP16"
    if path == "vnni" and not has("avx512vnni"):
        return "it needs a processor with AVX-512 VNNI"
    return ""


def forced(path: str | None = None) -> str:
    """The forced path, of `path` or else of the environment; empty where neither sets one.

    Raises:
        ValueError: there is no such path, or this processor cannot execute it.
    """
    source, path = ("path", path) if path is not None else (VARIABLE, os.environ.get(VARIABLE, ""))
    if not path:
        return ""
    if path not in ALL:
        raise ValueError(f"{source} must be {', '.join(ALL[:-1])} or {ALL[-1]}, not {path!r}")
    if why := obstacle(path):
        raise ValueError(f"{source} {path} cannot run here: {why}")
    return path


def dense(forced: str) -> str:
    """The path of bfloat16 weights.  Measures oneDNN at the first call of a process, unless a path is forced."""
    if forced in DENSE:
        return forced
    if onednn.multiplies_bfloat16():
        return "onednn"
    return "float32" if obstacle("fp16") else "fp16"


def quantised(forced: str) -> str:
    """The path of quantised weights."""
    if forced in QUANTISED:
        return forced
    return "integer" if obstacle("vnni") else "vnni"
