"""Products of 64 unsigned and 64 signed bytes, added in fours to 16 sums of 32 bits, exactly, by any processor.

    VNNI                       one instruction (`vpdpbusd`), of AVX-512 or of AVX-VNNI
    unsigned up to 127         pairs added in 16 bits, which hold them (`pmaddubsw`), then in 32 (`pmaddwd`)
    unsigned up to 255         even and odd bytes widened to 16 bits, and their pairs added in 32 (`pmaddwd`)
"""

from __future__ import annotations

from collections.abc import Sequence

from llvmlite import ir

from slotwise.kernels.cpu.llvm import BYTE, SHORT, WORD, all_of, call
from slotwise.kernels.cpu.processor import AVX2, AVX512

_BYTES, _SHORTS, _WORDS = (ir.VectorType(kind, lanes) for kind, lanes in ((BYTE, 64), (SHORT, 32), (WORD, 16)))


def add_fours(
    builder: ir.IRBuilder, so_far: ir.Value, unsigned: ir.Value, signed: ir.Value, *, by_vnni: bool, is_wide: bool
) -> ir.Value:
    """`so_far` plus the products of bytes in fours.  Args: is_wide: an unsigned byte may be above 127."""
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


def pick(builder: ir.IRBuilder, vector: ir.Value, lanes: Sequence[int]) -> ir.Value:
    """The vector of some lanes of another."""
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
