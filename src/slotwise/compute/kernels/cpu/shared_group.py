"""What the processes of one host exchange through memory that they share: sums of ranks, hidden states of stages.

A sum of ranks is three kernels:

    a rank     offer                    meet                           add up
               its part to its own  ─►  its count of meetings, then ─► all parts, in the order of the ranks, on
               part of the buffer       waits for the others'          every rank: the same bits

There are two buffers in turn: a rank writes one again only when all have met since, so that all have read it.  The
shared memory begins with lines of 64 bytes: one that ends all waiting, then for each rank its count of meetings and its
heartbeat.  `python -m benchmarks.ranks sum` compares it with gloo.

Hidden states go from stage to stage through boxes: every rank has one, which the rank before it fills and it empties.

    sent taken | message n   | message n + 1 |      two places in turn; a place is filled again once it is taken

That memory begins with a word that ends all waiting.  A box also records when its rank worked on its latest steps.

Everything here is kernels, so a captured decode step contains its exchanges, and does not return to Python within it.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from slotwise.compute.kernels.cpu.jit.compiler import CompiledKernel, compile_all, kernel, specialized
from slotwise.compute.kernels.cpu.launcher import HEADER, KernelLauncher
from slotwise.compute.kernels.cpu.memory import aligned
from slotwise.compute.kernels.cpu.simd import (
    INT64,
    Real,
    bytes_of,
    exchange,
    fetch_add,
    for_floats,
    load,
    look,
    nap,
    rest,
    stamp,
    store,
)
from slotwise.compute.kernels.group import PLACES, NoPipe, Pipe, PipelineStage

# In bytes: a cache line, what precedes the buffers, and a rank's part of a buffer, at least.
LINE = 64
HEAD = 4096
CHUNK = 1 << 20
MOST_RANKS = HEAD // LINE // 2 - 1
# Elements that a thread copies or adds at a time, and that one thread moves before two have synchronized.
BLOCK = 4096
SMALL = 1 << 14
# Polls before a rank that waits yields its core.
PATIENCE = 1 << 12

# Arguments in words after the header; SHARED is the address of the shared memory.
SHARED, RANK, SIZE, STRIDE, FROM, TO, COUNT, BOUNDS = range(HEADER, HEADER + 8)


def size_of(ranks: int, chunk: int) -> int:
    """Bytes of the shared memory."""
    return HEAD + 2 * ranks * chunk


def shared_file(size: int) -> int:
    """A file without a name, of `size` bytes of memory; its descriptor."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("slotwise-ranks", 0)
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.ftruncate(descriptor, size)
    return descriptor


