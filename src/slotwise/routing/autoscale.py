"""How many replicas a load needs: from predicted waits and occupied slots, not from the length of a queue."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import NamedTuple

FULL = 0.8  # share of occupied slots at which a replica counts as used up
SPARE = 0.6  # used share that the remaining replicas may have after one is removed: no adding and removing in turn


class Load(NamedTuple):
    """The load of a replica."""

    wait: float  # predicted seconds until a request that comes now has its first output
    busy: float  # requests that run or wait, per slot


def replicas_for(loads: Sequence[Load], target_wait: float) -> int:
    """Returns the number of replicas at which none would be more than used up.

    A replica is used up where `FULL` of its slots are occupied, or where its predicted wait is `target_wait` seconds.
    One is removed only where the others then have at most `SPARE`.
    """
    used = sum(max(load.busy / FULL, load.wait / target_wait) for load in loads)
    number = len(loads)
    if used > number:
        return ceil(used)
    return max(1, min(number, ceil(used / SPARE)))
