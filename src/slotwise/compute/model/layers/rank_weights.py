"""Where layers get their weights: a checkpoint's tensors, the kernels that pack them, and the part that a rank holds.

A layer asks for its tensors by names and shapes while it is constructed.  So the code that builds a model also lists
the tensors that it needs, before any file is opened: it is built over `Listing`, whose tensors have shapes and no
memory.

Where several ranks compute a model together (Shoeybi et al., "Megatron-LM", 2019), each holds a part of every weight:

    column-parallel    a range of each part's outputs    queries, keys, values; gates and ups; head
    row-parallel       a range of the inputs             the product after either; its results are summed over the ranks

Attention is divided by heads of keys with the queries that read them, so a rank caches its own heads only.  Where there
are fewer such heads than ranks, several ranks hold the same one, each with other queries.  Shares may differ by one
unit; rank 0 never has the smaller one.  Experts are divided like other MLPs or, where the group `splits_experts`, each
is held whole by one rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from slotwise.compute.kernels.group import SINGLE_RANK, Group
from slotwise.compute.kernels.interface import Activation, AttentionShape, Kernels, LatentShape, Linear
from slotwise.compute.kernels.matrix import Format, QuantizedMatrix, Rows, Weight, stacked
from slotwise.compute.kernels.reference import ReferenceKernels
from slotwise.compute.model.lora_weights import LoraWeights
from slotwise.compute.model.stored_tensors import WHOLE, Cut, Cuts, Read, Shapes, matrix_size
from slotwise.errors import CheckpointError

UNIT = 32  # columns between an MLP's products that stay together: packed weights are panels of so many, or fewer


def share(total: int, group: Group, what: str, unit: int = 1) -> range:
    """The part of `total` that the rank of `group` holds, in whole units.

    Raises:
        CheckpointError: a rank would hold none; `what` names the things shared.
    """
    units = total // unit
    if units < group.size:
        raise CheckpointError(f"tensor_parallel_size {group.size}: the model has {total} {what}, in units of {unit}, "
                              "fewer than ranks: lower it")
    first, end = (unit * -(-units * rank // group.size) for rank in (group.rank, group.rank + 1))
    return range(first, total if group.rank == group.size - 1 else end)


def shares(total: int, group: Group) -> list[int]:
    """How much of `total` each rank holds, in units of one."""
    bounds = [-(-total * rank // group.size) for rank in range(group.size + 1)]
    return [end - first for first, end in pairwise(bounds)]


def mlp_share(intermediate: int, group: Group, unit: int = 1) -> range:
    """The columns between an MLP's products that a rank computes, in whole groups of `unit` quantized inputs."""
    unit = math.lcm(UNIT, unit)
    return share(intermediate, group, "columns between the products of an MLP", 1 if intermediate % unit else unit)


def expert_share(count: int, group: Group) -> range | None:
    """The experts that a rank holds whole; None: ranks share every expert, or there is one rank."""
    return share(count, group, "experts") if group.splits_experts and group.size > 1 else None


class Heads(NamedTuple):
    """The heads of a rank, and the shape of its attention."""

    query: range
    key: range
    shape: AttentionShape
    whole: AttentionShape  # of all ranks together

    def cuts(self, parts: Collection[str], groups: int = 1, *, values_first: bool = False) -> dict[str, Cut]:
        """The cuts of the three weights of queries, keys and values, or of one fused weight.

        A fused weight may consist of `groups` of heads, each with its queries, then its keys, then its values, or
        with its values before its keys.  The cuts put all queries first, then all keys, then all values.
        """
        size = self.shape.head_dim
        query, key = (range(heads.start * size, heads.stop * size) for heads in (self.query, self.key))
        if len(parts) > 1:
            return {name: Cut((rows,)) for name, rows in zip(parts, (query, key, key)[: len(parts)], strict=True)}
        (name,) = parts
        queries, keys = self.whole.num_heads // groups, self.whole.num_kv_heads // groups  # of a group
        starts = [
            head // count * (queries + 2 * keys) + first + head % count
            for own, count, first in ((self.query, queries, 0), (self.key, keys, queries + values_first * keys),
                                      (self.key, keys, queries + (not values_first) * keys))
            for head in own]
        return {name: Cut(_merged([range(start * size, (start + 1) * size) for start in starts]))}

    @property
    def norm_cuts(self) -> tuple[Cut, Cut]:
        """Of the weights of norms over all queries and over all keys."""
        size = self.shape.head_dim
        query, key = (range(heads.start * size, heads.stop * size) for heads in (self.query, self.key))
        return Cut((query,)), Cut((key,))

    def normed_numbers(self, group: Group) -> tuple[int, int]:
        """Numbers of queries and keys over all ranks; a head that several ranks hold counts each time."""
        size, whole = self.shape.head_dim, self.whole
        return whole.num_heads * size, max(whole.num_kv_heads, group.size) * size