class SharedMemory:
    """The memory that the ranks share, mapped in this process."""

    def __init__(self, descriptor: int, ranks: int) -> None:
        self.ranks = ranks
        self._pages = mmap.mmap(descriptor, os.fstat(descriptor).st_size)
        self._words = np.frombuffer(self._pages, np.int64)
        self.address = self._words.ctypes.data
        self.chunk = (len(self._pages) - HEAD) // (2 * ranks)

    def beat(self, rank: int) -> None:
        """Count a heartbeat of a rank."""
        self._words[(1 + self.ranks + rank) * LINE // 8] += 1

    def beats(self, rank: int) -> int:
        """The number of heartbeats of a rank."""
        return int(self._words[(1 + self.ranks + rank) * LINE // 8])

    def end(self) -> None:
        """Ends all waiting of ranks for each other: results of the current step are worthless."""
        self._words[0] = 1

    @property
    def has_ended(self) -> bool:
        return bool(self._words[0])


@kernel
def _met(words: int) -> int:
    """Address of this rank's count of meetings."""
    return load(words, SHARED, INT64) + (1 + load(words, RANK, INT64)) * LINE


@kernel
def _part(words: int, rank: int, meeting: int) -> int:
    """Address of a rank's part of the buffer for a meeting."""
    place = (meeting & 1) * load(words, SIZE, INT64) + rank
    return load(words, SHARED, INT64) + HEAD + place * load(words, STRIDE, INT64)


@kernel
def _offer(words: int, kind: Real) -> None:
    """Copy `COUNT` elements to this rank's part for the next meeting."""
    count, source = load(words, COUNT, INT64), load(words, FROM, INT64)
    target = _part(words, load(words, RANK, INT64), look(_met(words)) + 1)
    start = fetch_add(words, BLOCK)
    while start < count:
        for i in range(start, min(start + BLOCK, count)):
            store(target, i, load(source, i, kind), kind)
        start = fetch_add(words, BLOCK)


@kernel
def _meet(words: int) -> None:
    """Wait until every rank has offered its part."""
    shared = load(words, SHARED, INT64)
    meeting = look(_met(words)) + 1
    exchange(_met(words), meeting)
    for rank in range(load(words, SIZE, INT64)):
        looks = 0
        while look(shared + (1 + rank) * LINE) < meeting and look(shared) == 0:
            looks += 1
            rest(looks, PATIENCE)


@kernel
def _add_up(words: int, kind: Real) -> None:
    """The sum of all parts to `TO`; each addition is rounded to the type of the numbers."""
    count, out = load(words, COUNT, INT64), load(words, TO, INT64)
    meeting = look(_met(words))
    start = fetch_add(words, BLOCK)
    while start < count:
        so_far = _part(words, 0, meeting)
        for rank in range(1, load(words, SIZE, INT64)):
            part = _part(words, rank, meeting)
            for i in range(start, min(start + BLOCK, count)):
                store(out, i, load(so_far, i, kind) + load(part, i, kind), kind)
            so_far = out
        start = fetch_add(words, BLOCK)


@kernel
def _collect(words: int, kind: Real) -> None:
    """`COUNT` rows of all parts side by side to `TO`; columns of rank r are `BOUNDS[r] ... BOUNDS[r + 1] - 1`."""
    rows, size, bounds = load(words, COUNT, INT64), load(words, SIZE, INT64), load(words, BOUNDS, INT64)
    width, meeting = load(bounds, size, INT64), look(_met(words))
    row = fetch_add(words, 1)
    while row < rows:
        for rank in range(size):
            first, end = load(bounds, rank, INT64), load(bounds, rank + 1, INT64)
            source = _part(words, rank, meeting) + row * (end - first) * bytes_of(kind)
            target = load(words, TO, INT64) + (row * width + first) * bytes_of(kind)
            for i in range(end - first):
                store(target, i, load(source, i, kind), kind)
        row = fetch_add(words, 1)


OFFER = for_floats(_offer)
ADD_UP = for_floats(_add_up)
COLLECT = for_floats(_collect)
MEET = specialized(_meet)


class SharedGroup:
    """`Group` for the ranks of one host, whose kernels run on `launcher`."""

    splits_experts = False

    def __init__(self, launcher: KernelLauncher, memory: SharedMemory, rank: int, pipe: Pipe | None = None) -> None:
        self.rank, self.size = rank, memory.ranks
        self.pipe: Pipe = pipe or NoPipe()
        self._launcher = launcher
        self._memory = memory
        self._bounds: dict[tuple[int, ...], tuple[object, int]] = {}

    def warm_up(self, kind: torch.dtype) -> None:
        """Compile the kernels for one type, and for logits."""
        logits = torch.float32
        compile_all(list(dict.fromkeys([ADD_UP[kind], OFFER[kind], OFFER[logits], COLLECT[logits], MEET])))

    def all_reduce(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        out = self._launcher.empty(tuple(x.shape), x.dtype)
        most, count = self._memory.chunk // x.itemsize, x.numel()
        for first in range(0, count, most):
            size, at = min(most, count - first), first * x.itemsize
            self._share(x.dtype, x.data_ptr() + at, size)
            self._run(ADD_UP[x.dtype], size, 0, out.data_ptr() + at, size)
        return out

    def gather(self, x: Tensor, widths: Sequence[int]) -> Tensor:
        x = x.contiguous()
        rows, total = len(x), sum(widths)
        out = x if self.rank else self._launcher.empty((rows, total), x.dtype)
        most = self._memory.chunk // (max(widths) * x.itemsize)
        for first in range(0, rows, most):
            size = min(most, rows - first)
            self._share(x.dtype, x[first].data_ptr(), size * x.shape[1])
            if not self.rank:
                self._run(COLLECT[x.dtype], size * total, 0, out.data_ptr() + first * total * x.itemsize, size,
                          self._bounds_of(tuple(widths)))
        return out

    def _share(self, kind: torch.dtype, address: int, count: int) -> None:
        """Offer numbers and wait for the numbers of the other ranks."""
        self._run(OFFER[kind], count, address, 0, count)
        self._run(MEET, 0)

    def _run(self, code: CompiledKernel, elements: int, *arguments: int) -> None:
        memory = self._memory
        self._launcher.give(memory.address, self.rank, self.size, memory.chunk, *arguments)
        if elements < SMALL:
            self._launcher.alone(code)
        else:
            self._launcher.together(code)

    def _bounds_of(self, widths: tuple[int, ...]) -> int:
        """Address of the ranks' first columns, then of their total; kept, because graphs read it."""
        if widths not in self._bounds:
            numbers, address = aligned(len(widths) + 1, np.int64)
            numbers[:] = list(accumulate(widths, initial=0))
            self._bounds[widths] = numbers, address
        return self._bounds[widths][1]


# Bytes before the places of a box.
PAGE = 4096
# When a rank worked on its latest steps: bytes of a box before these spans, bytes of a span, and the number of spans.
SPANS, SPAN, LATEST = 1024, 32, 64
# Polls, less than a millisecond, after which a stage that waits sleeps between polls.
STAGE_PATIENCE = 1 << 14

# Arguments in words after the header; ENDED and BOX are addresses.
ENDED, BOX, PLACE_STRIDE, DATA, ELEMENTS = range(HEADER, HEADER + 5)


def pipe_size(ranks: int, message: int) -> int:
    """Bytes of the shared memory, for messages of at most `message` bytes."""
    return PAGE + ranks * (PAGE + PLACES * _rounded(message))


def _rounded(message: int) -> int:
    return -(-message // PAGE) * PAGE


class PipeMemory:
    """The memory of all boxes, mapped in this process."""

    def __init__(self, descriptor: int, ranks: int) -> None:
        self._pages = mmap.mmap(descriptor, os.fstat(descriptor).st_size)
        self._words = np.frombuffer(self._pages, np.int64)
        self.address = self._words.ctypes.data
        # The most bytes of a message.
        self.message = ((len(self._pages) - PAGE) // ranks - PAGE) // PLACES

    def box(self, rank: int) -> int:
        """Address of a rank's box."""
        return self.address + PAGE + rank * (PAGE + PLACES * self.message)

    def arrived(self, rank: int) -> int:
        """When the rank received its last message, in monotonic nanoseconds; 0 before the first."""
        at = (self.box(rank) - self.address + LINE) // 8
        return int(self._words[at + 1]) * 10**9 + int(self._words[at + 2])

    def note(self, rank: int, step: int, started: int, ended: int) -> None:
        """Record when a rank worked on a step, in place of the step `LATEST` steps before."""
        at = self._span(rank, step)
        self._words[at + 1 : at + 3] = started, ended
        self._words[at] = step + 1

    def span(self, rank: int, step: int) -> tuple[int, int] | None:
        """When a rank worked on a step; None where that is not recorded."""
        at = self._span(rank, step)
        if self._words[at] != step + 1:
            return None
        return int(self._words[at + 1]), int(self._words[at + 2])

    def _span(self, rank: int, step: int) -> int:
        """Index of the words of a span."""
        return (self.box(rank) - self.address + SPANS + SPAN * (step % LATEST)) // 8

    def end(self) -> None:
        """Ends all waiting of stages for each other: results of the current step are worthless."""
        self._words[0] = 1


@kernel
def _move(words: int, source: int, target: int, kind: Real) -> None:
    for i in range(load(words, ELEMENTS, INT64)):
        store(target, i, load(source, i, kind), kind)


@kernel
def _send(words: int, kind: Real) -> None:
    """Wait for a free place in the box, and fill it with `ELEMENTS` elements."""
    ended, box = load(words, ENDED, INT64), load(words, BOX, INT64)
    number, looks = look(box), 0
    while look(box + LINE) + PLACES <= number and look(ended) == 0:
        looks += 1
        nap(looks, STAGE_PATIENCE)
    place = box + PAGE + (number & 1) * load(words, PLACE_STRIDE, INT64)
    _move(words, load(words, DATA, INT64), place, kind)
    exchange(box, number + 1)


@kernel
def _receive(words: int, kind: Real) -> None:
    """Wait for the next message, and empty its place."""
    ended, box = load(words, ENDED, INT64), load(words, BOX, INT64)
    number, looks = look(box + LINE), 0
    while look(box) <= number and look(ended) == 0:
        looks += 1
        nap(looks, STAGE_PATIENCE)
    stamp(box + LINE + 8)
    place = box + PAGE + (number & 1) * load(words, PLACE_STRIDE, INT64)
    _move(words, place, load(words, DATA, INT64), kind)
    exchange(box + LINE, number + 1)


SEND = for_floats(_send)
RECEIVE = for_floats(_receive)


class SharedPipe:
    """`Pipe` for the stages of one host, whose kernels run on `launcher`.

    Args:
        rank, after: the ranks whose boxes are read and filled.
    """

    def __init__(
        self, launcher: KernelLauncher, memory: PipeMemory, stage: PipelineStage, rank: int, after: int,
    ) -> None:
        self.stage = stage
        self._launcher = launcher
        self._memory = memory
        self._here, self._next = memory.box(rank), memory.box(after)

    def warm_up(self, kind: torch.dtype) -> None:
        """Compile the kernels for one type, and for the residual stream."""
        stream = torch.float32
        compile_all(list(dict.fromkeys([SEND[kind], RECEIVE[kind], SEND[stream], RECEIVE[stream]])))

    def send(self, x: Tensor) -> Tensor:
        """Raises ValueError for more bytes than a message has."""
        x = x.contiguous()
        if x.nbytes > self._memory.message:
            raise ValueError(f"a step's hidden states take {x.nbytes:,} bytes, more than the {self._memory.message:,} "
                             "that stages exchange at once: lower max_num_batched_tokens")
        self._run(SEND[x.dtype], self._next, x)
        return x

    def receive(self, rows: int, hidden: int, kind: torch.dtype) -> Tensor:
        x = self._launcher.empty((rows, hidden), kind)
        self._run(RECEIVE[kind], self._here, x)
        return x

    def _run(self, code: CompiledKernel, box: int, x: Tensor) -> None:
        self._launcher.give(self._memory.address, box, self._memory.message, x.data_ptr(), x.numel())
        self._launcher.alone(code)
