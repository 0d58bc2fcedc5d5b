"""The block types of GGUF files, as `compute/kernels/matrix.py` describes a matrix.

A row is blocks of 32 or 256 weights; a block is its scales and its packed codes.  The layouts are those of ggml's
`ggml-common.h`; `d`, `m` and `dmin` are float16, and bits are counted from the lowest.

    Q4_0 Q4_1 Q5_0 Q5_1 Q8_0    32: d, m where it has one, the fifth bits, the codes
    IQ4_NL MXFP4                32: a scale, the codes, which are entries of a table
    Q2_K ... Q6_K IQ4_XS       256: small scales (and minimums) of 16 or 32 weights, times d (and dmin)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from slotwise.compute.kernels.matrix import Factors, Format, QuantizedMatrix, Rows
from slotwise.compute.model.quantization.mxfp4 import MXFP4_LEVELS

Parse = Callable[[Tensor], Rows]
"""From blocks `[rows, blocks, bytes]` uint8 to codes `[rows, blocks, weights]`, and factors that need flattening."""

IQ4_LEVELS = tuple(map(float, (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)))

_BITS, _PAIRS, _NIBBLES = (tuple(range(0, 8, width)) for width in (1, 2, 4))  # shifts of what a byte holds


class BlockType(NamedTuple):
    """A quantized type of GGUF."""

    weights: int  # of a block
    bytes: int  # of a block
    format: Format
    parse: Parse

    def row_bytes(self, depth: int) -> int:
        """Bytes of a row of `depth` weights.

        Raises:
            ValueError: it is not whole blocks.
        """
        if depth % self.weights or not depth:
            raise ValueError(f"rows of {depth} weights are not whole blocks of {self.weights}")
        return depth // self.weights * self.bytes

    def matrix(self, data: Tensor, outputs: int, depth: int) -> QuantizedMatrix:
        """`data`, uint8 of any shape, as `[outputs, depth]` weights.  Nothing is copied or read.

        Raises:
            ValueError: it has another number of bytes, or a row is not whole blocks.
        """
        row_bytes = self.row_bytes(depth)
        if data.numel() != outputs * row_bytes:
            raise ValueError(f"{outputs} x {depth} weights take {outputs * row_bytes} bytes, not {data.numel()}")
        blocks = data.view(outputs, -1, self.bytes)

        def read(first: int, end: int) -> Rows:
            codes, scales, minimums = self.parse(blocks[first:end])
            return Rows(codes.flatten(1), _flat(scales), None if minimums is None else _flat(minimums))

        return QuantizedMatrix(self.format, outputs, depth, read)


DENSE = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Types without blocks."""


def _flat(factors: Factors) -> Factors:
    return Factors(factors.values.flatten(1), None if factors.units is None else factors.units.flatten(1))


def _half(blocks: Tensor, at: int) -> Tensor:
    """`[rows, blocks, 1]` float16, from byte `at` of each block on."""
    return blocks[..., at : at + 2].contiguous().view(torch.float16)


def _split(packed: Tensor, shifts: tuple[int, ...], run: int) -> Tensor:
    """Fields of the bytes of each block: the first of a run of bytes, then the second of the same run, and so on."""
    width = 8 // len(shifts)
    runs = packed.unflatten(-1, (-1, 1, run))
    fields = torch.bitwise_right_shift(runs, torch.tensor(shifts, dtype=torch.uint8).view(-1, 1))
    return (fields & ((1 << width) - 1)).flatten(-3)


def _of_32(bits: int, *, has_minimum: bool = False) -> BlockType:
    """Q4_0, Q4_1, Q5_0 and Q5_1; the stored minimum is added."""
    at = 4 if has_minimum else 2
    fifth = 4 if bits == 5 else 0

    def parse(blocks: Tensor) -> Rows:
        codes = _split(blocks[..., at + fifth :], _NIBBLES, 16)
        if fifth:
            bit = torch.bitwise_right_shift(blocks[..., at : at + 4, None], torch.arange(8, dtype=torch.uint8)) & 1
            codes |= bit.flatten(-2) << 4
        return Rows(codes, Factors(_half(blocks, 0)), Factors(-_half(blocks, 2)) if has_minimum else None)

    kind = Format(bits, 32, torch.float16, has_minimums=has_minimum, zero=0 if has_minimum else 1 << bits - 1)
    return BlockType(32, at + fifth + 16, kind, parse)


def _parse_q8_0(blocks: Tensor) -> Rows:
    return Rows(blocks[..., 2:] ^ 128, Factors(_half(blocks, 0)))


def _parse_iq4_nl(blocks: Tensor) -> Rows:
    return Rows(_split(blocks[..., 2:], _NIBBLES, 16), Factors(_half(blocks, 0)))


