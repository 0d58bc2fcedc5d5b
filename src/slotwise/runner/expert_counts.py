"""The tokens of each expert, by layer, from the counts that kernels keep while they route.

Counts are read from time to time.  On a GPU a copy is enqueued like any other work and read at the next call, so
reading never waits for the device.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from slotwise.runner.staging import Event, event_of, to_host


class ExpertCounts:
    """Reads the counts of a decoder's layers.

    Args:
        ends: by layer, `[experts]` int64 (see `kernels.interface.Kernels.experts`); at least one.
    """

    def __init__(self, ends: Mapping[int, Tensor]) -> None:
        self.layers = tuple(ends)
        self._ends = list(ends.values())
        self._device = self._ends[0].device
        self._pending = self._copy()
        self._before = self._read()

    def pop(self, *, is_idle: bool) -> tuple[tuple[int, ...], ...]:
        """Tokens of each expert of each layer since the last call; () if there are none.

        Args:
            is_idle: no step is in flight.  Else the counts of a GPU are those of the time of the last call.
        """
        is_behind = self._device.type != "cpu"
        if is_idle or not is_behind:
            self._pending = self._copy()
        counts = self._read()
        if is_behind:
            self._pending = self._copy()
        new, self._before = counts - self._before, counts
        return tuple(map(tuple, new.tolist())) if new.any() else ()

    def _copy(self) -> tuple[Tensor, Event]:
        copy, done = to_host(torch.stack(self._ends)), event_of(self._device)
        done.record()
        return copy, done

    def _read(self) -> np.ndarray:
        """The pending copy as tokens by layer and expert."""
        copy, done = self._pending
        done.synchronize()
        return np.diff(copy.numpy(), axis=1, prepend=0)
