"""The pages of a cache in host memory: pre-faulted before a step writes to them, and returned while the engine sleeps.

A cache takes memory as it fills, and the system clears each page at the first write: with huge pages, two megabytes in
every layer at once, which delays the step that begins a new page by a tenth of a second.  So a thread stays a page
ahead of the blocks in use, which the scheduler hands out in ascending order until all were used once.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from slotwise.compute.kernels.cpu.memory import discard
from slotwise.compute.kernels.cpu.threads import roam
from slotwise.compute.runner import memory_budget
from slotwise.core.record import StepPlan, StepResult
from slotwise.engine.executor import Executor

REST = 2.0  # times the time worked, after each layer


class Touchable(Protocol):
    """A layer's cache in host memory."""

    def touch(self, first: int, end: int) -> bool:
        """Allocate memory for the blocks from `first` to before `end`; False where the system cannot."""
        ...

    def give_back(self) -> None:
        """Return the memory of all blocks to the system; their contents are lost.  Raises OSError: it cannot."""
        ...


class Prefault:
    """An executor that passes plans on to another, and pre-faults cache pages.

    Args:
        caches: one per layer, of `num_blocks` blocks.
        distance: blocks to be ahead of the last one handed out.
    """

    def __init__(self, executor: Executor, caches: Sequence[Touchable], num_blocks: int, distance: int) -> None:
        self._executor = executor
        self._caches = caches
        self._num_blocks = num_blocks
        self._distance = distance
        self._touched = 0  # blocks, from the first on
        self._is_leaving = False  # the thread has to end
        self._thread: threading.Thread | None = None
        self._reach(0)

    def touch_all(self) -> None:
        """Pre-fault all blocks from now on, for requests that take many at once."""
        self._distance = self._num_blocks
        self._reach(0)

    def submit(self, plan: StepPlan) -> None:
        if plan.new_blocks:
            self._reach(max((max(blocks) for _, _, blocks in plan.new_blocks if blocks), default=0))
        self._executor.submit(plan)

    def collect(self) -> StepResult:
        return self._executor.collect()

    def give_back(self) -> None:
        """Return the memory of all caches to the system; their contents are lost.  No request may be in a step.

        Raises:
            OSError: the system cannot.
        """
        if self._thread is not None:
            self._is_leaving = True
            self._thread.join()
            self._is_leaving = False
        self._touched = 0
        for cache in self._caches:
            cache.give_back()

    def _reach(self, block: int) -> None:
        """Pre-fault for `block` in use.  Starts a thread once half of the distance is used up: few are started."""
        if block >= self._num_blocks or self._touched >= min(block + self._distance // 2, self._num_blocks):
            return
        if self._thread is None or not self._thread.is_alive():
            end = min(block + self._distance, self._num_blocks)
            self._thread = threading.Thread(target=self._touch, args=(end,), name="pages", daemon=True)
            self._thread.start()

    def _touch(self, end: int) -> None:
        """Layer by layer with pauses, because steps need the processors meanwhile.  Stops for good if it cannot."""
        roam()
        for cache in self._caches:
            if self._is_leaving:
                return
            began = time.monotonic()
            if not cache.touch(self._touched, end):
                self._touched = self._num_blocks
                return
            time.sleep(REST * (time.monotonic() - began))
        self._touched = end


class SleepingMemory:
    """The caches, whose contents are lost, and weights that lie in files, which are read again when they are needed.

    Args:
        caches: pre-faults the caches of all layers.
        mapped: bytes of files, which nothing writes to.
    """

    def __init__(self, caches: Prefault, mapped: Sequence[Tensor]) -> None:
        self._caches = caches
        self._mapped = mapped

    def give_back(self) -> None:
        """Return the memory to the system; no request may be in a step.  Raises OSError: the system cannot."""
        self._caches.give_back()
        for each in self._mapped:
            discard(each.data_ptr(), each.nbytes)
        memory_budget.give_back()