def _parse_mxfp4(blocks: Tensor) -> Rows:
    """The scale is a power of two, halved because the levels are doubled: exact in bfloat16, subnormals included."""
    exponents = blocks[..., :1].to(torch.int32)
    bits = torch.where(exponents < 2, 0x20 << exponents, (exponents - 1) << 7)
    return Rows(_split(blocks[..., 1:], _NIBBLES, 16), Factors(bits.to(torch.int16).view(torch.bfloat16)))


def _parse_q2_k(blocks: Tensor) -> Rows:
    scales = blocks[..., :16]
    return Rows(_split(blocks[..., 16:80], _PAIRS, 32), Factors((scales & 15).view(torch.int8), _half(blocks, 80)),
                Factors((scales >> 4).view(torch.int8), _half(blocks, 82)))


def _parse_q3_k(blocks: Tensor) -> Rows:
    codes = _split(blocks[..., 32:96], _PAIRS, 32) | _split(blocks[..., :32], _BITS, 32) << 2
    low, high = _split(blocks[..., 96:104], _NIBBLES, 8), _split(blocks[..., 104:108], _PAIRS, 4)
    return Rows(codes, Factors((low | high << 4).view(torch.int8) - 32, _half(blocks, 108)))


def _scales_and_minimums(blocks: Tensor) -> tuple[Factors, Factors]:
    """Of Q4_K and Q5_K: eight of each, 6 bits, in twelve bytes after d and dmin."""
    first, second, third = (blocks[..., at : at + 4] for at in (4, 8, 12))
    scales = torch.cat((first & 63, (third & 15) | (first >> 2 & 48)), dim=-1)
    minimums = torch.cat((second & 63, (third >> 4) | (second >> 2 & 48)), dim=-1)
    return (Factors(scales.view(torch.int8), _half(blocks, 0)), Factors(minimums.view(torch.int8), _half(blocks, 2)))


def _parse_q4_k(blocks: Tensor) -> Rows:
    return Rows(_split(blocks[..., 16:], _NIBBLES, 32), *_scales_and_minimums(blocks))


def _parse_q5_k(blocks: Tensor) -> Rows:
    codes = _split(blocks[..., 48:], _NIBBLES, 32) | _split(blocks[..., 16:48], _BITS, 32) << 4
    return Rows(codes, *_scales_and_minimums(blocks))


def _parse_q6_k(blocks: Tensor) -> Rows:
    codes = _split(blocks[..., :128], _NIBBLES, 64) | _split(blocks[..., 128:192], _PAIRS, 32) << 4
    return Rows(codes, Factors(blocks[..., 192:208].contiguous().view(torch.int8), _half(blocks, 208)))


def _parse_iq4_xs(blocks: Tensor) -> Rows:
    low = torch.bitwise_right_shift(blocks[..., 4:8, None], torch.tensor(_NIBBLES, dtype=torch.uint8)) & 15
    high = torch.bitwise_right_shift(blocks[..., 2:4, None], torch.tensor(_PAIRS, dtype=torch.uint8)) & 3
    scales = (low.flatten(-2) | high.flatten(-2) << 4).view(torch.int8) - 32
    return Rows(_split(blocks[..., 8:], _NIBBLES, 16), Factors(scales, _half(blocks, 0)))


def _of_256(bits: int, group: int, scale_bits: int, *, has_minimums: bool = False, zero: int = 0,
            levels: tuple[float, ...] = ()) -> Format:
    return Format(bits, group, torch.int8, 256 // group, has_minimums, zero, levels, scale_bits)


BLOCK_TYPES = {
    "Q4_0": _of_32(4),
    "Q4_1": _of_32(4, has_minimum=True),
    "Q5_0": _of_32(5),
    "Q5_1": _of_32(5, has_minimum=True),
    "Q8_0": BlockType(32, 34, Format(8, 32, torch.float16, zero=128), _parse_q8_0),
    "Q2_K": BlockType(256, 84, _of_256(2, 16, 4, has_minimums=True), _parse_q2_k),
    "Q3_K": BlockType(256, 110, _of_256(3, 16, 6, zero=4), _parse_q3_k),
    "Q4_K": BlockType(256, 144, _of_256(4, 32, 6, has_minimums=True), _parse_q4_k),
    "Q5_K": BlockType(256, 176, _of_256(5, 32, 6, has_minimums=True), _parse_q5_k),
    "Q6_K": BlockType(256, 210, _of_256(6, 16, 8, zero=32), _parse_q6_k),
    "IQ4_NL": BlockType(32, 18, Format(4, 32, torch.float16, levels=IQ4_LEVELS), _parse_iq4_nl),
    "IQ4_XS": BlockType(256, 136, _of_256(4, 32, 6, levels=IQ4_LEVELS), _parse_iq4_xs),
    "MXFP4": BlockType(32, 17, Format(4, 32, torch.bfloat16, levels=MXFP4_LEVELS), _parse_mxfp4),
}
"""The quantized types, by their names in ggml."""
