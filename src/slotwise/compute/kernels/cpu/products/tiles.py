"""Tiles: eight registers of 16 rows of 64 bytes, whose products AMX computes, or software with the same semantics.

    numbers   a tile, by row
    sums      [16 rows, 16 columns] of float32 or int32
    left      [16 rows, 32] of bfloat16, or [16 rows, 64] of int8
    right     [16 pairs, 16 columns, 2] of bfloat16, or [16 quads, 16 columns, 4] of uint8

    add_bf16(sums, left, right)    sums += left @ right, by `tdpbf16ps`
    add_int8(sums, left, right)    the same of int8 and uint8 to int32, by `tdpbsud`

A bfloat16 product is rounded as Intel's manual says ("Software Developer's Manual", TDPBF16PS): from zero, the even
and the odd products of a row and a column are added in order, each with one rounding; their sum is added to `sums`.
Numbers too small for a normal float32 become zero, before and after every operation.

A kernel is written once for `Tiles`.  `HardwareTiles` needs a processor with AMX and the system's permission; kernels
compiled with `SoftwareTiles` give the same results on any processor, slowly: tests run them.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol, TypeAlias, cast

from llvmlite import ir

from slotwise.compute.kernels.cpu.jit.compiler import INT, intrinsic
from slotwise.compute.kernels.cpu.jit.llvm import (
    BYTE,
    SINGLE,
    WORD,
    Loop,
    all_of,
    behind,
    call,
    fma,
    number,
    pointer,
    read,
    spread,
    write,
)
from slotwise.compute.kernels.cpu.processor import has

# Of a tile.
ROWS = 16
ROW_BYTES = 64
TILE_BYTES = ROWS * ROW_BYTES
# Tiles, and bytes of all software tiles.
COUNT = 8
MEMORY_BYTES = COUNT * TILE_BYTES

# Bits of MXCSR: operands and results below the smallest normal number become zero.
_ZERO_IF_SMALL = 0x8040
# Linux on x86-64, asm/prctl.h.
_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA = 158, 0x1023, 18
_BYTES, WORDS, _FLOATS = (ir.VectorType(kind, lanes) for kind, lanes in ((BYTE, 64), (WORD, 16), (SINGLE, 16)))


class Tiles(Protocol):
    """Emits instructions on tiles, each given by its number; strides are bytes from row to row."""

    def begin(self) -> None:
        """Configure the tiles: before the first use in a thread."""
        ...

    def end(self) -> None:
        """Release the tiles: after the last use in a thread."""
        ...

    def zero(self, tile: int) -> None: ...

    def load(self, tile: int, address: ir.Value, stride: int) -> None: ...

    def store(self, tile: int, address: ir.Value, stride: int) -> None: ...

    def add_bf16(self, sums: int, left: int, right: int) -> None: ...

    def add_int8(self, sums: int, left: int, right: int) -> None: ...

    def vectors(self) -> AbstractContextManager[None]:
        """A context in which vectors of float32 are computed like numbers of tiles: what is `flushed` is flushed."""
        ...

    def flushed(self, value: ir.Value) -> ir.Value:
        """Zero, with its sign, for numbers below the smallest normal float32."""
        ...


@functools.cache
def obstacle(feature: str) -> str:
    """Why this process cannot use AMX's tiles for products that need `feature`; empty where it can."""
    if not has(feature):
        return "it needs a processor with AMX"
    library = ctypes.CDLL(None, use_errno=True)
    if library.syscall(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA):
        return f"the system permits no AMX (error {ctypes.get_errno()})"
    return ""


def configuration() -> bytes:
    """The operand of `ldtilecfg`: every tile has 16 rows of 64 bytes."""
    palette, row_bytes, rows = 1, [ROW_BYTES] * COUNT, [ROWS] * COUNT
    return struct.pack(f"<B15x{COUNT}H16x{COUNT}B8x", palette, *row_bytes, *rows)


class HardwareTiles:
    """AMX's registers."""

    def __init__(self, builder: ir.IRBuilder, memory: ir.Value) -> None:
        self._builder = builder
        self._memory = memory

    def begin(self) -> None:
        place = self._builder.alloca(_BYTES)
        self._builder.store(ir.Constant(_BYTES, list(configuration())), place)
        self._emit("ldtilecfg", self._builder.bitcast(place, BYTE.as_pointer()))

    def end(self) -> None:
        """Give the registers up: the system need not save them when it switches threads."""
        self._emit("tilerelease")

    def zero(self, tile: int) -> None:
        self._emit("tilezero", _tile(tile))

    def load(self, tile: int, address: ir.Value, stride: int) -> None:
        self._emit("tileloadd64", _tile(tile), pointer(self._builder, address, BYTE), number(stride))

    def store(self, tile: int, address: ir.Value, stride: int) -> None:
        self._emit("tilestored64", _tile(tile), pointer(self._builder, address, BYTE), number(stride))

    def add_bf16(self, sums: int, left: int, right: int) -> None:
        self._emit("tdpbf16ps", *map(_tile, (sums, left, right)))

    def add_int8(self, sums: int, left: int, right: int) -> None:
        self._emit("tdpbsud", *map(_tile, (sums, left, right)))

    @contextmanager
    def vectors(self) -> Iterator[None]:
        """All operations in the context are emitted into loops, and are not moved out of them."""
        before, within = self._memory, behind(self._builder, self._memory, 4)
        self._control("stmxcsr", before)
        bits = self._builder.or_(read(self._builder, before, WORD), ir.Constant(WORD, _ZERO_IF_SMALL))
        write(self._builder, bits, within)
        self._control("ldmxcsr", within)
        yield
        self._control("ldmxcsr", before)

    def flushed(self, value: ir.Value) -> ir.Value:
        """The processor flushes; the fence keeps LLVM from reordering sums."""
        return call(self._builder, "llvm.arithmetic.fence.v16f32", _FLOATS, value)

    def _control(self, name: str, place: ir.Value) -> None:
        call(self._builder, f"llvm.x86.sse.{name}", ir.VoidType(), pointer(self._builder, place, BYTE))

    def _emit(self, name: str, *arguments: ir.Value) -> None:
        call(self._builder, f"llvm.x86.{name}", ir.VoidType(), *arguments)


