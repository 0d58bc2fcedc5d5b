"""Where the Triton kernels are tested: on a GPU where there is one, else on the CPU under Triton's interpreter.

Whether it interprets, Triton decides when a kernel is defined, its own library's included.  So the environment says so
while Triton and the kernels are imported, here, before any test runs; `conftest.py` says it again while they run.  The
interpreter knows no rounding of bfloat16 but cutting off, which the distances allowed for it take into account.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import strategies as st

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed: no Triton kernel is tested", allow_module_level=True)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@contextmanager
def interpreted() -> Iterator[None]:
    """TRITON_INTERPRET=1 where there is no GPU."""
    before = os.environ.get("TRITON_INTERPRET")
    if DEVICE == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
    try:
        yield
    finally:
        if before is None:
            os.environ.pop("TRITON_INTERPRET", None)
        else:
            os.environ["TRITON_INTERPRET"] = before


def hasten_interpreter() -> None:
    """Spare it most of its time.

    It prepares `triton.language` anew for every function that a kernel calls, looks for overflows that it reports only
    with its option `debug`, and makes a table of all types whenever it needs the type of an array.
    """
    from triton.runtime import interpreter

    prepare, prepared = interpreter._patch_lang, set()
    type_of, known = interpreter._get_np_dtype, {}
    builder = interpreter.interpreter_builder
    assert not builder.options.debug
    builder.options = replace(builder.options, sanitize_overflow=False)

    class Outermost:
        def __init__(self, scope: Any) -> None:
            self._scope = scope

        def restore(self) -> None:
            prepared.clear()
            self._scope.restore()

    def prepare_once(function: Any) -> Any:
        module = function.__globals__["__name__"]
        if module in prepared:
            return None
        is_outermost = not prepared
        prepared.add(module)
        scope = prepare(function)
        return Outermost(scope) if is_outermost else scope

    def known_type(kind: Any) -> np.dtype:
        scalar = kind.scalar
        if scalar.is_ptr():
            return type_of(kind)
        if scalar.name not in known:
            known[scalar.name] = type_of(scalar)
        return known[scalar.name]

    interpreter._patch_lang, interpreter._get_np_dtype = prepare_once, known_type


def share_shapes() -> None:
    """Make a shape once, and not for every type of a block and every value: a quarter of the interpreter's time."""
    from triton.language import core

    make_type, make_value = core.block_type.__init__, core.tensor.__init__
    of_types: dict[tuple[int, ...], tuple[Any, int, str]] = {}
    of_values: dict[int, tuple[Any, Any]] = {}  # by the identity of a shape in `of_types`

    def block_type(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple([size.value if isinstance(size, core.constexpr) else size for size in shape])
        if sizes not in of_types:
            make_type(self, element_ty, shape)
            of_types[sizes] = self.shape, self.numel, str(self.shape)
        self.element_ty, (self.shape, self.numel, text) = element_ty, of_types[sizes]
        self.name = f"<{text}, {element_ty}>"

    def value(self: Any, handle: Any, type: Any) -> None:
        if not type.is_block():
            make_value(self, handle, type)
            return
        if id(type.shape) not in of_values:
            make_value(self, handle, type)
            of_values[id(type.shape)] = self.shape, self.numel
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = of_values[id(type.shape)]

    core.block_type.__init__, core.tensor.__init__ = block_type, value


def sum_dots_in_double() -> None:
    """Sum the interpreter's products in float64: they round to the same float32 in any order.

    They are numpy's, and OpenBLAS's kernels for Haswell add a row's products in an order that depends on its place in a
    tile.
    """
    from triton.runtime import interpreter

    create_dot = interpreter.InterpreterBuilder.create_dot

    def in_double(builder: Any, a: Any, b: Any, d: Any, *others: Any) -> Any:
        if d.data.dtype != np.float32 or a.data.dtype.kind != "f" or b.data.dtype.kind != "f":
            return create_dot(builder, a, b, d, *others)
        product = np.matmul(a.data.astype(np.float64), b.data.astype(np.float64)).astype(np.float32)
        return interpreter.TensorHandle(product + d.data, d.dtype.scalar)

    interpreter.InterpreterBuilder.create_dot = in_double


with interpreted():
    from slotwise.compute.kernels.cuda import CudaKernels

    KERNELS = CudaKernels(DEVICE)
if DEVICE == "cpu":
    hasten_interpreter()
    share_shapes()
    sum_dots_in_double()

EXAMPLES = 25 if DEVICE == "cuda" else 1
"""So many times more examples are drawn where running one costs nothing."""


def thinned(*sets: object, few: int) -> list[object]:
    """All sets of parameters on a GPU, the first `few` under the interpreter, which takes a second for a set.

    Put first those that have every value of every parameter.
    """
    return list(sets if DEVICE == "cuda" else sets[:few])


def geometry(free: st.SearchStrategy, *chosen: Any) -> st.SearchStrategy:
    """What kernels are compiled for: anything where they are interpreted, a few values where each takes seconds."""
    return st.sampled_from(chosen) if DEVICE == "cuda" else free
