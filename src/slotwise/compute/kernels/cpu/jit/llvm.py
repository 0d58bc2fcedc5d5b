"""LLVM code that the intrinsics of kernels are built from: memory, loops, and functions of vectors of float32.

Values are llvmlite's; addresses are int64.  The functions of vectors are compiled as if floats were never NaN: for NaN,
their result is NaN or any number.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from llvmlite import ir
from numba.core import cgutils

BYTE, SHORT, WORD, LONG = (ir.IntType(bits) for bits in (8, 16, 32, 64))
SINGLE, HALF = ir.FloatType(), ir.HalfType()


class _Brain(ir.Type):  # type: ignore[misc]  # llvmlite has no annotations
    """bfloat16, for which llvmlite has no type: its vectors are only operands of instructions."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Brain)

    def __hash__(self) -> int:
        return hash(_Brain)


BRAIN = _Brain()

# Bytes of a cache line.
LINE = 64
FAST = ("nnan", "nsz", "contract", "reassoc")
# 2**x is a normal float32 in this range.
LOWEST, HIGHEST = -126.0, 127.0
LOG2_E = 1.4426950408889634

# (2**x - 1) / x on [-0.5, 0.5], Chebyshev interpolation of degree 5: 2**x within 5e-9, and 2**0 is exactly 1.
EXP2 = (0.6931471880262282, 0.24022650760567874, 0.055503571142205096, 0.009618082557306342, 0.001339086336403265,
        0.00015453162937243783)


def number(value: int) -> ir.Value:
    """An int64."""
    return ir.Constant(LONG, value)


def unknown(builder: ir.IRBuilder, value: int) -> ir.Value:
    """An int64 that LLVM does not know at compile time: it unrolls no loop of so many turns."""
    return builder.asm(ir.FunctionType(LONG, [LONG]), "", "=r,0", [number(value)], False)


def all_of(vector: ir.Type, value: float) -> ir.Value:
    """The same number in every lane."""
    return ir.Constant(vector, [value] * vector.count)


def pointer(builder: ir.IRBuilder, address: ir.Value, kind: ir.Type) -> ir.Value:
    """The pointer to a value of `kind` at `address`."""
    return builder.inttoptr(address, kind.as_pointer())


def read(builder: ir.IRBuilder, address: ir.Value, kind: ir.Type, align: int = 4) -> ir.Value:
    """The value of `kind` at `address`, a multiple of `align` bytes."""
    value = builder.load(pointer(builder, address, kind))
    value.align = align
    return value


def write(builder: ir.IRBuilder, value: ir.Value, address: ir.Value, align: int = 4) -> None:
    """Store `value` at `address`, a multiple of `align` bytes."""
    builder.store(value, pointer(builder, address, value.type)).align = align


def behind(builder: ir.IRBuilder, address: ir.Value, offset: int) -> ir.Value:
    """`address` plus `offset` bytes."""
    return builder.add(address, number(offset))


def spread(builder: ir.IRBuilder, scalar: ir.Value, vector: ir.Type) -> ir.Value:
    """`scalar` in every lane."""
    nothing = ir.Constant(vector, ir.Undefined)
    lone = builder.insert_element(nothing, scalar, ir.Constant(WORD, 0))
    return builder.shuffle_vector(lone, nothing, all_of(ir.VectorType(WORD, vector.count), 0))


def call(
    builder: ir.IRBuilder, name: str, result: ir.Type, *arguments: ir.Value, flags: Sequence[str] = ()
) -> ir.Value:
    """Call an LLVM intrinsic, or a function of the C library, that returns a `result`."""
    kind = ir.FunctionType(result, [argument.type for argument in arguments])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), arguments, fastmath=flags)


def fast(builder: ir.IRBuilder, name: str, result: ir.Type, *arguments: ir.Value) -> ir.Value:
    """`call` for functions of floats, which LLVM may reorder, and compile as if floats were never NaN."""
    return call(builder, name, result, *arguments, flags=FAST)


def fma(builder: ir.IRBuilder, left: ir.Value, right: ir.Value, added: ir.Value) -> ir.Value:
    """`left * right + added`, rounded once."""
    kind = added.type
    return call(builder, f"llvm.fma.v{kind.count}f{16 if kind.element == HALF else 32}", kind, left, right, added)


# The cache that prefetched lines go to, as LLVM numbers them.
SECOND_LEVEL, FIRST_LEVEL = 2, 3


def prefetch(builder: ir.IRBuilder, address: ir.Value, size: int = 1, to: int = SECOND_LEVEL) -> None:
    """Prefetch `size` bytes from `address` on: the hardware prefetcher stops at the end of every page.

    Long streams go to the second-level cache, which can have more requests in flight than the first.  What is read soon
    goes to the first one: blocks of 16 KiB anywhere in memory then arrive in a seventh less time (EPYC Zen 5).
    """
    for_reading, level, data = (ir.Constant(WORD, each) for each in (0, to, 1))
    for line in range(0, size, LINE):
        place = builder.inttoptr(behind(builder, address, line) if line else address, BYTE.as_pointer())
        call(builder, "llvm.prefetch.p0", ir.VoidType(), place, for_reading, level, data)


