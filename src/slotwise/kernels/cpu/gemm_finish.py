"""What becomes of a product's sums while they are in registers: bias, the gate, rounding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from llvmlite import ir
from numba import types

from slotwise.kernels.cpu.jit.intrinsic import ElementType
from slotwise.kernels.cpu.llvm import SINGLE, all_of, behind, number, read, round_to_bfloat16, silu, write

FLOATS = ir.VectorType(SINGLE, 16)


def read_floats(builder: ir.IRBuilder, address: ir.Value, vectors: int) -> list[ir.Value]:
    """Vectors of float32 that lie together."""
    return [read(builder, behind(builder, address, v * 64), FLOATS, 4) for v in range(vectors)]


def no_sums(vectors: int) -> list[ir.Value]:
    """Vectors of zeros."""
    return [all_of(FLOATS, 0.0)] * vectors


def added(builder: ir.IRBuilder, sums: Sequence[ir.Value], bias: Sequence[ir.Value]) -> list[ir.Value]:
    """Sums plus bias."""
    return [builder.fadd(*pair) for pair in zip(sums, bias, strict=True)]


def finish_row(
    builder: ir.IRBuilder, results: Sequence[ir.Value], target: ir.Value, kind: ElementType, *, is_gated: bool
) -> None:
    """Store a row's vectors of float32 as `kind`, or of a panel of gates their products with the other half."""
    if is_gated:
        half = len(results) // 2
        results = [builder.fmul(silu(builder, gate), up)
                   for gate, up in zip(results[:half], results[half:], strict=True)]
    for v, result in enumerate(results):
        if kind == types.uint16:
            result = round_to_bfloat16(builder, result)
        write(builder, result, behind(builder, target, v * kind.bitwidth * 2), align=2)


class OfKind(Protocol):
    def __call__(self, *, is_gated: bool) -> None: ...


def for_either_kind(builder: ir.IRBuilder, is_gated: ir.Value, emit: OfKind) -> None:
    """`emit` for a panel of gates and for any other, of which one is executed."""
    with builder.if_else(builder.icmp_signed("!=", is_gated, number(0))) as (gated, plain):
        with gated:
            emit(is_gated=True)
        with plain:
            emit(is_gated=False)
