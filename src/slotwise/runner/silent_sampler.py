"""The sampler of a rank that samples nothing: rank 0 does, and sends the tokens with the next plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from slotwise.core.step import NewRequest
from slotwise.runner.sampling.params import Logprobs, Sampled


class _Zeros(NamedTuple):
    """Token 0 for every row, on the device of the logits."""

    column: Tensor

    def read(self) -> Sampled:
        return Sampled([0] * len(self.column), [], ())


class SilentSampler:
    """Draws token 0 for every row, which the tokens of rank 0 replace before they are read."""

    def join(self, join: NewRequest) -> None:
        """Nothing is kept of a request."""

    def leave(self, slot: int) -> None:
        """Nothing was kept."""

    def draws_in_order(self, slot: int) -> bool:
        return False

    def sample(self, logits: Tensor, slots: Sequence[int], positions: Sequence[int]) -> _Zeros:
        return _Zeros(torch.zeros(len(slots), dtype=torch.int64, device=logits.device))

    def describe(self, logits: Tensor, tokens: Tensor, num_top: int) -> Logprobs:
        nothing = np.zeros((0, 0), np.int32)
        return Logprobs((), (), np.zeros(0, np.float32), np.zeros(0, np.int64), nothing, nothing.astype(np.float32))
