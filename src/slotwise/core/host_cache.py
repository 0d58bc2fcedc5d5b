"""The second tier of the prefix cache: blocks that the device's pool gave up, kept in host memory.

A place is a number here, like a block; the memory behind it belongs to the runner.  What moves is said by the plan: its
saves are copied before its loads, and both before its forward pass.  So a block may be given to somebody else in the
plan that saves it, and read in the plan that loads it.

    device   cached ──evicted──► written again      taken ──────► cached, shared
                        │ save                        ▲ load
    host     free ──► kept ───────────hold──────► loading ──plan is closed──► kept, as the most recently used
               ▲        │
               └──drop──┘ the least recently used, for one that is saved

What was loaded stays, for it is never written: evicted from the device again it costs no second copy.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from slotwise.core.block_pool import ConservationError
from slotwise.core.prefix_cache import NOWHERE, Entry
from slotwise.core.step import Copy


class Copies(NamedTuple):
    """Of one plan."""

    saves: tuple[Copy, ...]  # from a block of the device to a place of the host
    loads: tuple[Copy, ...]  # the other way


NO_COPIES = Copies((), ())


class HostCache:
    """Which place holds which entry, and what the plan in the making copies.

    Args:
        total: places; with none every eviction is for good.
        max_loads: blocks that one plan may load.
    """

    def __init__(self, total: int, max_loads: int) -> None:
        self.total = total
        self.max_loads = max_loads
        self._free = deque(range(total))
        self._kept: dict[int, Entry] = {}  # by place, least recently used first
        self._loading: dict[int, Entry] = {}  # by place; this plan reads them, so it must not write there
        self._saves: dict[int, int] = {}  # block by place: a place given out twice by one plan is written once
        self._loads: list[Copy] = []

    @property
    def num_loads_left(self) -> int:
        """Blocks that this plan may still load."""
        return self.max_loads - len(self._loads)

    def keep(self, entry: Entry, block: int) -> Entry | None:
        """Find a place for `entry`, whose `block` is about to be written again.

        Returns who lost its place for it: the least recently used, or `entry` itself where there is no place.
        """
        if entry.host_block != NOWHERE:
            self._kept[entry.host_block] = self._kept.pop(entry.host_block)
            return None
        lost = None
        if not self._free:
            if not self._kept:
                return entry
            lost = next(iter(self._kept.values()))
            self.drop(lost)
        entry.host_block = self._free.popleft()
        self._kept[entry.host_block] = entry
        self._saves[entry.host_block] = block
        return lost

    def drop(self, entry: Entry) -> None:
        """What the host holds of `entry`, if anything, is worth nothing any more."""
        if entry.host_block != NOWHERE:
            del self._kept[entry.host_block]
            self._free.append(entry.host_block)
            entry.host_block = NOWHERE

    def hold(self, entries: Sequence[Entry]) -> None:
        """Let nobody take the places of `entries`, which this plan will load."""
        for entry in entries:
            self._loading[entry.host_block] = self._kept.pop(entry.host_block)

    def load(self, entry: Entry, block: int) -> None:
        """Copy `entry`, which is held, into `block`."""
        self._loads.append(Copy(entry.host_block, block))

    def pop_copies(self) -> Copies:
        """The plan is closed: what it copies.  A beginning that was loaded outlives its continuation."""
        if not (self._saves or self._loading):
            return NO_COPIES
        copies = Copies(tuple([Copy(block, host_block) for host_block, block in self._saves.items()]),
                        tuple(self._loads))
        self._kept.update(reversed(self._loading.items()))
        self._loading.clear()
        self._saves.clear()
        self._loads.clear()
        return copies

    def check(self, is_known: Callable[[Entry], bool]) -> None:
        """Between two plans: free + kept == total, and whatever is kept can be found.

        Raises:
            ConservationError: naming what is wrong.
        """
        host_blocks = [*self._free, *self._kept]
        if sorted(host_blocks) != list(range(self.total)):
            raise ConservationError(f"{len(self._free)} places free and {len(self._kept)} kept, of {self.total}")
        for host_block, entry in self._kept.items():
            if entry.host_block != host_block or not is_known(entry):
                raise ConservationError(f"place {host_block} of the host holds what can never be found")
