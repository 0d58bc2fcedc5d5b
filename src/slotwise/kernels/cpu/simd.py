"""The machine-level primitives of the kernels.

A kernel gets addresses (integers) and walks them itself: wrapping tensors as arrays takes longer than many kernels run,
and twice as long to compile.  `kind` is a value whose type is that of the stored elements: `BFLOAT16` and `FLOAT32` are
read and written as float32, `INT32` and `INT64` as int64; `INT8` is written as float32, rounded to nearest even.
"""

from __future__ import annotations

import math
import platform

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from slotwise.kernels.cpu.parts import kernel

BFLOAT16 = np.uint16(0)  # as its bits
FLOAT32 = np.float32(0)
INT8 = np.int8(0)
INT32 = np.int32(0)
INT64 = np.int64(0)
ZERO = np.float32(0)

_BYTE, _HALF, _INT32, _INT64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
_FLOAT = ir.FloatType()
_STORED = {types.int8: _BYTE, types.uint16: _HALF, types.float32: _FLOAT, types.int32: _INT32, types.int64: _INT64}


def _value_type(kind):
    return types.float32 if kind in (types.int8, types.uint16, types.float32) else types.int64


def _element(builder, address, index, kind):
    base = builder.inttoptr(address, _STORED[kind].as_pointer())
    return builder.gep(base, [index], source_etype=_STORED[kind])


def round_to_bfloat16(builder, value):
    """Bits of the nearest bfloat16, ties to even; a NaN stays NaN.  For a float32 or a vector of them."""
    lanes = getattr(value.type, "count", 0)
    whole, half = (ir.VectorType(bits, lanes) if lanes else bits for bits in (_INT32, _HALF))
    constant = lambda number: ir.Constant(whole, [number] * lanes if lanes else number)
    bits = builder.bitcast(value, whole)
    odd = builder.and_(builder.lshr(bits, constant(16)), constant(1))
    rounded = builder.lshr(builder.add(bits, builder.add(odd, constant(0x7FFF))), constant(16))
    is_nan = builder.icmp_unsigned(">", builder.and_(bits, constant(0x7FFFFFFF)), constant(0x7F800000))
    return builder.trunc(builder.select(is_nan, constant(0x7FC0), rounded), half)


@intrinsic
def load(typingctx, address, index, kind):
    """Element `index` of the `kind`s at `address`."""

    def codegen(context, builder, signature, args):
        value = builder.load(_element(builder, args[0], args[1], kind), typ=_STORED[kind])
        if kind == types.uint16:
            return builder.bitcast(builder.shl(builder.zext(value, _INT32), ir.Constant(_INT32, 16)), _FLOAT)
        return builder.sext(value, _INT64) if kind == types.int32 else value

    return _value_type(kind)(types.int64, types.int64, kind), codegen


@intrinsic
def store(typingctx, address, index, value, kind):
    """Set element `index` of the `kind`s at `address`; bfloat16 and int8 are rounded to nearest even."""

    def codegen(context, builder, signature, args):
        address, index, value, _ = args
        if kind == types.uint16:
            value = round_to_bfloat16(builder, value)
        elif kind == types.int8:
            rint = cgutils.get_or_insert_function(builder.module, ir.FunctionType(_FLOAT, [_FLOAT]), "llvm.rint.f32")
            value = builder.trunc(builder.fptosi(builder.call(rint, [value]), _INT32), _BYTE)
        elif kind == types.int32:
            value = builder.trunc(value, _INT32)
        builder.store(value, _element(builder, address, index, kind))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, _value_type(kind), kind), codegen


@intrinsic
def fill(typingctx, address, count, value):
    """Set `count` float32 at `address` to `value`."""

    def codegen(context, builder, signature, args):
        address, count, value = args
        with cgutils.for_range(builder, count) as loop:
            builder.store(value, _element(builder, address, loop.index, types.float32))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.float32), codegen


@intrinsic
def bytes_of(typingctx, kind):
    """Bytes of a stored element."""
    size = kind.bitwidth // 8
    return types.int64(kind), lambda _context, _builder, _signature, _args: ir.Constant(_INT64, size)


@intrinsic
def float_of(typingctx, bits):
    """The float32 whose bits are the low 32 bits of an int64."""

    def codegen(context, builder, signature, args):
        return builder.bitcast(builder.trunc(args[0], _INT32), _FLOAT)

    return types.float32(types.int64), codegen


