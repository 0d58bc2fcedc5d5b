"""What adapters add to products (LoRA): one kernel a product, for the rows of all adapters.

Rows are sorted by adapter once a step, and cut into *runs* of up to RUN_ROWS of one adapter, which threads take:

    gather    rows of x, as strips                                [run, inputs]
    shrink    times a.T of all parts, side by side                [run, ranks]
    expand    times b.T of each part, added to rows of the output [run, outputs]

Both products are computed by `gemm.py`, with factors as its B, so a row's result does not depend on other rows.  Strips
are float32, or bfloat16 where it is multiplied in pairs; the first product is rounded to it then.  Runs are
independent, so threads do not wait between the two products, and the factors of an adapter are read from memory once
for RUN_ROWS rows.  Where there are fewer runs than threads, each thread computes the first product of a run and its
share of the second.  The kernel finds runs and factors by addresses that do not change, so a graph serves steps with
other rows and other adapters.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from slotwise.compute.kernels.cpu.cache import padded, stored_order
from slotwise.compute.kernels.cpu.jit.compiler import CompiledKernel, compile_all, kernel, specialized
from slotwise.compute.kernels.cpu.launcher import HEADER, THREAD_COUNTER, KernelLauncher
from slotwise.compute.kernels.cpu.memory import aligned
from slotwise.compute.kernels.cpu.processor import PAIR
from slotwise.compute.kernels.cpu.products.gemm import (
    MULTIPLY,
    MULTIPLY_PAIRS,
    STRIP,
    STRIP_ROW_BYTES,
    bytes_of_factor,
    call_multiply,
    load_strips,
    pairs_pay,
)
from slotwise.compute.kernels.cpu.products.linear import pack_panels
from slotwise.compute.kernels.cpu.simd import (
    BFLOAT16,
    FLOAT32,
    INT32,
    INT64,
    PAIRS,
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
CHUNK = 128
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
def _gather(words: int, rows: int, count: int, target: int, kind: Real, stored: Real) -> None:
    """The `count` rows of x that `rows` names, as strips."""
    inputs = load(words, INPUTS, INT64)
    for row in range(count):
        x = load(words, X, INT64) + load(rows, row, INT32) * inputs * bytes_of(kind)
        load_strips(x, inputs, target + row * STRIP_ROW_BYTES, count * STRIP_ROW_BYTES, kind, stored)


@kernel
def _shrink(
    words: int, record: int, count: int, x: int, sums: int, target: int, kind: Real, stored: Real,
) -> None:
    """The products of a run's rows with all ranks, as strips of float32, then as strips to be multiplied."""
    ranks, size = load(record, RANKS, INT64), bytes_of(kind)
    places = (ranks + STRIP - 1) // STRIP * count
    fill(sums, places * STRIP, ZERO)
    for rank in range(0, ranks, STRIP):
        call_multiply(load(words, MULTIPLY_ADDRESS, INT64), count, min(STRIP, ranks - rank), x, count * STRIP_ROW_BYTES,
                      load(record, A, INT64) + rank * size, ranks * size, PAIR * size, load(words, INPUTS, INT64),
                      sums + rank * count * 4, STRIP_ROW_BYTES, AHEAD)
    if bytes_of_factor(stored) != bytes_of(FLOAT32):
        for place in range(places):
            for i in range(STRIP):
                store(target + place * STRIP_ROW_BYTES, i, load(sums + place * STRIP_ROW_BYTES, i, FLOAT32), kind)


