"""Rows of a quantised table, dequantised from the panels that products read: the embedding of a tied head takes no
memory of its own."""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable

import torch
from llvmlite import ir
from torch import Tensor

from slotwise.kernels.cpu.block_layout import COLUMNS, Layout
from slotwise.kernels.cpu.gemm_blocks import factors
from slotwise.kernels.cpu.jit.compiler import Compiled, kernel, specialised
from slotwise.kernels.cpu.jit.intrinsic import INT, KIND, ElementType, intrinsic
from slotwise.kernels.cpu.launcher import HEADER, THREAD_COUNTER, KernelLauncher
from slotwise.kernels.cpu.linear_blocks import PackedBlocks
from slotwise.kernels.cpu.llvm import behind, write
from slotwise.kernels.cpu.simd import (
    BFLOAT16,
    FLOAT32,
    INT32,
    INT64,
    Real,
    bytes_of,
    fetch_add,
    float32,
    float_of,
    load,
    store,
)
from slotwise.kernels.matrix import Format

(PANELS, TOKEN_IDS, OUT, TOKENS, DEPTH, LAST_ID, LEVELS, ZERO, ORDER, SCALE_BITS,
 SCRATCH) = range(HEADER, HEADER + 11)
QUAD_BYTES = 4 * COLUMNS
FACTOR_BYTES = 4 * COLUMNS
FLOATS = 2 * COLUMNS  # of scratch per thread: scales and minimums of a group

_KINDS = {torch.bfloat16: BFLOAT16, torch.float32: FLOAT32}


def _block_factors(builder: ir.IRBuilder, record: ir.Value, group: ir.Value, target: ir.Value, layout: ElementType
                   ) -> None:
    shape: Layout = layout.instance_class.NUMBERS
    found = factors(builder, shape, record, group, minimum=False)
    if shape.has_minimums:
        found += factors(builder, shape, record, group, minimum=True)
    for place, vector in enumerate(found):
        write(builder, vector, behind(builder, target, 64 * place))


_factors_of: Callable[[int, int, int, Layout], None] = intrinsic(_block_factors, INT, INT, INT, KIND)
"""`_factors_of(record, group, target, layout)`: scales of 32 columns at `target`, then minimums, if any, as float32."""


@kernel
def _field(plane: int, quad: int, column: int, width: int) -> int:
    """Fields of `width` bits of the four codes of a quad, each in a byte."""
    fields = 8 // width
    word = load(plane + quad // fields * QUAD_BYTES, column, INT32) >> (quad % fields * width)
    return word & (((1 << width) - 1) * 0x01010101)


@kernel
def _codes(record: int, quad: int, column: int, layout: Layout) -> int:
    """Four codes of a quad, each in a byte."""
    bits = layout.bits
    width = 8 if bits == 8 else 4 if bits >= 4 else 2  # of the first plane
    codes = _field(record, quad, column, width)
    if bits > width:
        second = record + width * layout.record * COLUMNS // 8
        codes |= _field(second, quad, column, bits - width) << width
    return codes


@kernel
def _look_up(words: int, row: int, target: int, room: int, kind: Real, layout: Layout) -> None:
    """One row of the table to `target`."""
    depth, order, levels = load(words, DEPTH, INT64), load(words, ORDER, INT64), load(words, LEVELS, INT64)
    zero, scale = float32(load(words, ZERO, INT64)), float_of(load(words, SCALE_BITS, INT64))
    records, column = (depth + layout.record - 1) // layout.record, row % COLUMNS
    group_size = layout.record // layout.groups
    for index in range(records):
        record = load(words, PANELS, INT64) + (row // COLUMNS * records + index) * layout.record_bytes
        for group in range(layout.groups):
            _factors_of(record, group, room, layout)
            factor = load(room, column, FLOAT32)
            minimum = load(room + FACTOR_BYTES, column, FLOAT32) if layout.has_minimums else float32(0)
            begin = group * group_size
            count = min(group_size, depth - index * layout.record - begin)
            for i in range(count):
                place = begin + i
                code = _codes(record, place // 4, column, layout) >> (place % 4 * 8) & 255
                level = load(levels, code, FLOAT32) if layout.has_table else float32(code) - zero
                place += index * layout.record
                if order != 0:
                    place = load(order, place, INT32)
                store(target, place, (factor * level - minimum) * scale, kind)


@kernel
def _embed(words: int, kind: Real, layout: Layout) -> None:
    """Rows of the table by token ids.  An id outside the table is clamped: no other memory is read."""
    tokens, depth = load(words, TOKENS, INT64), load(words, DEPTH, INT64)
    room = load(words, SCRATCH, INT64) + fetch_add(words + THREAD_COUNTER, 1) * FLOATS * 4
    token = fetch_add(words, 1)
    while token < tokens:
        row = min(max(load(load(words, TOKEN_IDS, INT64), token, INT64), 0), load(words, LAST_ID, INT64))
        _look_up(words, row, load(words, OUT, INT64) + token * depth * bytes_of(kind), room, kind, layout)
        token = fetch_add(words, 1)


@functools.cache
def compiled(layout: Layout, kind: torch.dtype) -> Compiled:
    """The kernel for a table in a layout and embeddings of a type."""
    return specialised(_embed, _KINDS[kind], layout)


def lookup(
    packed: PackedBlocks, kind: Format, dtype: torch.dtype, scale: float, launcher: KernelLauncher
) -> Callable[[Tensor], Tensor]:
    """From token ids `[tokens]` int64 to rows of a table `[tokens, depth]` of `dtype`, times `scale`.

    Args:
        kind: the table's format.
    """
    levels = torch.tensor(kind.levels or (0.0,), dtype=torch.float32) - kind.zero
    (scale_bits,) = struct.unpack("<I", struct.pack("<f", scale))
    code = compiled(packed.layout, dtype)

    def look_up(token_ids: Tensor) -> Tensor:
        tokens = len(token_ids)
        out = launcher.empty((tokens, packed.depth), dtype)
        launcher.give(
            packed.panels.data_ptr(), token_ids.data_ptr(), out.data_ptr(), tokens, packed.depth, packed.outputs - 1,
            levels.data_ptr(), kind.zero, 0 if packed.order is None else packed.order.data_ptr(), scale_bits,
            launcher.scratch(launcher.threads * FLOATS))
        (launcher.alone if tokens == 1 else launcher.together)(code)
        return out

    return look_up
