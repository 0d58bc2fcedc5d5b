"""Starts kernels: their arguments, the threads that run them, and graphs that run recorded ones again.

A kernel is a plain C callback.  It receives the address of an int64 array, the same on every thread: `HEADER` words of
shared counters, zero at the start, then its arguments.  Threads take work by `fetch_add` on a counter, so that a busy
core does less of it; a kernel is correct with any number of threads, and with a thread that arrives when the work is
done.

A decode step of a small model starts hundreds of kernels, each of which costs more in Python and in synchronizing
threads than in computing.  A graph stores every kernel's arguments, and runs all of them without Python; kernels for
several threads are jobs of the thread pool (`threads.py`).  As with a CUDA graph, inputs and outputs must stay at their
addresses.  Memory between kernels comes from an arena that all graphs share, because only one runs at a time.
"""

from __future__ import annotations

import struct
import weakref
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from slotwise.compute.kernels.cpu.jit.compiler import CompiledKernel, kernel
from slotwise.compute.kernels.cpu.memory import HugePages, Panels, aligned
from slotwise.compute.kernels.cpu.simd import INT64, ZERO, call_kernel, fill, load, prefetch_all
from slotwise.compute.kernels.cpu.threads import run_shared, thread_pool, torch_threads

# The header's int64 words: work is counted in word 0 and threads in word 8, each on a cache line; word 1 is the pool's.
HEADER = 16
# Bytes from the start of the words to the counter of threads.
THREAD_COUNTER = 64
# Header and arguments fill whole cache lines: `threads.py` uses the low bits of their addresses.
MAX_ARGUMENTS = 40
WORDS = HEADER + MAX_ARGUMENTS

_COUNTERS = struct.Struct(f"{8 * HEADER}x")
_ARGUMENTS = [struct.Struct(f"{count}q") for count in range(MAX_ARGUMENTS + 1)]


class Threads(Protocol):
    def run(self, code: int, words: int) -> None:
        """Call the kernel at `code` with `words` on several threads; returns when its work is done."""
        ...


class KernelLauncher:
    """The threads, the arguments and the scratch memory of kernels.  One caller at a time."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self.recorder: GraphRecorder | None = None
        self.pool = thread_pool(threads)
        self.weights = HugePages()
        # Where panels of quantized matrices lie: `packed_file.py` replaces this while it keeps them.
        self.panels: Panels = self.weights
        # The bytes of mapped files that hold panels.
        self.mapped: list[Tensor] = []
        self.is_beside_torch = False
        self._all: Threads = self.pool
        self._block, self._address = aligned(WORDS, np.int64)
        self._memory = self._block.data
        self._scratch, self._scratch_address = aligned(0, np.float32)

    def join_torch(self) -> None:
        """Use torch's threads, where possible, because torch computes between these kernels."""
        self.is_beside_torch = True
        self._all = torch_threads(self.threads) or self.pool

    def give(self, *arguments: int) -> None:
        """Set the arguments of the next kernel, and the counters to zero."""
        _COUNTERS.pack_into(self._memory, 0)
        _ARGUMENTS[len(arguments)].pack_into(self._memory, 8 * HEADER, *arguments)
        self._given = len(arguments)

    def together(self, code: CompiledKernel) -> None:
        """Run on any number of threads, until the work is done."""
        if self.recorder is not None:
            self._note(code, is_alone=False)
        if self.threads == 1:
            code.call(self._address)
        else:
            self._all.run(code.address, self._address)

    def alone(self, code: CompiledKernel) -> None:
        """Run on the calling thread."""
        if self.recorder is not None:
            self._note(code, is_alone=True)
        code.call(self._address)

    def call(self, function: Callable[..., Tensor], inputs: Sequence[Tensor]) -> Tensor:
        """`function(*inputs)`, by torch on the calling thread, between kernels."""
        result = function(*inputs)
        if self.recorder is None:
            return result
        out = self.recorder.empty(tuple(result.shape), result.dtype).copy_(result)
        self.recorder.note_call(function, inputs, out)
        return out

    def empty(self, size: tuple[int, ...], kind: torch.dtype) -> Tensor:
        """An uninitialized tensor for a kernel's result."""
        return torch.empty(size, dtype=kind) if self.recorder is None else self.recorder.empty(size, kind)

    def scratch(self, floats: int) -> int:
        """Address of at least `floats` float32 words, valid until the next call."""
        if len(self._scratch) < floats:
            self._scratch, self._scratch_address = aligned(floats, np.float32)
        return self._scratch_address

    def _note(self, code: CompiledKernel, *, is_alone: bool) -> None:
        assert self.recorder is not None
        words = self._block[HEADER : HEADER + self._given].tobytes()
        self.recorder.note(code, words, self._scratch, is_alone=is_alone)


def _alias(tensor: Tensor) -> Tensor:
    """A tensor of its own in the same memory, so that the arena may reuse that."""
    place = (tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())
    alias: Tensor = tensor.new_empty(0).set_(*place)
    return alias