@kernel
def _expand(
    words: int, record: int, part: int, rows: int, count: int, x: int, sums: int, chunk: int, kind: Real, stored: Real,
) -> None:
    """Add a chunk of a part to the rows of the output."""
    first, size, column = load(part, FIRST, INT64), bytes_of(kind), chunk * CHUNK
    columns = min(CHUNK, load(part, COUNT, INT64) - column)
    rank, first_rank, bias = load(part, RANK, INT64), load(part, FIRST_RANK, INT64), load(record, BIAS, INT64)
    fill(sums, count * CHUNK, ZERO)
    if rank > 0:
        strip = x + first_rank // STRIP * STRIP_ROW_BYTES * count + first_rank % STRIP * bytes_of_factor(stored)
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
def _add(words: int, kind: Real, stored: Real) -> None:
    runs, inputs = load(words, RUNS, INT64), load(words, INPUTS, INT64)
    strips = (inputs + STRIP - 1) // STRIP * STRIP * RUN_ROWS * 4
    sums = load(words, SCRATCH, INT64) + fetch_add(words + THREAD_COUNTER, 1) * load(words, SCRATCH_BYTES, INT64)
    x = sums + RUN_ROWS * CHUNK * 4
    number = load(runs, 0, INT64)
    shares = load(words, THREADS, INT64) if number < load(words, THREADS, INT64) else 1
    index = fetch_add(words, 1)
    while index < number * shares:
        run, share = runs + (1 + index // shares * RUN_WORDS) * 8, index % shares
        rows, count = load(words, ROWS, INT64) + load(run, RUN_FIRST, INT64) * 4, load(run, RUN_COUNT, INT64)
        record = load(words, RECORDS, INT64) + load(run, RUN_PLACE, INT64) * load(words, RECORD_BYTES, INT64)
        ranks = load(record, RANKS, INT64)
        products = x + strips
        if ranks > 0:
            if bytes_of_factor(stored) != bytes_of(FLOAT32):
                products += (ranks + STRIP - 1) // STRIP * STRIP * RUN_ROWS * 4
            _gather(words, rows, count, x, kind, stored)
            _shrink(words, record, count, x, x + strips, products, kind, stored)
        passed = 0
        for place in range(load(record, NUM_PARTS, INT64)):
            part = record + (PARTS + place * PART_WORDS) * 8
            for chunk in range((load(part, COUNT, INT64) + CHUNK - 1) // CHUNK):
                if passed % shares == share:
                    _expand(words, record, part, rows, count, products, sums, chunk, kind, stored)
                passed += 1
        index = fetch_add(words, 1)


class _Method(NamedTuple):
    """A kernel, and the product that it calls."""

    add: CompiledKernel
    multiply: CompiledKernel


METHODS = {
    torch.bfloat16: _Method(specialized(_add, BFLOAT16, BFLOAT16), MULTIPLY[torch.bfloat16]),
    torch.float32: _Method(specialized(_add, FLOAT32, FLOAT32), MULTIPLY[torch.float32])}
PAIRED = _Method(specialized(_add, BFLOAT16, PAIRS), MULTIPLY_PAIRS)
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
        compile_all(list(self.method))

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
        strips = _whole_strips(inputs) + 2 * num_parts * _whole_strips(adapters.max_rank)
        self._floats = RUN_ROWS * (strips + CHUNK)  # of scratch memory per thread

    def set(self, place: int, packed: tuple[np.ndarray, list[Tensor]] | None) -> None:
        record = self._records[place * self._record_words : (place + 1) * self._record_words]
        record[:], held = (0, None) if packed is None else packed
        self._held.pop(place, None)
        if held is not None:
            self._held[place] = held

    def pack(self, factors: LowRank) -> tuple[np.ndarray, list[Tensor]]:
        """Returns a record, and the tensors whose addresses it holds."""
        kind, ranks, held = self._adapters.kind, 0, []
        record = np.zeros(self._record_words, np.int64)
        columns: list[Tensor] = []  # of a, in order, with zeros between parts
        for index, (first, a, b) in enumerate(factors.parts):
            rank = len(a)
            # A part lies within one strip, or begins one, and begins with a pair.
            start = ranks + ranks % 2
            start = start if rank <= STRIP - start % STRIP else _whole_strips(start)
            columns += [a.new_zeros(start - ranks, self._inputs), a]
            ranks = start + rank
            panels = pack_panels(b.to(kind)) if rank else b
            held.append(panels)
            at = PARTS + index * PART_WORDS
            record[at : at + PART_WORDS] = first, len(b), start, rank, panels.data_ptr() if rank else 0
        if ranks:
            columns.append(columns[0].new_zeros(padded(ranks) - ranks, self._inputs))
            ranks = padded(ranks)
            packed = torch.cat(columns).to(kind)[stored_order(ranks, kind)].T.contiguous()
            held.append(packed)
            record[A] = packed.data_ptr()
        if factors.bias is not None:
            held.append(factors.bias.float().contiguous())
            record[BIAS] = held[-1].data_ptr()
        record[RANKS], record[NUM_PARTS] = ranks, len(factors.parts)
        return record, held

    def add(self, x: Tensor, out: Tensor) -> Tensor:
        adapters, x = self._adapters, x.contiguous()
        launcher, runs = adapters.launcher, adapters.runs
        launcher.give(
            x.data_ptr(), out.data_ptr(), self._inputs, self._outputs, self._records_at, self._record_words * 8,
            runs.rows_at, runs.runs_at, launcher.scratch(launcher.threads * self._floats), self._floats * 4,
            adapters.method.multiply.address, launcher.threads)
        launcher.together(adapters.method.add)
        return out


def _whole_strips(columns: int) -> int:
    return -(-columns // STRIP) * STRIP
