"""Compiles Python functions to machine code with Numba, or loads what was compiled before.

    @kernel                      a part: a function that only kernels and other parts call.  It becomes machine code
                                 only as a part of a whole kernel, where LLVM optimizes it once
    intrinsic(emit, ...)         a function of kernels that is written as LLVM IR
    CompiledKernel(entry)        a whole kernel: a C callback of addresses and integers, compiled at first use, kept in
                                 `store.py`
    specialized(part, BFLOAT16)  a whole kernel that calls a part for some kinds of elements

Numba would make a library of each part, optimized and compiled at once in case Python calls it.  Parts would then be
optimized again in each of their callers, and their machine code would never run: a third of the time to compile our
kernels.  Here a part stays LLVM IR, linked into its callers, until a kernel is complete.
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
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, ParamSpec, TypeAlias, TypeVar, cast

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
from numba.extending import intrinsic as numba_intrinsic

from slotwise.compute.kernels.cpu.jit import workers
from slotwise.compute.kernels.cpu.jit.store import KernelStore, ObjectCode
from slotwise.platform.host import num_processors

SOURCES = Path(__file__).parents[1]
FASTMATH = {"reassoc", "nnan", "nsz", "contract", "arcp"}

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class _LinkedPart(JITCodeLibrary):
    """A library that is linked into others, and that never runs."""

    @property
    def codegen(self) -> _LinkedPart:
        """The object that gets a function's environment.  Parts need no environment: they use no Python objects."""
        return self

    def set_env(self, env_name: str, env: object) -> None:
        """Nothing: there is no machine code that could use it."""

    def _optimize_functions(self, ll_module: object) -> None:
        """Nothing: the kernel is optimized as a whole."""

    def _optimize_final_module(self) -> None:
        """Nothing: the kernel is optimized as a whole."""

    def _finalize_final_module(self) -> None:
        self._finalized = True


class _KernelLibrary(JITCodeLibrary):
    """The library of a whole kernel, which keeps its parts to itself.

    Parts are named by a counter of the process that compiles them.  Kernels that different processes compiled may have
    different parts of one name, and the linker would call the first one for all of them.
    """

    def _optimize_final_module(self) -> None:
        module: Any = self
        super()._optimize_final_module()  # type: ignore[no-untyped-call]
        for function in module._final_module.functions:
            if function.linkage == llvm.Linkage.linkonce_odr:
                function.linkage = "internal"


class _SetLibrary(FunctionPass):
    """Makes the function's library one of the class `library`."""

    library: type[JITCodeLibrary]

    def __init__(self) -> None:
        FunctionPass.__init__(self)

    def run_pass(self, state: Any) -> bool:
        state.library = cast(Any, self.library)(state.targetctx.codegen(), state.func_id.func_qualname)
        state.library.enable_object_caching()
        return True


@register_pass(mutates_CFG=False, analysis_only=True)
class _SetPart(_SetLibrary):
    _name, library = "set_part", _LinkedPart


@register_pass(mutates_CFG=False, analysis_only=True)
class _SetKernel(_SetLibrary):
    _name, library = "set_kernel", _KernelLibrary


def _compiler_with(set_library: type[_SetLibrary]) -> type[CompilerBase]:
    """Numba's own compiler, with a library that a pass sets."""
    class Compiler(CompilerBase):
        def define_pipelines(self) -> list[PassManager]:
            passes = DefaultPassBuilder.define_nopython_pipeline(self.state)
            passes.add_pass_after(set_library, TranslateByteCode)
            passes.finalize()
            return [passes]

    return Compiler


_PartCompiler, _KernelCompiler = _compiler_with(_SetPart), _compiler_with(_SetKernel)

_part: Any = cast(Any, njit)(
    fastmath=FASTMATH, error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True,
    pipeline_class=_PartCompiler)


def kernel(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """A part: a function that only kernels and other parts call.

    In its annotations an int is an int64 and a float a float32.
    """
    return cast("Callable[Arguments, Result]", _part(function))


class CompiledKernel:
    """A kernel: a function of integers, most of them addresses, as machine code.

    Args:
        entry: the function, plain Python.
        name: of the kernel, where the entry's own is not unique.
        source: the file that defines it; "": the file of the entry.
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
        """Whether nothing is left to compile: the code was read already, or is valid on disk."""
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
        self._compiled: Any = cast(Any, cfunc)(
            signature, nopython=True, pipeline_class=_KernelCompiler)(self._entry)
        code = self._compiled._library._get_compiled_object()
        store().write(self._file, ObjectCode(self._compiled.native_name, code))
        return int(self._compiled.address)

    @functools.cached_property
    def call(self) -> Callable[..., None]:
        """The code as a function of Python integers; it runs without the interpreter's lock."""
        return ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * self._arity)(self.address)


_known: dict[str, CompiledKernel] = {}


