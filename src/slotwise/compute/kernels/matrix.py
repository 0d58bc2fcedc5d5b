"""Quantized matrices in one form for every file format: checkpoint loaders produce them, kernels multiply them.

    w[o, i] = scale[o, g] * (level(code[o, i]) - zero) - minimum[o, g]        g = order[i] // group, or i // group

`code` is an unsigned integer of `bits` bits.  `level` is the code itself, or an entry of a table (NF4, IQ4_NL, MXFP4,
FP8).  Scales and minimums are floats, or small integers times a unit that several groups of an output share, as in
GGUF's K-quants.  The zero point of a group becomes a minimum, `scale * zero`: for scales of 16 bits that is exactly the
same number, because both products and their difference fit into a float32.

A matrix does not hold its codes: `read` unpacks a range of outputs from wherever they are stored, so that kernels can
repack a memory-mapped file a few outputs at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from slotwise.errors import CheckpointError

# The most bits of a code.
MOST_BITS = 8
E4M3 = tuple(torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().nan_to_num(0.0).tolist())
"""The levels of 8-bit floats (Micikevicius et al., 2022), by their bits.  The level of NaN, never stored, is 0."""


@dataclass(frozen=True, slots=True)
class Format:
    """How the numbers of a matrix are encoded: what is known before any number is read.

    Args:
        bits: of a code, 1 ... 8.
        group: inputs of an output that share a scale; 0: all inputs.
        scale: the type of scales and minimums as stored; an integer type if they have units.
        groups_per_unit: groups that share a unit; 0: scales are plain numbers.
        zero: the level that means 0, for formats without minimums.
        levels: the level of each code; (): the codes themselves.
        scale_bits: of scales and minimums that have units.
    """

    bits: int
    group: int
    scale: torch.dtype
    groups_per_unit: int = 0
    has_minimums: bool = False
    zero: int = 0
    levels: tuple[float, ...] = ()
    scale_bits: int = 8

    @property
    def unit(self) -> int:
        """A matrix can be cut at multiples of this many inputs; 1 where all inputs share a scale."""
        return max(1, self.group * max(1, self.groups_per_unit))

    @property
    def are_floats(self) -> bool:
        """Whether codes are 8-bit floats (FP8)."""
        return self.levels == E4M3

    def __post_init__(self) -> None:
        """Raises ValueError for a format that contradicts itself."""
        if not 1 <= self.bits <= MOST_BITS or self.group < 0 or self.groups_per_unit < 0:
            raise ValueError(f"no format: {self.bits} bits, groups of {self.group}")
        if self.scale.is_floating_point == bool(self.groups_per_unit):
            raise ValueError(f"scales of {self.scale} with {self.groups_per_unit} groups per unit")
        if self.levels and len(self.levels) != 1 << self.bits:
            raise ValueError(f"{len(self.levels)} levels for codes of {self.bits} bits")


class Factors(NamedTuple):
    """Scales or minimums of some outputs."""

    values: Tensor  # [outputs, groups], of `Format.scale`
    units: Tensor | None = None  # [outputs, groups / groups_per_unit] float16

    def floats(self) -> Tensor:
        """`[outputs, groups]` float32; a value and its unit are multiplied in float32."""
        if self.units is None:
            return self.values.float()
        per_unit = self.values.shape[1] // self.units.shape[1]
        return self.units.float().repeat_interleave(per_unit, dim=1) * self.values.float()

    def between(self, groups: slice, units: slice) -> Factors:
        """The factors of some groups, and their units."""
        return Factors(self.values[:, groups], None if self.units is None else self.units[:, units])

    def of(self, outputs: Tensor) -> Factors:
        """The factors of some outputs, by their places."""
        return Factors(self.values[outputs], None if self.units is None else self.units[outputs])


class Rows(NamedTuple):
    """Some outputs of a matrix, unpacked."""

    codes: Tensor  # [outputs, depth] uint8
    scales: Factors
    minimums: Factors | None = None


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class QuantizedMatrix:
    """`[outputs, depth]` weights in one format.

    Args:
        read: `read(first, end)` unpacks outputs `first ... end - 1`; any thread may call it.
        order: `[depth]` int64, the place of each input in the permutation by which groups are counted (GPTQ's
            act-order); None: groups are adjacent inputs.
    """

    format: Format
    outputs: int
    depth: int
    read: Callable[[int, int], Rows]
    order: Tensor | None = None

    @property
    def shape(self) -> torch.Size:
        """`[outputs, depth]`, the shape of the tensor that it stands for."""
        return torch.Size((self.outputs, self.depth))

    @property
    def groups(self) -> int:
        """Groups of each output; the last may be incomplete."""
        return -(-self.depth // self.format.group) if self.format.group else 1

    def dequantized(self, first: int = 0, end: int | None = None) -> Tensor:
        """Outputs `first ... end - 1` in float32, each operation rounded once: the reference of all kernels."""
        rows = self.read(first, self.outputs if end is None else end)
        levels = rows.codes.float()
        if self.format.levels:
            levels = torch.tensor(self.format.levels, device=levels.device)[rows.codes.int()]
        weights = self._of_inputs(rows.scales) * (levels - self.format.zero)
        return weights if rows.minimums is None else weights - self._of_inputs(rows.minimums)

    def _of_inputs(self, factors: Factors) -> Tensor:
        """The factor of each weight, `[outputs, depth]`."""
        floats, group = factors.floats(), self.format.group or self.depth
        if self.order is None:
            return floats.repeat_interleave(group, dim=1)[:, : self.depth]
        return floats[:, self.order.to(floats.device) // group]


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class StackedMatrix:
    """Matrices of several formats that read the same inputs, concatenated along their outputs."""

    parts: tuple[QuantizedMatrix, ...]

    @property
    def shape(self) -> torch.Size:
        """`[outputs, depth]` of all matrices together."""
        return torch.Size((sum(part.outputs for part in self.parts), self.parts[0].depth))

    def dequantized(self) -> Tensor:
        """All outputs in float32."""
        return torch.cat([part.dequantized() for part in self.parts])


Weight = Tensor | QuantizedMatrix | StackedMatrix
"""What a product multiplies with: `[outputs, depth]`."""


def formats_of(weight: Weight) -> tuple[Format, ...]:
    """The formats of a weight's parts; `()` for a tensor."""
    parts = weight.parts if isinstance(weight, StackedMatrix) else () if isinstance(weight, Tensor) else (weight,)
    return tuple(part.format for part in parts)


