"""Object code and functions: extracts Numba's code to be cached, and links cached code into this process."""

from __future__ import annotations

import functools
import threading

from llvmlite import binding as llvm
from numba.core.ccallback import CFunc
from numba.core.registry import cpu_target
from numba.core.runtime import rtsys

from slotwise.kernels.cpu.disk import Object

_lock = threading.Lock()
_linked: list[tuple[bytes, llvm.ObjectFileRef]] = []  # the linker does not copy them


def object_of(function: CFunc) -> Object:
    """The object code Numba compiled `function` to."""
    return Object(function.native_name, function._library._get_compiled_object())


def link(compiled: Object) -> int:
    """The address of a kernel's entry.  Link each object once."""
    with _lock:
        reference = llvm.ObjectFileRef.from_data(compiled.code)
        _linked.append((compiled.code, reference))
        engine = _engine()
        engine.add_object_file(reference)
        engine.finalize_object()
        return engine.get_function_address(compiled.symbol)


@functools.cache
def _engine() -> llvm.ExecutionEngine:
    context = cpu_target.target_context
    context.codegen()
    rtsys.initialize(context)  # every kernel references its symbols, though none calls them
    machine = llvm.Target.from_triple(llvm.get_process_triple()).create_target_machine(jit=True)
    return llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)
