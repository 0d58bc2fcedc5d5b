"""Kernels recorded once and run again as one program.

A decode step of a small model starts hundreds of kernels, each of which costs Python and the threads' meeting more than
it computes.  A recording keeps what every kernel was given, and does it all again without asking Python; those that
were shared are jobs of the crew's (see `threads.py`).  The same idea as a CUDA graph's, and the same condition: inputs
and outputs stay where they are.

Memory between kernels comes from an arena that all recordings share, for only one runs at a time.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from slotwise.kernels.cpu.compiled import Compiled
from slotwise.kernels.cpu.launcher import HEADER, MAX_ARGUMENTS, KernelLauncher
from slotwise.kernels.cpu.memory import aligned
from slotwise.kernels.cpu.parts import kernel
from slotwise.kernels.cpu.simd import INT64, call, load
from slotwise.kernels.cpu.threads import run_shared

WORDS = HEADER + MAX_ARGUMENTS  # int64 of a kernel's block


class Graph:
    """What a piece of work started, and what it returned.

    Args:
        result: lies in the arena; it holds until any recording runs again.
    """

    def __init__(self, launcher: KernelLauncher, kernels: Sequence[tuple[Compiled, bool, bytes]], result: Tensor,
                 held: Sequence[object]) -> None:
        self._launcher = launcher
        self._held = (kernels, held)  # memory the kernels were given
        place = (result.untyped_storage(), result.storage_offset(), result.shape)
        self.result = result.new_empty(0).set_(*place)  # a tensor of its own: the arena may give away the memory
        self._codes = np.array([[code.address, is_alone] for code, is_alone, _ in kernels], np.int64)
        self._blocks, self._address = aligned(len(kernels) * WORDS, np.int64)
        self._blocks = self._blocks.reshape(len(kernels), WORDS)
        for block, (_, _, words) in zip(self._blocks, kernels, strict=True):
            block[HEADER : HEADER + len(words) // 8] = np.frombuffer(words, np.int64)

    def run(self) -> Tensor:
        """Do it again; what it yields."""
        self._blocks[:, :HEADER] = 0
        self._launcher.pool.run_program(PROGRAM, self._codes.ctypes.data, self._address, len(self._blocks))
        return self.result


class _Place:
    """Bytes in the arena, and who has them."""

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self.user: Callable[[], Tensor | None] = lambda: None

    def holds(self, needed: int) -> bool:
        """Whether so many bytes may be had here."""
        return len(self.memory) >= needed and self.user() is None


class Arena:
    """Memory for tensors that live as long as somebody holds them, kept and given out again.

    A tensor is known to be dropped when its Python object is: holding on to a view of it alone does not count.
    Kernels run in the order in which they are recorded, so memory is free once the last one that needs it is known.
    """

    def __init__(self) -> None:
        self._places: list[_Place] = []

    def empty(self, size: tuple[int, ...], kind: torch.dtype) -> Tensor:
        """An uninitialised tensor."""
        needed = torch.Size(size).numel() * kind.itemsize
        place = next((place for place in self._places if place.holds(needed)), None)
        if place is None:
            place = _Place(torch.empty(1 << (needed - 1).bit_length(), dtype=torch.uint8))
            self._places.append(place)
        tensor = place.memory[:needed].view(kind).view(size)
        place.user = weakref.ref(tensor)
        return tensor


class GraphRecorder:
    """What a team's kernels are noted in while some work is recorded."""

    def __init__(self, launcher: KernelLauncher, arena: Arena) -> None:
        self._launcher = launcher
        self._arena = arena
        self._kernels: list[tuple[Compiled, bool, bytes]] = []
        self._held: list[object] = []

    def record(self, work: Callable[[], Tensor]) -> Graph:
        """Do `work`, which must start kernels of this team and nothing else."""
        self._launcher.recorder = self
        try:
            result = work()
        finally:
            self._launcher.recorder = None
        return Graph(self._launcher, self._kernels, result, self._held)

    def note(self, code: Compiled, words: bytes, scratch: object, *, is_alone: bool) -> None:
        """A kernel is being started on `words`, and works in `scratch`."""
        self._kernels.append((code, is_alone, words))
        if not self._held or self._held[-1] is not scratch:
            self._held.append(scratch)

    def empty(self, size: tuple[int, ...], kind: torch.dtype) -> Tensor:
        """Memory for what a kernel yields."""
        return self._arena.empty(size, kind)


@kernel
def _run(pool, codes, block, count):
    """Each kernel in turn, those that are more than one thread's work with whoever comes to help."""
    for index in range(count):
        code, is_alone = load(codes, 2 * index, INT64), load(codes, 2 * index + 1, INT64)
        if is_alone != 0:
            call(code, block)
        else:
            run_shared(pool, code, block)
        block += 8 * WORDS


def _program(pool, codes, block, count):
    _run(pool, codes, block, count)


PROGRAM = Compiled(_program, "void(int64, int64, int64, int64)")
