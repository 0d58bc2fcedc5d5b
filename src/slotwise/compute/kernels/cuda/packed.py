"""Quantized matrices (`compute/kernels/matrix.py`) on a GPU: how they are packed, their products, and rows of
quantized tables.

The codes of an output lie one after another:

    more than 4 bits    [ c0 c1 c2 ... ]                                a byte each
    up to 4 bits        [ c0 | cC << 4   c1 | cC+1 << 4   ... ]         a chunk of C codes below, the next one above

C is the chunk of inputs that a product multiplies at a time.  All of a chunk have one scale, and both chunks that share
bytes come from one load, so no code changes its place in registers.  Where inputs are counted in another order (GPTQ's
act-order), codes lie in that order, and products read their inputs in it.

A product of numbers of 16 bits with such a matrix (W4A16, W8A16) is a program for each tile of tokens and outputs.
Codes go from memory to registers, become numbers of the tokens' type there, and are multiplied by tensor cores: a step
reads as many bytes as the packed matrix has (as Marlin does, Frantar et al., 2024, for one of these formats).

A product of one token with 4,096 outputs has 128 tiles of outputs, fewer programs than a large GPU runs at once.  So
products of few tokens are split along their depth (split-K; NVIDIA's CUTLASS, 2017): each program adds up a part, in
float32, and the parts are added in order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from slotwise.compute.kernels.cuda.configs import FEW, ProductConfig, codes_tile
from slotwise.compute.kernels.cuda.jit import OPERANDS, jit, jit_varying
from slotwise.compute.kernels.matrix import Factors, Format, QuantizedMatrix

# In inputs.
LARGEST_CHUNK, SMALLEST_CHUNK = 64, 16
# In bits.
NIBBLE = 4
# Codes that are unpacked together.
AT_A_TIME = 1 << 24


@dataclass(frozen=True, slots=True, eq=False)
class PackedMatrix:
    """A matrix on a device.  Scales and minimums have units where the format says so."""

    format: Format
    outputs: int
    depth: int
    # [outputs, bytes] uint8.
    codes: Tensor
    scales: Factors
    minimums: Factors | None
    # [codes] float32, for formats with a table.
    levels: Tensor | None
    # [depth] int64: the place of each input, and the input at each place.
    order: Tensor | None
    inputs: Tensor | None

    @property
    def chunk(self) -> int:
        """Inputs multiplied at a time."""
        return chunk_of(self.format)


def chunk_of(kind: Format) -> int:
    """The largest chunk whose inputs share a scale; 0 if there is no such chunk."""
    sizes = (LARGEST_CHUNK, LARGEST_CHUNK // 2, SMALLEST_CHUNK)
    return next((size for size in sizes if kind.group % size == 0), 0)


def refusal(kind: Format) -> str:
    """Why a format cannot be packed, "" where it can: every chunk that tensor cores multiply would cut its groups."""
    if chunk_of(kind):
        return ""
    return f"groups of {kind.group} inputs are not supported on device cuda, only multiples of {SMALLEST_CHUNK}"


def row_bytes(kind: Format, depth: int) -> int:
    """Bytes of an output's codes."""
    chunk = chunk_of(kind)
    together = 2 * chunk if kind.bits <= NIBBLE else chunk
    return -(-depth // together) * chunk


def packed_bytes(kind: Format, outputs: int, depth: int) -> int:
    """Bytes of a packed matrix."""
    groups = -(-depth // kind.group) if kind.group else 1
    units = -(-groups // kind.groups_per_unit) * torch.float16.itemsize if kind.groups_per_unit else 0
    factors = (groups * kind.scale.itemsize + units) * (1 + kind.has_minimums)
    return outputs * (row_bytes(kind, depth) + factors)


def pack(matrix: QuantizedMatrix, device: torch.device) -> PackedMatrix:
    """Read a matrix, some outputs at a time.

    Raises:
        ValueError: the format is refused.
    """
    if why := refusal(matrix.format):
        raise ValueError(why)
    kind, inputs = matrix.format, None if matrix.order is None else matrix.order.argsort().to(device)
    codes = torch.empty(matrix.outputs, row_bytes(kind, matrix.depth), dtype=torch.uint8, device=device)
    scales, minimums, step = [], [], max(1, AT_A_TIME // matrix.depth)
    for first in range(0, matrix.outputs, step):
        rows = matrix.read(first, min(first + step, matrix.outputs))
        unpacked = rows.codes.to(device)
        _pack_codes(codes[first : first + step], unpacked if inputs is None else unpacked[:, inputs], kind)
        scales.append(rows.scales)
        if rows.minimums is not None:
            minimums.append(rows.minimums)
    levels = torch.tensor(kind.levels, device=device) if kind.levels and not kind.are_floats else None
    order = None if matrix.order is None else matrix.order.to(device)
    return PackedMatrix(kind, matrix.outputs, matrix.depth, codes, _joined(scales, device),
                        _joined(minimums, device) if minimums else None, levels, order, inputs)


def _pack_codes(out: Tensor, codes: Tensor, kind: Format) -> None:
    """Pack `codes [outputs, depth]`; zeros fill each row up."""
    chunk = chunk_of(kind)
    if kind.bits > NIBBLE:
        out.copy_(F.pad(codes, (0, out.shape[1] - codes.shape[1])))
        return
    low, high = F.pad(codes, (0, 2 * out.shape[1] - codes.shape[1])).view(len(codes), -1, 2, chunk).unbind(2)
    out.copy_((low | high << NIBBLE).flatten(1))


def _joined(parts: list[Factors], device: torch.device) -> Factors:
    units = [part.units for part in parts if part.units is not None]
    return Factors(torch.cat([part.values for part in parts]).to(device).contiguous(),
                   torch.cat(units).to(device).contiguous() if units else None)


# Programs of a product: some for each multiprocessor of the largest device.
ENOUGH_PROGRAMS = 512
MOST_PARTS = 8
# Steps of a part, at least, so that its loads and products overlap.
LEAST_STEPS = 4
# Outputs that a program adds up.
SUMMED_COLUMNS = 512


class SplitProduct(NamedTuple):
    """A product that is split along its depth: the sums of its parts, before they are added."""

    # [parts, tokens, outputs] float32, or the product's own memory where there is one part.
    sums: Tensor
    # Of parts, and the depth of each.
    number: int
    depth: int

    @classmethod
    def of(cls, out: Tensor, grid: tuple[int, int], depth: int, step: int) -> SplitProduct:
        """For `out [tokens, outputs]` by a grid of tiles, each of which goes along `depth` by `step`.

        Products of more tokens than the smallest tile holds are not split.
        """
        steps = -(-depth // step)
        number = num_parts(grid[0] * grid[1], steps) if len(out) <= FEW else 1
        if number == 1:
            return cls(out, 1, depth)
        of_one = -(-steps // number)
        number = -(-steps // of_one)
        return cls(out.new_empty(number, *out.shape, dtype=torch.float32), number, of_one * step)

    def added(self, out: Tensor, bias: Tensor | None) -> Tensor:
        """`out`, with the sum of all parts and the bias; a single part is complete already."""
        if self.number > 1:
            add_parts(out, self.sums, bias)
        return out


def num_parts(programs: int, steps: int) -> int:
    """Into how many parts the depth of a product is split.

    Args:
        programs: tiles of the product.
        steps: along its depth.
    """
    return max(1, min(MOST_PARTS, ENOUGH_PROGRAMS // programs, steps // LEAST_STEPS))


def add_parts(out: Tensor, parts: Tensor, bias: Tensor | None) -> None:
    """`out [tokens, outputs]` becomes the sum of `parts [parts, tokens, outputs]` and `bias`."""
    number, tokens, outputs = parts.shape
    _add_parts[tokens, triton.cdiv(outputs, SUMMED_COLUMNS)](
        out, parts, parts if bias is None else bias, tokens, PARTS=number, OUTPUTS=outputs, BIAS=bias is not None,
        BLOCK=SUMMED_COLUMNS, num_warps=4)


@jit
def part_of(DEPTH: tl.constexpr, PART: tl.constexpr) -> tuple[tl.tensor, ...]:
    """Begin and end of the depth that the program adds up."""
    begin = tl.program_id(2) * PART if PART < DEPTH else 0
    return begin, tl.minimum(begin + PART, DEPTH) if PART < DEPTH else DEPTH


@jit_varying("tokens")
def _add_parts(
    out: tl.tensor, parts: tl.tensor, bias: tl.tensor, tokens: tl.tensor, PARTS: tl.constexpr, OUTPUTS: tl.constexpr,
    BIAS: tl.constexpr, BLOCK: tl.constexpr,
) -> None:
    """BLOCK outputs of one token."""
    token, output = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = output < OUTPUTS
    total = tl.load(bias + output, there, 0.0).to(tl.float32) if BIAS else tl.full([BLOCK], 0.0, tl.float32)
    for part in tl.static_range(PARTS):
        total += tl.load(parts + (part * tokens + token) * OUTPUTS + output, there, 0.0)
    tl.store(out + token * OUTPUTS + output, total.to(out.dtype.element_ty), there)


# Columns of a table's row that a program reads.
COLUMNS = 256
# What a code stands for.
_NUMBERS, _TABLE, _FLOATS = (tl.constexpr(which) for which in range(3))


def multiply(x: Tensor, matrix: PackedMatrix, bias: Tensor | None) -> Tensor:
    """`x [tokens, depth] @ matrix.T + bias`: `[tokens, outputs]` of x's type."""
    x = x.contiguous() if matrix.inputs is None else x.index_select(1, matrix.inputs)
    tokens = len(x)
    out = x.new_empty(tokens, matrix.outputs)
    if not tokens:
        return out
    tile: ProductConfig = codes_tile(tokens, x.dtype, has_table=matrix.levels is not None)
    grid = (triton.cdiv(tokens, tile.block_m), triton.cdiv(matrix.outputs, tile.block_n))
    parts = SplitProduct.of(out, grid, matrix.codes.shape[1], matrix.chunk)
    _multiply_codes[(*grid, parts.number)](
        parts.sums, x, matrix.codes, *factors(matrix), x if bias is None else bias, tokens, **constants(matrix),
        BIAS=bias is not None and parts.number == 1, OPERAND=OPERANDS[x.dtype], PART=parts.depth, BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n, num_warps=tile.num_warps, num_stages=tile.num_stages)
    return parts.added(out, bias)


def rows_of(matrix: PackedMatrix, token_ids: Tensor, kind: torch.dtype, scale: float) -> Tensor:
    """Rows of a table by `token_ids [tokens]` int64, times `scale`, rounded to `kind`: `[tokens, depth]`."""
    out = torch.empty(len(token_ids), matrix.depth, dtype=kind, device=token_ids.device)
    if len(token_ids):
        order = matrix.codes if matrix.order is None else matrix.order
        _look_up[len(token_ids), triton.cdiv(matrix.depth, COLUMNS)](
            out, token_ids, matrix.codes, *factors(matrix), order, scale, **constants(matrix),
            ORDERED=matrix.order is not None, BLOCK=COLUMNS, num_warps=4)
    return out


def factors(matrix: PackedMatrix) -> tuple[Tensor, ...]:
    """Scales and minimums with their units, and levels; the codes stand in for what a format does not have."""
    nothing = matrix.codes
    minimums = matrix.minimums or Factors(nothing)
    return (matrix.scales.values, nothing if matrix.scales.units is None else matrix.scales.units, minimums.values,
            nothing if minimums.units is None else minimums.units,
            nothing if matrix.levels is None else matrix.levels)


def constants(matrix: PackedMatrix) -> dict[str, Any]:
    """The compile-time constants of kernels."""
    kind, groups, units = matrix.format, matrix.scales.values.shape[1], matrix.scales.units
    return {
        "OUTPUTS": matrix.outputs, "DEPTH": matrix.depth, "ROW_BYTES": matrix.codes.shape[1], "GROUPS": groups,
        "GROUP": kind.group or 1 << 30, "PER_UNIT": 0 if units is None else groups // units.shape[1],
        "ZERO": kind.zero, "NIBBLES": kind.bits <= NIBBLE, "MINIMUMS": kind.has_minimums,
        "LEVELS": (_FLOATS if kind.are_floats else _TABLE if kind.levels else _NUMBERS).value, "CHUNK": matrix.chunk}


@jit_varying("tokens")
def _multiply_codes(
    out: tl.tensor, x: tl.tensor, codes: tl.tensor, scales: tl.tensor, scale_units: tl.tensor, minimums: tl.tensor,
    minimum_units: tl.tensor, levels: tl.tensor, bias: tl.tensor, tokens: tl.tensor, OUTPUTS: tl.constexpr,
    DEPTH: tl.constexpr, ROW_BYTES: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr, PER_UNIT: tl.constexpr,
    ZERO: tl.constexpr, NIBBLES: tl.constexpr, MINIMUMS: tl.constexpr, LEVELS: tl.constexpr, BIAS: tl.constexpr,
    OPERAND: tl.constexpr, CHUNK: tl.constexpr, PART: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
) -> None:
    """One tile of tokens and outputs, of one part of PART bytes."""
    token = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    output = (tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    present, there = token < tokens, output < OUTPUTS
    total = tl.full([BLOCK_M, BLOCK_N], 0.0, tl.float32)
    begin, end = part_of(ROW_BYTES, PART)
    total = add_products(
        total, x, token, present, codes, scales, scale_units, minimums, minimum_units, levels, output, there, codes,
        begin, end, DEPTH, ROW_BYTES, GROUPS, GROUP, PER_UNIT, ZERO, NIBBLES, MINIMUMS, LEVELS, OPERAND, CHUNK, False)
    if BIAS:
        total += tl.load(bias + output, there, 0.0).to(tl.float32)[None, :]
    inside = present[:, None] & there[None, :]
    if PART < ROW_BYTES:
        token += tl.program_id(2).to(tl.int64) * tokens
    tl.store(out + token[:, None] * OUTPUTS + output[None, :], total.to(out.dtype.element_ty), inside)


@jit
def add_products(
    total: tl.tensor, x: tl.tensor, row: tl.tensor, present: tl.tensor, codes: tl.tensor, scales: tl.tensor,
    scale_units: tl.tensor, minimums: tl.tensor, minimum_units: tl.tensor, levels: tl.tensor, output: tl.tensor,
    there: tl.tensor, inputs: tl.tensor, begin: tl.tensor, end: tl.tensor, DEPTH: tl.constexpr,
    ROW_BYTES: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr, PER_UNIT: tl.constexpr, ZERO: tl.constexpr,
    NIBBLES: tl.constexpr, MINIMUMS: tl.constexpr, LEVELS: tl.constexpr, OPERAND: tl.constexpr, CHUNK: tl.constexpr,
    ORDERED: tl.constexpr,
) -> tl.tensor:
    """Add the products of rows of `x` and outputs over bytes `begin ... end - 1`, CHUNK of them at a time.

    Args:
        total: `[rows, outputs]` float32.
        row: int64, of those that are `present`.
        output: int64, of those that are `there`.
        inputs: `[DEPTH]` int64, the input at each place, where they are ORDERED.
    """
    place = tl.arange(0, CHUNK)
    for byte in range(begin, end, CHUNK):
        pointers = codes + output[None, :] * ROW_BYTES + (byte + place)[:, None]
        packed = tl.load(pointers, there[None, :], 0).to(tl.int32)
        for half in tl.static_range(2 if NIBBLES else 1):
            first = byte * 2 + half * CHUNK if NIBBLES else byte
            code = (packed >> half * 4) & 15 if NIBBLES else packed
            at = tl.minimum(first // GROUP, GROUPS - 1)
            scale = _factor(scales, scale_units, output, at, there, GROUPS, PER_UNIT)
            minimum = _factor(minimums, minimum_units, output, at, there, GROUPS, PER_UNIT) if MINIMUMS else scale
            weight = _number(code, scale[None, :], minimum[None, :], levels, ZERO, MINIMUMS, LEVELS)
            column = first + place
            inside = column < DEPTH
            source = tl.load(inputs + column, inside, 0) if ORDERED else column
            numbers = tl.load(x + row[:, None] * DEPTH + source[None, :], present[:, None] & inside[None, :], 0.0)
            total = tl.dot(numbers.to(OPERAND), weight.to(OPERAND), total, input_precision="ieee")
    return total


@jit
def _look_up(
    out: tl.tensor, token_ids: tl.tensor, codes: tl.tensor, scales: tl.tensor, scale_units: tl.tensor,
    minimums: tl.tensor, minimum_units: tl.tensor, levels: tl.tensor, order: tl.tensor, by: tl.tensor,
    OUTPUTS: tl.constexpr, DEPTH: tl.constexpr, ROW_BYTES: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr,
    PER_UNIT: tl.constexpr, ZERO: tl.constexpr, NIBBLES: tl.constexpr, MINIMUMS: tl.constexpr, LEVELS: tl.constexpr,
    CHUNK: tl.constexpr, ORDERED: tl.constexpr, BLOCK: tl.constexpr,
) -> None:
    """BLOCK columns of one token's row; an id outside of the table reads its nearest row."""
    token = tl.program_id(0).to(tl.int64)
    row = tl.minimum(tl.maximum(tl.load(token_ids + token).to(tl.int64), 0), OUTPUTS - 1)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < DEPTH
    place = tl.load(order + column, inside, 0).to(tl.int32) if ORDERED else column
    byte = place // (2 * CHUNK) * CHUNK + place % CHUNK if NIBBLES else place
    code = tl.load(codes + row * ROW_BYTES + byte, inside, 0).to(tl.int32)
    if NIBBLES:
        code = (code >> place // CHUNK % 2 * 4) & 15
    group = place // GROUP
    scale = _factor(scales, scale_units, row, group, inside, GROUPS, PER_UNIT)
    minimum = _factor(minimums, minimum_units, row, group, inside, GROUPS, PER_UNIT) if MINIMUMS else scale
    number = _number(code, scale, minimum, levels, ZERO, MINIMUMS, LEVELS) * by
    tl.store(out + token * DEPTH + column, number.to(out.dtype.element_ty), inside)


@jit
def _factor(
    values: tl.tensor, units: tl.tensor, output: tl.tensor, group: tl.tensor, inside: tl.tensor, GROUPS: tl.constexpr,
    PER_UNIT: tl.constexpr,
) -> tl.tensor:
    """Scales or minimums of outputs' groups, float32."""
    factor = tl.load(values + output * GROUPS + group, inside, 0).to(tl.float32)
    if PER_UNIT:
        unit = tl.load(units + output * (GROUPS // PER_UNIT) + group // PER_UNIT, inside, 0)
        factor = unit.to(tl.float32) * factor
    return factor


@jit
def _number(
    code: tl.tensor, scale: tl.tensor, minimum: tl.tensor, levels: tl.tensor, ZERO: tl.constexpr,
    MINIMUMS: tl.constexpr, LEVELS: tl.constexpr,
) -> tl.tensor:
    """What codes stand for, float32: `scale * (level - ZERO) - minimum`."""
    if LEVELS == _TABLE:
        level = tl.load(levels + code)
    elif LEVELS == _FLOATS:  # E4M3 has float16's layout with a bit of exponent less, whose bias is smaller by 8
        bits = ((code & 0x80) << 8) | ((code & 0x7F) << 7)
        level = bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 256.0
        level = tl.where((code & 0x7F) == 0x7F, 0.0, level)  # NaN, which no matrix has
    else:
        level = code.to(tl.float32)
    number = scale * (level - ZERO)
    return number - minimum if MINIMUMS else number
