"""The ranks of a stage and the stages of a model: what they compute together, and what they exchange.

    rank 0    product of its inputs ──┐                 ┌──► sum, the same bits on every rank
    rank 1    product of its inputs ──┴─► all_reduce ───┴──► sum

Every rank calls every operation, in the same order and with the same shapes.  Sums are taken in the order of the ranks,
so that a run repeats bit for bit.  Ranks on a CPU exchange through shared memory (`cpu/shared_group.py`), all others
through torch.distributed: NCCL between GPUs, gloo between processes of plain torch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

# The stages of a model: each holds some of its layers, and hands hidden states on to the next.
#
#     stage 0    embed ─► layers 0 ... 9 ──┐                                    ┌──► head ─► logits
#     stage 1                              └──► layers 10 ... 19 ─► norm ───────┘
#
# The head is on the first stage: it may be the embedding's table, and the rank that samples is there.  Every rank of a
# stage has the whole hidden states, and hands them to the rank of the same number on the next stage.  Messages arrive
# in the order in which they were sent, and `send` waits for no stage to have read what it sends, unless that one is two
# messages behind.

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


class Group(Protocol):
    """The ranks of a stage, seen by one of them."""

    rank: int  # of this process within its stage; rank 0 of the first one samples
    size: int
    pipe: Pipe  # to the other stages
    splits_experts: bool  # each rank holds some of the experts whole, in place of a share of each

    def warm_up(self, kind: torch.dtype) -> None:
        """Compile what exchanging numbers of `kind` needs."""
        ...

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of all ranks' `x [rows, columns]`, in the type of `x`."""
        ...

    def gather(self, x: Tensor, widths: Sequence[int]) -> Tensor:
        """The columns of all ranks side by side, `[rows, sum(widths)]`, on rank 0; on others `x [rows, width]`."""
        ...


def num_ranks(group: Group) -> int:
    """The ranks of all stages together."""
    return group.size * group.pipe.stage.total


class Alone:
    """The one rank of a stage, or of a model."""

    rank: int = 0
    size: int = 1
    splits_experts = False

    def __init__(self, pipe: Pipe | None = None) -> None:
        self.pipe: Pipe = pipe or NoPipe()

    def warm_up(self, kind: torch.dtype) -> None:
        """Nothing is exchanged within the stage."""

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def gather(self, x: Tensor, widths: Sequence[int]) -> Tensor:
        return x


ALONE = Alone()


class TorchGroup:
    """Ranks of one host, connected by torch.distributed.

    Args:
        members: their process group; None: all ranks.
    """

    splits_experts = False

    def __init__(self, members: Any = None, pipe: Pipe | None = None) -> None:
        self._members = members
        self.rank, self.size = torch.distributed.get_rank(members), torch.distributed.get_world_size(members)
        self.pipe: Pipe = pipe or NoPipe()

    def warm_up(self, kind: torch.dtype) -> None:
        """Nothing is compiled."""

    def all_reduce(self, x: Tensor) -> Tensor:
        first, *others = self._all(x.contiguous())
        for other in others:  # a library's own sum has an order of its own
            first += other
        return first

    def gather(self, x: Tensor, widths: Sequence[int]) -> Tensor:
        padded = torch.nn.functional.pad(x, (0, max(widths) - x.shape[1]))
        parts = self._all(padded)
        return x if self.rank else torch.cat([part[:, :width] for part, width in zip(parts, widths, strict=True)], 1)

    def _all(self, x: Tensor) -> list[Tensor]:
        """Every rank's `x`, in order."""
        parts = [torch.empty_like(x) for _ in range(self.size)]
        torch.distributed.all_gather(parts, x, group=self._members)
        return parts


def embed_part(table: Tensor, places: Tensor) -> Tensor:
    """Rows of a rank's part of a table; zeros for places outside."""
    is_here = (places >= 0) & (places < len(table))
    return table.index_select(0, places.clamp(0, len(table) - 1)) * is_here[:, None].to(table.dtype)


class Divided(Alone):
    """A rank that exchanges nothing: what of a model it would hold."""

    def __init__(self, size: int, stage: Stage = WHOLE, *, splits_experts: bool = False) -> None:
        super().__init__(NoPipe(stage))
        self.rank, self.size, self.splits_experts = 0, size, splits_experts
