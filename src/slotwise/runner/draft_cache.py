"""Which positions of each slot a draft model's cache holds.

A draft model's keys and values lie in the same blocks as the target's, in layers of its own.  It computes a position
when a draft needs it, so it may lack what the target has: a prompt, or what a row decoded without drafts.

    target   |■■■■■■■■■■■■■■■■■■■■■■■|          until the row's start
    draft    |■■■■■■■■■■■■|                     held: what it computes before it proposes again
    blocks   |complete|complete|   |

Positions behind a row's start were computed from drafts that were not accepted, and count no more at its next row.
Blocks that the draft model has computed to their end are *complete*, and stay so as long as they hold their tokens: in
the prefix cache, where the next request finds them, and on the host.  A request that finds others computes them again.
"""

from __future__ import annotations

import numpy as np

from slotwise.core.step import StepPlan
from slotwise.runner.input_batch import SlotTable


class DraftPositions:
    """Follows the plans, as `SlotTable` does, whose block tables it reads.

    Args:
        num_blocks: of the device.
        num_host_blocks: of the host.
    """

    def __init__(self, slots: SlotTable, num_blocks: int, num_host_blocks: int) -> None:
        self._slots = slots
        self._held = np.zeros(slots.num_slots, np.int64)  # positions that the cache holds, from the first on
        self._num_complete = np.zeros(slots.num_slots, np.int64)  # of a slot's first blocks
        self._is_complete = np.zeros(num_blocks, np.bool_)
        self._is_complete_on_host = np.zeros(num_host_blocks, np.bool_)

    def apply(self, plan: StepPlan) -> None:
        """Apply copies, blocks and new requests.  Call once per plan, after `SlotTable.apply`."""
        for block, place in plan.saves:
            self._is_complete_on_host[place] = self._is_complete[block]
        joined = {join.slot for join in plan.new_requests}
        starts = dict(zip(plan.slots, plan.starts, strict=True))
        found = {slot: starts.get(slot, 0) // self._slots.block_size for slot in joined}
        for slot, _, blocks in plan.new_blocks:
            self._is_complete[list(blocks[found.get(slot, 0) :])] = False
        for place, block in plan.loads:
            self._is_complete[block] = self._is_complete_on_host[place]
        if plan.slots:
            slots = np.array(plan.slots, np.int64)
            self._held[slots] = np.minimum(self._held[slots], np.array(plan.starts, np.int64))
        for slot, num_found in found.items():
            complete = self._is_complete[self._slots.blocks(slot)[:num_found]]
            self._num_complete[slot] = number = num_found if complete.all() else int(complete.argmin())
            self._held[slot] = number * self._slots.block_size

    def held(self, slot: int) -> int:
        """How many positions of the slot's request the cache holds, from the first on."""
        return int(self._held[slot])

    def known(self, slot: int, end: int) -> None:
        """The positions until `end` were computed, from tokens that are known."""
        self._held[slot] = end
        first, behind = int(self._num_complete[slot]), end // self._slots.block_size
        if behind > first:
            self._is_complete[self._slots.blocks(slot)[first:behind]] = True
            self._num_complete[slot] = behind

    def drafted(self, slot: int, end: int) -> None:
        """The positions until `end` were computed, the last ones from drafts, which may not be accepted."""
        self._held[slot] = end
