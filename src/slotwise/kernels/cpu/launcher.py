"""The arguments of kernels, and the threads that run them.

A kernel is a plain C callback.  It receives the address of an int64 array, the same on every thread: `HEADER` words of
shared counters, zero at the start, then its arguments.  Threads take work by `fetch_add` on a counter, so that a busy
core does less of it; a kernel is correct with any number of threads, and with one that comes when all is done.
"""

from __future__ import annotations

import struct
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from slotwise.kernels.cpu.jit.compiler import Compiled
from slotwise.kernels.cpu.memory import HugePages, Panels, aligned
from slotwise.kernels.cpu.threads import thread_pool, torch_threads

HEADER = 16  # int64 words: work is counted in word 0, threads in word 8, on a cache line each; word 1 is the pool's
THREAD_COUNTER = 64  # bytes from the start of the words
MAX_ARGUMENTS = 32  # header and arguments are whole cache lines: `threads.py` uses the low bits of their addresses

_COUNTERS = struct.Struct(f"{8 * HEADER}x")
_ARGUMENTS = [struct.Struct(f"{count}q") for count in range(MAX_ARGUMENTS + 1)]


class Threads(Protocol):
    def run(self, code: int, words: int) -> None:
        """Call the kernel at `code` with `words` on several threads; returns when its work is done."""
        ...


class Recorder(Protocol):
    """Notes the kernels that are launched."""

    def note(self, code: Compiled, words: bytes, scratch: object, *, is_alone: bool) -> None:
        """Note a kernel that starts with the arguments `words` and works in `scratch`."""
        ...

    def empty(self, size: tuple[int, ...], kind: torch.dtype) -> Tensor:
        """Memory for a kernel's result."""
        ...


class KernelLauncher:
    """The threads, the arguments and the scratch memory of kernels.  One caller at a time."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self.recorder: Recorder | None = None
        self.pool = thread_pool(threads)
        self.weights = HugePages()
        self.panels: Panels = self.weights  # of quantised matrices: elsewhere while `packed_file.py` has them
        self.mapped: list[Tensor] = []  # bytes of the files in which panels lie
        self.is_beside_torch = False
        self._all: Threads = self.pool
        self._block, self._address = aligned(HEADER + MAX_ARGUMENTS, np.int64)
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

    def together(self, code: Compiled) -> None:
        """Run on any number of threads, until the work is done."""
        if self.recorder is not None:
            self._note(code, is_alone=False)
        if self.threads == 1:
            code.call(self._address)
        else:
            self._all.run(code.address, self._address)

    def alone(self, code: Compiled) -> None:
        """Run on the calling thread."""
        if self.recorder is not None:
            self._note(code, is_alone=True)
        code.call(self._address)

    def empty(self, size: tuple[int, ...], kind: torch.dtype) -> Tensor:
        """An uninitialised tensor for a kernel's result."""
        return torch.empty(size, dtype=kind) if self.recorder is None else self.recorder.empty(size, kind)

    def scratch(self, floats: int) -> int:
        """Address of at least `floats` float32 words, valid until the next call."""
        if len(self._scratch) < floats:
            self._scratch, self._scratch_address = aligned(floats, np.float32)
        return self._scratch_address

    def _note(self, code: Compiled, *, is_alone: bool) -> None:
        assert self.recorder is not None
        words = self._block[HEADER : HEADER + self._given].tobytes()
        self.recorder.note(code, words, self._scratch, is_alone=is_alone)
