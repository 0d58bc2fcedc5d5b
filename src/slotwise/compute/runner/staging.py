"""Copies between host and device: one asynchronous copy takes a step's columns there, another its tokens back.

    host     |■■ positions ■■|■■ places ■■| ... |■ contexts ■|■ tables ■|      page-locked
                  │ copied while the host goes on
    device   |■■ positions ■■|■■ places ■■| ... |■ contexts ■|■ tables ■|      columns are views of it

With a step in flight, the host prepares the next one while copies for the last may still wait for the device's work, so
host memory must not be written again before they have ended.  Torch's allocator of page-locked memory ensures this: it
notes every non-blocking copy, and reuses memory only once all of them are done.  Where the device is the CPU, nothing
is copied: tensors are views of the columns themselves.

`DeviceExpertCounts` reads the tokens of each expert, which kernels count while they route, without waiting for the
device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

ALIGNMENT = 16  # bytes to which every column is aligned: kernels are compiled for an alignment

Columns = Sequence[np.ndarray]
Send = Callable[[Columns, Columns], list[Tensor]]
"""Sends columns of int64, then of int32: tensors of the same shapes on the device."""


class Event(Protocol):
    """A point in the device's work."""

    def record(self) -> None:
        """Place the event after all work enqueued so far."""
        ...

    def synchronize(self) -> None:
        """Wait until the device has passed it."""
        ...


class _Now:
    """An event of a device whose work is done at once."""

    def record(self) -> None: ...

    def synchronize(self) -> None: ...


def event_of(device: torch.device) -> Event:
    """A new event on `device`."""
    return torch.cuda.Event() if device.type == "cuda" else _Now()


def sender(device: torch.device) -> Send:
    """Returns the function that sends columns to `device`."""
    if device.type == "cpu":
        return lambda longs, ints: [torch.from_numpy(column) for column in (*longs, *ints)]
    return lambda longs, ints: send(device, longs, ints)


def viewer(device: torch.device) -> Callable[[Tensor], Any]:
    """Returns how to access a few words of a tensor on `device`; the CPU's numpy view costs a fifth of a call."""
    return Tensor.numpy if device.type == "cpu" else lambda tensor: tensor


def send(device: torch.device, longs: Columns, ints: Columns) -> list[Tensor]:
    """Columns of int64, then of int32, packed and copied at once: tensors of the same shapes on `device`."""
    columns = [*((column, torch.int64) for column in longs), *((column, torch.int32) for column in ints)]
    starts = [0, *accumulate(-(-column.nbytes // ALIGNMENT) * ALIGNMENT for column, _ in columns)]
    packed = torch.empty(starts.pop(), dtype=torch.uint8, pin_memory=device.type == "cuda")
    host = packed.numpy()
    for (column, _), start in zip(columns, starts, strict=True):
        host[start : start + column.nbytes].view(column.dtype).reshape(column.shape)[...] = column
    sent = packed.to(device, non_blocking=True)
    return [sent[start : start + column.nbytes].view(kind).view(column.shape)
            for (column, kind), start in zip(columns, starts, strict=True)]


def rows_of(tensor: Tensor, places: Sequence[int]) -> Tensor:
    """The rows `places` of a contiguous `tensor [rows, ...]`; itself, where these are all of its rows in order.

    On the CPU numpy copies them: torch would start threads for it, which compete with the kernels' for milliseconds.
    """
    if len(places) == len(tensor) and list(places) == list(range(len(tensor))):
        return tensor
    if tensor.device.type == "cpu":
        rows = tensor.contiguous().view(len(tensor), -1).view(torch.uint8).numpy()[list(places)]
        return torch.from_numpy(rows).view(tensor.dtype).view(len(places), *tensor.shape[1:])
    return tensor.index_select(0, torch.tensor(places, device=tensor.device))


def to_host(tensor: Tensor) -> Tensor:
    """A copy of `tensor` on the host, complete once the device has done all work enqueued before."""
    if tensor.device.type == "cpu":
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


class DeviceExpertCounts:
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
