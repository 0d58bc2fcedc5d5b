"""Which layers share block tables: layers that keep the same positions, in groups of equal size.

All groups take blocks from one pool (`core/cache_groups.py`), so layer i of every group lies in the same memory:

    layer     0    1    2    3    4    5        of which 2 and 5 attend to all tokens, the others to a window
    group     1    2    0    1    2    0        three groups of two layers
    cache     0    0    0    1    1    1        two caches, whose blocks belong to the groups in turn

Groups are as large as they can be without unused places in those of full attention, which would cost memory for every
token, and with at most PADDING of them in the others: fewer groups have fewer block tables.

A layer with a recurrent state looks back on one token, in whose block its state lies (`StateShape`).  So its
group keeps the last block alone, and full blocks in the prefix cache are snapshots of the state.  A block must then
have as many tokens as make their keys and values no smaller than a state: `least_block_size`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from slotwise.compute.kernels.interface import (
    AttentionShape,
    GroupTables,
    LatentShape,
    LayerShape,
    RaggedBatch,
    StateShape,
)

PADDING = 0.1  # of the layers with one window
MAX_BLOCK = 1 << 16  # tokens


class LayerGroups(NamedTuple):
    """The cache groups of a model's layers."""

    windows: tuple[int, ...]  # tokens that each group looks back on; 0: all
    of_layers: tuple[int, ...]  # group of each layer
    caches: tuple[int, ...]  # cache of each layer; layers of different groups share one

    @property
    def num_caches(self) -> int:
        return max(self.caches) + 1


def layer_groups(shapes: Sequence[LayerShape], longest: int, kv_layers: Sequence[int] = ()) -> LayerGroups:
    """Groups of layers by their windows, for sequences of at most `longest` tokens.

    Layers whose keys and values differ in size are all one group, which keeps every position.  A layer that reads
    those of another one, by `kv_layers`, has its group and cache.
    """
    if kv_layers:
        own = [layer for layer, read in enumerate(kv_layers) if layer == read]
        found, places = layer_groups([shapes[layer] for layer in own], longest), [own.index(read) for read in kv_layers]
        return LayerGroups(found.windows, tuple(found.of_layers[place] for place in places),
                           tuple(found.caches[place] for place in places))
    windows = [shape.window if 0 < shape.window < longest else 0 for shape in shapes]
    sizes = {(shape.num_kv_heads, shape.head_dim) for shape in shapes if isinstance(shape, AttentionShape)}
    if len(sizes) > 1:
        return one_group(len(shapes))
    layers = Counter(windows)
    size = max(size for size in range(1, len(windows) + 1) if _fits(layers, size))
    of_group: list[int] = []  # the window of each group
    firsts = {}
    for window in sorted(layers):  # full attention first
        firsts[window] = len(of_group)
        of_group += [window] * -(-layers[window] // size)
    seen: Counter[int] = Counter()
    groups, caches = [], []
    for window in windows:
        groups.append(firsts[window] + seen[window] // size)
        caches.append(seen[window] % size)
        seen[window] += 1
    return LayerGroups(tuple(of_group), tuple(groups), tuple(caches))


def cache_shapes(
    groups: LayerGroups, shapes: Sequence[LayerShape], layers: range, num_bytes: Callable[[LayerShape], int],
) -> dict[int, LayerShape]:
    """The largest shape among the `layers` that share each cache, by number of the cache.

    Of a state and keys of one size it is the keys: a state needs no layout of its blocks, attention does.
    """
    def size(shape: LayerShape) -> tuple[int, bool]:
        return num_bytes(shape), not isinstance(shape, StateShape)

    made: dict[int, LayerShape] = {}
    for layer in layers:
        number, shape = groups.caches[layer], shapes[layer]
        if number not in made or size(shape) > size(made[number]):
            made[number] = shape
    return dict(sorted(made.items()))


def least_block_size(
    groups: LayerGroups, shapes: Sequence[LayerShape], num_bytes: Callable[[int, LayerShape], int],
) -> int:
    """The least tokens of a block whose keys and values are as large as a state that shares its memory.

    `num_bytes` are those of a block of so many tokens.
    """
    states = dict.fromkeys(shape for shape in shapes if isinstance(shape, StateShape))
    attention = [shape for number, shape in zip(groups.caches, shapes, strict=True)
                 if isinstance(shape, AttentionShape | LatentShape) and groups.caches.count(number) > 1]
    if not states or not attention:
        return 1
    needed, low, high = max(num_bytes(1, state) for state in states), 1, MAX_BLOCK
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if num_bytes(middle, attention[0]) >= needed else (middle + 1, high)
    return low


def one_group(num_layers: int, kv_layers: Sequence[int] = ()) -> LayerGroups:
    """All layers in a group that keeps every position; `kv_layers` as in `layer_groups`."""
    own = [layer for layer, read in enumerate(kv_layers) if layer == read]
    caches = tuple(own.index(read) for read in kv_layers) if kv_layers else tuple(range(num_layers))
    return LayerGroups((0,), (0,) * num_layers, caches)


def one_cache(num_layers: int) -> LayerGroups:
    """All layers in one cache: each reads what it has just written, and the next one overwrites it."""
    return LayerGroups((0,), (0,) * num_layers, (0,) * num_layers)


def by_layer(batch: RaggedBatch, num_layers: int) -> list[RaggedBatch]:
    """The batch as each layer sees it: with the block tables and cache places of its group."""
    if not batch.groups:
        return [batch] * num_layers
    first = GroupTables(batch.slot_mapping, batch.block_tables)
    views = [replace(batch, slot_mapping=group.slot_mapping, block_tables=group.block_tables)
             for group in (first, *batch.groups)]
    return [views[group] for group in batch.group_of_layer]


def _fits(layers: Counter[int], size: int) -> bool:
    """Whether groups of `size` layers leave few enough places unused; `layers`: their number by window."""
    return all(-count % size <= (PADDING * count if window else 0) for window, count in layers.items())
