"""How packed quantized matrices lie in memory for `linear_blocks.py`: close to the bytes of their file.

Outputs are panels of 32 columns; a panel is records of a few groups along depth:

    record     [ planes of codes | scales | minimums | units of scales | units of minimums ]
    planes     fields of 8, 4, 2 or 1 bits: a code of 6 bits is one of 4 and one of 2
    a plane    quads of depth x 32 columns x 4 codes; a byte holds the same place of 2, 4 or 8 consecutive quads
    scales     groups x 32 columns, of the kind that the format stores

A *unit* is the depth over which products are added as integers: a group of weights, or a part of a group.
"""

from __future__ import annotations

import functools
from math import lcm
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from slotwise.compute.kernels.cpu.memory import Panels
from slotwise.compute.kernels.matrix import Format, QuantizedMatrix, Rows

# Columns of a panel.
COLUMNS = 32
# The depth of two quads, which are unpacked together.
STEP = 8
# The least and the most depth of a record.
LEAST, MOST = 32, 256
LARGEST_UNIT = 64
PLANES = {8: (8,), 6: (4, 2), 5: (4, 1), 4: (4,), 3: (2, 1), 2: (2,)}
"""Widths of the planes, lowest bits first, by the bits of a code; other codes are widened to the next entry."""
HALF, BRAIN, SINGLE, BYTE, NIBBLE = range(5)
"""Kinds of scales: float16, bfloat16, float32; and int8, or 4 bits next to 4 bits of minimum, times a float16."""

_FLOATS = {torch.float16: HALF, torch.bfloat16: BRAIN, torch.float32: SINGLE}
_SIZES = {HALF: 2, BRAIN: 2, SINGLE: 4, BYTE: 1, NIBBLE: 1}
_NIBBLE_BITS = 4


