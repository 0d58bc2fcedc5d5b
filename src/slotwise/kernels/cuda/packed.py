"""Quantised matrices (`kernels/matrix.py`) as the GPU's kernels read them: the codes of an output one after another.

    more than 4 bits    [ c0 c1 c2 ... ]                                a byte each
    up to 4 bits        [ c0 | cC << 4   c1 | cC+1 << 4   ... ]         a chunk of C codes below, the next one above

C is the chunk of inputs that a product multiplies at a time.  All of a chunk have one scale, and both chunks that share
bytes come of one load, so no code changes its place in registers.  Where inputs are counted in another order (GPTQ's
act-order), codes lie in that order, and products read their inputs in it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from slotwise.kernels.matrix import Factors, Format, QuantisedMatrix

LARGEST_CHUNK, SMALLEST_CHUNK = 64, 16  # inputs
NIBBLE = 4  # bits
AT_A_TIME = 1 << 24  # codes that are unpacked together


@dataclass(frozen=True, slots=True, eq=False)
class PackedMatrix:
    """A matrix on a device.  Scales and minimums have units where the format says so."""

    format: Format
    outputs: int
    depth: int
    codes: Tensor  # [outputs, bytes] uint8
    scales: Factors
    minimums: Factors | None
    levels: Tensor | None  # [codes] float32, of formats with a table
    order: Tensor | None  # [depth] int64, the place of each input
    inputs: Tensor | None  # [depth] int64, the input at each place

    @property
    def chunk(self) -> int:
        """Inputs multiplied at a time."""
        return chunk_of(self.format)


def chunk_of(kind: Format) -> int:
    """The largest chunk whose inputs share a scale; 0 where none does."""
    sizes = (LARGEST_CHUNK, LARGEST_CHUNK // 2, SMALLEST_CHUNK)
    return next((size for size in sizes if kind.group % size == 0), 0)


def refusal(kind: Format) -> str:
    """Why a format cannot be packed: every chunk that tensor cores multiply would cut its groups.  "" where it can."""
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


def pack(matrix: QuantisedMatrix, device: torch.device) -> PackedMatrix:
    """Read a matrix, some outputs at a time.

    Raises:
        ValueError: a format that is refused.
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
    """`codes [outputs, depth]`, behind which zeros fill a row up."""
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
