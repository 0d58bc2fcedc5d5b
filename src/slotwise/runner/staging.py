"""From the host to the device: the columns of a step packed into one buffer and sent by one asynchronous copy.

    host     |■■ int64 ■■|■ int32 ■|      one of two buffers, page-locked where the device is a GPU
                  │ copied while the host goes on
    device   |■■ int64 ■■|■ int32 ■|      columns are views of it

A buffer is filled again only when its last copy has ended.  With two, the host fills one while the other may still be
read.  Where the device is the CPU nothing is copied: tensors are views of the columns themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor


class Event(Protocol):
    """A point in the device's work."""

    def record(self) -> None:
        """It is behind all that was enqueued so far."""
        ...

    def synchronize(self) -> None:
        """Wait until the device has passed it; at once when it was never recorded."""
        ...


class _Now:
    """An event of a device that is never behind."""

    def record(self) -> None: ...

    def synchronize(self) -> None: ...


def event_of(device: torch.device) -> Event:
    """A new event on `device`."""
    return torch.cuda.Event() if device.type == "cuda" else _Now()


class _Buffer:
    """Memory of the host that copies are made from, and the last of them."""

    def __init__(self, copied: Event, *, pinned: bool) -> None:
        self.copied = copied
        self._pinned = pinned
        self._memory = torch.empty(0, dtype=torch.uint8)

    def take(self, size: int) -> Tensor:
        """`size` bytes that no copy reads any more."""
        self.copied.synchronize()
        if len(self._memory) < size:
            self._memory = torch.empty(1 << (size - 1).bit_length(), dtype=torch.uint8, pin_memory=self._pinned)
        return self._memory[:size]


Columns = Sequence[np.ndarray]
Send = Callable[[Columns, Columns], list[Tensor]]
"""Sends columns of int64, then of int32: tensors of the same shapes on the device."""


def sender(device: torch.device) -> Send:
    """How columns get to `device`."""
    return view if device.type == "cpu" else Staging(device).send


def view(longs: Columns, ints: Columns) -> list[Tensor]:
    """The columns as they are."""
    return [torch.from_numpy(column) for column in (*longs, *ints)]


class Staging:
    """Sends columns to a device.  One caller at a time.

    Args:
        new_event: makes the events by which copies are known to have ended.
    """

    def __init__(self, device: torch.device, new_event: Callable[[torch.device], Event] = event_of) -> None:
        self._device = device
        pinned = device.type == "cuda"
        self._buffers = [_Buffer(new_event(device), pinned=pinned) for _ in range(2)]

    def send(self, longs: Columns, ints: Columns) -> list[Tensor]:
        """Columns of int64, then of int32, as tensors of the same shapes on the device."""
        self._buffers.reverse()
        buffer = self._buffers[0]
        num_longs = sum(column.size for column in longs)
        packed = buffer.take(8 * num_longs + 4 * sum(column.size for column in ints))
        _pack(packed[: 8 * num_longs].view(torch.int64).numpy(), longs)
        _pack(packed[8 * num_longs :].view(torch.int32).numpy(), ints)
        sent = packed.to(self._device, non_blocking=True)
        buffer.copied.record()
        return [
            *_unpacked(sent[: 8 * num_longs].view(torch.int64), longs),
            *_unpacked(sent[8 * num_longs :].view(torch.int32), ints)]


def _pack(target: np.ndarray, columns: Columns) -> None:
    if columns:
        np.concatenate([column.reshape(-1) for column in columns], out=target, casting="same_kind")


def _unpacked(packed: Tensor, columns: Columns) -> list[Tensor]:
    parts = packed.split([column.size for column in columns]) if columns else ()
    return [part.view(column.shape) for part, column in zip(parts, columns, strict=True)]
