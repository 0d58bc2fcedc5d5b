"""Compiles functions that only kernels call: they become machine code only as a part of a whole kernel.

Numba makes a library of each function, optimised and compiled to machine code at once, in case it is called.  A
function that only kernels call was therefore optimised again in each of them, and its machine code never run: a third
of the time to compile our kernels.  Here it stays LLVM IR, linked into its callers, until a kernel is complete.
"""

from __future__ import annotations

from numba import njit
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import CompilerBase, DefaultPassBuilder
from numba.core.compiler_machinery import FunctionPass, PassManager, register_pass
from numba.core.untyped_passes import TranslateByteCode

FASTMATH = {"reassoc", "nnan", "nsz", "contract", "arcp"}


class _Part(JITCodeLibrary):
    """A library that others link, and that never runs."""

    @property
    def codegen(self) -> _Part:
        """The object that gets a function's environment.  Ours have none: they use no Python object or exception."""
        return self

    def set_env(self, env_name: str, env: object) -> None:
        """Nothing: there is no machine code that could use it."""

    def _optimize_functions(self, ll_module: object) -> None:
        """Nothing: the kernel is optimised as a whole."""

    def _optimize_final_module(self) -> None:
        """Nothing: the kernel is optimised as a whole."""

    def _finalize_final_module(self) -> None:
        self._finalized = True


@register_pass(mutates_CFG=False, analysis_only=True)
class _KeepAsPart(FunctionPass):
    """Makes a `_Part` the function's library."""

    _name = "keep_as_part"

    def __init__(self) -> None:
        FunctionPass.__init__(self)

    def run_pass(self, state) -> bool:
        state.library = _Part(state.targetctx.codegen(), state.func_id.func_qualname)
        return True


class _Compiler(CompilerBase):
    """Numba's own compiler, with a `_Part` as the library."""

    def define_pipelines(self) -> list[PassManager]:
        passes = DefaultPassBuilder.define_nopython_pipeline(self.state)
        passes.add_pass_after(_KeepAsPart, TranslateByteCode)
        passes.finalize()
        return [passes]


kernel = njit(
    fastmath=FASTMATH, error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True, pipeline_class=_Compiler,
)
"""Compiles a function that only kernels and other parts call."""
