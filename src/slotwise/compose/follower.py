"""A rank other than 0: its share of the model, and the caches of its heads."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from slotwise.compose.engine import Loaded, load
from slotwise.compose.rank_messages import Join, Known
from slotwise.compose.ranks import group_of, store_of
from slotwise.core.limits import SchedulerLimits
from slotwise.core.step import StepPlan
from slotwise.kernels.cpu.shared_group import SharedMemory
from slotwise.kernels.group import Group
from slotwise.kernels.interface import Kernels
from slotwise.runner.silent_sampler import SilentSampler


class Follower:
    """Loads the rank's weights.

    Raises:
        Exception: as `compose.engine.load` does.
    """

    def __init__(self, join: Join, memory: SharedMemory) -> None:
        def group(kernels: Kernels) -> Group:
            return group_of(kernels, memory, join.rank, store_of(join.port, memory.ranks) if join.port else None)

        self._config = join.config
        if torch.cuda.is_available():
            torch.cuda.set_device(join.rank)
        self._loaded: Loaded = load(join.config, joining=group)

    def allocate(self, limits: SchedulerLimits) -> None:
        """Makes caches and slots, in place of those before."""
        self._slots, self._runner = self._loaded.share_of_runner(self._config, limits, SilentSampler())

    def run(self, plan: StepPlan, known: Sequence[Known]) -> None:
        """Computes this rank's share of a plan, after `known` tokens of the steps before.

        Raises:
            Exception: the step failed.
        """
        for one in known:
            self._slots.learn(one.slot, one.start, one.tokens)
        self._runner.submit(plan)
        self._runner.collect()
