"""Packs outputs into panels: groups of outputs that are computed together."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def whole(outputs: Tensor, size: int) -> Tensor:
    """`outputs [out, ...]`, padded with zeros to whole panels of `size`."""
    return F.pad(outputs, (0, 0) * (outputs.dim() - 1) + (0, -len(outputs) % size))


def paired(outputs: Tensor, gates: int) -> Tensor:
    """`outputs [gates, then as many of what they gate; ...]` as panels of `gates` gates and what they gate."""
    halves = [whole(half, gates).unflatten(0, (-1, gates)) for half in outputs.chunk(2)]
    return torch.cat(halves, dim=1).flatten(0, 1)