@intrinsic
def power_of_two(typingctx, whole):
    """2**whole for an integral float32 from -126 to 127, by setting the exponent's bits."""

    def codegen(context, builder, signature, args):
        exponent = builder.add(builder.fptosi(args[0], _INT32), ir.Constant(_INT32, 127))
        return builder.bitcast(builder.shl(exponent, ir.Constant(_INT32, 23)), _FLOAT)

    return types.float32(types.float32), codegen


@intrinsic
def fetch_add(typingctx, address, amount):
    """Atomically add to the int64 at `address`; returns the old value.  Sequentially consistent."""

    def codegen(context, builder, signature, args):
        return builder.atomic_rmw("add", builder.inttoptr(args[0], _INT64.as_pointer()), args[1], "seq_cst")

    return types.int64(types.int64, types.int64), codegen


@intrinsic
def call(typingctx, address, words):
    """Call the kernel at `address`."""

    def codegen(context, builder, signature, args):
        function = ir.FunctionType(ir.VoidType(), [_INT64])
        builder.call(builder.inttoptr(args[0], function.as_pointer()), args[1:])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic
def look(typingctx, address):
    """Load the int64 at `address` atomically, with all that was written before it.  Sequentially consistent."""

    def codegen(context, builder, signature, args):
        return builder.load_atomic(builder.inttoptr(args[0], _INT64.as_pointer()), "seq_cst", 8)

    return types.int64(types.int64), codegen


@intrinsic
def exchange(typingctx, address, value):
    """Atomically set the int64 at `address` to `value`; returns the old value.  Sequentially consistent."""

    def codegen(context, builder, signature, args):
        return builder.atomic_rmw("xchg", builder.inttoptr(args[0], _INT64.as_pointer()), args[1], "seq_cst")

    return types.int64(types.int64, types.int64), codegen


@intrinsic
def rest(typingctx, looks, patience):
    """Pause between two polls of what another thread is about to change, after `looks` polls in vain.

    After `patience` polls the processor is yielded; a few hundred polls take some microseconds.
    """

    def codegen(context, builder, signature, args):
        if platform.machine() in ("x86_64", "AMD64"):
            pause = ir.FunctionType(ir.VoidType(), [])
            builder.call(cgutils.get_or_insert_function(builder.module, pause, "llvm.x86.sse2.pause"), [])
        with builder.if_then(builder.icmp_signed(">", *args)):
            builder.call(cgutils.get_or_insert_function(builder.module, ir.FunctionType(_INT32, []), "sched_yield"), [])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


def _semaphore(name):
    """A function of the C library that takes the address of a semaphore."""

    @intrinsic
    def operation(typingctx, address):
        def codegen(context, builder, signature, args):
            function = ir.FunctionType(_INT32, [_BYTE.as_pointer()])
            place = builder.inttoptr(args[0], _BYTE.as_pointer())
            builder.call(cgutils.get_or_insert_function(builder.module, function, name), [place])
            return context.get_dummy_value()

        return types.void(types.int64), codegen

    return operation


wait_at = _semaphore("sem_wait")
post = _semaphore("sem_post")


def _of_two(name):
    """An LLVM intrinsic of two float32, flagged so that loops which fold with it vectorise."""

    @intrinsic
    def operation(typingctx, left, right):
        def codegen(context, builder, signature, args):
            function = cgutils.get_or_insert_function(
                builder.module, ir.FunctionType(_FLOAT, [_FLOAT, _FLOAT]), f"llvm.{name}.f32"
            )
            return builder.call(function, args, fastmath=("nnan", "nsz"))

        return types.float32(types.float32, types.float32), codegen

    return operation


larger = _of_two("maxnum")
smaller = _of_two("minnum")


# (2**x - 1) / x on [-0.5, 0.5], Chebyshev interpolation of degree 5: 2**x within 5e-9, and 2**0 is exactly 1.
EXP2 = (0.6931471880262282, 0.24022650760567874, 0.055503571142205096, 0.009618082557306342, 0.001339086336403265,
        0.00015453162937243783)
_C0, _C1, _C2, _C3, _C4, _C5 = map(np.float32, EXP2)
LOG2_E = np.float32(1.4426950408889634)


@kernel
def exp2(x):
    """2**x in float32 without a branch or a call, so that loops over it vectorise; 0 below -126."""
    clamped = smaller(larger(x, np.float32(-126)), np.float32(127))
    whole = np.float32(math.floor(clamped + np.float32(0.5)))
    part = clamped - whole
    slope = ((((_C5 * part + _C4) * part + _C3) * part + _C2) * part + _C1) * part + _C0
    return (slope * part + np.float32(1)) * power_of_two(whole) if x >= np.float32(-126) else np.float32(0)
