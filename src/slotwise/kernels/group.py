"""The ranks of a stage, which compute its layers together, and what they exchange.

    rank 0    product of its inputs ──┐                 ┌──► sum, the same bits on every rank
    rank 1    product of its inputs ──┴─► all_reduce ───┴──► sum

Every rank calls every operation, in the same order and with the same shapes.  Sums are taken in the order of the ranks,
so that a run repeats bit for bit.  Ranks on a CPU exchange through shared memory (`cpu/shared_group.py`), all others
through torch.distributed: NCCL between GPUs, gloo between processes of plain torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from slotwise.kernels.pipe import WHOLE, NoPipe, Pipe, Stage


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
