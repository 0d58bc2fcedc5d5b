"""The interface of samplers, on the host or on the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from slotwise.core.step import NewRequest, TokenLogprobs

GREEDY_BELOW = 1e-5  # temperature; the same threshold as vLLM's


class Sampled(NamedTuple):
    """One token per row."""

    tokens: list[int]  # FAILED in rows that failed
    logprobs: list[TokenLogprobs | None]  # [] when no row requests any, else by row
    failed: tuple[int, ...]  # rows with NaN, +inf or nothing but -inf, or whose edits failed; the others are sound

    @property
    def column(self) -> Tensor:
        return torch.from_numpy(np.array(self.tokens, np.int64))  # three times as fast as from the list itself

    def read(self) -> Sampled:
        return self


class Drawn(Protocol):
    """Sampled tokens, being copied from the device."""

    @property
    def column(self) -> Tensor:
        """The tokens on the device, `[rows]` int64, FAILED in rows that failed."""
        ...

    def read(self) -> Sampled:
        """The tokens on the host.  Call when the device is done with the step."""
        ...


class Sampling(Protocol):
    """The sampling state of every slot."""

    def join(self, join: NewRequest) -> None:
        """Set the slot's request, new or resumed after preemption."""
        ...

    def leave(self, slot: int) -> None:
        """Clear the slot."""
        ...

    def sample(self, logits: Tensor, slots: Sequence[int], positions: Sequence[int]) -> Drawn:
        """Choose the next token of every row of `logits [rows, vocab]`.

        Args:
            slots: slot of each row, each at most once.
            positions: position of the new token in its request, prompt included.
        """
        ...
