"""Packs a quantised matrix into the panels of `block_layout.py`, some outputs at a time."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from slotwise.kernels.cpu.block_layout import COLUMNS, NIBBLE, PLANES, Layout
from slotwise.kernels.cpu.memory import Panels
from slotwise.kernels.matrix import QuantisedMatrix, Rows

QUAD = 4
CHUNK = 1 << 23  # weights unpacked at once


def pack(matrix: QuantisedMatrix, layout: Layout, memory: Panels, *, is_gated: bool = False) -> Tensor:
    """`matrix` as panels: `[panels, records, bytes]` uint8.

    Args:
        memory: where the panels will lie.
        is_gated: its outputs are gates, then as many of what they gate: a panel becomes half of either.
    """
    halves = 2 if is_gated else 1
    panels = -(-(matrix.outputs // halves) // (COLUMNS // halves))
    what = f"{type(layout).__name__} of {matrix.outputs} x {matrix.depth}{' in halves' * is_gated}"
    return memory.filled(what, (panels, layout.records(matrix.depth), layout.record_bytes),
                         lambda target: _fill(target, matrix, layout, halves))


def _fill(panels: Tensor, matrix: QuantisedMatrix, layout: Layout, halves: int) -> None:
    """Packs into `panels`, of which each has columns of every one of the `halves` of the outputs."""
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
    """Pieces `[panels, records, ..., COLUMNS, bytes]`, one behind the other in each record."""
    at = 0
    for piece in pieces:
        flat = piece.flatten(2)
        target[..., at : at + flat.shape[2]] = flat
        at += flat.shape[2]


def _parts(rows: Rows, matrix: QuantisedMatrix, layout: Layout, columns: int) -> list[Tensor]:
    """Planes, scales, minimums and units, each `[panels, records, ..., columns, bytes]`."""
    records, more = layout.records(matrix.depth), -len(rows.codes) % columns

    def in_records(values: Tensor, per_record: int) -> Tensor:
        """`[outputs, n]` as `[panels, records, per_record, columns, bytes]`, with zeros for what is missing."""
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


def _of_records(values: Tensor, matrix: QuantisedMatrix, layout: Layout) -> Tensor:
    """A group's factor `[outputs, groups]` once for each of its records, where it has several."""
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
