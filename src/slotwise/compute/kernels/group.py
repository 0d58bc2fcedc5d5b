"""The ranks of a pipeline stage and the stages of a model: what they compute together, and what they exchange.

    rank 0    product of its inputs ──┐                 ┌──► sum, the same bits on every rank
    rank 1    product of its inputs ──┴─► all_reduce ───┴──► sum

Every rank calls every operation, in the same order and with the same shapes.  Sums are taken in the order of the ranks,
so that a run repeats bit for bit.

    stage 0    embed ─► layers 0 ... 9 ──┐                                    ┌──► head ─► logits
    stage 1                              └──► layers 10 ... 19 ─► norm ───────┘

Each stage holds some of a model's layers, and passes hidden states on to the next.  The head is on the first stage: it
may be the embedding's table, and the rank that samples is there.  Every rank of a stage has the whole hidden states,
and sends them to the rank of the same number on the next stage.  Messages arrive in the order in which they were sent;
`send` waits only for a stage that is `PLACES` messages behind.

Ranks on a CPU exchange through shared memory (`cpu/shared_group.py`), all others through torch.distributed: NCCL
between GPUs, gloo between processes of plain torch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

# Messages that a stage may be behind the stage before it.
PLACES = 2


class PipelineStage(NamedTuple):
    """The place of a process among the stages."""

    number: int = 0
    total: int = 1

    @property
    def is_first(self) -> bool:
        return self.number == 0

    @property
    def is_last(self) -> bool:
        return self.number == self.total - 1


WHOLE = PipelineStage()


class Pipe(Protocol):
    """The stages, seen by one rank."""

    stage: PipelineStage

    def warm_up(self, kind: torch.dtype) -> None:
        """Compile what sending numbers of `kind` needs."""
        ...

    def send(self, x: Tensor) -> Tensor:
        """Send `x [rows, hidden]` to the next stage, from the last stage to the first; returns `x`."""
        ...

    def receive(self, rows: int, hidden: int, kind: torch.dtype) -> Tensor:
        """The next message from the stage before: `[rows, hidden]`, as it was sent."""
        ...


class NoPipe:
    """A stage that exchanges nothing: the only stage of a model, or one whose size alone is of interest."""

    def __init__(self, stage: PipelineStage = WHOLE) -> None:
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
        before, after: the ranks that send to this one, and receive from it.
        edges: the process groups of both directions: a wait in one must not block the other.
    """

    def __init__(
        self, stage: PipelineStage, before: int, after: int, edges: tuple[Any, Any], device: torch.device,
    ) -> None:
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
    """The ranks of a stage, seen by one of them.

    Attributes:
        rank: the number of this process within its stage; rank 0 of the first stage samples.
        pipe: to the other stages.
        splits_experts: each rank holds some of the experts whole, instead of a share of each.
    """

    rank: int
    size: int
    pipe: Pipe
    splits_experts: bool

    def warm_up(self, kind: torch.dtype) -> None:
        """Compile what exchanging numbers of `kind` needs."""
        ...

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of all ranks' `x [rows, columns]`, in the type of `x`."""
        ...

    def gather(self, x: Tensor, widths: Sequence[int]) -> Tensor:
        """The columns of all ranks side by side, `[rows, sum(widths)]`, on rank 0; on other ranks `x [rows, width]`."""
        ...


def num_ranks(group: Group) -> int:
    """The ranks of all stages together."""
    return group.size * group.pipe.stage.total


class SingleRank:
    """The only rank of a stage, or of a model."""

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


SINGLE_RANK = SingleRank()


class TorchGroup:
    """Ranks of one host, connected by torch.distributed.

    Args:
        members: the process group of the ranks; None: all ranks.
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
        # In the order of the ranks, unlike a library's own sum.
        for other in others:
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


class UnconnectedRank(SingleRank):
    """A rank that exchanges nothing: it says what part of a model such a rank would hold."""

    def __init__(self, size: int, stage: PipelineStage = WHOLE, *, splits_experts: bool = False) -> None:
        super().__init__(NoPipe(stage))
        self.rank, self.size, self.splits_experts = 0, size, splits_experts
