"""Hidden states from stage to stage, through memory that processes of one host share.

Every rank has a box, which the rank before it fills and it empties:

    sent   taken   | message n     | message n + 1 |        two places in turn; a place is filled again once it is taken

Sending and receiving are kernels, so a captured decode step contains them, and no stage returns to Python within it.
The memory begins with a word that ends all waiting.  A rank's box also tells when it worked on its latest steps.
"""

from __future__ import annotations

import mmap
import os

import numpy as np
import torch
from torch import Tensor

from slotwise.kernels.cpu.jit.compiler import Compiled, compile_all, kernel, specialised
from slotwise.kernels.cpu.launcher import HEADER, KernelLauncher
from slotwise.kernels.cpu.simd import BFLOAT16, FLOAT32, INT64, Real, exchange, load, look, nap, stamp, store
from slotwise.kernels.pipe import PLACES, Stage

LINE = 64  # bytes
PAGE = 4096  # bytes before the places of a box
SPANS, SPAN, LATEST = 1024, 32, 64  # bytes before the spans of a box and of one of them, and their number
PATIENCE = 1 << 14  # polls before a stage that waits sleeps between two: less than a millisecond

# Arguments in words after the header; ENDED and BOX are addresses.
ENDED, BOX, STRIDE, DATA, COUNT = range(HEADER, HEADER + 5)


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
        self.message = ((len(self._pages) - PAGE) // ranks - PAGE) // PLACES  # most bytes

    def box(self, rank: int) -> int:
        """Address of a rank's box."""
        return self.address + PAGE + rank * (PAGE + PLACES * self.message)

    def arrived(self, rank: int) -> int:
        """When the rank received its last message, in monotonic nanoseconds; 0 before the first."""
        at = (self.box(rank) - self.address + LINE) // 8
        return int(self._words[at + 1]) * 10**9 + int(self._words[at + 2])

    def note(self, rank: int, step: int, started: int, ended: int) -> None:
        """Tells when a rank worked on a step; forgets those `LATEST` steps before."""
        at = self._span(rank, step)
        self._words[at + 1 : at + 3] = started, ended
        self._words[at] = step + 1

    def span(self, rank: int, step: int) -> tuple[int, int] | None:
        """When a rank worked on a step; None where it has not told."""
        at = self._span(rank, step)
        if self._words[at] != step + 1:
            return None
        return int(self._words[at + 1]), int(self._words[at + 2])

    def _span(self, rank: int, step: int) -> int:
        """Index of the words of a span."""
        return (self.box(rank) - self.address + SPANS + SPAN * (step % LATEST)) // 8

    def end(self) -> None:
        """No stage waits for another any more: what is being computed is worth nothing."""
        self._words[0] = 1


@kernel
def _move(words: int, source: int, target: int, kind: Real) -> None:
    for i in range(load(words, COUNT, INT64)):
        store(target, i, load(source, i, kind), kind)


@kernel
def _send(words: int, kind: Real) -> None:
    """Wait for a free place in the box, and fill it with `COUNT` elements."""
    ended, box = load(words, ENDED, INT64), load(words, BOX, INT64)
    number, looks = look(box), 0
    while look(box + LINE) + PLACES <= number and look(ended) == 0:
        looks += 1
        nap(looks, PATIENCE)
    place = box + PAGE + (number & 1) * load(words, STRIDE, INT64)
    _move(words, load(words, DATA, INT64), place, kind)
    exchange(box, number + 1)


@kernel
def _receive(words: int, kind: Real) -> None:
    """Wait for the next message, and empty its place."""
    ended, box = load(words, ENDED, INT64), load(words, BOX, INT64)
    number, looks = look(box + LINE), 0
    while look(box) <= number and look(ended) == 0:
        looks += 1
        nap(looks, PATIENCE)
    stamp(box + LINE + 8)
    place = box + PAGE + (number & 1) * load(words, STRIDE, INT64)
    _move(words, place, load(words, DATA, INT64), kind)
    exchange(box + LINE, number + 1)


_KINDS = {torch.bfloat16: BFLOAT16, torch.float32: FLOAT32}
SEND = {kind: specialised(_send, element) for kind, element in _KINDS.items()}
RECEIVE = {kind: specialised(_receive, element) for kind, element in _KINDS.items()}


class SharedPipe:
    """The stages of one host, whose kernels run on `launcher`; see `kernels.pipe.Pipe`.

    Args:
        rank, after: whose boxes are read and filled.
    """

    def __init__(self, launcher: KernelLauncher, memory: PipeMemory, stage: Stage, rank: int, after: int) -> None:
        self.stage = stage
        self._launcher = launcher
        self._memory = memory
        self._here, self._next = memory.box(rank), memory.box(after)

    def warm_up(self, kind: torch.dtype) -> None:
        """Compile the kernels for one type."""
        compile_all([SEND[kind], RECEIVE[kind]])

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

    def _run(self, code: Compiled, box: int, x: Tensor) -> None:
        self._launcher.give(self._memory.address, box, self._memory.message, x.data_ptr(), x.numel())
        self._launcher.alone(code)
