"""What adapters add to products (LoRA), by the grouped products of experts: an adapter is an expert.

    rows of x    in the order of their adapters    ─► a of each ─► [rows, parts * rank] ─► b of each ─► added to out

Rows without an adapter belong to one more adapter, which no product reads.  The parts of a product are concatenated
along the ranks, and b holds zeros between them.  All sizes are those of the largest adapter, and the adapter of each
row is read from memory, so a captured step serves every mixture of adapters (Punica, Chen et al., 2023, groups in this
way).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from slotwise.compute.kernels.cuda import experts
from slotwise.compute.kernels.cuda.graphs import MAX_ROWS
from slotwise.compute.kernels.interface import NO_ADAPTER, LowRank


class CudaAdapters:
    """The adapters of rows.  For graphs, a step of few rows keeps them in memory that does not move."""

    def __init__(self, num_places: int, max_rank: int, kind: torch.dtype, device: torch.device) -> None:
        self.num_places, self.max_rank, self.kind, self.device = num_places, max_rank, kind, device
        self._fixed = torch.full((MAX_ROWS,), num_places, dtype=torch.int32, device=device)
        # The place of each row, `num_places` for the base model; padding follows.
        self.places = self._fixed
        self.are_any = False

    def assign(self, places: Sequence[int]) -> None:
        """Set the place of each row's adapter, NO_ADAPTER for the base model."""
        self.are_any = any(place != NO_ADAPTER for place in places)
        padded = [self.num_places if place == NO_ADAPTER else place for place in places]
        padded += [self.num_places] * (MAX_ROWS - len(padded))
        host = torch.tensor(padded, dtype=torch.int32, pin_memory=self.device.type == "cuda")
        if len(padded) == MAX_ROWS:
            self._fixed.copy_(host, non_blocking=True)
            self.places = self._fixed
        else:
            self.places = host.to(self.device, non_blocking=True)

    def select(self, rows: Tensor) -> None:
        """Keep these rows, `[rows]` int64."""
        self.places = self.places.index_select(0, rows)

    def product(self, outputs: int, inputs: int, num_parts: int) -> CudaAddedProduct:
        """What adapters add to a product; its memory is allocated at once, because graphs hold its address."""
        return CudaAddedProduct(self, outputs, inputs, num_parts)


class CudaAddedProduct:
    """The factors of all adapters for one product."""

    def __init__(self, adapters: CudaAdapters, outputs: int, inputs: int, num_parts: int) -> None:
        self._adapters = adapters
        ranks, places, device = num_parts * adapters.max_rank, adapters.num_places, adapters.device
        self._a = torch.zeros(places, ranks, inputs, dtype=adapters.kind, device=device)
        self._b = torch.zeros(places, outputs, ranks, dtype=adapters.kind, device=device)
        self._bias = torch.zeros(places, outputs, device=device)

    def pack(self, factors: LowRank) -> LowRank:
        """Returns the factors as they are: `set` copies them, on the thread that captures graphs."""
        return factors

    def set(self, place: int, factors: LowRank | None) -> None:
        """Copy an adapter's factors to the device, or remove them with None."""
        for tensor in (self._a, self._b, self._bias):
            tensor[place].zero_()
        if factors is None:
            return
        if factors.bias is not None:
            self._bias[place].copy_(factors.bias)
        for number, (first, a, b) in enumerate(factors.parts):
            at = number * self._adapters.max_rank
            self._a[place, at : at + len(a)].copy_(a)
            self._b[place, first : first + len(b), at : at + len(a)].copy_(b)

    def add(self, x: Tensor, out: Tensor) -> Tensor:
        """Add to `out [rows, outputs]`, in place; sums are float32, rounded once."""
        if not len(x):
            return out
        places, number = self._adapters.places[: len(x)], self._adapters.num_places
        arranged = experts.in_order(places, number + 1)
        inner = experts.multiply(x.contiguous(), self._a, None, arranged, 1, is_first=True)
        added = torch.zeros(out.shape, device=out.device)
        experts.multiply(inner, self._b, self._bias, arranged, 1, is_first=False, out=added)
        return out.copy_(out.float() + added)