class BlockLayout(NamedTuple):
    """The layout of a format.  Each has a subclass, made by `layout_of`, so that Numba compiles kernels for it.

    Args:
        unit, record: their depth.
        groups: of a record.
        kind: of scales.
        is_wide: levels may be above 127.
    """

    bits: int
    unit: int
    groups: int
    record: int
    record_bytes: int
    kind: int
    has_minimums: int
    has_zero: int
    has_table: int
    is_wide: int

    @property
    def scales_at(self) -> int:
        """Bytes from a record's start to its scales."""
        return sum(PLANES[self.bits]) * self.record * COLUMNS // 8

    @property
    def minimums_at(self) -> int:
        """Bytes from a record's start to its minimums; for `NIBBLE` they are in the scales' bytes."""
        return self.scales_at + (0 if self.kind == NIBBLE else self._factor_bytes)

    @property
    def units_at(self) -> int:
        """Bytes from a record's start to the unit of its scales."""
        return self.minimums_at + (self._factor_bytes if self.has_minimums or self.kind == NIBBLE else 0)

    @property
    def minimum_units_at(self) -> int:
        """Bytes from a record's start to the unit of its minimums."""
        return self.units_at + (2 * COLUMNS if self.has_units else 0)

    @property
    def has_units(self) -> bool:
        return self.kind in (BYTE, NIBBLE)

    @property
    def _factor_bytes(self) -> int:
        return self.groups * COLUMNS * _SIZES[self.kind]

    @property
    def size(self) -> int:
        """Bytes of a record."""
        return self.minimum_units_at + (2 * COLUMNS if self.has_units and self.has_minimums else 0)

    def records(self, depth: int) -> int:
        """Records of a panel."""
        return -(-depth // self.record)

    def bytes(self, outputs: int, depth: int) -> int:
        """Bytes of a packed matrix."""
        return -(-outputs // COLUMNS) * self.records(depth) * self.record_bytes


class Levels(NamedTuple):
    """What codes stand for, as integers: `factor * (table[code] - zero)`.

    The table has levels of 0 ... 255; (): the codes themselves.
    """

    table: tuple[int, ...]
    zero: int
    factor: float


@functools.cache
def levels_of(kind: Format) -> Levels:
    """The levels of a format.

    Levels that are multiples of a half are exact; others (NF4) are rounded to 1/127 of the largest.

    Raises:
        ValueError: there are more than 16 levels: only products of integers are supported here.
    """
    if not kind.levels:
        return Levels((), kind.zero, 1.0)
    if len(kind.levels) > 1 << _NIBBLE_BITS:
        raise ValueError(f"products of {len(kind.levels)} levels are not supported on device cpu")
    largest = max(map(abs, kind.levels))
    steps = next((steps for steps in (1, 2) if largest * steps <= 127 and all(
        float(level * steps).is_integer() for level in kind.levels)), 127 / largest)
    integers = [round(level * steps) for level in kind.levels]
    zero = -min(*integers, 0)
    return Levels(tuple(integer + zero for integer in integers), zero + kind.zero, 1 / steps)


def refusal(kind: Format) -> str:
    """Why products with a format are not supported, in one sentence; "" where they are."""
    try:
        layout_of(kind)
    except ValueError as error:
        return str(error)
    return ""


@functools.cache
def layout_of(kind: Format) -> BlockLayout:
    """The layout for a format.

    Raises:
        ValueError: products with the format are not supported.
    """
    levels = levels_of(kind)
    if kind.group % 16:
        raise ValueError(f"groups of {kind.group} weights are not supported on device cpu: only multiples of 16 are")
    if levels.zero and kind.has_minimums:
        raise ValueError("a zero point together with minimums is not supported on device cpu")
    bits = next(bits for bits in sorted(PLANES) if bits >= kind.bits)
    unit = next(unit for unit in (LARGEST_UNIT, 32, 16) if kind.group % unit == 0)
    record = kind.group * kind.groups_per_unit or lcm(kind.group or LARGEST_UNIT, LEAST)
    if record > MOST and kind.group % LARGEST_UNIT == 0 and not kind.groups_per_unit:
        record = LARGEST_UNIT  # its scale is stored again with each
    if record > MOST or record % LEAST:
        raise ValueError(f"groups of {kind.group} weights are not supported on device cpu")
    scale = _FLOATS.get(kind.scale, BYTE)
    if kind.scale_bits <= _NIBBLE_BITS and scale == BYTE and kind.has_minimums:
        scale = NIBBLE
    made = BlockLayout(bits, unit, max(1, record // (kind.group or record)), record, 0, scale, int(kind.has_minimums),
                  int(levels.zero != 0), int(bool(levels.table)),
                  int(max(levels.table, default=(1 << bits) - 1) > 127))
    return _of_its_own_type(made._replace(record_bytes=made.size))


@functools.cache
def _of_its_own_type(layout: BlockLayout) -> BlockLayout:
    """The same numbers in a subclass, whose name is part of the names of the kernels compiled for it."""
    name = f"Layout_{'_'.join(map(str, layout))}"
    own = type(name, (BlockLayout,), {"__slots__": (), "__module__": __name__, "NUMBERS": layout})
    made: BlockLayout = own(*layout)
    return made


QUAD = 4
# Weights that are unpacked at once.
CHUNK = 1 << 23


def pack(matrix: QuantizedMatrix, layout: BlockLayout, memory: Panels, *, is_gated: bool = False) -> Tensor:
    """`matrix` as panels: `[panels, records, bytes]` uint8.

    Args:
        memory: where the panels will lie.
        is_gated: its outputs are gates, then the up projection: a panel becomes half of either.
    """
    halves = 2 if is_gated else 1
    panels = -(-(matrix.outputs // halves) // (COLUMNS // halves))
    what = f"{type(layout).__name__} of {matrix.outputs} x {matrix.depth}{' in halves' * is_gated}"
    return memory.filled(what, (panels, layout.records(matrix.depth), layout.record_bytes),
                         lambda target: _fill(target, matrix, layout, halves))


def _fill(panels: Tensor, matrix: QuantizedMatrix, layout: BlockLayout, halves: int) -> None:
    """Pack into `panels`, each of which has columns of all `halves` of the outputs."""
    columns, outputs = COLUMNS // halves, matrix.outputs // halves
    many = max(1, CHUNK // (COLUMNS * matrix.depth))
    inputs = None if matrix.order is None else matrix.order.argsort()
    for first in range(0, len(panels), many):
        target = panels[first : first + many]
        begin, end = first * columns, min((first + many) * columns, outputs)
        parts = []
        for half in range(halves):
            rows = matrix.read(half * outputs + begin, half * outputs + end)
            if inputs is not None:
                rows = rows._replace(codes=rows.codes[:, inputs])
            parts.append(_parts(rows, matrix, layout, columns))
        _write(target, [torch.cat(pieces, dim=-2) for pieces in zip(*parts, strict=True)])


def _write(target: Tensor, pieces: list[Tensor]) -> None:
    """Write pieces `[panels, records, ..., COLUMNS, bytes]` one after another into each record."""
    at = 0
    for piece in pieces:
        flat = piece.flatten(2)
        target[..., at : at + flat.shape[2]] = flat
        at += flat.shape[2]


def _parts(rows: Rows, matrix: QuantizedMatrix, layout: BlockLayout, columns: int) -> list[Tensor]:
    """Planes, scales, minimums and units, each `[panels, records, ..., columns, bytes]`."""
    records, more = layout.records(matrix.depth), -len(rows.codes) % columns

    def in_records(values: Tensor, per_record: int) -> Tensor:
        """`[outputs, n]` as `[panels, records, per_record, columns, bytes]`, padded with zeros."""
        whole = F.pad(values, (0, records * per_record - values.shape[1], 0, more))
        whole = whole.view(-1, columns, records, per_record).permute(0, 2, 3, 1).contiguous()
        return whole.unsqueeze(-1).view(torch.uint8)

    codes = F.pad(rows.codes, (0, records * layout.record - matrix.depth)).view(torch.int32)
    parts = _planes(in_records(codes, layout.record // QUAD), layout.bits)
    factors = [rows.scales] if rows.minimums is None else [rows.scales, rows.minimums]
    values = [_of_records(factor.values, matrix, layout) for factor in factors]
    if layout.kind == NIBBLE:
        values = [values[0] | values[1] << 4]
    parts += [in_records(value, layout.groups) for value in values]
    return parts + [in_records(factor.units, 1) for factor in factors if factor.units is not None]


def _of_records(values: Tensor, matrix: QuantizedMatrix, layout: BlockLayout) -> Tensor:
    """A group's factors `[outputs, groups]`, repeated for each of its records."""
    group, records = matrix.format.group, layout.records(matrix.depth)
    if 0 < group <= layout.record:
        return values
    return values.repeat_interleave(group // layout.record or records, dim=1)[:, :records]


def _planes(quads: Tensor, bits: int) -> list[Tensor]:
    """Codes `[panels, records, quads, columns, 4]` as planes `[panels, records, quads / fields, columns, 4]`."""
    planes, at = [], 0
    for width in PLANES[bits]:
        fields = 8 // width
        split = (quads >> at & ((1 << width) - 1)).unflatten(2, (-1, fields))
        plane = split[:, :, :, 0]
        for field in range(1, fields):
            plane = plane | split[:, :, :, field] << field * width
        planes.append(plane)
        at += width
    return planes