def _tile(tile: int) -> ir.Value:
    return ir.Constant(BYTE, tile)


class SoftwareTiles:
    """Tiles in `MEMORY_BYTES` of memory."""

    def __init__(self, builder: ir.IRBuilder, memory: ir.Value) -> None:
        self._builder = builder
        self._memory = memory

    def begin(self) -> None:
        """Nothing: memory needs no configuration."""

    def end(self) -> None:
        """Nothing."""

    def zero(self, tile: int) -> None:
        for row in range(ROWS):
            write(self._builder, all_of(WORDS, 0), self._row(tile, number(row)))

    def load(self, tile: int, address: ir.Value, stride: int) -> None:
        for row in range(ROWS):
            value = read(self._builder, behind(self._builder, address, row * stride), WORDS, 1)
            write(self._builder, value, self._row(tile, number(row)))

    def store(self, tile: int, address: ir.Value, stride: int) -> None:
        for row in range(ROWS):
            value = read(self._builder, self._row(tile, number(row)), WORDS)
            write(self._builder, value, behind(self._builder, address, row * stride), align=1)

    def add_bf16(self, sums: int, left: int, right: int) -> None:
        builder = self._builder
        rows = Loop(builder, number(ROWS), 1, [])
        pairs = Loop(builder, number(ROWS), 1, [all_of(_FLOATS, 0.0)] * 2)
        ours = halves(builder, self, spread(builder, self._word(left, rows.index, pairs.index), WORDS))
        theirs = halves(builder, self, read(builder, self._row(right, pairs.index), WORDS))
        even, odd = pairs.close([
            self.flushed(fma(builder, *each)) for each in zip(ours, theirs, pairs.values, strict=True)])
        place = self._row(sums, rows.index)
        total = self.flushed(builder.fadd(even, odd))
        so_far = self.flushed(read(builder, place, _FLOATS))
        write(builder, self.flushed(builder.fadd(so_far, total)), place)
        rows.close([])

    def add_int8(self, sums: int, left: int, right: int) -> None:
        builder = self._builder
        rows = Loop(builder, number(ROWS), 1, [])
        place = self._row(sums, rows.index)
        quads = Loop(builder, number(ROWS), 1, [read(builder, place, WORDS)])
        ours = spread(builder, self._word(left, rows.index, quads.index), WORDS)
        theirs = read(builder, self._row(right, quads.index), WORDS)
        (total,) = quads.values
        for byte in range(4):
            signed = builder.ashr(builder.shl(ours, all_of(WORDS, 24 - 8 * byte)), all_of(WORDS, 24))
            unsigned = builder.and_(builder.lshr(theirs, all_of(WORDS, 8 * byte)), all_of(WORDS, 255))
            total = builder.add(total, builder.mul(signed, unsigned))
        write(builder, quads.close([total])[0], place)
        rows.close([])

    def vectors(self) -> AbstractContextManager[None]:
        return nullcontext()

    def flushed(self, value: ir.Value) -> ir.Value:
        bits = self._builder.bitcast(value, WORDS)
        is_small = self._builder.icmp_unsigned(
            "==", self._builder.and_(bits, all_of(WORDS, 0x7F800000)), all_of(WORDS, 0))
        kept = self._builder.select(is_small, self._builder.and_(bits, all_of(WORDS, 0x80000000)), bits)
        return self._builder.bitcast(kept, _FLOATS)

    def _row(self, tile: int, row: ir.Value) -> ir.Value:
        """The address of a row."""
        offset = self._builder.mul(row, number(ROW_BYTES))
        return behind(self._builder, self._builder.add(self._memory, offset), tile * TILE_BYTES)

    def _word(self, tile: int, row: ir.Value, word: ir.Value) -> ir.Value:
        place = self._builder.add(self._row(tile, row), self._builder.mul(word, number(4)))
        return read(self._builder, place, WORD)


def halves(builder: ir.IRBuilder, tiles: Tiles, pairs: ir.Value) -> tuple[ir.Value, ir.Value]:
    """The even and the odd numbers of pairs of bfloat16 as float32."""
    even, odd = builder.shl(pairs, all_of(WORDS, 16)), builder.and_(pairs, all_of(WORDS, 0xFFFF0000))
    return tiles.flushed(builder.bitcast(even, _FLOATS)), tiles.flushed(builder.bitcast(odd, _FLOATS))


Kind: TypeAlias = Callable[[ir.IRBuilder, ir.Value], Tiles]
"""`kind(builder, memory)`: tiles; software tiles lie in a thread's `memory`."""


def around(kind: Kind) -> tuple[Callable[[int], None], Callable[[int], None]]:
    """`begin(memory)` and `end(memory)` for kernels, which go around all uses of a kind of tiles by a thread."""
    def begin(builder: ir.IRBuilder, memory: ir.Value) -> None:
        kind(builder, memory).begin()

    def end(builder: ir.IRBuilder, memory: ir.Value) -> None:
        kind(builder, memory).end()

    first, last = (cast("Callable[[int], None]", intrinsic(emit, INT)) for emit in (begin, end))
    return first, last
