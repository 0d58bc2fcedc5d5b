"""The machine-level primitives of kernels: memory, integer dot products, atomics, waits and simple functions.

A kernel gets addresses (integers) and walks them itself: wrapping tensors as arrays takes longer than many kernels run,
and twice as long to compile.  `kind` is a value whose type is that of the stored elements: `BFLOAT16` and `FLOAT32` are
read and written as float32, `INT32` and `INT64` as int64; `INT8` is written as float32, rounded to nearest even.

In the annotations of kernels an int is an int64 or an int32, a float a float32 or a float64; the functions that convert
numbers, `float32` and the like, are numpy's.
"""

from __future__ import annotations

import math
import platform
import time
from collections.abc import Callable, Sequence
from typing import NewType, Protocol, cast, overload

import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils

from slotwise.compute.kernels.cpu.jit.compiler import (
    FLOAT,
    INT,
    KIND,
    VALUE,
    CompiledKernel,
    ElementType,
    intrinsic,
    kernel,
    specialized,
)
from slotwise.compute.kernels.cpu.jit.llvm import (
    BYTE,
    EXP2,
    FIRST_LEVEL,
    LINE,
    LONG,
    SECOND_LEVEL,
    SHORT,
    SINGLE,
    WORD,
    Loop,
    all_of,
    call,
    number,
    pointer,
    prefetch,
    round_to_bfloat16,
)
from slotwise.compute.kernels.cpu.processor import AVX2, AVX512

_BYTES, _SHORTS, _WORDS = (ir.VectorType(kind, lanes) for kind, lanes in ((BYTE, 64), (SHORT, 32), (WORD, 16)))


def add_fours(
    builder: ir.IRBuilder, so_far: ir.Value, unsigned: ir.Value, signed: ir.Value, *, by_vnni: bool, is_wide: bool
) -> ir.Value:
    """`so_far`, 16 sums of 32 bits, plus the products of 64 unsigned and 64 signed bytes in fours, exactly.

        VNNI                       one instruction (`vpdpbusd`), of AVX-512 or of AVX-VNNI
        unsigned up to 127         pairs added in 16 bits, which hold them (`pmaddubsw`), then in 32 (`pmaddwd`)
        unsigned up to 255         even and odd bytes widened to 16 bits, and their pairs added in 32 (`pmaddwd`)

    Args:
        is_wide: an unsigned byte may be above 127.
    """
    if by_vnni:
        operands = so_far, builder.bitcast(unsigned, _WORDS), builder.bitcast(signed, _WORDS)
        if AVX512:
            return call(builder, "llvm.x86.avx512.vpdpbusd.512", _WORDS, *operands)
        return _in_halves(builder, "avx512.vpdpbusd.256", _WORDS, *operands)
    if not is_wide and (AVX512 or AVX2):
        pairs = pairs_of_bytes(builder, unsigned, signed)
        return builder.add(so_far, pairs_of_shorts(builder, pairs, all_of(_SHORTS, 1)))
    unsigned, signed = builder.bitcast(unsigned, _SHORTS), builder.bitcast(signed, _SHORTS)
    eight = all_of(_SHORTS, 8)
    even = pairs_of_shorts(builder, builder.and_(unsigned, all_of(_SHORTS, 255)),
                            builder.ashr(builder.shl(signed, eight), eight))
    odd = pairs_of_shorts(builder, builder.lshr(unsigned, eight), builder.ashr(signed, eight))
    return builder.add(so_far, builder.add(even, odd))


def add_signed_fours(builder: ir.IRBuilder, so_far: ir.Value, left: ir.Value, right: ir.Value) -> ir.Value:
    """`so_far`, 16 sums of 32 bits, plus the products of 64 and 64 signed bytes in fours, exactly, on AVX2.

    The sign of `left` moves to `right` (`psignb`), which has no -128; then pairs fit into 16 bits (`pmaddubsw`).
    """
    size = call(builder, f"llvm.abs.v{left.type.count}i8", left.type, left, ir.Constant(ir.IntType(1), 0))
    pairs = pairs_of_bytes(builder, size, _in_halves(builder, "avx2.psign.b", left.type, right, left))
    return builder.add(so_far, pairs_of_shorts(builder, pairs, all_of(_SHORTS, 1)))


def pick(builder: ir.IRBuilder, vector: ir.Value, lanes: Sequence[int]) -> ir.Value:
    """The vector of some lanes of `vector`."""
    chosen = ir.Constant(ir.VectorType(WORD, len(lanes)), list(lanes))
    return builder.shuffle_vector(vector, ir.Constant(vector.type, ir.Undefined), chosen)