def stacked(parts: Sequence[QuantizedMatrix]) -> QuantizedMatrix | StackedMatrix:
    """Matrices of one depth, concatenated along their outputs: a single matrix if all have one format.

    Raises:
        ValueError: their depths differ.
    """
    first = parts[0]
    if len({part.depth for part in parts}) > 1:
        raise ValueError(f"matrices of {sorted({part.depth for part in parts})} inputs cannot be stacked")
    if len(parts) == 1:
        return first
    if any(part.format != first.format or not _have_one_order(part, first) for part in parts):
        return StackedMatrix(tuple(parts))
    starts = [sum(part.outputs for part in parts[:place]) for place in range(len(parts))]

    def read(begin: int, end: int) -> Rows:
        pieces = [part.read(max(0, begin - start), min(part.outputs, end - start))
                  for start, part in zip(starts, parts, strict=True) if start < end and begin < start + part.outputs]
        return pieces[0] if len(pieces) == 1 else Rows(
            torch.cat([piece.codes for piece in pieces]), _joined([piece.scales for piece in pieces]),
            _joined([piece.minimums for piece in pieces if piece.minimums is not None])
            if first.format.has_minimums else None)

    return QuantizedMatrix(first.format, sum(part.outputs for part in parts), first.depth, read, first.order)


def reordered(matrix: QuantizedMatrix, order: Tensor) -> QuantizedMatrix:
    """The outputs `order [outputs]` int64 of a matrix, in that order.

    A range is read from the least to the greatest output in it: cheap where neighbors stay close, as within a head.
    """

    def read(first: int, end: int) -> Rows:
        wanted = order[first:end]
        least = int(wanted.min())
        rows = matrix.read(least, int(wanted.max()) + 1)
        places = wanted - least
        minimums = None if rows.minimums is None else rows.minimums.of(places)
        return Rows(rows.codes[places], rows.scales.of(places), minimums)

    return replace(matrix, outputs=len(order), read=read)


def scaled(matrix: QuantizedMatrix, factor: Tensor) -> QuantizedMatrix:
    """The matrix times a number.  Its scales and minimums are rounded to the type in which they are stored.

    Raises:
        CheckpointError: scales are powers of two, which the products are not.  Reading raises it where a product is
            too large for the type.
    """
    if matrix.format.scale == torch.bfloat16:
        raise CheckpointError("quantized weights whose scales are powers of two (MXFP4) cannot be multiplied by the "
                              "scale that the checkpoint has for them: serve another quantization of the model")

    def times(factors: Factors) -> Factors:
        stored = factors.values if factors.units is None else factors.units
        found = (stored.float() * factor.float()).to(stored.dtype)
        if not found.isfinite().all():
            raise CheckpointError("a scale of quantized weights, times the scale that the checkpoint has for them, is "
                                  f"too large for {stored.dtype}: download the checkpoint again")
        return Factors(found) if factors.units is None else Factors(factors.values, found)

    def read(first: int, end: int) -> Rows:
        rows = matrix.read(first, end)
        return Rows(rows.codes, times(rows.scales), None if rows.minimums is None else times(rows.minimums))

    return replace(matrix, read=read)


def narrowed(matrix: QuantizedMatrix, inputs: range) -> QuantizedMatrix:
    """The matrix without the inputs outside a range.

    Raises:
        ValueError: the range begins or ends within a group, or groups are not adjacent inputs.
    """
    group, unit = matrix.format.group, matrix.format.unit
    if matrix.order is not None or any(at % unit and at != matrix.depth for at in (inputs.start, inputs.stop)):
        raise ValueError(f"inputs {inputs.start} to {inputs.stop} of {matrix.depth}, in groups of {unit}"
                         + " that are not neighbors" * (matrix.order is not None))
    columns = slice(inputs.start, inputs.stop)
    groups = slice(inputs.start // group, -(-inputs.stop // group)) if group else slice(None)
    units = slice(inputs.start // unit, -(-inputs.stop // unit))

    def read(first: int, end: int) -> Rows:
        rows = matrix.read(first, end)
        return Rows(rows.codes[:, columns].contiguous(), rows.scales.between(groups, units),
                    None if rows.minimums is None else rows.minimums.between(groups, units))

    return replace(matrix, depth=len(inputs), read=read)


def _have_one_order(one: QuantizedMatrix, other: QuantizedMatrix) -> bool:
    if one.order is None or other.order is None:
        return one.order is other.order
    return torch.equal(one.order, other.order)


def _joined(factors: Sequence[Factors]) -> Factors:
    units = [factor.units for factor in factors if factor.units is not None]
    return Factors(torch.cat([factor.values for factor in factors]), torch.cat(units) if units else None)
