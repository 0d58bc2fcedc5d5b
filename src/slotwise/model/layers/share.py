"""Which part of each weight a rank holds, where several compute a model together (Shoeybi et al., "Megatron-LM", 2019).

    column-parallel    a range of each part's outputs    queries, keys, values; gates and what they gate; head
    row-parallel       a range of the inputs             the product after either; its results are summed over the ranks

Attention is divided by heads of keys with the queries that read them, so a rank caches its own heads only.  Where there
are fewer such heads than ranks, several ranks hold the same one, each with other queries.  Shares may differ by one
unit; rank 0 never has the smaller one.

Experts are divided as other MLPs are, or, where the group `splits_experts`, each is held whole by one rank.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

from slotwise.kernels.group import Group
from slotwise.kernels.interface import AttentionShape
from slotwise.model.errors import CheckpointError
from slotwise.model.stored import Cut

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
    """The columns between an MLP's products that a rank computes, in whole groups of `unit` quantised inputs."""
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

    def cuts(self, parts: Collection[str]) -> dict[str, Cut]:
        """Of the weights called queries, keys and values, or of the one that holds all three."""
        size = self.shape.head_dim
        query, key = (range(heads.start * size, heads.stop * size) for heads in (self.query, self.key))
        if len(parts) > 1:
            return {name: Cut((rows,)) for name, rows in zip(parts, (query, key, key), strict=True)}
        (name,) = parts
        starts = self.whole.num_heads * size, (self.whole.num_heads + self.whole.num_kv_heads) * size
        return {name: Cut((query, *(range(at + key.start, at + key.stop) for at in starts)))}


    @property
    def norm_cuts(self) -> tuple[Cut, Cut]:
        """Of the weights of norms over all queries and over all keys."""
        size = self.shape.head_dim
        query, key = (range(heads.start * size, heads.stop * size) for heads in (self.query, self.key))
        return Cut((query,)), Cut((key,))

    def normed_numbers(self, group: Group) -> tuple[int, int]:
        """How many queries and keys the ranks hold together, those that several ranks hold as often as they do."""
        size, whole = self.shape.head_dim, self.whole
        return whole.num_heads * size, max(whole.num_kv_heads, group.size) * size


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