def pairs_of_bytes(builder: ir.IRBuilder, unsigned: ir.Value, signed: ir.Value) -> ir.Value:
    """Products of bytes, added in pairs: int16 x 32, which must hold them."""
    if AVX512:
        return call(builder, "llvm.x86.avx512.pmaddubs.w.512", _SHORTS, unsigned, signed)
    if AVX2:
        return _in_halves(builder, "avx2.pmadd.ub.sw", _SHORTS, unsigned, signed)
    return builder.add(*(builder.mul(
        builder.zext(pick(builder, unsigned, range(odd, 64, 2)), _SHORTS),
        builder.sext(pick(builder, signed, range(odd, 64, 2)), _SHORTS)) for odd in (0, 1)))


def pairs_of_shorts(builder: ir.IRBuilder, left: ir.Value, right: ir.Value) -> ir.Value:
    """Products of int16, added in pairs: int32 x 16."""
    if AVX512:
        return call(builder, "llvm.x86.avx512.pmaddw.d.512", _WORDS, left, right)
    if AVX2:
        return _in_halves(builder, "avx2.pmadd.wd", _WORDS, left, right)
    return builder.add(*(builder.mul(*(builder.sext(pick(builder, shorts, range(odd, 32, 2)), _WORDS)
                                       for shorts in (left, right))) for odd in (0, 1)))


