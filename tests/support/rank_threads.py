"""The ranks of a model on threads of this process: everything that their processes do, without starting these.

Memory, kernels, messages and the loop of a rank are those of `slotwise.compose`.  A rank has one compute thread.
"""

from __future__ import annotations

import gc
import os
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from slotwise.compose import rank_process, ranks
from slotwise.compute.kernels.cpu import launcher
from slotwise.compute.kernels.cpu.threads import ThreadPool
from slotwise.compute.kernels.group import SingleRank
from slotwise.engine.ipc import BlockingChannel


class _Rank:
    """A rank, with what its process would be asked."""

    def __init__(self, command: Sequence[str], **_: object) -> None:
        channel = BlockingChannel(socket.socket(fileno=os.dup(int(command[-1]))))
        self._thread = threading.Thread(target=rank_process.obey, args=(channel,), daemon=True)
        self._thread.start()

    def poll(self) -> int | None:
        return None if self._thread.is_alive() else 0

    def kill(self) -> None:
        """It ends when its channel does."""


@contextmanager
def ranks_on_threads() -> Iterator[None]:
    """Ranks that are started within the context are threads, and end with their engines."""
    before, opened = torch.get_num_threads(), list[ranks.RankFiles]()
    gc.collect()
    gc.freeze()  # the collections below then examine only objects created meanwhile
    close = ranks.RankFiles.close
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launcher, "thread_pool", lambda threads: ThreadPool(0))  # each rank has its own
        patch.setattr(ranks, "spawn", SimpleNamespace(start=_Rank))
        patch.setattr(rank_process, "settle", lambda: None)
        patch.setattr(ranks.RankFiles, "close", lambda files: opened.append(files))  # threads have no copies
        torch.set_num_threads(1)
        try:
            yield
        finally:
            gc.collect()
            torch.set_num_threads(before)
            for files in opened:
                close(files)


class Paired(SingleRank):
    """A rank on a thread: what it gives is there once both ranks have come."""

    size = 2

    def __init__(self, rank: int, given: list, barrier: threading.Barrier) -> None:
        super().__init__()
        self.rank, self._given, self._barrier = rank, given, barrier

    def _all(self, x: torch.Tensor) -> list[torch.Tensor]:
        self._given[self.rank] = x
        self._barrier.wait(120)
        parts = list(self._given)
        self._barrier.wait(120)
        return parts

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        first, second = self._all(x)
        return first + second

    def gather(self, x: torch.Tensor, widths: list[int]) -> torch.Tensor:
        parts = self._all(x)
        return x if self.rank else torch.cat(parts, 1)
