"""The stages of a model: each holds some of its layers, and hands hidden states on to the next.

    stage 0    embed ─► layers 0 ... 9 ──┐                                    ┌──► head ─► logits
    stage 1                              └──► layers 10 ... 19 ─► norm ───────┘

The head is on the first stage: it may be the embedding's table, and the rank that samples is there.  Every rank of a
stage has the whole hidden states, and hands them to the rank of the same number on the next stage.  Messages arrive in
the order in which they were sent, and `send` waits for no stage to have read what it sends, unless that one is two
messages behind.
"""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

PLACES = 2  # messages that a stage may be behind the one before it


class Stage(NamedTuple):
    """The place of a process among the stages."""

    number: int = 0
    total: int = 1

    @property
    def is_first(self) -> bool:
        return self.number == 0

    @property
    def is_last(self) -> bool:
        return self.number == self.total - 1


WHOLE = Stage()


class Pipe(Protocol):
    """The stages, seen by a rank of one of them."""

    stage: Stage

    def warm_up(self, kind: torch.dtype) -> None:
        """Compile what sending numbers of `kind` needs."""
        ...

    def send(self, x: Tensor) -> Tensor:
        """Hand `x [rows, hidden]` on to the next stage, from the last one to the first; returns `x`."""
        ...

    def receive(self, rows: int, hidden: int, kind: torch.dtype) -> Tensor:
        """The next message of the stage before: `[rows, hidden]`, as it was sent."""
        ...


class NoPipe:
    """A stage that exchanges nothing: the one of a model that is not divided, or one that is only described."""

    def __init__(self, stage: Stage = WHOLE) -> None:
        self.stage = stage

    def warm_up(self, kind: torch.dtype) -> None:
        """Nothing is sent."""

    def send(self, x: Tensor) -> Tensor:
        return x

    def receive(self, rows: int, hidden: int, kind: torch.dtype) -> Tensor:
        raise RuntimeError("there is no stage to receive from")


class TorchPipe:
    """Stages connected by torch.distributed.

    Args:
        before, after: ranks that send to this one, and receive from it.
        edges: process groups of the two: each direction has its own, for one that waits must not hold up the other.
    """

    def __init__(self, stage: Stage, before: int, after: int, edges: tuple[Any, Any], device: torch.device) -> None:
        self.stage = stage
        self._before, self._after = before, after
        self._from, self._to = edges
        self._device = device
        self._sending: deque[tuple[Any, Tensor]] = deque()

    def warm_up(self, kind: torch.dtype) -> None:
        """Nothing is compiled."""

    def send(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        work = torch.distributed.isend(x, self._after, group=self._to)
        self._sending.append((work, x))
        while len(self._sending) > self.stage.total + 1:
            self._sending.popleft()[0].wait()
        return x

    def receive(self, rows: int, hidden: int, kind: torch.dtype) -> Tensor:
        x = torch.empty(rows, hidden, dtype=kind, device=self._device)
        torch.distributed.recv(x, self._before, group=self._from)
        return x