class KernelGraph:
    """The kernels that a piece of work started, the functions of torch between them, and its result.

    Args:
        calls: functions, and how many kernels run before each.
        result: lies in the arena; it is valid until any graph runs again.
    """

    def __init__(
        self, launcher: KernelLauncher, kernels: Sequence[tuple[CompiledKernel, bool, bytes]],
        calls: Sequence[tuple[int, Callable[[], object]]], result: Tensor, held: Sequence[object],
    ) -> None:
        self._launcher = launcher
        self._held = (kernels, held)  # keeps the kernels' memory alive
        self._calls = calls
        self.result = _alias(result)
        self._codes = np.array([[code.address, is_alone] for code, is_alone, _ in kernels], np.int64)
        self._blocks, self._address = aligned(len(kernels) * WORDS, np.int64)
        self._blocks = self._blocks.reshape(len(kernels), WORDS)
        for block, (_, _, words) in zip(self._blocks, kernels, strict=True):
            block[HEADER : HEADER + len(words) // 8] = np.frombuffer(words, np.int64)
        self._codes_address = self._codes.ctypes.data

    def run(self) -> Tensor:
        """Run it again; returns its result."""
        first = 0
        for end, call in self._calls:
            self._run(first, end)
            call()
            first = end
        self._run(first, len(self._blocks))
        return self.result

    def _run(self, first: int, end: int) -> None:
        """Run the kernels `first ... end - 1`."""
        if end > first:
            codes, blocks = self._codes_address + 16 * first, self._address + 8 * WORDS * first
            self._launcher.pool.run_program(PROGRAM, codes, blocks, end - first)


class GraphRecorder:
    """Notes the kernels of a launcher while some work is recorded."""

    def __init__(self, launcher: KernelLauncher, arena: Arena) -> None:
        self._launcher = launcher
        self._arena = arena
        self._kernels: list[tuple[CompiledKernel, bool, bytes]] = []
        self._calls: list[tuple[int, Callable[[], object]]] = []
        self._held: list[object] = []

    def record(self, work: Callable[[], Tensor]) -> KernelGraph:
        """Run `work`, which must start kernels of this launcher, and functions by its `call`, and nothing else."""
        self._launcher.recorder = self
        try:
            result = work()
        finally:
            self._launcher.recorder = None
        return KernelGraph(self._launcher, self._kernels, self._calls, result, self._held)

    def note(self, code: CompiledKernel, words: bytes, scratch: object, *, is_alone: bool) -> None:
        """Note a kernel that starts with the arguments `words` and works in `scratch`."""
        self._kernels.append((code, is_alone, words))
        if not self._held or self._held[-1] is not scratch:
            self._held.append(scratch)

    def note_call(self, function: Callable[..., Tensor], inputs: Sequence[Tensor], out: Tensor) -> None:
        """Note a function of `inputs`, whose result belongs into `out`."""
        arguments, target = [_alias(tensor) for tensor in inputs], _alias(out)
        self._calls.append((len(self._kernels), lambda: target.copy_(function(*arguments))))

    def empty(self, size: tuple[int, ...], kind: torch.dtype) -> Tensor:
        """Memory for a kernel's result."""
        return self._arena.empty(size, kind)


class _ArenaPlace:
    """Bytes in the arena, and the tensor that uses them."""

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self.num_bytes = len(memory)
        self.user: Callable[[], Tensor | None] = lambda: None

    def fits(self, needed: int) -> bool:
        """Whether it is free and has at least `needed` bytes."""
        return self.num_bytes >= needed and self.user() is None


class Arena:
    """Memory for tensors, reused when a tensor is dropped.

    A tensor counts as dropped when its Python object is: a view of it does not keep it alive.  Kernels run in the order
    in which they are recorded, so memory is free as soon as its last use is recorded.
    """

    def __init__(self) -> None:
        self._places: list[_ArenaPlace] = []

    def empty(self, size: tuple[int, ...], kind: torch.dtype) -> Tensor:
        """An uninitialized tensor."""
        needed = torch.Size(size).numel() * kind.itemsize
        place = next((place for place in self._places if place.fits(needed)), None)
        if place is None:
            place = _ArenaPlace(torch.empty(1 << (needed - 1).bit_length(), dtype=torch.uint8))
            self._places.append(place)
        tensor = place.memory[:needed].view(kind).view(size)
        place.user = weakref.ref(tensor)
        return tensor


@kernel
def run_recorded(pool: int, codes: int, block: int, index: int) -> None:
    """Run one of recorded kernels, whose words lie at `block`, on the calling thread or shared with the pool.

    The words of the next one are prefetched: since the last step, weights have displaced them from the caches.
    """
    code, is_alone = load(codes, 2 * index, INT64), load(codes, 2 * index + 1, INT64)
    fill(block, 2 * HEADER, ZERO)
    prefetch_all(block + 8 * WORDS, 8 * WORDS)
    if is_alone != 0:
        call_kernel(code, block)
    else:
        run_shared(pool, code, block)


def _program(pool: int, codes: int, block: int, count: int) -> None:
    for index in range(count):
        run_recorded(pool, codes, block, index)
        block += 8 * WORDS


PROGRAM = CompiledKernel(_program)
