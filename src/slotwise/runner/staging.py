"""Between host and device: the columns of a step go there by one asynchronous copy, its tokens come back by another.

    host     |■■ positions ■■|■■ places ■■| ... |■ contexts ■|■ tables ■|      page-locked
                  │ copied while the host goes on
    device   |■■ positions ■■|■■ places ■■| ... |■ contexts ■|■ tables ■|      columns are views of it

With a step in flight the host prepares the next one while copies for the last may still wait behind the device's work,
so memory of the host must not be written again before they have ended.  Torch's allocator of page-locked memory sees to
that: it notes every copy that does not block, and gives memory out again only once all of them have been done.  Where
the device is the CPU nothing is copied: tensors are views of the columns themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

ALIGNMENT = 16  # bytes that every column begins at a multiple of: kernels are compiled for what they may expect

Columns = Sequence[np.ndarray]
Send = Callable[[Columns, Columns], list[Tensor]]
"""Sends columns of int64, then of int32: tensors of the same shapes on the device."""


class Event(Protocol):
    """A point in the device's work."""

    def record(self) -> None:
        """It is behind all that was enqueued so far."""
        ...

    def synchronize(self) -> None:
        """Wait until the device has passed it."""
        ...


class _Now:
    """An event of a device that is never behind."""

    def record(self) -> None: ...

    def synchronize(self) -> None: ...


def event_of(device: torch.device) -> Event:
    """A new event on `device`."""
    return torch.cuda.Event() if device.type == "cuda" else _Now()


def sender(device: torch.device) -> Send:
    """How columns get to `device`."""
    if device.type == "cpu":
        return lambda longs, ints: [torch.from_numpy(column) for column in (*longs, *ints)]
    return lambda longs, ints: send(device, longs, ints)


def viewer(device: torch.device) -> Callable[[Tensor], Any]:
    """How to look at a few words of a tensor on `device`, or write them: where the host may, numpy's view of it does so
    at a fifth of the price of a call.
    """
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


def to_host(tensor: Tensor) -> Tensor:
    """A copy of `tensor` on the host, there once the device is done with what was enqueued before."""
    if tensor.device.type == "cpu":
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