def _merged(ranges: Sequence[range]) -> tuple[range, ...]:
    """The same numbers in the same order, in as few ranges as possible."""
    merged = [ranges[0]]
    for each in ranges[1:]:
        if each.start == merged[-1].stop:
            merged[-1] = range(merged[-1].start, each.stop)
        else:
            merged.append(each)
    return tuple(merged)


def heads_of(shape: AttentionShape, group: Group) -> Heads:
    """The heads that the rank of `group` computes.

    Raises:
        CheckpointError: the heads cannot be divided.
    """
    heads, keys, size = shape.num_heads, shape.num_kv_heads, group.size
    per_key = heads // keys
    if keys >= size:
        key = share(keys, group, "heads of keys and values")
        query = range(key.start * per_key, key.stop * per_key)
    elif size % keys == 0 and heads % size == 0:
        query = share(heads, group, "heads")
        key = range(group.rank * keys // size, group.rank * keys // size + 1)
    else:
        raise CheckpointError(f"tensor_parallel_size {size} does not divide a model of {heads} heads of queries and "
                              f"{keys} of keys and values: choose a divisor of {heads} that is a multiple of {keys}")
    return Heads(query, key, replace(shape, num_heads=len(query), num_kv_heads=len(key)), shape)


def latent_heads(shape: LatentShape, group: Group) -> tuple[range, LatentShape]:
    """The heads that the rank of `group` computes, and its shape; every rank caches the latents, which heads share.

    Raises:
        CheckpointError: there are fewer heads than ranks.
    """
    heads = share(shape.num_heads, group, "heads") if group.size > 1 else range(shape.num_heads)
    return heads, replace(shape, num_heads=len(heads))


NO_CUTS: Cuts = {}


class WeightSource:
    """The tensors of a checkpoint, read as `dtype` to where `kernels` compute, as the rank of `group` needs them."""

    adapters: LoraWeights | None  # of the products that are built; None: they have none

    def __init__(
        self, read: Read, kernels: Kernels, dtype: torch.dtype, adapters: LoraWeights | None = None,
        group: Group = SINGLE_RANK, formats: Mapping[str, Format] = {},
    ) -> None:
        """Args: formats: of quantized matrices, by name."""
        self.kernels = kernels
        self.adapters = adapters
        self.group = group
        self.dtype = dtype
        self.unit = max((kind.unit for kind in formats.values()), default=1)  # inputs of a product that stay together
        self._read = read

    def weight(self, shapes: Shapes, cuts: Cuts = NO_CUTS) -> Weight:
        """One matrix as stored, or several stacked along their outputs."""
        return self._read(*shapes, cuts=cuts) if cuts else self._read(*shapes)

    def tensor(self, shapes: Shapes, cuts: Cuts = NO_CUTS) -> Tensor:
        """Plain numbers of `dtype`, of one name or of several stacked along their first dimension."""
        found = self.weight(shapes, cuts)
        return found if isinstance(found, Tensor) else found.dequantized().to(self.kernels.device, self.dtype)

    def floats(self, shapes: Shapes) -> Tensor:
        """Plain numbers in float32, whatever the model computes in."""
        found = self._read(*shapes, kind=torch.float32)
        assert isinstance(found, Tensor)
        return found


class ScaledSource(WeightSource):
    """A source whose tensors are multiplied by `factors`, by name: by one number, or by one for each output.

    Raises CheckpointError, as they are read, for quantized matrices with factors other than 1.
    """

    def __init__(self, source: WeightSource, factors: Mapping[str, float | Tensor]) -> None:
        self.kernels, self.adapters, self.group = source.kernels, source.adapters, source.group
        self.dtype, self.unit = source.dtype, source.unit
        self._source = source
        self._factors = {name: factor for name, factor in factors.items() if isinstance(factor, Tensor) or factor != 1}

    def weight(self, shapes: Shapes, cuts: Cuts = NO_CUTS) -> Weight:
        found = self._source.weight(shapes, cuts)
        if not isinstance(found, Tensor) and any(name in self._factors for name in shapes):
            raise CheckpointError(f"{next(iter(shapes))} is quantized, and this model multiplies it by a factor, which "
                                  "is not supported: serve the checkpoint with full weights")
        return self._scaled(found, shapes) if isinstance(found, Tensor) else found

    def tensor(self, shapes: Shapes, cuts: Cuts = NO_CUTS) -> Tensor:
        return self._scaled(self._source.tensor(shapes, cuts), shapes)

    def floats(self, shapes: Shapes) -> Tensor:
        return self._scaled(self._source.floats(shapes), shapes)

    def _scaled(self, found: Tensor, shapes: Shapes) -> Tensor:
        if found.is_meta or not any(name in self._factors for name in shapes):
            return found
        rows = torch.cat([self._factors.get(name, 1.0) * torch.ones(size[0]) for name, size in shapes.items()])
        rows = rows.to(found.device).view(-1, *[1] * (found.dim() - 1))
        return (found.float() * rows).to(found.dtype)


class _PackedSizes(ReferenceKernels):
    """Packs nothing, and reports how many bytes other kernels' packed weights take."""

    def __init__(self, kernels: Kernels) -> None:
        super().__init__()
        self.linear_bytes = kernels.linear_bytes  # type: ignore[method-assign]
        self.head_bytes = kernels.head_bytes  # type: ignore[method-assign]

    def linear(self, weight: Weight, bias: Tensor | None = None, activation: Activation | None = None) -> Linear:
        return lambda x: x

    def embedding(self, table: QuantizedMatrix, kind: torch.dtype, scale: float = 1.0) -> Callable[[Tensor], Tensor]:
        return lambda token_ids: token_ids


class Listing(WeightSource):
    """Lists the tensors that layers ask for, and returns tensors without memory.

    Args:
        kernels: whose packed sizes count.
        formats: of quantized matrices, by name.
    """

    def __init__(
        self, dtype: torch.dtype, kernels: Kernels | None = None, formats: Mapping[str, Format] | None = None,
        group: Group = SINGLE_RANK, adapters: LoraWeights | None = None,
    ) -> None:
        self._formats = formats or {}
        super().__init__(self._record, _PackedSizes(kernels) if kernels else ReferenceKernels(), dtype, adapters, group,
                         self._formats)
        self.shapes: dict[str, tuple[int, ...]] = {}

    def weight(self, shapes: Shapes, cuts: Cuts = NO_CUTS) -> Weight:
        """A matrix that cannot be read, or an empty tensor on the device "meta"; notes names and shapes."""
        self.shapes |= shapes
        return super().weight(shapes, cuts)

    def tensor(self, shapes: Shapes, cuts: Cuts = NO_CUTS) -> Tensor:
        self.shapes |= shapes
        return self._empty(shapes, cuts)

    def floats(self, shapes: Shapes) -> Tensor:
        self.shapes |= shapes
        return self._empty(shapes, NO_CUTS).float()

    def _record(self, *names: str, cuts: Cuts = NO_CUTS) -> Weight:
        if not all(name in self._formats for name in names):
            return self._empty(names, cuts)
        whole = {name: QuantizedMatrix(self._formats[name], *matrix_size(self.shapes[name]), _unreadable)
                 for name in names}
        return stacked([cuts.get(name, WHOLE).of(matrix, name) for name, matrix in whole.items()])

    def _empty(self, names: Collection[str], cuts: Cuts) -> Tensor:
        sizes = [cuts.get(name, WHOLE).size(self.shapes[name]) for name in names]
        return torch.empty((sum(size[0] for size in sizes), *sizes[0][1:]), dtype=self.dtype, device="meta")


def _unreadable(first: int, end: int) -> Rows:
    raise TypeError("a listed matrix has no contents")