def specialized(part: Callable[..., None], *kinds: object) -> CompiledKernel:
    """The kernel that calls `part(words, *kinds)`.

    Its symbol is named after both: kernels that different processes compiled are linked into one.
    """
    def entry(words: int) -> None:
        part(words, *kinds)

    names = [part.__name__, *(type(kind).__name__ for kind in kinds)]
    entry.__module__, entry.__name__ = part.__module__, "_".join(names)
    entry.__qualname__ = entry.__name__
    return CompiledKernel(entry, source=inspect.unwrap(part).__code__.co_filename)


ElementType: TypeAlias = Any
"""Numba's type of a stored element; its `bitwidth` is not in numba's annotations."""

INT, FLOAT, NOTHING = types.int64, types.float32, types.void
KIND = object()
"""An argument of which only the type counts, that of stored elements: the emitter gets the type."""
VALUE = object()
"""An element of the last `KIND` as it is in registers: int64 for the wider integers, else float32."""


def intrinsic(emit: Callable[..., Any], *arguments: Any, returns: Any = NOTHING) -> Any:
    """A function for kernels whose calls become what `emit` emits.

        def _fetch_add(builder, address, amount):            # emits the instructions of one call
            return builder.atomic_rmw("add", ...)

        fetch_add: Callable[[int, int], int] = intrinsic(_fetch_add, INT, INT, returns=INT)

    The declared type is what kernels and the type checker see; the numba types say what is in registers.

    Args:
        emit: called with a builder and the values of the arguments; returns the result, or a list for a tuple.
        arguments: a numba type, KIND or VALUE for each.
        returns: a numba type or VALUE.
    """
    def define(_typing: object, *given: types.Type) -> tuple[Any, Callable[..., Any]]:
        def resolved(wanted: Any, kind: types.Type) -> types.Type:
            return kind if wanted is KIND else _in_registers(given) if wanted is VALUE else wanted

        def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            operands = [kind if wanted is KIND else value
                        for wanted, kind, value in zip(arguments, given, values, strict=True)]
            made = emit(builder, *operands)
            if made is None:
                return context.get_dummy_value()
            return context.make_tuple(builder, signature.return_type, made) if isinstance(made, list) else made

        operands = [resolved(*pair) for pair in zip(arguments, given, strict=True)]
        return resolved(returns, returns)(*operands), generate

    names = ["typing", *(f"argument{place}" for place in range(len(arguments)))]
    parameters = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in names]
    define.__name__ = define.__qualname__ = emit.__name__.lstrip("_")
    define.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # numba reads it
    return numba_intrinsic(define)


def _in_registers(given: tuple[types.Type, ...]) -> types.Type:
    """The type of an element in registers whose kind is the last of the given types."""
    return INT if given[-1] in (types.int32, types.int64) else FLOAT


def compile_all(codes: Sequence[CompiledKernel]) -> None:
    """Compile or load all `codes`.  What is not on disk is compiled by as many processes as there are processors.

    Args:
        codes: the slowest to compile first.
    """
    missing = [code for code in codes if not code.is_ready]
    workers.compilation.begin(len(missing))
    processors = num_processors() if store().folder else 1
    number = max(0, min(processors, len(missing)) - 1)
    if number:  # only then is a folder needed, and the store has one
        with tempfile.TemporaryDirectory(prefix=".", dir=store().folder) as folder:
            claims = Path(folder)
            with workers.compilation.shared(claims, len(missing)):
                called = workers.set_to_work(number, claims, [code.name for code in missing])
                _share(claims, missing)
                for worker in called:
                    worker.wait()  # if it failed, its claims are compiled below
    for code in codes:
        code.compile()
        if not number and code in missing:
            workers.compilation.compiled()


def compile_here(codes: Iterable[CompiledKernel]) -> None:
    """Compile or load all `codes` in this process."""
    missing = [code for code in dict.fromkeys(codes) if "address" not in code.__dict__]
    absent = [code for code in missing if not code.is_on_disk]
    workers.compilation.begin(len(absent))
    for code in missing:
        code.compile()
        if code in absent:
            workers.compilation.compiled()


def share_named(claims: Path, names: Sequence[str]) -> None:
    """A worker's part of `compile_all`."""
    for name in names:
        importlib.import_module(name.rpartition(".")[0])
    _share(claims, [_known[name] for name in names])


def _share(claims: Path, codes: Sequence[CompiledKernel]) -> None:
    """Compile the kernels that no other process has claimed."""
    for code in codes:
        with contextlib.suppress(FileExistsError):
            (claims / code.name).touch(exist_ok=False)
            code.compile()
            (claims / f"{workers.COMPILED}{code.name}").touch()


@functools.cache
def store() -> KernelStore:
    """The store of kernels compiled by this state of the sources, for this processor."""
    return KernelStore(key())


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


def _link(compiled: ObjectCode) -> int:
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
    rtsys.initialize(context)  # kernels reference its symbols, but never call them
    machine = llvm.Target.from_triple(llvm.get_process_triple()).create_target_machine(jit=True)
    return llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)
