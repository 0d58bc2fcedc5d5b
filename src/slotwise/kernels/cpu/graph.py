"""Kernels captured once and run again as one program.

A decode step of a small model starts hundreds of kernels, each of which costs more in Python and in synchronising
threads than in computing.  A graph stores every kernel's arguments, and runs all of them without Python; those for
several threads are jobs of the thread pool (see `threads.py`).  As with a CUDA graph, inputs and outputs must stay at
their addresses.

Memory between kernels comes from an arena that all graphs share, for only one runs at a time.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from slotwise.kernels.cpu.jit.compiler import Compiled, kernel
from slotwise.kernels.cpu.launcher import HEADER, MAX_ARGUMENTS, KernelLauncher
from slotwise.kernels.cpu.memory import aligned
from slotwise.kernels.cpu.simd import INT64, call_kernel, load
from slotwise.kernels.cpu.threads import run_shared

WORDS = HEADER + MAX_ARGUMENTS  # int64 of a kernel's header and arguments


class Graph:
    """The kernels that a piece of work started, and its result.

    Args:
        result: lies in the arena; it is valid until any graph runs again.
    """

    def __init__(self, launcher: KernelLauncher, kernels: Sequence[tuple[Compiled, bool, bytes]], result: Tensor,
                 held: Sequence[object]) -> None:
        self._launcher = launcher
        self._held = (kernels, held)  # keeps the kernels' memory alive
        place = (result.untyped_storage(), result.storage_offset(), result.shape, result.stride())
        self.result: Tensor = result.new_empty(0).set_(*place)  # of its own: the arena may reuse the memory
        self._codes = np.array([[code.address, is_alone] for code, is_alone, _ in kernels], np.int64)
        self._blocks, self._address = aligned(len(kernels) * WORDS, np.int64)
        self._blocks = self._blocks.reshape(len(kernels), WORDS)
        for block, (_, _, words) in zip(self._blocks, kernels, strict=True):
            block[HEADER : HEADER + len(words) // 8] = np.frombuffer(words, np.int64)

    def run(self) -> Tensor:
        """Run it again; returns its result."""
        self._blocks[:, :HEADER] = 0
        self._launcher.pool.run_program(PROGRAM, self._codes.ctypes.data, self._address, len(self._blocks))
        return self.result


class _Place:
    """Bytes in the arena, and the tensor that uses them."""

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self.user: Callable[[], Tensor | None] = lambda: None

    def holds(self, needed: int) -> bool:
        """Whether it is free and has at least `needed` bytes."""
        return len(self.memory) >= needed and self.user() is None


class Arena:
    """Memory for tensors, reused when a tensor is dropped.

    A tensor counts as dropped when its Python object is: a view of it alone does not keep it.  Kernels run in the order
    in which they are captured, so memory is free as soon as its last use is captured.
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
    """Notes the kernels of a launcher while some work is captured."""

    def __init__(self, launcher: KernelLauncher, arena: Arena) -> None:
        self._launcher = launcher
        self._arena = arena
        self._kernels: list[tuple[Compiled, bool, bytes]] = []
        self._held: list[object] = []

    def record(self, work: Callable[[], Tensor]) -> Graph:
        """Run `work`, which must start kernels of this launcher and nothing else."""
        self._launcher.recorder = self
        try:
            result = work()
        finally:
            self._launcher.recorder = None
        return Graph(self._launcher, self._kernels, result, self._held)

    def note(self, code: Compiled, words: bytes, scratch: object, *, is_alone: bool) -> None:
        """Note a kernel that starts with the arguments `words` and works in `scratch`."""
        self._kernels.append((code, is_alone, words))
        if not self._held or self._held[-1] is not scratch:
            self._held.append(scratch)

    def empty(self, size: tuple[int, ...], kind: torch.dtype) -> Tensor:
        """Memory for a kernel's result."""
        return self._arena.empty(size, kind)


@kernel
def _run(pool: int, codes: int, block: int, count: int) -> None:
    """Run the kernels in order, each on the calling thread or shared with the pool."""
    for index in range(count):
        code, is_alone = load(codes, 2 * index, INT64), load(codes, 2 * index + 1, INT64)
        if is_alone != 0:
            call_kernel(code, block)
        else:
            run_shared(pool, code, block)
        block += 8 * WORDS


def _program(pool: int, codes: int, block: int, count: int) -> None:
    _run(pool, codes, block, count)


PROGRAM = Compiled(_program)
