"""What adapters add to products (LoRA): one kernel a product, for the rows of all adapters.

Rows are sorted by adapter once a step, and cut into *runs* of up to RUN_ROWS of one adapter, which threads take:

    gather    rows of x, widened to strips of float32             [run, inputs]
    shrink    times a.T of all parts, side by side                [run, ranks]
    expand    times b.T of each part, added to rows of the output [run, outputs]

Both products are computed by `gemm.py`, with factors as its B, so a row's result does not depend on other rows.  Runs
are independent, so threads do not wait between the two products, and the factors of an adapter are read from memory
once for RUN_ROWS rows.  The kernel finds runs and factors by addresses that do not change, so a graph serves steps with
other rows and other adapters.

bfloat16 is multiplied in pairs where the processor does that fast (`PAIRED`).  Then strips are bfloat16, also those of
the first product, and sums begin with the rows of the output, in registers.  Where there are fewer runs than threads,
each thread computes the first product of a run and its share of the second.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from llvmlite import ir
from numba import types
from torch import Tensor

from slotwise.compute.kernels.cpu.cache import padded, stored_order
from slotwise.compute.kernels.cpu.jit.compiler import INT, CompiledKernel, compile_all, intrinsic, kernel, specialized
from slotwise.compute.kernels.cpu.jit.llvm import (
    LONG,
    SHORT,
    WORD,
    Loop,
    behind,
    number,
    prefetch,
    read,
    switch,
    widened,
)
from slotwise.compute.kernels.cpu.launcher import HEADER, THREAD_COUNTER, KernelLauncher
from slotwise.compute.kernels.cpu.memory import aligned
from slotwise.compute.kernels.cpu.processor import PAIR
from slotwise.compute.kernels.cpu.products.gemm import (
    MULTIPLY,
    STRIP,
    STRIP_ROW_BYTES,
    added,
    call_multiply,
    finish_row,
    no_sums,
    pairs_pay,
    read_floats,
)
from slotwise.compute.kernels.cpu.products.gemm_bf16 import STRIP as PAIRED_STRIP
from slotwise.compute.kernels.cpu.products.gemm_bf16 import STRIP_PAIRS, dot_pairs
from slotwise.compute.kernels.cpu.products.gemm_bf16 import STRIP_ROW_BYTES as PAIRED_ROW_BYTES
from slotwise.compute.kernels.cpu.products.linear import in_panels, pack_panels
from slotwise.compute.kernels.cpu.products.linear_bf16 import copy_to_strips
from slotwise.compute.kernels.cpu.simd import (
    BFLOAT16,
    FLOAT32,
    INT32,
    INT64,
    ZERO,
    Real,
    bytes_of,
    fetch_add,
    fill,
    load,
    store,
)
from slotwise.compute.kernels.interface import NO_ADAPTER, LowRank

# The most rows of a run.
RUN_ROWS = 16
# Outputs that are summed before they are added.
CHUNK = 256
# Bytes of factors between what is read and what is prefetched.
AHEAD = 2048

# Arguments in words after the header.
(X, OUT, INPUTS, OUTPUTS, RECORDS, RECORD_BYTES, ROWS, RUNS, SCRATCH, SCRATCH_BYTES, MULTIPLY_ADDRESS,
 THREADS) = range(HEADER, HEADER + 12)
# A record, of an adapter's factors of one product, in words: of all parts, then of each.
A, RANKS, NUM_PARTS, BIAS, PARTS = range(5)
FIRST, COUNT, FIRST_RANK, RANK, B, PART_WORDS = range(6)
# A run; the number of runs comes before the first one.
RUN_FIRST, RUN_COUNT, RUN_PLACE, RUN_WORDS = range(4)


@kernel
def _gather(words: int, rows: int, count: int, target: int, kind: Real) -> None:
    """The `count` rows of x that `rows` names, as strips of float32."""
    inputs = load(words, INPUTS, INT64)
    for row in range(count):
        x = load(words, X, INT64) + load(rows, row, INT32) * inputs * bytes_of(kind)
        for start in range(0, inputs, STRIP):
            strip = target + (start * count + row * STRIP) * 4
            for i in range(min(STRIP, inputs - start)):
                store(strip, i, load(x, start + i, kind), FLOAT32)


@kernel
def _shrink(words: int, record: int, count: int, x: int, target: int, kind: Real) -> None:
    """The products of a run's rows with all ranks, as strips."""
    ranks, size = load(record, RANKS, INT64), bytes_of(kind)
    fill(target, (ranks + STRIP - 1) // STRIP * STRIP * count, ZERO)
    for rank in range(0, ranks, STRIP):
        call_multiply(load(words, MULTIPLY_ADDRESS, INT64), count, min(STRIP, ranks - rank), x, count * STRIP_ROW_BYTES,
                      load(record, A, INT64) + rank * size, ranks * size, PAIR * size, load(words, INPUTS, INT64),
                      target + rank * count * 4, STRIP_ROW_BYTES, AHEAD)


@kernel
def _expand(words: int, record: int, part: int, rows: int, count: int, x: int, sums: int, kind: Real) -> None:
    """Add a part to the rows of the output."""
    outputs, first, size = load(part, COUNT, INT64), load(part, FIRST, INT64), bytes_of(kind)
    rank, first_rank, bias = load(part, RANK, INT64), load(part, FIRST_RANK, INT64), load(record, BIAS, INT64)
    strip = x + (first_rank // STRIP * STRIP * count + first_rank % STRIP) * 4
    for column in range(0, outputs, CHUNK):
        columns = min(CHUNK, outputs - column)
        fill(sums, count * CHUNK, ZERO)
        if rank > 0:
            call_multiply(load(words, MULTIPLY_ADDRESS, INT64), count, (columns + PAIR - 1) // PAIR * PAIR, strip,
                          count * STRIP_ROW_BYTES, load(part, B, INT64) + column * rank * size, PAIR * size,
                          rank * PAIR * size, rank, sums, CHUNK * 4, AHEAD)
        for row in range(count):
            source, at = sums + row * CHUNK * 4, first + column
            if bias != 0:
                for i in range(columns):
                    store(source, i, load(source, i, FLOAT32) + load(bias, at + i, FLOAT32), FLOAT32)
            target = load(words, OUT, INT64) + (load(rows, row, INT32) * load(words, OUTPUTS, INT64) + at) * size
            for i in range(columns):
                store(target, i, load(target, i, kind) + load(source, i, FLOAT32), kind)


@kernel
def _add(words: int, kind: Real) -> None:
    runs, inputs = load(words, RUNS, INT64), load(words, INPUTS, INT64)
    strips = (inputs + STRIP - 1) // STRIP * STRIP * RUN_ROWS * 4
    sums = load(words, SCRATCH, INT64) + fetch_add(words + THREAD_COUNTER, 1) * load(words, SCRATCH_BYTES, INT64)
    x = sums + RUN_ROWS * CHUNK * 4
    number = load(runs, 0, INT64)
    index = fetch_add(words, 1)
    while index < number:
        run = runs + (1 + index * RUN_WORDS) * 8
        rows, count = load(words, ROWS, INT64) + load(run, RUN_FIRST, INT64) * 4, load(run, RUN_COUNT, INT64)
        record = load(words, RECORDS, INT64) + load(run, RUN_PLACE, INT64) * load(words, RECORD_BYTES, INT64)
        if load(record, RANKS, INT64) > 0:
            _gather(words, rows, count, x, kind)
            _shrink(words, record, count, x, x + strips, kind)
        for part in range(load(record, NUM_PARTS, INT64)):
            _expand(words, record, record + (PARTS + part * PART_WORDS) * 8, rows, count, x + strips, sums, kind)
        index = fetch_add(words, 1)


# In pairs of bfloat16.  The outputs of both products are panels, of 16 or 32 columns; a panel's factors are pairs x
# columns x bfloat16[2], and its rows are strips x rows x bfloat16[32], as in `gemm_bf16.py`.

# Columns of a panel, and rows of a tile: its sums fit into registers.
PANEL = 32
TALLEST = 8
# Bytes of factors between what is read and what is prefetched.
PAIRS_AHEAD = 4096
# Bytes of a thread's scratch before its strips: zeros that stand for a bias, then rows of an unfinished panel, and
# their numbers.
BIAS_BYTES = 4 * PANEL
ROOM_BYTES = 2 * PANEL * RUN_ROWS
NUMBERS_AT = BIAS_BYTES + ROOM_BYTES
STRIPS_AT = NUMBERS_AT + 4 * RUN_ROWS


def _sum_pairs(
    builder: ir.IRBuilder, factors: ir.Value, x: ir.Value, strip_bytes: ir.Value, pairs: ir.Value,
    start: list[ir.Value], vectors: int,
) -> list[ir.Value]:
    """`start`, so many vectors of sums a row, plus the products of a panel and rows of strips at `x`."""
    strips = Loop(builder, pairs, STRIP_PAIRS, [x, factors, *start])
    column, line, *sums = strips.values
    left = builder.sub(pairs, strips.index)
    length = builder.select(builder.icmp_signed("<", left, number(STRIP_PAIRS)), left, number(STRIP_PAIRS))
    turns = Loop(builder, length, 1, [column, line, *sums])
    pair, line, *sums = turns.values
    prefetch(builder, behind(builder, line, PAIRS_AHEAD), 64 * vectors)
    sums = dot_pairs(builder, pair, line, sums, vectors)
    _, line, *sums = turns.close([behind(builder, pair, 4), behind(builder, line, 64 * vectors), *sums])
    return strips.close([builder.add(column, strip_bytes), line, *sums])[2:]


def _shrink_tile(
    builder: ir.IRBuilder, height: ir.Value, columns: ir.Value, factors: ir.Value, x: ir.Value, strip_bytes: ir.Value,
    pairs: ir.Value, target: ir.Value,
) -> None:
    def of_size(size: int) -> None:
        rows, vectors = divmod(size, 4)
        sums = _sum_pairs(builder, factors, x, strip_bytes, pairs, no_sums(rows * vectors), vectors)
        for row in range(rows):
            finish_row(builder, sums[row * vectors : (row + 1) * vectors],
                       behind(builder, target, row * PAIRED_ROW_BYTES), types.uint16, is_gated=False)

    sizes = [4 * rows + vectors for rows in range(1, TALLEST + 1) for vectors in (1, 2)]
    switch(builder, builder.add(builder.shl(height, number(2)), builder.lshr(columns, number(4))), sizes, of_size)


shrink_tile: Callable[..., None] = intrinsic(_shrink_tile, *[INT] * 7)
"""`shrink_tile(height, columns, factors, x, strip_bytes, pairs, target)`: the products of a panel of 16 or 32 columns
and `height` rows of strips at `x`, as rows of a strip at `target`."""


def _expand_tile(
    builder: ir.IRBuilder, height: ir.Value, factors: ir.Value, x: ir.Value, strip_bytes: ir.Value, pairs: ir.Value,
    out: ir.Value, stride: ir.Value, numbers: ir.Value, bias: ir.Value,
) -> None:
    def of_height(rows: int) -> None:
        of_columns, start, places = read_floats(builder, bias, 2), [], []
        for row in range(rows):
            index = builder.sext(read(builder, behind(builder, numbers, 4 * row), WORD), LONG)
            place = builder.add(out, builder.mul(index, stride))
            given = [widened(builder, read(builder, behind(builder, place, 32 * half), ir.VectorType(SHORT, 16), 2))
                     for half in (0, 1)]
            start += added(builder, given, of_columns)
            places.append(place)
        sums = _sum_pairs(builder, factors, x, strip_bytes, pairs, start, 2)
        for row, place in enumerate(places):
            finish_row(builder, sums[2 * row : 2 * row + 2], place, types.uint16, is_gated=False)

    switch(builder, height, range(1, TALLEST + 1), of_height)


expand_tile: Callable[..., None] = intrinsic(_expand_tile, *[INT] * 9)
"""`expand_tile(height, factors, x, strip_bytes, pairs, out, stride, numbers, bias)`: add a panel of 32 columns to the
rows of `out` whose numbers, int32, are given; `pairs` is at least 1."""


@kernel
def _gather_pairs(words: int, rows: int, count: int, target: int) -> None:
    """The `count` rows of x that `rows` names, as strips of bfloat16."""
    inputs = load(words, INPUTS, INT64)
    for row in range(count):
        copy_to_strips(load(words, X, INT64) + load(rows, row, INT32) * inputs * 2, inputs,
                       target + row * PAIRED_ROW_BYTES, count * PAIRED_ROW_BYTES, BFLOAT16)


@kernel
def _shrink_pairs(words: int, record: int, count: int, x: int, target: int) -> None:
    """The products of a run's rows with all ranks, as strips of bfloat16."""
    ranks, factors, strip_bytes = load(record, RANKS, INT64), load(record, A, INT64), count * PAIRED_ROW_BYTES
    pairs = (load(words, INPUTS, INT64) + 1) // 2
    for rank in range(0, ranks, PANEL):
        columns = min(PANEL, ranks - rank)
        for row in range(0, count, TALLEST):
            shrink_tile(min(TALLEST, count - row), columns, factors, x + row * PAIRED_ROW_BYTES, strip_bytes, pairs,
                        target + rank // PANEL * strip_bytes + row * PAIRED_ROW_BYTES)
        factors += pairs * columns * 4


@kernel
def _expand_panel(words: int, record: int, part: int, rows: int, count: int, x: int, panel: int, room: int) -> None:
    """Add a panel of a part to the rows of the output; an unfinished one passes through the room."""
    rank, first_rank, bias = load(part, RANK, INT64), load(part, FIRST_RANK, INT64), load(record, BIAS, INT64)
    pairs, strip_bytes = (rank + 1) // 2, count * PAIRED_ROW_BYTES
    columns = min(PANEL, load(part, COUNT, INT64) - panel * PANEL)
    column = load(part, FIRST, INT64) + panel * PANEL
    stride = load(words, OUTPUTS, INT64) * 2
    out = load(words, OUT, INT64) + column * 2
    if rank == 0:
        if bias != 0:
            for row in range(count):
                place = out + load(rows, row, INT32) * stride
                for i in range(columns):
                    store(place, i, load(place, i, BFLOAT16) + load(bias, column + i, FLOAT32), BFLOAT16)
        return
    bias = room if bias == 0 else bias + column * 4
    target, numbers, step = out, rows, stride
    if columns < PANEL:
        target, numbers, step = room + BIAS_BYTES, room + NUMBERS_AT, 2 * PANEL
        for row in range(count):
            store(numbers, row, row, INT32)
            for i in range(columns):
                store(target + row * step, i, load(out + load(rows, row, INT32) * stride, i, BFLOAT16), BFLOAT16)
    factors = load(part, B, INT64) + panel * pairs * PANEL * 4
    strip = x + first_rank // PAIRED_STRIP * strip_bytes + first_rank % PAIRED_STRIP * 2
    for row in range(0, count, TALLEST):
        expand_tile(min(TALLEST, count - row), factors, strip + row * PAIRED_ROW_BYTES, strip_bytes, pairs, target,
                    step, numbers + row * 4, bias)
    if columns < PANEL:
        for row in range(count):
            for i in range(columns):
                store(out + load(rows, row, INT32) * stride, i, load(target + row * step, i, BFLOAT16), BFLOAT16)


def _add_by_bf16(words: int) -> None:
    runs, inputs = load(words, RUNS, INT64), load(words, INPUTS, INT64)
    room = load(words, SCRATCH, INT64) + fetch_add(words + THREAD_COUNTER, 1) * load(words, SCRATCH_BYTES, INT64)
    x = room + STRIPS_AT
    products = x + (inputs + PAIRED_STRIP - 1) // PAIRED_STRIP * RUN_ROWS * PAIRED_ROW_BYTES
    fill(room, PANEL, ZERO)
    number = load(runs, 0, INT64)
    shares = load(words, THREADS, INT64) if number < load(words, THREADS, INT64) else 1
    index = fetch_add(words, 1)
    while index < number * shares:
        run, share = runs + (1 + index // shares * RUN_WORDS) * 8, index % shares
        rows, count = load(words, ROWS, INT64) + load(run, RUN_FIRST, INT64) * 4, load(run, RUN_COUNT, INT64)
        record = load(words, RECORDS, INT64) + load(run, RUN_PLACE, INT64) * load(words, RECORD_BYTES, INT64)
        if load(record, RANKS, INT64) > 0:
            _gather_pairs(words, rows, count, x)
            _shrink_pairs(words, record, count, x, products)
        passed = 0
        for place in range(load(record, NUM_PARTS, INT64)):
            part = record + (PARTS + place * PART_WORDS) * 8
            for panel in range((load(part, COUNT, INT64) + PANEL - 1) // PANEL):
                if passed % shares == share:
                    _expand_panel(words, record, part, rows, count, products, panel, room)
                passed += 1
        index = fetch_add(words, 1)


class _Method(NamedTuple):
    """How the products of adapters are computed.

    Args:
        add: the kernel.
        multiply: the kernel that it calls.
        strip: columns that lie side by side; a part lies within one strip, or begins one.
        whole: a part's ranks begin at a multiple of this number.
        pack_a, pack_b: factors `[ranks, inputs]`, of so many ranks as `padded` makes of them, and `[outputs, rank]`.
    """

    add: CompiledKernel
    multiply: CompiledKernel | None
    strip: int
    whole: int
    pack_a: Callable[[Tensor], Tensor]
    pack_b: Callable[[Tensor], Tensor]


def _pack_a(a: Tensor) -> Tensor:
    stored: Tensor = a[stored_order(len(a), a.dtype)]
    return stored.T.contiguous()


def _in_pairs(columns: Tensor) -> Tensor:
    """`[columns, depth]` as `[depth / 2, columns, 2]`, filled up with a zero."""
    filled: Tensor = F.pad(columns, (0, columns.shape[1] % 2))
    pairs: Tensor = filled.unflatten(1, (-1, 2)).transpose(0, 1).contiguous()
    return pairs


def _pack_pairs_of_a(a: Tensor) -> Tensor:
    return torch.cat([_in_pairs(panel).flatten() for panel in a.split(PANEL)])


def _pack_pairs_of_b(b: Tensor) -> Tensor:
    return torch.cat([_in_pairs(panel).flatten() for panel in in_panels(b, PANEL).split(PANEL)])


METHODS = {
    kind: _Method(specialized(_add, element), MULTIPLY[kind], STRIP, 1, _pack_a, pack_panels)
    for kind, element in ((torch.bfloat16, BFLOAT16), (torch.float32, FLOAT32))}
PAIRED = _Method(CompiledKernel(_add_by_bf16), None, PAIRED_STRIP, 2, _pack_pairs_of_a, _pack_pairs_of_b)
"""The method for bfloat16 that is multiplied in pairs."""


class _AdapterRuns:
    """Rows sorted by adapter, and their runs, for up to `room` rows."""

    def __init__(self, room: int) -> None:
        self.room = room
        self._rows, self.rows_at = aligned(room, np.int32)
        self._runs, self.runs_at = aligned(1 + room * RUN_WORDS, np.int64)

    def set(self, places: np.ndarray) -> None:
        rows = np.flatnonzero(places != NO_ADAPTER)
        rows = rows[np.argsort(places[rows], kind="stable")]
        self._rows[: len(rows)] = rows
        ends = np.flatnonzero(np.diff(places[rows], append=NO_ADAPTER)) + 1
        at, first = 1, 0
        for end in ends.tolist():
            for start in range(first, end, RUN_ROWS):
                self._runs[at : at + RUN_WORDS] = start, min(RUN_ROWS, end - start), places[rows[start]]
                at += RUN_WORDS
            first = end
        self._runs[0] = at // RUN_WORDS


class CpuAdapters:
    """The adapters of rows, and what they add to products.

    Args:
        recorded_rows: the rows of the largest step that a graph may record.
    """

    def __init__(
        self, launcher: KernelLauncher, num_places: int, max_rank: int, kind: torch.dtype, recorded_rows: int,
    ) -> None:
        self.launcher, self.num_places, self.max_rank, self.kind = launcher, num_places, max_rank, kind
        self.are_any = False
        self._places = np.zeros(0, np.int64)
        # The runs of steps that may be recorded: these stay at their addresses.
        self._recorded = self.runs = _AdapterRuns(recorded_rows)
        self.method = PAIRED if kind == torch.bfloat16 and pairs_pay() else METHODS[kind]
        compile_all([code for code in (self.method.add, self.method.multiply) if code is not None])

    def assign(self, places: Sequence[int]) -> None:
        self._assign(np.array(places, np.int64))

    def _assign(self, by_row: np.ndarray) -> None:
        self._places = by_row
        self.are_any = bool((by_row != NO_ADAPTER).any())
        if self.are_any:
            if len(by_row) <= self._recorded.room:
                self.runs = self._recorded
            elif len(by_row) > self.runs.room:
                self.runs = _AdapterRuns(len(by_row))
            self.runs.set(by_row)

    def select(self, rows: Tensor) -> None:
        if self.are_any:
            self._assign(self._places[rows.numpy()])

    def product(self, outputs: int, inputs: int, num_parts: int) -> _CpuAddedProduct:
        return _CpuAddedProduct(self, outputs, inputs, num_parts)


class _CpuAddedProduct:
    """What adapters add to one product."""

    def __init__(self, adapters: CpuAdapters, outputs: int, inputs: int, num_parts: int) -> None:
        self._adapters, self._outputs, self._inputs = adapters, outputs, inputs
        self._record_words = PARTS + num_parts * PART_WORDS
        self._records, self._records_at = aligned(adapters.num_places * self._record_words, np.int64)
        self._held: dict[int, list[Tensor]] = {}  # packed factors by place
        strips = _whole_strips(inputs) + num_parts * _whole_strips(adapters.max_rank)
        self._floats = RUN_ROWS * (strips + CHUNK)  # of scratch memory per thread

    def set(self, place: int, packed: tuple[np.ndarray, list[Tensor]] | None) -> None:
        record = self._records[place * self._record_words : (place + 1) * self._record_words]
        record[:], held = (0, None) if packed is None else packed
        self._held.pop(place, None)
        if held is not None:
            self._held[place] = held

    def pack(self, factors: LowRank) -> tuple[np.ndarray, list[Tensor]]:
        """Returns a record, and the tensors whose addresses it holds."""
        kind, method, ranks, held = self._adapters.kind, self._adapters.method, 0, []
        record = np.zeros(self._record_words, np.int64)
        columns: list[Tensor] = []  # of a, in order, with zeros between parts
        for index, (first, a, b) in enumerate(factors.parts):
            rank = len(a)
            start = -(-ranks // method.whole) * method.whole
            start = start if rank <= method.strip - start % method.strip else -(-start // method.strip) * method.strip
            columns += [a.new_zeros(start - ranks, self._inputs), a]
            ranks = start + rank
            panels = method.pack_b(b.to(kind)) if rank else b
            held.append(panels)
            at = PARTS + index * PART_WORDS
            record[at : at + PART_WORDS] = first, len(b), start, rank, panels.data_ptr() if rank else 0
        if ranks:
            columns.append(columns[0].new_zeros(padded(ranks) - ranks, self._inputs))
            ranks = padded(ranks)
            packed = method.pack_a(torch.cat(columns).to(kind))
            held.append(packed)
            record[A] = packed.data_ptr()
        if factors.bias is not None:
            held.append(F.pad(factors.bias.float(), (0, PANEL)))  # panels are read whole
            record[BIAS] = held[-1].data_ptr()
        record[RANKS], record[NUM_PARTS] = ranks, len(factors.parts)
        return record, held

    def add(self, x: Tensor, out: Tensor) -> Tensor:
        adapters, x = self._adapters, x.contiguous()
        launcher, runs = adapters.launcher, adapters.runs
        launcher.give(
            x.data_ptr(), out.data_ptr(), self._inputs, self._outputs, self._records_at, self._record_words * 8,
            runs.rows_at, runs.runs_at, launcher.scratch(launcher.threads * self._floats), self._floats * 4,
            0 if adapters.method.multiply is None else adapters.method.multiply.address, launcher.threads)
        launcher.together(adapters.method.add)
        return out


def _whole_strips(columns: int) -> int:
    return -(-columns // STRIP) * STRIP
