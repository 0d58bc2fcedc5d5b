"""Blocks of the cache as bytes: in host caches, for transfers to other engines, and copied to host memory as plans say.

On the device a block is spread over the layers' caches; on the host it is contiguous.  It is gathered in a staging area
on the device, so a block is transferred by one copy, and a layer gathers or scatters many blocks by one operation:

    layer 0   [blocks, ...] ──┐ gather                  copy
    layer 1   [blocks, ...] ──┼────────► staging ──────────────────► host [places, block], page-locked
    ...                     ──┘ ◄────────              ◄──────────────────
                              scatter                   copy

The copies are enqueued before the next forward pass.  Nothing waits for them, and the device runs them in order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise

import numpy as np
import torch
from torch import Tensor

from slotwise.compute.runner.slots import BlocksLostError, SlotListener
from slotwise.compute.runner.staging import sender
from slotwise.core.record import Copy, StepPlan


class HostCacheBlocks:
    """Reads and writes blocks of caches in host memory, from any thread.

    Args:
        pieces: the layers' caches as `[blocks, ...]` each, contiguous.
        of_what: tokens of a block, and the model, as text.
    """

    def __init__(self, pieces: Sequence[Tensor], of_what: str) -> None:
        self._views = [piece.view(torch.uint8).flatten(1).numpy() for piece in pieces]
        self._spans = list(pairwise(accumulate([view.shape[1] for view in self._views], initial=0)))
        self.block_bytes = self._spans[-1][1]
        shapes = sorted({f"{str(piece.dtype).removeprefix('torch.')}{list(piece.shape[1:])}" for piece in pieces})
        self.layout = f"{of_what}, {len(pieces)} pieces of {', '.join(shapes)}"

    def read(self, block: int, into: memoryview) -> None:
        target = np.frombuffer(into, np.uint8)
        for view, (start, end) in zip(self._views, self._spans, strict=True):
            target[start:end] = view[block]

    def write(self, block: int, data: memoryview) -> None:
        source = np.frombuffer(data, np.uint8)
        for view, (start, end) in zip(self._views, self._spans, strict=True):
            view[block] = source[start:end]


STAGING = 64 << 20  # bytes
SLAB = 1 << 30  # bytes; torch rounds page-locked memory up to powers of two


class HostBlocks(SlotListener):
    """Copies blocks between the caches of all layers and places in host memory.

    Args:
        num_places: blocks that fit the host.
        pieces: the layers' caches as `[blocks, ...]` each, contiguous, of one type, on one device.
    """

    def __init__(self, num_places: int, pieces: Sequence[Tensor]) -> None:
        self._pieces = [piece.flatten(1) for piece in pieces]
        self._spans = list(pairwise(accumulate([piece.shape[1] for piece in self._pieces], initial=0)))
        device, kind, elements = pieces[0].device, pieces[0].dtype, self._spans[-1][1]
        block_bytes = elements * kind.itemsize
        self._staging = torch.empty(
            staging_bytes(num_places, block_bytes) // block_bytes, elements, dtype=kind, device=device)
        self._places = _page_locked(num_places, elements, kind, device)
        self._send = sender(device)

    def apply(self, plan: StepPlan) -> None:
        """Copy the blocks that a plan saves and loads.

        Raises:
            BlocksLostError: they may not all be copied.  The scheduler counts them as copied, whatever becomes of the
                step, so no later plan may be run.
        """
        try:
            self.save(plan.saves)
            self.load(plan.loads)
        except Exception as error:
            raise BlocksLostError(f"blocks could not be copied: {type(error).__name__}: {error}") from error

    def save(self, copies: Sequence[Copy]) -> None:
        """Copy blocks of the device to places of the host."""
        for few in self._in_turn(copies):
            blocks = self._on_device([copy.source for copy in few])
            staging = self._staging[: len(few)]
            for piece, (start, end) in zip(self._pieces, self._spans, strict=True):
                staging[:, start:end] = piece.index_select(0, blocks)
            for row, copy in zip(staging, few, strict=True):
                self._places[copy.target].copy_(row, non_blocking=True)

    def load(self, copies: Sequence[Copy]) -> None:
        """Copy places of the host to blocks of the device."""
        for few in self._in_turn(copies):
            staging = self._staging[: len(few)]
            for row, copy in zip(staging, few, strict=True):
                row.copy_(self._places[copy.source], non_blocking=True)
            blocks = self._on_device([copy.target for copy in few])
            for piece, (start, end) in zip(self._pieces, self._spans, strict=True):
                piece.index_copy_(0, blocks, staging[:, start:end])

    def _in_turn(self, copies: Sequence[Copy]) -> Iterator[Sequence[Copy]]:
        """The copies in parts that fit the staging area."""
        for first in range(0, len(copies), len(self._staging) or 1):
            yield copies[first : first + len(self._staging)]

    def _on_device(self, blocks: list[int]) -> Tensor:
        return self._send((np.array(blocks, np.int64),), ())[0]


def staging_bytes(num_places: int, block_bytes: int) -> int:
    """Bytes of the staging area on the device."""
    return min(num_places, max(1, STAGING // block_bytes)) * block_bytes


def _page_locked(num_places: int, elements: int, kind: torch.dtype, device: torch.device) -> list[Tensor]:
    """Rows of host memory that `device` copies to and from asynchronously."""
    each = max(1, SLAB // (elements * kind.itemsize))
    slabs = [
        torch.empty(min(each, num_places - first), elements, dtype=kind, pin_memory=device.type == "cuda")
        for first in range(0, num_places, each)]
    return [row for slab in slabs for row in slab]
