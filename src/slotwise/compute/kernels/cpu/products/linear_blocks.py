"""Products with quantized matrices (`compute/kernels/matrix.py`), and rows of quantized tables, from the same panels.

Weights stay the codes of their file, in the panels of `block_layout.py`, and are unpacked in registers; activations are
quantized by `quantize.py`.  Threads take items, a block of rows times a panel, from `threads.py`.

    a thread's scratch    [ a tile | an unfinished unit | units x rows of bytes | units x rows of facts | of tiles ]

Few rows are multiplied by instructions on vectors (`gemm_blocks.py`), more than `TALLEST` by AMX's tiles, where there
are any (`gemm_block_tiles.py`).
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from llvmlite import ir
from torch import Tensor

from slotwise.compute.kernels.cpu.jit.compiler import (
    INT,
    KIND,
    CompiledKernel,
    ElementType,
    intrinsic,
    kernel,
    specialized,
)
from slotwise.compute.kernels.cpu.jit.llvm import behind, write
from slotwise.compute.kernels.cpu.launcher import HEADER, THREAD_COUNTER, KernelLauncher
from slotwise.compute.kernels.cpu.processor import AVX512, has
from slotwise.compute.kernels.cpu.products import gemm_block_tiles, tiles
from slotwise.compute.kernels.cpu.products.block_layout import (
    COLUMNS,
    LARGEST_UNIT,
    STEP,
    BlockLayout,
    layout_of,
    levels_of,
    pack,
)
from slotwise.compute.kernels.cpu.products.gemm import GATED, PLAIN, WIDE
from slotwise.compute.kernels.cpu.products.gemm_block_tiles import begin_tiles, end_tiles, tile_gemm
from slotwise.compute.kernels.cpu.products.gemm_blocks import (
    HEIGHTS,
    MIDDLE,
    TALLEST,
    block_gemm,
    factors,
    has_signed_levels,
)
from slotwise.compute.kernels.cpu.products.linear import (
    DEPTH,
    FORM,
    NO_TABLES,
    OUT,
    OUTPUTS,
    SCRATCH,
    SCRATCH_BYTES,
    STORED,
    THREADS,
    RowBlock,
    Tables,
    block_at,
    copy_results,
    in_panels,
    num_blocks,
    panel_after,
    result_bytes,
)
from slotwise.compute.kernels.cpu.products.quantize import (
    CENTER,
    FACTS,
    HEAD,
    STRIDE,
    TABLE,
    quantize_rows,
    quantized,
)
from slotwise.compute.kernels.cpu.simd import (
    BFLOAT16,
    FLOAT32,
    INT32,
    INT64,
    Real,
    Whole,
    bytes_of,
    fetch_add,
    float32,
    float_of,
    load,
    prefetch_all,
    prefetch_soon,
    store,
)
from slotwise.compute.kernels.cpu.threads import NOTHING, pop, rows_of_a_block, upcoming
from slotwise.compute.kernels.matrix import Format, QuantizedMatrix

# The gates of a panel that is half gates, half up projection.
GATES = COLUMNS // 2
# Bytes of weights between what is read and what is prefetched, where a panel is read only once.
AHEAD = 8192
# Bytes of activations quantized at once: a part of a typical second-level cache.
BLOCK_BYTES = 1 << 18
TILE_BYTES = max(TALLEST, gemm_block_tiles.TALLEST) * COLUMNS * 4
# Bytes of scratch before the activations.
HELD = TILE_BYTES + LARGEST_UNIT * 4

_KINDS = {torch.bfloat16: BFLOAT16, torch.float32: FLOAT32}
PATHS = {"amx_int8": Whole(np.uint32(0)), "vnni": Whole(np.uint16(0)), "integer": Whole(np.uint8(0)),
         "software tiles": Whole(np.uint64(0))}
"""The values by whose types `gemm_blocks.py` and `gemm_block_tiles.py` tell paths apart."""

TILED = ("amx_int8", "software tiles")
# The smallest unit whose products are faster by AMX's tiles; a processor that has tiles also has VNNI.
TILED_UNIT = 32
# An argument: rows of the tallest tile.
TALL = CENTER + 1


def has_vnni_gemm() -> bool:
    """Whether this processor adds products of bytes in fours: AVX-512 VNNI, or AVX-VNNI where there is no AVX-512."""
    return has("avx512vnni") if AVX512 else has("avxvnni")


@functools.cache
def amx_obstacle() -> str:
    """Why this process cannot multiply bytes by AMX; empty where it can, and a test product was right."""
    if why := tiles.obstacle("amx-int8"):
        return why
    x, weight = (torch.arange(96 * rows).mul(7).remainder(255).sub(127).view(rows, 96).bfloat16() for rows in (40, 64))
    x[:, ::32] = weight[:, ::32] = 127  # the largest of each group: numbers are quantized without loss
    packed = pack_blocks(quantized(weight, HEAD), None, "amx_int8", launcher := KernelLauncher(1))
    return "" if torch.allclose(
        blocks_linear([packed], launcher)(x).float(), x.float() @ weight.float().T, rtol=2**-7) else (
        "its products are wrong here")


@kernel
def _multiply(
    words: int, room: int, memory: int, block: RowBlock, row: int, panel: int, following: int, kind: Real,
    layout: BlockLayout, path: Whole,
) -> int:
    """Multiply one tile: a panel with rows of a block from `row` on; returns the number of rows.

    Meanwhile it prefetches its share of the panel at `following`; the only tile of a panel prefetches its own panel, a
    little ahead.  A panel wider than the rest of the output is stored to the scratch `room` first.  `memory` is for
    tiles.
    """
    stored, (first, rows, weight, bias, _) = load(words, STORED, INT64), block
    records = (load(words, DEPTH, INT64) + layout.record - 1) // layout.record
    units = records * (layout.record // layout.unit)
    tall, height = load(words, TALL, INT64), 1
    for size in HEIGHTS:
        if size <= rows - row:
            height = size
    is_tiled = tall > TALLEST and rows - row > TALLEST
    if is_tiled:
        height = min(tall, rows - row)
    tiles, steps = (rows + tall - 1) // tall, layout.record // STEP
    weight += panel * records * layout.record_bytes
    share = (layout.record_bytes // steps + tiles - 1) // tiles
    asked = weight + AHEAD if tiles == 1 else following + row // tall * share * steps * records
    form = load(words, FORM, INT64)
    width = GATES if form == GATED else COLUMNS
    left, size = stored - panel * width, result_bytes(form, kind)
    row_bytes = load(words, STRIDE, INT64) * size
    place = load(words, OUT, INT64) + (first + row) * row_bytes + panel * width * size
    target, stride = (place, row_bytes) if left >= width else (room, width * size)
    held = room + HELD
    facts = held + units * rows * layout.unit + row * FACTS
    bias += panel * COLUMNS * 4
    prefetch_soon(bias, COLUMNS * 4)
    if is_tiled:
        tile_gemm(
            height, memory, weight, records, load(words, TABLE, INT64), held + row * layout.unit, facts, rows, target,
            stride, bias, form, asked, share, layout, path, kind)
    else:
        block_gemm(
            height, weight, records, load(words, TABLE, INT64), held + row * layout.unit, facts, rows, target, stride,
            bias, form, asked, share, layout, path, kind)
    if left < width:
        for i in range(height):
            copy_results(target + i * stride, place + i * row_bytes, left, form, kind)
    return height


@kernel
def _product(words: int, kind: Real, layout: BlockLayout, path: Whole) -> None:
    threads, panels = load(words, THREADS, INT64), (load(words, OUTPUTS, INT64) + COLUMNS - 1) // COLUMNS
    items = num_blocks(words) * panels
    panel_bytes = (load(words, DEPTH, INT64) + layout.record - 1) // layout.record * layout.record_bytes
    thread = fetch_add(words + THREAD_COUNTER, 1)
    room = load(words, SCRATCH, INT64) + thread * load(words, SCRATCH_BYTES, INT64)
    memory = room + load(words, SCRATCH_BYTES, INT64) - gemm_block_tiles.SCRATCH_BYTES
    held = -1
    begin_tiles(memory, path)
    first = upcoming(words, thread, threads, items)
    if first != NOTHING:  # while rows are quantized
        prefetch_all(block_at(words, first // panels).weights + first % panels * panel_bytes, AHEAD)
    item = pop(words, thread, threads, items)
    while item != NOTHING:
        number, panel = item // panels, item % panels
        block = block_at(words, number)
        if number != held:
            quantize_rows(words, block, room + HELD, room + TILE_BYTES, layout, kind)
            held = number
        after = upcoming(words, thread, threads, items)
        following = panel_after(words, item, after, panels, panel_bytes, AHEAD)
        row = 0
        while row < block.rows:
            row += _multiply(words, room, memory, block, row, panel, following, kind, layout, path)
        item = pop(words, thread, threads, items)
    end_tiles(memory, path)


@functools.cache
def product_kernel(layout: BlockLayout, kind: torch.dtype, path: str) -> CompiledKernel:
    """The kernel for weights in a layout and activations of a type, by one of `PATHS`."""
    return specialized(_product, _KINDS[kind], layout, PATHS[path])


@dataclass(frozen=True, slots=True)
class PackedBlocks:
    """A quantized matrix in panels, for many products.

    Args:
        table: 16 levels, where the layout has a table.
        order: int32, the input at each place.
        center: float32, of the input at each place; the bias includes their product.
        outputs: of the panels.
        stored: numbers per token in the result: half of the outputs where these are gates and up projection.
    """

    panels: Tensor
    bias: Tensor
    table: Tensor
    order: Tensor | None
    center: Tensor
    zero_and_factor: int
    layout: BlockLayout
    depth: int
    outputs: int
    stored: int
    path: str
    threads: int

    def kernel(self, kind: torch.dtype) -> CompiledKernel:
        """The kernel for activations of `kind`."""
        return product_kernel(self.layout, kind, self.path)

    @property
    def floats(self) -> int:
        """Floats of scratch memory per thread."""
        behind = gemm_block_tiles.SCRATCH_BYTES if self.path in TILED else 0
        return (HELD + self._most * self._row_bytes + behind + 63) // 64 * 16

    @property
    def block_rows(self) -> Callable[[int], int]:
        """Rows quantized at once, for a number of tokens."""
        return lambda tokens: rows_of_a_block(tokens, self._most, self.threads)

    @property
    def _row_bytes(self) -> int:
        """Bytes of a quantized row."""
        layout = self.layout
        return layout.records(self.depth) * layout.record // layout.unit * (layout.unit + FACTS)

    @property
    def _most(self) -> int:
        """Rows quantized at once."""
        return max(self._tall, BLOCK_BYTES // self._row_bytes // self._tall * self._tall)

    @property
    def _tall(self) -> int:
        """Rows of the tallest tile."""
        return gemm_block_tiles.TALLEST if self.path in TILED else TALLEST

    def arguments(
        self, launcher: KernelLauncher, x: int, out: int, tokens: int, stride: int = 0, tables: Tables = NO_TABLES, *,
        is_wide: bool = False,
    ) -> tuple[int, ...]:
        """The arguments of the product of `tokens` rows at `x` to `out`; valid until the launcher's next kernel.

        Args:
            stride: numbers of a row of the result; 0: as many as this product has.
            tables: of the rows; with a table of blocks `tokens` is 1.
            is_wide: results are float32, whatever the activations are.
        """
        floats = self.floats
        form = WIDE if is_wide else GATED if self.stored != self.outputs else PLAIN
        return (
            x, self.panels.data_ptr(), self.bias.data_ptr(), 0 if self.order is None else self.order.data_ptr(), out,
            tokens, self.depth, self.outputs, self.stored, form, rows_of_a_block(tokens, self._most, self.threads),
            launcher.scratch(launcher.threads * floats), floats * 4, launcher.threads, *tables, stride or self.stored,
            self.table.data_ptr(), self.zero_and_factor, self.center.data_ptr(), self._tall)

    def set_center(self, center: Tensor, launcher: KernelLauncher) -> None:
        """Quantize distances from `center [depth]` from now on, a tensor of the activations' type; once.

        Its product is exact: it is that of rows with a single input other than 0 in each unit.
        """
        unit, places = self.layout.unit, torch.arange(self.depth)
        inputs = places if self.order is None else self.order.long()
        rows, out = torch.zeros(unit, self.depth, dtype=center.dtype), torch.empty(unit, self.outputs)
        rows[places % unit, inputs] = center[inputs]
        replace(self, stored=self.outputs).multiply(rows, out, 0, launcher)
        bias = self.bias.flatten()[: self.outputs]
        bias += out.double().sum(0) - unit * bias
        self.center[: self.depth] = center[inputs]

    def multiply(self, x: Tensor, out: Tensor, at: int, launcher: KernelLauncher) -> None:
        """`x [tokens, depth]`, contiguous, to the columns of `out` from `at` on."""
        launcher.give(*self.arguments(
            launcher, x.data_ptr(), out.data_ptr() + at * out.itemsize, len(x), out.shape[1],
            is_wide=out.dtype != x.dtype))
        launcher.together(self.kernel(x.dtype))


class BlocksProduct:
    """The product with matrices of one depth: their outputs concatenated, as float32 if it `is_wide`."""

    def __init__(self, parts: Sequence[PackedBlocks], launcher: KernelLauncher, *, is_wide: bool) -> None:
        self._parts, self._launcher, self._is_wide = parts, launcher, is_wide
        self._starts = [sum(part.stored for part in parts[:place]) for place in range(len(parts))]
        self._depth, self._width = parts[0].depth, sum(part.stored for part in parts)
        self._seen: list[Tensor] | None = None  # inputs that are kept for `center`

    def __call__(self, x: Tensor) -> Tensor:
        rows = x.contiguous().view(-1, self._depth)
        out = self._launcher.empty((len(rows), self._width), torch.float32 if self._is_wide else x.dtype)
        for part, start in zip(self._parts, self._starts, strict=True):
            part.multiply(rows, out, start, self._launcher)
        if self._seen is not None:
            self._seen.append(rows.clone())
        return out if x.dim() == rows.dim() else out.view(*x.shape[:-1], self._width)

    def keep_inputs(self) -> None:
        """Keep inputs until `center`."""
        self._seen = []

    def center(self) -> None:
        """Quantize distances from the means of the inputs kept, if any, where that lessens the error.

        Matrices that have a center already keep it: two products may share one.
        """
        seen, self._seen = self._seen, None
        if not seen:
            return
        center = center_of(torch.cat(seen), self._parts[0].layout.unit)
        if center is not None:
            for part in self._parts:
                if not part.center.any():
                    part.set_center(center, self._launcher)


# A row with a number so many times as large as that of the median row is left out of the center.
EXCEPTION = 4.0
# The most that may be left of the squares of units' largest numbers: rounding errors are proportional to these.
LEFT = 0.8


def center_of(rows: Tensor, unit: int) -> Tensor | None:
    """The mean of `rows [tokens, depth]`, in their type; None where distances from it would not be much smaller.

    Sums are float64: torch adds in an order that depends on its threads, which must not change an answer.
    """
    values = rows.double()
    largest_of_row = values.abs().amax(1)
    usual = values[largest_of_row <= EXCEPTION * largest_of_row.median()]
    center = usual.mean(0).to(rows.dtype)

    def squares(values: Tensor) -> Tensor:
        padded: Tensor = F.pad(values, (0, -values.shape[1] % unit))
        largest: Tensor = padded.unflatten(1, (-1, unit)).abs().amax(2)
        return largest.square().sum()

    return center if squares(usual - center.double()) < LEFT * squares(usual) else None


def blocks_linear(parts: Sequence[PackedBlocks], launcher: KernelLauncher, *, is_wide: bool = False) -> BlocksProduct:
    """The product with matrices of one depth: their outputs concatenated, as float32 if it `is_wide`."""
    return BlocksProduct(parts, launcher, is_wide=is_wide)


def path_for(layout: BlockLayout, path: str) -> str:
    """The path of a layout where other layouts take `path`; results have the same bits."""
    return "vnni" if path == "amx_int8" and layout.unit < TILED_UNIT else path


def pack_blocks(
    matrix: QuantizedMatrix, bias: Tensor | None, path: str, launcher: KernelLauncher, *, is_gated: bool = False
) -> PackedBlocks:
    """Pack `matrix` once for many products.

    Args:
        is_gated: its outputs are gates, then the up projection; the result is silu(gate) * up.

    Raises:
        ValueError: products with its format are not supported.
    """
    layout, levels = layout_of(matrix.format), levels_of(matrix.format)
    panels = pack(matrix, layout, launcher.panels, is_gated=is_gated)
    added = torch.zeros(matrix.outputs) if bias is None else bias.float()
    table = torch.tensor((*levels.table, *[0] * (16 - len(levels.table))), dtype=torch.uint8)
    (factor_bits,) = struct.unpack("<I", struct.pack("<f", levels.factor))
    path = path_for(layout, path)
    zero = levels.zero - (MIDDLE if path == "integer" and has_signed_levels(layout) else 0)
    return PackedBlocks(
        panels, in_panels(added, COLUMNS, is_gated=is_gated), table,
        None if matrix.order is None else matrix.order.argsort().to(torch.int32),
        torch.zeros(layout.records(matrix.depth) * layout.record), zero << 32 | factor_bits,
        layout, matrix.depth, len(panels) * COLUMNS if is_gated else matrix.outputs,
        matrix.outputs // 2 if is_gated else matrix.outputs, path, launcher.threads)


# Rows of a quantized table, dequantized from the panels that products read: a tied head's embedding takes no memory of
# its own.

# Arguments in words after the header.
(TABLE_PANELS, TOKEN_IDS, EMBEDDING, EMBEDDED, TABLE_DEPTH, LAST_ID, LEVELS, TABLE_ZERO, TABLE_ORDER, SCALE_BITS,
 FACTORS_ROOM) = range(HEADER, HEADER + 11)
QUAD_BYTES = 4 * COLUMNS
FACTOR_BYTES = 4 * COLUMNS
# Scratch memory per thread: scales and minimums of a group.
LOOKUP_FLOATS = 2 * COLUMNS


def _block_factors(builder: ir.IRBuilder, record: ir.Value, group: ir.Value, target: ir.Value, layout: ElementType
                   ) -> None:
    shape: BlockLayout = layout.instance_class.NUMBERS
    found = factors(builder, shape, record, group, minimum=False)
    if shape.has_minimums:
        found += factors(builder, shape, record, group, minimum=True)
    for place, vector in enumerate(found):
        write(builder, vector, behind(builder, target, 64 * place))


_factors_of: Callable[[int, int, int, BlockLayout], None] = intrinsic(_block_factors, INT, INT, INT, KIND)
"""`_factors_of(record, group, target, layout)`: scales of 32 columns at `target`, then minimums, if any, as float32."""


@kernel
def _field(plane: int, quad: int, column: int, width: int) -> int:
    """Fields of `width` bits of the four codes of a quad, each in a byte."""
    fields = 8 // width
    word = load(plane + quad // fields * QUAD_BYTES, column, INT32) >> (quad % fields * width)
    return word & (((1 << width) - 1) * 0x01010101)


@kernel
def _codes(record: int, quad: int, column: int, layout: BlockLayout) -> int:
    """Four codes of a quad, each in a byte."""
    bits = layout.bits
    width = 8 if bits == 8 else 4 if bits >= 4 else 2  # of the first plane
    codes = _field(record, quad, column, width)
    if bits > width:
        second = record + width * layout.record * COLUMNS // 8
        codes |= _field(second, quad, column, bits - width) << width
    return codes


@kernel
def _look_up(words: int, row: int, target: int, room: int, kind: Real, layout: BlockLayout) -> None:
    """One row of the table to `target`."""
    depth, order, levels = load(words, TABLE_DEPTH, INT64), load(words, TABLE_ORDER, INT64), load(words, LEVELS, INT64)
    zero, scale = float32(load(words, TABLE_ZERO, INT64)), float_of(load(words, SCALE_BITS, INT64))
    records, column = (depth + layout.record - 1) // layout.record, row % COLUMNS
    group_size = layout.record // layout.groups
    for index in range(records):
        record = load(words, TABLE_PANELS, INT64) + (row // COLUMNS * records + index) * layout.record_bytes
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
def _embed(words: int, kind: Real, layout: BlockLayout) -> None:
    """Rows of the table by token ids.  An id outside the table is clamped: no other memory is read."""
    tokens, depth = load(words, EMBEDDED, INT64), load(words, TABLE_DEPTH, INT64)
    room = load(words, FACTORS_ROOM, INT64) + fetch_add(words + THREAD_COUNTER, 1) * LOOKUP_FLOATS * 4
    token = fetch_add(words, 1)
    while token < tokens:
        row = min(max(load(load(words, TOKEN_IDS, INT64), token, INT64), 0), load(words, LAST_ID, INT64))
        _look_up(words, row, load(words, EMBEDDING, INT64) + token * depth * bytes_of(kind), room, kind, layout)
        token = fetch_add(words, 1)


@functools.cache
def lookup_kernel(layout: BlockLayout, kind: torch.dtype) -> CompiledKernel:
    """The kernel for a table in a layout and embeddings of a type."""
    return specialized(_embed, _KINDS[kind], layout)


def lookup(
    packed: PackedBlocks, kind: Format, dtype: torch.dtype, scale: float, launcher: KernelLauncher
) -> Callable[[Tensor], Tensor]:
    """From token ids `[tokens]` int64 to rows of a table `[tokens, depth]` of `dtype`, times `scale`.

    Args:
        kind: the table's format.
    """
    levels = torch.tensor(kind.levels or (0.0,), dtype=torch.float32) - kind.zero
    (scale_bits,) = struct.unpack("<I", struct.pack("<f", scale))
    code = lookup_kernel(packed.layout, dtype)

    def look_up(token_ids: Tensor) -> Tensor:
        tokens = len(token_ids)
        out = launcher.empty((tokens, packed.depth), dtype)
        launcher.give(
            packed.panels.data_ptr(), token_ids.data_ptr(), out.data_ptr(), tokens, packed.depth, packed.outputs - 1,
            levels.data_ptr(), kind.zero, 0 if packed.order is None else packed.order.data_ptr(), scale_bits,
            launcher.scratch(launcher.threads * LOOKUP_FLOATS))
        (launcher.alone if tokens == 1 else launcher.together)(code)
        return out

    return look_up
