"""Compiles every kernel for a GPU that need not be there, through the code that launches it, and starts none.

    python compiled.py '[[90, "bfloat16", 128, 0]]'

Prints JSON lines: kernel, compute capability, bytes of shared memory, instructions of note.  Each launch is a compute
capability, a type, a size of heads and a window.

Run as a process of its own: one in which Triton was imported for its interpreter compiles nothing.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from slotwise.kernels.cuda import attention, pointwise, rotary, sampling
from slotwise.kernels.cuda.cache import CudaCache
from slotwise.kernels.cuda.configs import default_tuning
from slotwise.kernels.interface import AttentionShape, QKNorm, RaggedBatch


class Absent:
    """A driver of a GPU that is not there."""

    def __init__(self, capability: int) -> None:
        self._capability, self._target = capability, GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return self._capability  # for what was compiled is kept by device

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_only() -> None:
    """From here on a launch compiles and prints what came of it."""
    run = JITFunction.run

    def compiled(self: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        ptx = kernel.asm["ptx"]
        assert kernel.asm["cubin"], "no machine code"
        print(json.dumps({
            "kernel": self.__name__, "target": kernel.metadata.target.arch, "shared": kernel.metadata.shared,
            "wgmma": ptx.count("wgmma.mma_async"), "mma": ptx.count("mma.sync"), "copies": ptx.count("cp.async.c"),
            "tf32": ptx.count(".tf32")}), flush=True)

    JITFunction.run = compiled


def launch(kind: torch.dtype, head_dim: int, window: int) -> None:
    """One step of a chunk and a decode row through one layer, and its sampling; with a window, with all options."""
    shape = AttentionShape(8, 2, head_dim, 0.1, window, soft_cap=50.0 if window else 0.0)
    cache = CudaCache.allocate(4, 16, shape, kind, torch.device("cpu"))
    longs, ints = torch.zeros(40, dtype=torch.int64), torch.zeros(3, dtype=torch.int32)
    batch = RaggedBatch(longs, longs, longs, ints, ints[:2], torch.zeros(2, 3, dtype=torch.int32), longs[:2], 39, 40)
    norm = QKNorm(torch.ones(head_dim, dtype=kind), torch.ones(head_dim, dtype=kind), 1e-6)
    qkv = torch.zeros(40, 12 * head_dim, dtype=kind)
    query = rotary.rotary_store(qkv, torch.zeros(64, head_dim), batch, cache, shape, norm)
    sinks = torch.zeros(8) if window else None
    attention.attend(query, cache, batch, shape, default_tuning(head_dim, kind), sinks)
    x, weight = torch.zeros(40, 576, dtype=kind), torch.ones(576, dtype=kind)
    pointwise.rms_norm(x, weight, 1e-5)
    pointwise.add_rms_norm(x, x.clone(), weight, 1e-5)
    pointwise.activated(x, "silu")
    pointwise.activated(x, "gelu_tanh")
    sampling.sample(torch.zeros(2, 50_000, dtype=kind), torch.zeros(2, 4), longs[:2], longs[:2])


if __name__ == "__main__":
    compile_only()
    for capability, kind, *shape in json.loads(sys.argv[1]):
        triton.runtime.driver.set_active(Absent(capability))
        launch(getattr(torch, kind), *shape)
