"""Compiles Python functions to machine code with Numba, or loads what was compiled before.

    @kernel            a part: a function that only kernels and other parts call.  It becomes machine code only as a
                       part of a whole kernel, where LLVM optimises it once
    Compiled(entry)    a whole kernel: a C callback of addresses and integers, compiled at first use, kept in `store.py`
    specialised(part, BFLOAT16)    the same, of a part for some kinds of elements

Numba would make a library of each part, optimised and compiled at once in case Python calls it.  Parts were therefore
optimised again in each of their callers, and their machine code never run: a third of the time to compile our kernels.
Here a part stays LLVM IR, linked into its callers, until a kernel is complete.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import importlib
import inspect
import platform
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, cast

import llvmlite
import numba
import torch
from llvmlite import binding as llvm
from numba import cfunc, njit, types
from numba.core.codegen import JITCodeLibrary, get_host_cpu_features
from numba.core.compiler import CompilerBase, DefaultPassBuilder
from numba.core.compiler_machinery import FunctionPass, PassManager, register_pass
from numba.core.registry import cpu_target
from numba.core.runtime.nrt import rtsys
from numba.core.untyped_passes import TranslateByteCode

from slotwise.host import num_processors
from slotwise.kernels.cpu.jit import workers
from slotwise.kernels.cpu.jit.store import Object, Store

SOURCES = Path(__file__).parents[1]
FASTMATH = {"reassoc", "nnan", "nsz", "contract", "arcp"}

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class _Part(JITCodeLibrary):
    """A library that others link, and that never runs."""

    @property
    def codegen(self) -> _Part:
        """The object that gets a function's environment.  Parts have none: they use no Python object or exception."""
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

    def run_pass(self, state: Any) -> bool:
        state.library = cast(Any, _Part)(state.targetctx.codegen(), state.func_id.func_qualname)
        return True


class _PartCompiler(CompilerBase):
    """Numba's own compiler, with a `_Part` as the library."""

    def define_pipelines(self) -> list[PassManager]:
        passes = DefaultPassBuilder.define_nopython_pipeline(self.state)
        passes.add_pass_after(_KeepAsPart, TranslateByteCode)
        passes.finalize()
        return [passes]


_part: Any = cast(Any, njit)(
    fastmath=FASTMATH, error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True,
    pipeline_class=_PartCompiler)


def kernel(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Compile a function that only kernels and other parts call.

    In its annotations an int is an int64 and a float a float32.
    """
    return cast("Callable[Arguments, Result]", _part(function))


class Compiled:
    """A kernel: a function of integers, most of them addresses, as machine code.

    Args:
        entry: the function, plain Python.
        name: of the kernel, where the entry's own is not unique.
        source: the file that defines it; "": the entry's.
    """

    def __init__(self, entry: Callable[..., None], name: str = "", source: str = "") -> None:
        self.name = name or f"{entry.__module__}.{entry.__name__}"
        self._entry = entry
        self._source = source or entry.__code__.co_filename
        self._arity = entry.__code__.co_argcount
        self._lock = threading.Lock()
        _known[self.name] = self

    @functools.cached_property
    def _file(self) -> str:
        """The name of the code on disk."""
        return f"{self.name}-{hashlib.sha256(Path(self._source).read_bytes()).hexdigest()[:8]}"

    @property
    def is_on_disk(self) -> bool:
        """Whether valid code is on disk, so that it need only be read."""
        return store().read(self._file) is not None

    @property
    def is_ready(self) -> bool:
        """Whether nothing is left to compile: it was read already, or valid code is on disk."""
        return "address" in self.__dict__ or self.is_on_disk

    def compile(self) -> None:
        """Compile now rather than at first use."""
        self.address  # noqa: B018

    @functools.cached_property
    def address(self) -> int:
        """Address of the machine code."""
        with self._lock:  # the warm-up thread and the first step may both call this
            return self.__dict__.get("address") or self._ready()

    def _ready(self) -> int:
        """Read from disk and link, or compile and write."""
        kept = store().read(self._file)
        if kept is not None:
            return _link(kept)
        signature = types.void(*[types.int64] * self._arity)
        self._compiled: Any = cast(Any, cfunc)(signature, nopython=True)(self._entry)
        store().write(self._file, Object(self._compiled.native_name, self._compiled._library._get_compiled_object()))
        return int(self._compiled.address)

    @functools.cached_property
    def call(self) -> Callable[..., None]:
        """The code as a function of Python integers; it runs without the interpreter's lock."""
        return ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * self._arity)(self.address)


