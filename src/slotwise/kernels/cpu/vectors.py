"""LLVM code for functions of vectors of float32, of any length (`simd.py` has them for one number).

Compiled as if floats never were NaN: for a NaN, the result is NaN or any number.
"""

from __future__ import annotations

from llvmlite import ir
from numba.core import cgutils

from slotwise.kernels.cpu.simd import EXP2, LOG2_E

FAST = ("nnan", "nsz", "contract", "reassoc")
LOWEST, HIGHEST = -126.0, 127.0  # 2**x is a float32 between


def call(builder, name, result, *arguments):
    """Call an LLVM intrinsic that returns a `result`."""
    kind = ir.FunctionType(result, [argument.type for argument in arguments])
    is_whole = isinstance(getattr(result, "element", result), ir.IntType)
    function = cgutils.get_or_insert_function(builder.module, kind, name)
    return builder.call(function, arguments, fastmath=() if is_whole else FAST)


def ask(builder, address):
    """Prefetch a line into the second-level cache."""
    byte, whole = ir.IntType(8).as_pointer(), ir.IntType(32)
    function = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(ir.VoidType(), [byte, whole, whole, whole]), "llvm.prefetch.p0")
    for_reading, second_level, data = (ir.Constant(whole, number) for number in (0, 2, 1))
    builder.call(function, [builder.inttoptr(address, byte), for_reading, second_level, data])


def all_of(vector, number):
    """The same number in every lane."""
    return ir.Constant(vector, [number] * vector.count)


def exp2(builder, x):
    """2**x from `LOWEST` to `HIGHEST`: `simd.exp2`, lane by lane."""
    kind, lanes = x.type, x.type.count
    wide = ir.VectorType(ir.IntType(32), lanes)
    whole = call(builder, f"llvm.floor.v{lanes}f32", kind, builder.fadd(x, all_of(kind, 0.5)))
    part = builder.fsub(x, whole)
    value = all_of(kind, EXP2[-1])
    for coefficient in (*EXP2[-2::-1], 1.0):
        value = call(builder, f"llvm.fma.v{lanes}f32", kind, value, part, all_of(kind, coefficient))
    exponent = builder.add(builder.fptosi(whole, wide), all_of(wide, 127))
    return builder.fmul(value, builder.bitcast(builder.shl(exponent, all_of(wide, 23)), kind))


def silu(builder, x):
    """x / (1 + exp(-x))."""
    kind, lanes = x.type, x.type.count
    power = builder.fmul(x, all_of(kind, -float(LOG2_E)))
    power = call(builder, f"llvm.maxnum.v{lanes}f32", kind, power, all_of(kind, LOWEST))
    power = call(builder, f"llvm.minnum.v{lanes}f32", kind, power, all_of(kind, HIGHEST))
    return builder.fdiv(x, builder.fadd(all_of(kind, 1.0), exp2(builder, power)))
