"""Compiles what launches would start, and starts nothing; prints one JSON line for each kernel.

    echo '[KEY, ...]' | python -m benchmarks.gpu_compile.worker 0 2 80 90    every second launch, for sm_80 and sm_90

Kernels whose keys are given are known, and not compiled: their lines hold the key only.  A process of its own: one in
which Triton was imported for its interpreter compiles nothing.
"""

from __future__ import annotations

import gc
import hashlib
import json
import re
import subprocess
import sys
import tempfile
from itertools import islice
from pathlib import Path
from typing import Any

import triton
import triton.backends.nvidia
from benchmarks.gpu_compile.launches import Launch, launches
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler import compile as compile_kernel
from triton.runtime.jit import JITCallable, JITFunction

CUOBJDUMP = Path(triton.backends.nvidia.__file__).parent / "bin" / "cuobjdump"
PRODUCTS = {"wgmma": "wgmma.mma_async", "mma": "mma.sync", "tcgen05": "tcgen05.mma"}  # of tensor cores, in PTX


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


class Compiler:
    """Stands in for what Triton does at the first launch of a kernel for its arguments.

    Args:
        known: keys that are not compiled.
    """

    def __init__(self, known: frozenset[str]) -> None:
        self._known, self._seen = known, set[str]()
        self.launch: Launch | None = None

    def install(self) -> None:
        """From here on a launch compiles and prints what came of it."""
        def run(function: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
            original(function, *args, grid=grid, warmup=True, **options)

        def do_compile(function: JITFunction, key: Any, signature: Any, device: Any, constants: Any, options: Any,
                       attributes: Any, warmup: Any) -> None:
            self._compile(function, ASTSource(function, signature, constants, attributes), device, options)

        for function in gc.get_objects():
            if isinstance(function, JITCallable):
                function.starting_line_number = 0  # where a kernel stands in its file changes no instruction
        original = JITFunction.run
        JITFunction.run, JITFunction._do_compile = run, do_compile

    def _compile(self, function: JITFunction, source: ASTSource, capability: int, options: Any) -> None:
        key = key_of(source, capability, options)
        if key in self._seen or self.launch is None:
            return
        self._seen.add(key)
        found: dict[str, Any] = {"key": key}
        if key not in self._known:
            target = GPUTarget("cuda", capability, 32)
            compiled = compile_kernel(source, target=target, options=options.__dict__)
            name = function.__name__.removeprefix("_")
            found |= {"kernel": name, "capability": capability, "kind": self.launch.kind, "of": self.launch.of,
                      "claimed": self.launch.claims.get(name, 1)} | facts(compiled)
        print(json.dumps(found), flush=True)


def key_of(source: ASTSource, capability: int, options: Any) -> str:
    """What the machine code follows from: the sources of the kernel and all it calls, its constants and options."""
    said = f"{source.hash()} {capability} {options.num_warps} {options.num_stages}"
    return hashlib.sha256(said.encode()).hexdigest()[:16]


def facts(compiled: Any) -> dict[str, Any]:
    """Registers, bytes of the stack a thread spills to, shared memory, and instructions of note."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = subprocess.run(
            [CUOBJDUMP, "-res-usage", file.name], capture_output=True, text=True, check=True, timeout=60).stdout
    registers, stack = (int(re.findall(rf"{name}:(\d+)", usage)[0]) for name in ("REG", "STACK"))
    ptx = compiled.asm["ptx"]
    return {
        "registers": registers, "stack": stack, "shared": compiled.metadata.shared,
        "warps": compiled.metadata.num_warps,
        "products": [name for name, instruction in PRODUCTS.items() if instruction in ptx],
        "asynchronous": "cp.async.c" in ptx, "tf32": ".tf32" in ptx}


def main() -> None:
    first, every, *capabilities = map(int, sys.argv[1:])
    compiler = Compiler(frozenset(json.load(sys.stdin)))
    compiler.install()
    for capability in capabilities:
        triton.runtime.driver.set_active(Absent(capability))
        for launch in islice(launches(capability), first, None, every):
            compiler.launch = launch
            launch.work()


if __name__ == "__main__":
    main()