class Loop:
    """A loop from 0 to `end` by `step`, with values carried from iteration to iteration; `end` is at least 1."""

    def __init__(self, builder: ir.IRBuilder, end: ir.Value, step: int, start: Sequence[ir.Value]) -> None:
        self._builder, self._end, self._step = builder, end, number(step)
        before, self._body = builder.block, builder.append_basic_block("turn")
        builder.branch(self._body)
        builder.position_at_end(self._body)
        self.index = builder.phi(LONG)
        self.index.add_incoming(number(0), before)
        self.values = [builder.phi(value.type) for value in start]
        for phi, value in zip(self.values, start, strict=True):
            phi.add_incoming(value, before)

    def close(self, results: Sequence[ir.Value]) -> list[ir.Value]:
        """End an iteration, whose `results` are the next values; they are also the values after the loop."""
        builder, last = self._builder, self._builder.block
        following = builder.add(self.index, self._step)
        for phi, result in zip((self.index, *self.values), (following, *results), strict=True):
            phi.add_incoming(result, last)
        after = builder.append_basic_block("after")
        builder.cbranch(builder.icmp_signed("<", following, self._end), self._body, after)
        builder.position_at_end(after)
        return list(results)


def switch(builder: ir.IRBuilder, value: ir.Value, cases: Sequence[int], emit: Callable[[int], None]) -> None:
    """`emit(case)` for the one of `cases` that equals `value`; nothing for other values."""
    end = builder.append_basic_block("end")
    choice = builder.switch(value, end)
    for case in cases:
        block = builder.append_basic_block(f"case{case}")
        choice.add_case(number(case), block)
        builder.position_at_end(block)
        emit(case)
        builder.branch(end)
    builder.position_at_end(end)


def round_to_bfloat16(builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
    """Bits of the nearest bfloat16, ties to even; a NaN stays NaN.  For a float32 or a vector of them."""
    lanes = getattr(value.type, "count", 0)
    whole, half = (ir.VectorType(bits, lanes) if lanes else bits for bits in (WORD, SHORT))

    def constant(value: int) -> ir.Value:
        return ir.Constant(whole, [value] * lanes if lanes else value)

    bits = builder.bitcast(value, whole)
    odd = builder.and_(builder.lshr(bits, constant(16)), constant(1))
    rounded = builder.lshr(builder.add(bits, builder.add(odd, constant(0x7FFF))), constant(16))
    is_nan = builder.icmp_unsigned(">", builder.and_(bits, constant(0x7FFFFFFF)), constant(0x7F800000))
    return builder.trunc(builder.select(is_nan, constant(0x7FC0), rounded), half)


def widened(builder: ir.IRBuilder, bits: ir.Value) -> ir.Value:
    """Vector of float32 from one of bfloat16 as bits: each is the upper half of its float32."""
    whole = ir.VectorType(WORD, bits.type.count)
    shifted = builder.shl(builder.zext(bits, whole), all_of(whole, 16))
    return builder.bitcast(shifted, ir.VectorType(SINGLE, bits.type.count))


def polynomial(builder: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """2**x from -0.5 to 0.5."""
    kind, value = x.type, all_of(x.type, EXP2[-1])
    for coefficient in (*EXP2[-2::-1], 1.0):
        value = fast(builder, f"llvm.fma.v{kind.count}f32", kind, value, x, all_of(kind, coefficient))
    return value


def exp2(builder: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """2**x from `LOWEST` to `HIGHEST`: `simd.exp2`, lane by lane."""
    kind, lanes = x.type, x.type.count
    wide = ir.VectorType(WORD, lanes)
    whole = fast(builder, f"llvm.floor.v{lanes}f32", kind, builder.fadd(x, all_of(kind, 0.5)))
    value = polynomial(builder, builder.fsub(x, whole))
    exponent = builder.add(builder.fptosi(whole, wide), all_of(wide, 127))
    return builder.fmul(value, builder.bitcast(builder.shl(exponent, all_of(wide, 23)), kind))


def silu(builder: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """x / (1 + exp(-x))."""
    kind, lanes = x.type, x.type.count
    power = builder.fmul(x, all_of(kind, -LOG2_E))
    power = fast(builder, f"llvm.maxnum.v{lanes}f32", kind, power, all_of(kind, LOWEST))
    power = fast(builder, f"llvm.minnum.v{lanes}f32", kind, power, all_of(kind, HIGHEST))
    return builder.fdiv(x, builder.fadd(all_of(kind, 1.0), exp2(builder, power)))
