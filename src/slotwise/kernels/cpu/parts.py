"""Compiles the parts that kernels are made of, which become machine code only where a whole kernel does.

Numba makes a library of each function: optimised, and machine code at once, for somebody may call it.  What only other
parts of a kernel call was therefore optimised again in each of them, and its machine code never run: a third of what
compiling our kernels took.  Here it stays as LLVM's language, linked into its callers, until all of a kernel is there.
"""

from __future__ import annotations

from numba import njit
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import CompilerBase, DefaultPassBuilder
from numba.core.compiler_machinery import FunctionPass, PassManager, register_pass
from numba.core.untyped_passes import TranslateByteCode

FASTMATH = {"reassoc", "nnan", "nsz", "contract", "arcp"}


class _Part(JITCodeLibrary):
    """What others link, and nothing runs."""

    @property
    def codegen(self) -> _Part:
        """Who is told a function's environment.  Ours have none: they know neither Python's objects nor exceptions."""
        return self

    def set_env(self, env_name: str, env: object) -> None:
        """There is no machine code that could ask for it."""

    def _optimize_functions(self, ll_module: object) -> None:
        """Left to the kernel, as is all that makes it fast."""

    def _optimize_final_module(self) -> None:
        """The same."""

    def _finalize_final_module(self) -> None:
        self._finalized = True


@register_pass(mutates_CFG=False, analysis_only=True)
class _KeepAsPart(FunctionPass):
    """Has the function's code go to a `_Part`."""

    _name = "keep_as_part"

    def __init__(self) -> None:
        FunctionPass.__init__(self)

    def run_pass(self, state) -> bool:
        state.library = _Part(state.targetctx.codegen(), state.func_id.func_qualname)
        return True


class _Compiler(CompilerBase):
    """Numba's own, but for where code goes."""

    def define_pipelines(self) -> list[PassManager]:
        passes = DefaultPassBuilder.define_nopython_pipeline(self.state)
        passes.add_pass_after(_KeepAsPart, TranslateByteCode)
        passes.finalize()
        return [passes]


kernel = njit(
    fastmath=FASTMATH, error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True, pipeline_class=_Compiler,
)
"""Compiles a part of a kernel, which only other parts call."""
