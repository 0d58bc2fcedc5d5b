"""Parts of kernels: compiled into whoever calls them, and nothing by themselves."""

from __future__ import annotations

import numpy as np
from numba import cfunc

from slotwise.kernels.cpu.parts import kernel
from slotwise.kernels.cpu.simd import INT64, load, store


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