def _in_halves(builder: ir.IRBuilder, name: str, result: ir.Type, *vectors: ir.Value) -> ir.Value:
    """Apply an instruction of 256 bits to both halves of vectors."""
    count, half = vectors[0].type.count, ir.VectorType(result.element, result.count // 2)
    parts = [call(builder, f"llvm.x86.{name}", half, *(pick(builder, vector, lanes) for vector in vectors))
             for lanes in (range(count // 2), range(count // 2, count))]
    return builder.shuffle_vector(*parts, ir.Constant(ir.VectorType(WORD, result.count), list(range(result.count))))


# Kinds of elements that are floats, and integers, in registers.
Real = NewType("Real", np.generic)
Whole = NewType("Whole", np.generic)

BFLOAT16 = Real(np.uint16(0))
FLOAT32 = Real(np.float32(0))
# bfloat16 that is multiplied in pairs (`gemm.py`), and neither read nor written.
PAIRS = Real(np.int16(0))
INT8 = Real(np.int8(0))
INT32 = Whole(np.int32(0))
INT64 = Whole(np.int64(0))

FLOATS = {torch.bfloat16: BFLOAT16, torch.float32: FLOAT32}
"""The kinds of activations, by their types."""


def for_floats(part: Callable[[int, Real], None]) -> dict[torch.dtype, CompiledKernel]:
    """The kernels that call `part(words, kind)`, by the type of the activations."""
    return {dtype: specialized(part, kind) for dtype, kind in FLOATS.items()}


float32, float64, sqrt, log = (cast("Callable[[float], float]", each) for each in (
    np.float32, np.float64, np.sqrt, np.log))
int32, int64, uint64 = (cast("Callable[[float], int]", each) for each in (np.int32, np.int64, np.uint64))
ZERO, ONE = float32(0), float32(1)
LOG2_E = float32(1.4426950408889634)

_STORED = {types.int8: BYTE, types.uint16: SHORT, types.float32: SINGLE, types.int32: WORD, types.int64: LONG}


def _element(builder: ir.IRBuilder, address: ir.Value, index: ir.Value, kind: ElementType) -> ir.Value:
    base = pointer(builder, address, _STORED[kind])
    return builder.gep(base, [index], source_etype=_STORED[kind])


def _load(builder: ir.IRBuilder, address: ir.Value, index: ir.Value, kind: ElementType) -> ir.Value:
    value = builder.load(_element(builder, address, index, kind), typ=_STORED[kind])
    if kind == types.uint16:
        return builder.bitcast(builder.shl(builder.zext(value, WORD), ir.Constant(WORD, 16)), SINGLE)
    return builder.sext(value, LONG) if kind == types.int32 else value


class _Load(Protocol):
    @overload
    def __call__(self, address: int, index: int, kind: Real, /) -> float: ...
    @overload
    def __call__(self, address: int, index: int, kind: Whole, /) -> int: ...


load: _Load = intrinsic(_load, INT, INT, KIND, returns=VALUE)
"""Element `index` of the `kind`s at `address`."""


def _store(
    builder: ir.IRBuilder, address: ir.Value, index: ir.Value, value: ir.Value, kind: ElementType
) -> None:
    if kind == types.uint16:
        value = round_to_bfloat16(builder, value)
    elif kind == types.int8:
        value = builder.trunc(builder.fptosi(call(builder, "llvm.rint.f32", SINGLE, value), WORD), BYTE)
    elif kind == types.int32:
        value = builder.trunc(value, WORD)
    builder.store(value, _element(builder, address, index, kind))


class _Store(Protocol):
    @overload
    def __call__(self, address: int, index: int, value: float, kind: Real, /) -> None: ...
    @overload
    def __call__(self, address: int, index: int, value: int, kind: Whole, /) -> None: ...


store: _Store = intrinsic(_store, INT, INT, VALUE, KIND)
"""Set element `index` of the `kind`s at `address`; bfloat16 and int8 are rounded to nearest even."""


def _fill(builder: ir.IRBuilder, address: ir.Value, count: ir.Value, value: ir.Value) -> None:
    with cgutils.for_range(builder, count) as loop:
        builder.store(value, _element(builder, address, loop.index, types.float32))


fill: Callable[[int, int, float], None] = intrinsic(_fill, INT, INT, FLOAT)
"""`fill(address, count, value)`: set `count` float32 at `address` to `value`."""


def _prefetch_all(builder: ir.IRBuilder, address: ir.Value, size: ir.Value, to: int = SECOND_LEVEL) -> None:
    lines = Loop(builder, size, LINE, [])
    prefetch(builder, builder.add(address, lines.index), to=to)
    lines.close([])


def _prefetch_soon(builder: ir.IRBuilder, address: ir.Value, size: ir.Value) -> None:
    _prefetch_all(builder, address, size, FIRST_LEVEL)


prefetch_all: Callable[[int, int], None] = intrinsic(_prefetch_all, INT, INT)
"""`prefetch_all(address, size)`: prefetch `size` bytes, at least one."""
prefetch_soon: Callable[[int, int], None] = intrinsic(_prefetch_soon, INT, INT)
"""`prefetch_soon(address, size)`: the same, of what is read soon."""

bytes_of: Callable[[Real | Whole], int] = intrinsic(
    lambda _builder, kind: number(kind.bitwidth // 8), KIND, returns=INT)
"""Bytes of a stored element."""

float_of: Callable[[int], float] = intrinsic(
    lambda builder, bits: builder.bitcast(builder.trunc(bits, WORD), SINGLE), INT, returns=FLOAT)
"""The float32 whose bits are the low 32 bits of an int64."""

bits_of: Callable[[float], int] = intrinsic(
    lambda builder, value: builder.zext(builder.bitcast(value, WORD), LONG), FLOAT, returns=INT)
"""The 32 bits of a float32, as an int64 without a sign."""

signed_bits_of: Callable[[float], int] = intrinsic(
    lambda builder, value: builder.bitcast(value, WORD), FLOAT, returns=types.int32)
"""The 32 bits of a float32 as int32."""


def _power_of_two(builder: ir.IRBuilder, whole: ir.Value) -> ir.Value:
    exponent = builder.add(builder.fptosi(whole, WORD), ir.Constant(WORD, 127))
    return builder.bitcast(builder.shl(exponent, ir.Constant(WORD, 23)), SINGLE)


power_of_two: Callable[[float], float] = intrinsic(_power_of_two, FLOAT, returns=FLOAT)
"""2**whole for an integral float32 from -126 to 127, by setting the exponent's bits."""


def _atomic(operation: str) -> Callable[[int, int], int]:
    return cast("Callable[[int, int], int]", intrinsic(
        lambda builder, address, operand: builder.atomic_rmw(
            operation, pointer(builder, address, LONG), operand, "seq_cst"), INT, INT, returns=INT))


fetch_add = _atomic("add")
"""Atomically add to the int64 at an address; returns the old value.  Sequentially consistent."""
exchange = _atomic("xchg")
"""Atomically set the int64 at an address; returns the old value.  Sequentially consistent."""

look: Callable[[int], int] = intrinsic(
    lambda builder, address: builder.load_atomic(pointer(builder, address, LONG), "seq_cst", 8), INT, returns=INT)
"""Load the int64 at an address atomically, with all that was written before it.  Sequentially consistent."""


def _call_kernel(builder: ir.IRBuilder, address: ir.Value, words: ir.Value) -> None:
    builder.call(pointer(builder, address, ir.FunctionType(ir.VoidType(), [LONG])), [words])


call_kernel: Callable[[int, int], None] = intrinsic(_call_kernel, INT, INT)
"""`call_kernel(address, words)`: call the kernel at `address`."""


def _rest(builder: ir.IRBuilder, looks: ir.Value, patience: ir.Value) -> None:
    if platform.machine() == "x86_64":
        call(builder, "llvm.x86.sse2.pause", ir.VoidType())
    elif platform.machine() == "aarch64":  # whose `yield` does nothing on most processors
        call(builder, "llvm.aarch64.isb", ir.VoidType(), ir.Constant(WORD, 15))
    with builder.if_then(builder.icmp_signed(">", looks, patience)):
        call(builder, "sched_yield", WORD)


rest: Callable[[int, int], None] = intrinsic(_rest, INT, INT)
"""`rest(looks, patience)`: pause between two polls of what another thread is about to change, after `looks` polls.

After `patience` polls the processor is yielded; a few hundred polls take some microseconds.
"""


# In microseconds.
NAP = 20


def _nap(builder: ir.IRBuilder, looks: ir.Value, patience: ir.Value) -> None:
    with builder.if_else(builder.icmp_signed(">", looks, patience)) as (long, short):
        with long:
            call(builder, "usleep", WORD, ir.Constant(WORD, NAP))
        with short:
            _rest(builder, looks, patience)


nap: Callable[[int, int], None] = intrinsic(_nap, INT, INT)
"""`nap(looks, patience)`: `rest` for waits that may be long: after `patience` polls the thread sleeps between polls.

Its core is then free: some tens of microseconds pass until the thread polls again.
"""


def _stamp(builder: ir.IRBuilder, address: ir.Value) -> None:
    call(builder, "clock_gettime", WORD, ir.Constant(WORD, time.CLOCK_MONOTONIC), pointer(builder, address, BYTE))


stamp: Callable[[int], None] = intrinsic(_stamp, INT)
"""`stamp(address)`: write the monotonic time there, as an int64 of seconds and one of nanoseconds."""


def _semaphore(name: str) -> Callable[[int], None]:
    """A function of the C library that takes the address of a semaphore."""
    def operation(builder: ir.IRBuilder, address: ir.Value) -> None:
        call(builder, name, WORD, pointer(builder, address, BYTE))

    return cast("Callable[[int], None]", intrinsic(operation, INT))


wait_at = _semaphore("sem_wait")
post = _semaphore("sem_post")


def _of_two(name: str) -> Callable[[float, float], float]:
    """An LLVM intrinsic of two float32, flagged so that loops which fold with it vectorize."""
    return cast("Callable[[float, float], float]", intrinsic(
        lambda builder, *pair: call(builder, f"llvm.{name}.f32", SINGLE, *pair, flags=("nnan", "nsz")), FLOAT, FLOAT,
        returns=FLOAT))


larger = _of_two("maxnum")
smaller = _of_two("minnum")


def _weighted(
    builder: ir.IRBuilder, left: ir.Value, left_weight: ir.Value, right: ir.Value, right_weight: ir.Value
) -> ir.Value:
    return call(builder, "llvm.fma.f32", SINGLE, right, right_weight, builder.fmul(left, left_weight))


weighted: Callable[[float, float, float, float], float] = intrinsic(
    _weighted, FLOAT, FLOAT, FLOAT, FLOAT, returns=FLOAT)
"""`weighted(left, its weight, right, its weight)`: their weighted sum, rounded the same wherever it is compiled.

`left * a + right * b` may become either of two fused products.
"""

_C0, _C1, _C2, _C3, _C4, _C5 = map(float32, EXP2)


@kernel
def exp2(x: float) -> float:
    """2**x in float32 without a branch or a call, so that loops over it vectorize; 0 below -126."""
    clamped = smaller(larger(x, float32(-126)), float32(127))
    whole = float32(math.floor(clamped + float32(0.5)))
    part = clamped - whole
    slope = ((((_C5 * part + _C4) * part + _C3) * part + _C2) * part + _C1) * part + _C0
    return (slope * part + ONE) * power_of_two(whole) if x >= float32(-126) else ZERO


_T3, _T5, _T7 = float32(1 / 3), float32(2 / 15), float32(17 / 315)


@kernel
def sigmoid(x: float) -> float:
    """1 / (1 + e**-x)."""
    return ONE / (ONE + exp2(-x * LOG2_E))


@kernel
def tanh(x: float) -> float:
    """The hyperbolic tangent, within 6e-7: near 0 by its series, where the other form cancels."""
    square = x * x
    series = x * (ONE - square * (_T3 - square * (_T5 - square * _T7)))
    return series if square < float32(0.0625) else float32(2) * sigmoid(float32(2) * x) - ONE
