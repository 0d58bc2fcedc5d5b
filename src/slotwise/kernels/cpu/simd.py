"""The few machine-level words the kernels are written in.

A kernel gets addresses (integers) and walks them itself: wrapping tensors as arrays costs more than many of these
kernels take.  `kind` is a value whose type picks the storage format: `uint16` holds bfloat16 bits, `float32` itself.
Arithmetic is always float32.
"""

from __future__ import annotations

import math

import numpy as np
from llvmlite import ir
from numba import carray, njit, types
from numba.core import cgutils
from numba.extending import intrinsic, overload

FASTMATH = {"reassoc", "nnan", "nsz", "contract", "arcp"}
BFLOAT16 = np.uint16(0)
FLOAT32 = np.float32(0)
INT32 = np.int32(0)
INT64 = np.int64(0)

_FLOAT, _INT32, _INT64 = ir.FloatType(), ir.IntType(32), ir.IntType(64)
# 2**x on [-0.5, 0.5], Chebyshev interpolation of degree 5: relative error 1e-7.
_EXP2 = tuple(np.float32(c) for c in (1.0000000716546679, 0.6931469670647601, 0.24022186636363382, 0.0555079398169214,
                                      0.009687651967298596, 0.0013267672459907432))


@intrinsic
def _pointer(typingctx, address, kind):
    def codegen(context, builder, signature, args):
        return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

    return types.CPointer(kind)(types.int64, kind), codegen


@intrinsic
def bits_to_float(typingctx, bits):
    """The float32 of 32 bits."""
    return types.float32(types.uint32), lambda _context, builder, _signature, args: builder.bitcast(args[0], _FLOAT)


@intrinsic
def float_to_bits(typingctx, value):
    """The 32 bits of a float32."""
    return types.uint32(types.float32), lambda _context, builder, _signature, args: builder.bitcast(args[0], _INT32)


@intrinsic
def fetch_add(typingctx, address, amount):
    """Atomically add to the int64 at `address`; what stood there before.  Sequentially consistent."""

    def codegen(_context, builder, _signature, args):
        return builder.atomic_rmw("add", builder.inttoptr(args[0], _INT64.as_pointer()), args[1], "seq_cst")

    return types.int64(types.int64, types.int64), codegen


@intrinsic
def prefetch(typingctx, address):
    """Ask for the cache line at `address`, to be read soon."""

    def codegen(context, builder, _signature, args):
        byte = ir.IntType(8).as_pointer()
        hint = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(ir.VoidType(), [byte, _INT32, _INT32, _INT32]), "llvm.prefetch.p0"
        )
        builder.call(hint, [builder.inttoptr(args[0], byte), *(ir.Constant(_INT32, n) for n in (0, 3, 1))])
        return context.get_dummy_value()

    return types.void(types.int64), codegen


@njit(forceinline=True)
def array(address, size, kind):
    """The `size` elements at `address`."""
    return carray(_pointer(address, kind), size)


def widen(value):
    """A stored element as float32.  For compiled code only."""
    raise NotImplementedError


def narrow(value, kind):
    """A float32 as a stored element of `kind`, bfloat16 rounded to nearest even.  For compiled code only."""
    raise NotImplementedError


def bytes_of(kind):
    """Bytes of a stored element.  For compiled code only."""
    raise NotImplementedError


@overload(bytes_of)
def _bytes_of(kind):
    size = kind.bitwidth // 8
    return lambda kind: size


@overload(widen)
def _widen(value):
    if value == types.uint16:
        return lambda value: bits_to_float(np.uint32(value) << np.uint32(16))
    return lambda value: value


@overload(narrow)
def _narrow(value, kind):
    if kind == types.uint16:
        return lambda value, kind: _round_to_bfloat16(np.float32(value))
    return lambda value, kind: np.float32(value)


@njit(forceinline=True)
def _round_to_bfloat16(value):
    bits = float_to_bits(value)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    is_nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    return np.uint16(np.uint32(0x7FC0) if is_nan else rounded)


@njit(forceinline=True, fastmath=FASTMATH)
def exp2(x):
    """2**x in float32 without a branch or a call, so that loops over it vectorise; 0 below -126."""
    clamped = min(max(x, np.float32(-126.0)), np.float32(127.0))
    whole = np.float32(math.floor(clamped + np.float32(0.5)))
    part = clamped - whole
    power = _EXP2[5]
    power = power * part + _EXP2[4]
    power = power * part + _EXP2[3]
    power = power * part + _EXP2[2]
    power = power * part + _EXP2[1]
    power = power * part + _EXP2[0]
    scale = bits_to_float(np.uint32(np.int32(whole) + np.int32(127)) << np.uint32(23))
    return power * scale if x >= np.float32(-126.0) else np.float32(0.0)
