"""The paths of products with weights on a CPU: what each needs, and which one is used.

    weights      path       products
    float32      float32    in float32 (`linear_fp32.py`: AVX-512; `linear_widened.py`: AVX2; else `gemm.py`)
    bfloat16     amx        of tiles (`linear_bf16.py`): AMX
                 fp16       in half precision (`linear_fp16.py`): AVX-512 FP16, and a depth of whole chains
                 bf16       of pairs of bfloat16, added to float32 (`linear_bf16.py`): AVX-512 BF16
                 float32    widened to float32 on the way into registers (`linear_widened.py`: AVX2; else `gemm.py`)
                 onednn     by oneDNN, through torch (`onednn.py`); decode steps are not recorded
    int8, int4   amx_int8   of tiles (`linear_blocks.py`): AMX
                 vnni       of bytes, added in fours by one instruction (`linear_blocks.py`): AVX-512 VNNI or AVX-VNNI
                 integer    of bytes, added in pairs (`linear_blocks.py`)

By default the path of bfloat16 is the one that the user had measured and kept (`slotwise bench kernels
--keep-fastest`), a line of JSON in the user's folder of caches; without that file, the first of `FASTEST` whose feature
this processor has.  A start measures nothing, so that every start on a machine computes the same.  One path can be
forced, by an argument of `CpuKernels` or by the environment variable SLOTWISE_CPU_LINEAR; the other group keeps its
default.  Tests run every path without an `obstacle`.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from slotwise.compute.kernels.cpu.processor import features, has
from slotwise.compute.kernels.cpu.products import linear_bf16, linear_blocks, linear_fp16, onednn
from slotwise.platform import files
from slotwise.platform.files import read_regular, write_output

# The most bytes that are read of the file with the kept path.
MAX_BYTES = 1 << 16


def file() -> Path:
    """The file with the kept path."""
    return files.cache_folder() / "slotwise" / "product-path.json"


def read() -> str:
    """The path kept for this processor; empty if no path is kept."""
    try:
        kept = json.loads(read_regular(file(), MAX_BYTES))
    except (OSError, ValueError, RecursionError):
        return ""
    if files.folder_objection(file()):  # no other user may decide what this one computes
        return ""
    matches = isinstance(kept, dict) and kept.get("features") == features() and isinstance(kept.get("path"), str)
    return str(kept["path"]) if matches else ""


def keep(path: str) -> Path:
    """Keep `path` for this processor; returns the file."""
    target = file()
    target.parent.mkdir(parents=True, exist_ok=True)
    write_output(target, f"{json.dumps({'path': path, 'features': features()})}\n".encode())
    return target


VARIABLE = "SLOTWISE_CPU_LINEAR"
# The paths for weights of bfloat16, and for quantized weights.
DENSE = ("amx", "fp16", "bf16", "float32", "onednn")
QUANTIZED = ("amx_int8", "vnni", "integer")
ALL = DENSE + QUANTIZED

FASTEST = (
    ("amx-bf16", "amx"),
    # Intel's processors with FP16 multiply bfloat16 at half the rate of float32.
    ("avx512fp16", "fp16"),
    ("avx512bf16", "bf16"),
    ("", "float32"),
)
"""The fastest path for a processor with a feature, by LLVM's name: the first line that applies, as measured by
`slotwise bench kernels`.  One path serves all numbers of rows, because a row's result must not depend on the other
rows, and weights are packed once."""


def obstacle(path: str) -> str:
    """Why this processor cannot execute `path`; empty where it can."""
    if path == "onednn":
        return onednn.obstacle()
    if path == "amx":
        return linear_bf16.amx_obstacle()
    if path == "amx_int8":
        return linear_blocks.amx_obstacle()
    if path == "fp16" and not linear_fp16.has_fp16_gemm():
        return "it needs a processor with AVX-512 FP16"
    if path == "bf16" and not linear_bf16.has_bf16_gemm():
        return "it needs a processor with AVX-512 BF16"
    if path == "vnni" and not linear_blocks.has_vnni_gemm():
        return "it needs a processor with AVX-512 VNNI or AVX-VNNI"
    return ""


def forced(path: str | None = None) -> str:
    """The forced path, from `path` or else from the environment; empty where neither sets one.

    Raises:
        ValueError: the path is unknown, or this processor cannot execute it.
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
    """The path of bfloat16 weights."""
    if forced in DENSE:
        return forced
    kept = read()
    if kept in DENSE and not obstacle(kept):
        return kept
    return next(path for feature, path in FASTEST if (not feature or has(feature)) and not obstacle(path))


def quantized(forced: str) -> str:
    """The path of quantized weights: the first one that can run, since faster paths come first."""
    if forced in QUANTIZED:
        return forced
    return next(path for path in QUANTIZED if not obstacle(path))
