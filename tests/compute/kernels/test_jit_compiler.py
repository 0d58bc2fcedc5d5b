"""Parts of kernels, compiled into their callers and nothing by themselves; kernels of several kinds; intrinsics."""

from __future__ import annotations

import functools
import itertools

import numpy as np
import pytest
from numba import cfunc, types
from numba.core.bytecode import FunctionIdentity

from slotwise.compute.kernels.cpu.jit import compiler
from slotwise.compute.kernels.cpu.jit.compiler import INT, KIND, VALUE, CompiledKernel, intrinsic, kernel, specialized
from slotwise.compute.kernels.cpu.jit.llvm import LONG
from slotwise.compute.kernels.cpu.jit.store import KernelStore
from slotwise.compute.kernels.cpu.simd import BFLOAT16, FLOAT32, INT8, INT32, INT64, bytes_of, load, store


@kernel
def _square(number):
    return number * number


@kernel
def _square_all(numbers, count):
    for i in range(count):
        store(numbers, i, _square(load(numbers, i, INT64)), INT64)


def _twice(numbers, count):
    _square_all(numbers, count)
    _square_all(numbers, count)


def test_parts_of_parts_run_within_their_kernel_and_have_no_code_of_their_own():
    numbers = np.arange(7)
    kernel_of_them = cfunc("void(int64, int64)", nopython=True)(_twice)  # not kept on disk, where no part is looked at
    kernel_of_them.ctypes(numbers.ctypes.data, len(numbers))
    assert numbers.tolist() == [number**4 for number in range(7)]
    for part in (_square, _square_all):
        (compiled,) = part.overloads.values()
        assert compiled.library.get_pointer_to_function(compiled.fndesc.mangled_name) == 0


@kernel
def _note_size(words, kind, factor):
    store(words, 0, bytes_of(kind) * factor, INT64)


def test_kernels_of_other_kinds_are_other_kernels_that_one_process_links():
    kernels = [specialized(_note_size, kind, np.int64(10)) for kind in (INT8, BFLOAT16, FLOAT32)]
    assert len({made.name for made in kernels}) == 3
    words = np.zeros(1, np.int64)
    for made, size in zip(kernels, (1, 2, 4), strict=True):
        compiler.compile_all([made])  # from disk, where an earlier run left it
        made.call(words.ctypes.data)
        assert words.tolist() == [10 * size]


def _mixing(amount):
    """A kernel that mixes `amount` into a number by a part that is too long to be inlined."""
    mix = intrinsic(lambda builder, number: functools.reduce(
        lambda mixed, _: builder.xor(builder.mul(mixed, LONG(3)), LONG(amount)), range(400), number), INT, returns=INT)

    @kernel
    def part(words):
        store(words, 0, mix(load(words, 0, INT64)), INT64)

    def entry(words):
        part(words)

    entry.__name__ = entry.__qualname__ = f"mixing_{amount}"
    return entry


def test_parts_of_one_name_that_different_processes_compiled_stay_apart(tmp_path, monkeypatch):
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    kept = KernelStore("key")
    monkeypatch.setattr(compiler, "store", lambda: kept)
    for amount in (5, 9):  # each compiled as by a process that has compiled nothing else
        monkeypatch.setattr(FunctionIdentity, "_unique_ids", itertools.count(1))
        CompiledKernel(_mixing(amount)).compile()
    for amount in (5, 9):
        words = np.ones(1, np.int64)
        CompiledKernel(_mixing(amount)).call(words.ctypes.data)  # from disk
        assert words.tolist() == functools.reduce(lambda mixed, _, amount=amount: mixed * 3 ^ amount, range(400),
                                                  np.ones(1, np.int64)).tolist()


swap = intrinsic(lambda _builder, left, right: [right, left], INT, INT, returns=types.UniTuple(INT, 2))
double = intrinsic(
    lambda builder, value, kind: (builder.fadd if isinstance(kind, types.Float) else builder.add)(value, value),
    VALUE, KIND, returns=VALUE)


def _swap_and_double(whole, real):
    first, second = swap(load(whole, 0, INT64), load(whole, 1, INT64))
    store(whole, 0, double(first, INT32), INT64)
    store(whole, 1, second, INT64)
    store(real, 0, double(load(real, 0, FLOAT32), FLOAT32), FLOAT32)


def test_an_intrinsic_returns_tuples_and_elements_of_a_kind():
    whole, real = np.array([3, 50]), np.array([1.25], np.float32)
    code = cfunc("void(int64, int64)", nopython=True)(_swap_and_double)
    code.ctypes(whole.ctypes.data, real.ctypes.data)
    assert whole.tolist() == [100, 3] and real.tolist() == [2.5]


@pytest.mark.parametrize("file", ["kernel.py", "jit/compiler.py"])
def test_a_change_in_any_source_has_a_store_of_its_own(tmp_path, monkeypatch, file):
    (tmp_path / "jit").mkdir()
    for each in ("kernel.py", "jit/compiler.py"):
        (tmp_path / each).write_text("one")
    monkeypatch.setattr(compiler, "SOURCES", tmp_path)
    before = compiler.key()
    (tmp_path / file).write_text("another")
    assert compiler.key() != before
