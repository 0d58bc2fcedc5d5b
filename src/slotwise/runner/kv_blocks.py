"""Blocks of the cache as bytes, for transfers to other engines: the layers' pieces of a block, one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np
import torch
from torch import Tensor


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