_known: dict[str, Compiled] = {}


def specialised(part: Callable[..., None], *kinds: object) -> Compiled:
    """The kernel that calls `part(words, *kinds)`.

    Its symbol is named after both: kernels that different processes compiled are linked into one.
    """
    def entry(words: int) -> None:
        part(words, *kinds)

    names = [part.__name__, *(type(kind).__name__ for kind in kinds)]
    entry.__module__, entry.__name__ = part.__module__, "_".join(names)
    entry.__qualname__ = entry.__name__
    return Compiled(entry, source=inspect.unwrap(part).__code__.co_filename)


def compile_all(codes: Sequence[Compiled]) -> None:
    """Compile or load all `codes`.  What is not on disk is compiled by as many processes as there are processors.

    Args:
        codes: the slowest to compile first.
    """
    missing = [code for code in codes if not code.is_ready]
    processors = num_processors() if store().folder else 1
    number = max(0, min(processors, len(missing)) - 1)
    if number:  # only then is a folder needed, and the store has one
        with tempfile.TemporaryDirectory(prefix=".", dir=store().folder) as folder:
            claims = Path(folder)
            called = workers.set_to_work(number, claims, [code.name for code in missing])
            _share(claims, missing)
            for worker in called:
                worker.wait()  # if it failed, its claims are compiled below
    for code in codes:
        code.compile()


def share_named(claims: Path, names: Sequence[str]) -> None:
    """A worker's part of `compile_all`."""
    for name in names:
        importlib.import_module(name.rpartition(".")[0])
    _share(claims, [_known[name] for name in names])


def _share(claims: Path, codes: Sequence[Compiled]) -> None:
    """Compile the kernels that no other process has claimed."""
    for code in codes:
        with contextlib.suppress(FileExistsError):
            (claims / code.name).touch(exist_ok=False)
            code.compile()


@functools.cache
def store() -> Store:
    """The store of kernels compiled by this state of the sources, for this processor."""
    return Store(key())


def key() -> str:
    """A digest of all that compiled code depends on: our sources, versions, the processor as Numba and torch see it."""
    sources = b"".join(path.read_bytes() for path in sorted(SOURCES.rglob("*.py")))
    config: Any = numba.config
    cpu = config.CPU_NAME or llvmlite.binding.get_host_cpu_name()
    features = get_host_cpu_features() if config.CPU_FEATURES is None else config.CPU_FEATURES
    parts = (numba.__version__, llvmlite.__version__, platform.python_version(), llvm.get_process_triple(), cpu,
             features, torch.backends.cpu.get_cpu_capability())
    return hashlib.sha256(sources + "\0".join(parts).encode()).hexdigest()[:16]


_linking = threading.Lock()
_linked: list[tuple[bytes, llvm.ObjectFileRef]] = []  # the linker does not copy them


def _link(compiled: Object) -> int:
    """The address of a kernel's entry.  Link each object once."""
    with _linking:
        reference = llvm.ObjectFileRef.from_data(compiled.code)
        _linked.append((compiled.code, reference))
        engine = _engine()
        engine.add_object_file(reference)
        engine.finalize_object()
        return int(engine.get_function_address(compiled.symbol))


@functools.cache
def _engine() -> llvm.ExecutionEngine:
    context = cpu_target.target_context
    context.codegen()
    rtsys.initialize(context)  # every kernel references its symbols, though none calls them
    machine = llvm.Target.from_triple(llvm.get_process_triple()).create_target_machine(jit=True)
    return llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)
