"""The kernels as code for aarch64, made on this machine: only those for x86's own instructions are not portable.

That they compute the same there is what tests/aarch64/run.sh shows, under emulation.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from llvmlite import binding as llvm

TRIPLE = "aarch64-unknown-linux-gnu"
AARCH64 = 183  # in the header of an object file
MACHINE = 18  # where that is
SCRIPT = """
import json, platform
platform.machine = lambda: "aarch64"  # before kernels are compiled
from llvmlite import binding as llvm
from numba import types
from slotwise.compute.kernels.cpu import kernels, processor
from slotwise.compute.kernels.cpu.products import linear_blocks, paths
from slotwise.compute.kernels.cpu.products.block_layout import layout_of
from slotwise.compute.kernels.cpu.products.quantize import HEAD
from slotwise.compute.kernels.cpu.jit import compiler
import torch

blocks = {linear_blocks.product_kernel(layout_of(HEAD), torch.bfloat16, path).name: f"blocks_by_{path}"
          for path in linear_blocks.PATHS}

llvm.initialize_all_targets()
llvm.initialize_all_asmprinters()
machine = llvm.Target.from_triple(TRIPLE).create_target_machine(cpu="neoverse-n1", opt=0)
lacks = [path for path in paths.ALL if path != "onednn" and paths.obstacle(path)]
made, not_portable, kind = {}, [], 0
for name, code in compiler._known.items():
    narrow = name.replace("float32", "uint16")
    name = blocks.get(name, name)
    path = "fp16" if name.endswith("_in_halves") else name.partition("_by_")[2]
    if path in ("amx", "amx_int8", "bf16", "fp16", "software tiles", "software_tiles", "vnni"):
        continue  # not used there
    if name.endswith("_int16") and not name.endswith("multiply_int16"):
        continue  # nor are pairs of bfloat16, of which one kernel shows that what is not portable is found
    if not path and narrow != name and narrow in compiler._known:
        continue  # it differs from the kernel of fewer bits in loads and stores, which other kernels have, too
    part = compiler._part(code._entry)
    part.compile((types.int64,) * code._arity)
    (overload,) = part.overloads.values()
    text = overload.library.get_llvm_str()
    if "llvm.x86" in text:
        not_portable.append(name)
        continue
    module = llvm.parse_assembly(text)
    module.triple, module.data_layout = TRIPLE, str(machine.target_data)
    made[name] = machine.emit_assembly(module).count("isb")
    kind = kind or machine.emit_object(module)[MACHINE]
print(json.dumps([processor.LANES, lacks, kind, made, not_portable]))
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_kernel_that_a_processor_without_avx_uses_compiles_for_aarch64() -> None:
    llvm.initialize_all_targets()
    try:
        llvm.Target.from_triple(TRIPLE)
    except RuntimeError:
        pytest.skip("this llvmlite has no code generator for aarch64")
    environment = os.environ | {
        "ATEN_CPU_CAPABILITY": "default", "NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": "", "OMP_NUM_THREADS": "1"}
    script = SCRIPT.replace("TRIPLE", repr(TRIPLE)).replace("MACHINE", str(MACHINE))
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    lanes, lacks, kind, made, not_portable = json.loads(done.stdout)
    assert lanes == 8, "what torch says of a processor without AVX"
    assert lacks == ["amx", "fp16", "bf16", "amx_int8", "vnni"]
    assert [name.rpartition(".")[2] for name in not_portable] == ["multiply_int16"]
    assert len(made) > 30 and kind == AARCH64
    assert [name.rpartition(".")[2] for name, pauses in made.items() if pauses] == [
        "_enter_jobs", "_run_shared", "_program"], "those that wait for other threads"
